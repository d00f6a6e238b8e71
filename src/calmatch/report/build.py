"""report.html: one page that opens from disk and loads nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from calmatch.checkpoint import write
from calmatch.report import charts
from calmatch.report.console import COLUMNS, LEGEND, cell
from calmatch.results import Run


def build(runs: Sequence[Run], path: Path) -> Path:
    """Write the page of one or more runs."""
    loader = jinja2.PackageLoader("calmatch.report", "")
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    text = page.get_template("template.html").render(
        heading=" · ".join(dict.fromkeys(run.config.dataset for run in runs)),
        sentence=sentence(runs[0]) if len(runs) == 1 else "",
        columns=[column.head.replace("\n", " ") for column in COLUMNS],
        rows=[_row(run) for run in runs],
        legend=LEGEND,
        reliability=charts.svg(charts.reliability_figure(runs)),
    )
    write(path, text)
    return path


def _row(run: Run) -> dict[str, Any]:
    return {
        "title": run.title,
        "leaky": run.result["leaky"],
        "cells": [cell(run.result["metrics"].get(column.key), column) for column in COLUMNS],
        "curves": charts.svg(charts.curves_figure(run)),
        "config": json.dumps(run.config.dump(), indent=2),
        "command": f"calmatch train {run.folder / 'config.json'} --out NEW_FOLDER",
        "notes": run.result["notes"],
    }


def sentence(run: Run) -> str:
    """The result in words."""
    found = run.result["metrics"]
    error, ece = found["error"]["value"], found["ece"]
    return (
        f"Of 100 test pictures about {100 * error:.0f} are classified wrongly, and confidence is "
        f"off by {100 * ece['value']:.1f} points on average "
        f"(95 % interval {100 * ece['low']:.1f} to {100 * ece['high']:.1f})."
    )
