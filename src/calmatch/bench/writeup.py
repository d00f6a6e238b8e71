"""From the run folders of a suite to its tables and figures, all in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calmatch.bench import figures, published, render, tables, tidy
from calmatch.bench.groups import Found, gather
from calmatch.checkpoint import write

ENDINGS = {"md": "md", "latex": "tex", "html": "html"}


def write_all(folders: Sequence[Path], out: Path, suite: str | None) -> list[str]:
    """Write every table and every figure that the runs allow; a line about each.

    Args:
        folders: of finished runs.
        out: where the files go.
        suite: whose names and published numbers apply; None: the runs are changed ones.
    """
    out.mkdir(parents=True, exist_ok=True)
    found = gather(folders, suite)
    compare = _printed(found, suite or "")
    built = tables.build(found, suite=suite or "", compare=compare)
    for kind, ending in ENDINGS.items():
        write(out / f"table.{ending}", render.RENDER[kind](built))
    write(out / "table.csv", tidy.text(found, suite=suite or "", compare=compare))
    lines = [f"Tables:  {out}/table.md, .tex, .html, .csv"]
    drawn, left = [], []
    for name, stem, runs in figures.each(found):
        try:
            content = figures.FIGURES[name].prepare(runs)
        except ValueError as error:  # these runs do not allow it
            left.append(f"No figure {stem}: {error}")
            continue
        write(out / f"{stem}.svg", figures.encode(figures.drawn(name, content), ".svg"))
        drawn.append(stem)
    return [*lines, f"Figures: {out}/ {', '.join(f'{name}.svg' for name in drawn)}", *left]


def _printed(found: Found, suite: str) -> bool:
    """Whether the paper prints a number for one of these cells."""
    return any(published.find(g.row, g.column, "error", suite) for g in found.groups)
