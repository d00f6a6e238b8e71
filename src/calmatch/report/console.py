"""Tables on the console: aligned, with units and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from calmatch.metrics import Interval
from calmatch.results import Run


class Column(NamedTuple):
    """A quantity: its key, heading, factor and decimals."""

    key: str
    head: str
    scale: float = 100.0
    digits: int = 1


COLUMNS = (
    Column("error", "error\n%"),
    Column("ece", "ECE\n%"),
    Column("adaptive_ece", "adapt.\nECE %"),
    Column("classwise_ece", "class\nECE %"),
    Column("nll", "NLL\nnats", 1.0, 2),
    Column("agree", "agree\n%"),
    Column("gap", "logit\ngap", 1.0),
)
LEGEND = (
    "Below each value its 95 % interval (bootstrap over test pictures; one seed). ECE: 15 bins of "
    "the top class; adapt.: bins of equal mass; class: every class's probability. Agree: share of "
    "accepted unlabelled pictures whose weak and strong views agree, last log interval. Logit "
    "gap: largest distance of two logits, mean over test pictures."
)


def cell(found: Mapping[str, Any] | None, column: Column) -> tuple[str, str]:
    """A value and its interval as text; dashes where there is none."""
    if found is None:
        return "-", ""
    value, low, high = (column.scale * found[end] for end in ("value", "low", "high"))
    digits = column.digits
    return f"{value:.{digits}f}", f"{low:.{digits}f}–{high:.{digits}f}"


def show(runs: Sequence[Run]) -> None:
    """The table of runs."""
    table = Table(title=_title(runs), title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("run", vertical="top", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.head, justify="right", no_wrap=True)
    for run in runs:
        cells = [cell(run.result["metrics"].get(column.key), column) for column in COLUMNS]
        name = run.title.replace(" + ", "\n+ ") + ("\n(leaky)" if run.result["leaky"] else "")
        table.add_row(name, *(f"{value}\n[dim]{ends}[/dim]" for value, ends in cells))
    console = Console(highlight=False)
    console.print(table)
    console.print(LEGEND, style="dim")
    if any(run.result["leaky"] for run in runs):
        console.print("Leaky: these weights were chosen on the test set, as the paper and USB do.")
    for note in sorted({note for run in runs for note in run.result["notes"]}):
        console.print(note, style="yellow", markup=False)


def _title(runs: Sequence[Run]) -> str:
    first = runs[0]
    pictures = first.result["pictures"]
    return (
        f"{first.data}: {pictures['labelled']} labels, {pictures['unlabelled']:,} "
        f"unlabelled, {pictures['test']:,} test pictures; seed {first.config.seed}, "
        f"{_chosen(first)}"
    )


def _chosen(run: Run) -> str:
    averaged = "averaged " if run.result["weights"] == "ema" else ""
    best = "" if run.result["selected"] == "last" else f", {run.result['selected']}"
    return f"{averaged}weights of step {run.result['step']:,} of {run.result['steps']:,}{best}"


def show_metrics(found: Mapping[str, Interval], pictures: int, intervals: bool = True) -> None:
    """The table of one model's metrics."""
    table = Table(title=f"{pictures:,} pictures", title_justify="left", pad_edge=False)
    table.add_column("metric")
    for head in ("value", "95 % from", "to")[: 3 if intervals else 1]:
        table.add_column(head, justify="right")
    for name, item in found.items():
        scale, unit, digits = (1.0, "nats", 4) if name == "nll" else (100.0, "%", 2)
        if name == "brier":
            scale, unit, digits = 1.0, "0 to 2", 4
        shown = item if intervals else item[:1]
        numbers = [f"{scale * value:.{digits}f}" for value in shown]
        table.add_row(f"{name} ({unit})", *numbers)
    Console(highlight=False).print(table)
