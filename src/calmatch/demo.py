"""The demo: five runs on scikit-learn's digits with 40 labels, a table, a picture, a page."""

from __future__ import annotations

from pathlib import Path

from calmatch.api import train
from calmatch.log import tell
from calmatch.recipes import digits_40
from calmatch.report import charts
from calmatch.report.build import build
from calmatch.report.console import show
from calmatch.results import Run

RUNS = [
    ("supervised", ""),
    ("fixmatch", ""),
    ("fixmatch", "margin(m=10)"),
    ("freematch", ""),
    ("freematch", "margin(m=10)"),
]


def run(out: Path, quiet: bool = False) -> list[Run]:
    """Train, print what was measured, and say where everything is."""
    tell("Five runs on scikit-learn's digits: 40 labels, the other pictures unlabelled.", quiet)
    runs = []
    for method, penalty in RUNS:
        folder = out / (f"{method}-margin" if penalty else method)
        runs.append(train(digits_40(method, penalty=penalty), folder, quiet=quiet))
    picture = charts.save(charts.reliability_figure(runs), out / "reliability.png")
    page = build(runs, out / "report.html")
    show(runs)
    print(f"Run folders: {out}\nPicture:     {picture}\nReport:      {page}")
    return runs
