"""Tables as Markdown or LaTeX: aligned, escaped, the best bold, the second underlined."""

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
    def plain(text: str) -> str:
        return re.sub(r"([\\|<>*`])", r"\\\1", text).replace("\n", " ")

    lines = _escape_lines(table, plain, "**{}**", "<u>{}</u>")
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    sides = "<" * table.words + ">" * (len(widths) - table.words)
    aligned = [
        [f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)]
        for line in lines
    ]
    rule = ["-" * (w - 1) + ("-" if k < table.words else ":") for k, w in enumerate(widths)]
    body = [f"| {' | '.join(cells)} |" for cells in (aligned[0], rule, *aligned[1:])]
    notes = [f"{plain(note)}\n" for note in table.notes]
    return "\n".join([f"### {plain(table.title)}\n", *body, "", *notes])


def _escape_lines(
    table: Table, escape: Callable[[str], str], best: str, second: str
) -> list[list[str]]:
    """Headings and rows as escaped text, the best and the second in their marks."""
    marks = {"": "{}", "best": best, "second": second}
    rows = [[marks[entry.mark].format(escape(entry.text)) for entry in row] for row in table.rows]
    return [[escape(head) for head in table.heads], *rows]


LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}"},
    **{"±": r"$\pm$", "↓": r"$\downarrow$", "↑": r"$\uparrow$", "²": r"\textsuperscript{2}"},
    **{"–": "--", "\n": " "},
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
    lines = _escape_lines(table, latex_text, "\\textbf{{{}}}", "\\underline{{{}}}")
    heads, *rows = (" & ".join(line) + r" \\" for line in lines)
    columns = "l" * table.words + "r" * (len(table.heads) - table.words)
    return rf"""\begin{{table}}
\centering
\caption{{{latex_text(" ".join([table.title + ".", *table.notes]))}}}
\resizebox{{\ifdim\width>\linewidth\linewidth\else\width\fi}}{{!}}{{%
\begin{{tabular}}{{{columns}}}
\toprule
{heads}
\midrule
{"".join(row + chr(10) for row in rows)}\bottomrule
\end{{tabular}}}}
\end{{table}}
"""


RENDERERS: Mapping[str, Callable[[Sequence[Table]], str]] = {"md": markdown, "latex": latex}
