"""`calmatch table` and `calmatch figure`: from run folders to files."""

from __future__ import annotations

import sys
from pathlib import Path

from calmatch import spec
from calmatch.bench import render, tables, tidy
from calmatch.bench.groups import gather
from calmatch.checkpoint import write
from calmatch.options import FigureOptions, TableOptions

ENDINGS = {".md": "md", ".tex": "latex", ".csv": "csv", ".html": "html"}


def table(options: TableOptions) -> None:
    """Print or write the tables of some runs."""
    kind: str = options.to or "md"
    if options.out and not options.to:
        if options.out.suffix not in ENDINGS:
            raise ValueError(f"{options.out} should end in {', '.join(ENDINGS)}, or set --to.")
        kind = ENDINGS[options.out.suffix]
    found = gather(options.runs, options.suite)
    suite = options.suite or ""
    if kind == "csv":
        text = tidy.text(found, suite=suite, compare=options.published)
    else:
        text = render.RENDER[kind](tables.build(found, suite=suite, compare=options.published))
    if options.out:
        _write(options.out, text)
        print(f"Table: {options.out}")
    else:
        sys.stdout.write(text)


def figure(name: str, options: FigureOptions) -> None:
    """Draw one figure into a file."""
    from calmatch.bench import figures

    if name not in figures.FIGURES:
        raise ValueError(f"There is no figure {name!r}.{spec.nearest(name, figures.FIGURES)}")
    drawing = figures.FIGURES[name]
    if options.published and drawing.published is None:
        raise ValueError(f"The paper prints no numbers for the figure {name}; name run folders.")
    if not (options.runs or options.published or name == "entropy"):
        raise ValueError(f"The figure {name} needs run folders: calmatch figure {name} RUNS ...")
    path = options.out or Path(f"{name}.svg")
    if path.suffix not in figures.FORMATS:
        raise ValueError(f"{path} should end in {', '.join(figures.FORMATS)}.")
    found = gather(options.runs, options.suite) if options.runs else None
    if found and options.column:
        found = found.only(options.column)
    if options.published and drawing.published is not None:
        content = drawing.published()
    elif name == "logits":
        assert found is not None
        content = figures.prepare_logits(found, target=options.target)
    else:
        content = drawing.prepare(found)
    _write(path, figures.encode(figures.drawn(name, content), path.suffix))
    print(f"Figure: {path}")


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)
