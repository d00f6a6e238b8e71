"""Regenerates what docs/bench.md shows: the list of suites, the digits suite's tables, figures.

`python tools/bench_docs.py [FOLDER]` trains the digits suite into FOLDER (`runs/digits`) where
it is not there yet, then rewrites the page; `--suites` rewrites the list alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from calmatch import train
from calmatch.bench import figures
from calmatch.bench.paper import SUITE_LINES, suite_cells
from calmatch.bench.render import markdown
from calmatch.bench.tables import build_tables, gather_runs
from calmatch.report import charts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "bench.md"
ASSETS = ROOT / "docs" / "assets" / "bench"
DIGITS = ("reliability", "entropy", "logits", "convergence")
PUBLISHED = ("ranks", "radar")


def between(text: str, name: str, content: str) -> str:
    """Replace what stands between two markers."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    new, number = re.subn(
        pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.S
    )
    assert number == 1, f"{PAGE} has no place for {name}"
    return new


def suites() -> str:
    """The suites with their lines and how many runs they are."""
    lines = ["| suite | what | runs |", "|---|---|---:|"]
    for name, line in SUITE_LINES.items():
        lines.append(f"| `{name}` | {line} | {len(suite_cells(name)):,} |")
    return "\n".join(lines)


def main() -> None:
    text = between(PAGE.read_text(), "suites", suites())
    if "--suites" in sys.argv:
        PAGE.write_text(text)
        return
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/digits")
    for cell in suite_cells("digits"):
        train(cell.config, folder / cell.folder)
    table = gather_runs([folder], "digits")
    page = markdown(build_tables(table, suite="digits")).replace("### ", "#### ")
    PAGE.write_text(between(text, "digits", page))
    ASSETS.mkdir(parents=True, exist_ok=True)
    for name in DIGITS:
        drawn = figures.draw_figure(name, figures.FIGURES[name].prepare(table))
        charts.save_figure(drawn, ASSETS / f"digits_{name}.svg")
    for name in PUBLISHED:
        published = figures.FIGURES[name].published
        assert published is not None
        drawn = figures.draw_figure(name, published())
        charts.save_figure(drawn, ASSETS / f"published_{name}.svg")


if __name__ == "__main__":
    main()
