"""Tables as Markdown, LaTeX, HTML or tidy CSV: aligned, escaped, the best bold, the second underlined."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

Mark = Literal["", "best", "second"]


class Entry(NamedTuple):
    """What stands in one place of a table."""

    text: str
    mark: Mark = ""


class Table(NamedTuple):
    """A title that says units, one line of headings, rows of entries, notes below."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    notes: Sequence[str] = ()
    words: int = 1  # so many columns hold words and stand left, the others numbers


def markdown(tables: Sequence[Table]) -> str:
    """Markdown whose columns also line up as plain text."""
    return "\n".join(_markdown(table) for table in tables)


def _markdown(table: Table) -> str:
    marks = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}

    def plain(text: str) -> str:
        return re.sub(r"([\\|<>*`])", r"\\\1", text).replace("\n", " ")

    lines = [[plain(head) for head in table.heads]]
    lines += [[marks[e.mark].format(plain(e.text)) for e in row] for row in table.rows]
    widths = [max(3, *(len(line[k]) for line in lines)) for k in range(len(table.heads))]
    shown = []
    for line in lines:
        cells = [
            text.ljust(width) if k < table.words else text.rjust(width)
            for k, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        shown.append(f"| {' | '.join(cells)} |")
    rule = [
        "-" * width if k < table.words else "-" * (width - 1) + ":"
        for k, width in enumerate(widths)
    ]
    shown.insert(1, f"| {' | '.join(rule)} |")
    notes = [f"{plain(note)}\n" for note in table.notes]
    return "\n".join([f"### {plain(table.title)}\n", *shown, "", *notes])


LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "²": r"\textsuperscript{2}",
    "–": "--",
    "\n": " ",
}


def latex_text(text: str) -> str:
    """Text for LaTeX.

    >>> latex_text("50 % of a_b")
    '50 \\\\% of a\\\\_b'
    """
    return "".join(LATEX_SPECIAL.get(sign, sign) for sign in text)


def latex(tables: Sequence[Table]) -> str:
    """Table environments for a document that loads booktabs and graphicx."""
    head = "% needs \\usepackage{booktabs} and \\usepackage{graphicx}\n"
    return head + "\n".join(_latex(table) for table in tables)


def _latex(table: Table) -> str:
    marks = {"": "{}", "best": "\\textbf{{{}}}", "second": "\\underline{{{}}}"}
    numbers = len(table.heads) - table.words
    lines = [[latex_text(head) for head in table.heads]]
    lines += [[marks[e.mark].format(latex_text(e.text)) for e in row] for row in table.rows]
    body = [" & ".join(line) + r" \\" for line in lines]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex_text(' '.join([table.title + '.', *table.notes]))}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{'l' * table.words}{'r' * numbers}}}",
            r"\toprule",
            body[0],
            r"\midrule",
            *body[1:],
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


PAGE_STYLE = (
    "body{font:15px/1.4 system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:.5rem 0;font-variant-numeric:tabular-nums}"
    "th,td{padding:.2rem .7rem;border-bottom:1px solid #8884;text-align:right;white-space:nowrap}"
    ".word{text-align:left}div{overflow-x:auto}p{color:#666;max-width:60rem}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}p{color:#aaa}}"
)


def html_page(tables: Sequence[Table]) -> str:
    """One HTML page that loads nothing."""
    body = "\n".join(_html(table) for table in tables)
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tables</title><style>{PAGE_STYLE}</style>\n<main>\n{body}\n</main></html>\n"
    )


def _html(table: Table) -> str:
    marks = {"": "{}", "best": "<strong>{}</strong>", "second": "<u>{}</u>"}

    def line(tag: str, texts: Sequence[str]) -> str:
        kind = [' class="word"' if k < table.words else "" for k in range(len(texts))]
        inside = "".join(f"<{tag}{c}>{text}</{tag}>" for c, text in zip(kind, texts, strict=True))
        return f"<tr>{inside}</tr>"

    rows = [line("td", [marks[e.mark].format(html.escape(e.text)) for e in r]) for r in table.rows]
    heads = line("th", [html.escape(head) for head in table.heads])
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in table.notes)
    return (
        f"<h2>{html.escape(table.title)}</h2>\n<div><table><thead>{heads}</thead>\n"
        f"<tbody>{chr(10).join(rows)}</tbody></table></div>\n{notes}"
    )


RENDERERS: Mapping[str, Callable[[Sequence[Table]], str]] = {
    "md": markdown,
    "latex": latex,
    "html": html_page,
}
