"""A run's result in sentences and console tables."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calmatch.console import visible
from calmatch.metrics import FEW, Interval
from calmatch.predict import Checked
from calmatch.report.summary import make_predictions, percent, reliability_bins
from calmatch.runs import Run

WORST = 10  # mistakes that are named
EVALUATED_ON = {
    "test": "test pictures",
    "crossfit": "labelled pictures, out of fold: each by a model that did not see its label",
    "holdout": "held-out labelled pictures",
}
TEST_SELECTED = "Test-selected: these weights were chosen on the test set, as the paper and USB do."


def short_verdict(measured: Mapping[str, Any]) -> str:
    """The calibration in two or three words."""
    if measured["ece"]["value"] <= measured["chance"]["high"]:
        return "no fault shown"
    if not measured["over_shown"]:
        return "off, both ways"
    return "too sure" if measured["over"] > 0 else "not sure enough"


def compare_runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which run is best at what, and how far that can be believed."""
    sentences = []
    named = (("error", "lowest error"), ("ece", "lowest calibration error (ECE)"))
    for key, what in named[: 1 if any(run["few"] for run in runs) else 2]:
        best = min(runs, key=lambda run: run[key]["value"])
        rivals = [run for run in runs if run is not best and run[key]["low"] <= best[key]["high"]]
        others = f"{len(rivals)} other intervals overlap" if rivals[1:] else "another one overlaps"
        value, low, high = (percent(best[key][name]) for name in ("value", "low", "high"))
        ends = f"{low} to {high}; {others}" if rivals else f"{low} to {high}"
        sentences.append(f"{best['title']} has the {what}: {value} % ({ends}).")
    return [*sentences, "Each is one run: another seed can change more than these intervals say."]


def describe_calibration(parts: Mapping[str, Any]) -> str:
    """How the confidence was corrected after training, in a line."""
    scaling, sets = parts.get("calibration"), parts.get("conformal")
    words = []
    if scaling and scaling.kind != "identity":
        heat = scaling.values.get("temperature")
        value = f" {heat:.3g}" if heat is not None else ""
        words.append(f"{scaling.kind}{value} from {scaling.labels:,} labels")
    if sets and sets.threshold is not None:
        words.append(f"prediction sets ({sets.score}) of {100 * sets.coverage:g} %")
    return "; ".join(words)


COLUMNS = {  # the heading of each quantity, its factor and decimals
    "error": ("error\n%", 100.0, 1),
    "ece": ("ECE\n%", 100.0, 1),
    "adaptive_ece": ("adapt.\nECE %", 100.0, 1),
    "classwise_ece": ("class\nECE %", 100.0, 1),
    "nll": ("NLL\nnats", 1.0, 2),
    "agree": ("agree\n%", 100.0, 1),
    "gap": ("logit\ngap", 1.0, 1),
}
LEGEND = Path(__file__).with_name("legend.txt").read_text("utf-8").strip()


def table_cells(run: Run) -> list[tuple[str, str, float | str]]:
    """A value and its interval as text, and what it is sorted by; a dash where there is none."""
    cells: list[tuple[str, str, float | str]] = []
    few = run.result.evaluated_on != "test" and run.result.images.get("test", 0) < FEW
    for key, (_, scale, digits) in COLUMNS.items():
        interval = run.result.metrics.get(key, ()) if not (few and "ece" in key) else ()
        texts = [f"{scale * number:.{digits}f}" for number in interval]
        cells.append((texts[0], "–".join(texts[1:]), interval[0]) if interval else ("-", "", ""))
    return cells


def print_runs(runs: Sequence[Run]) -> None:
    result, images = runs[0].result, runs[0].result.images
    averaged = "averaged " if result.weights == "ema" else ""
    best = "" if result.selected == "last" else f", {result.selected}"
    title = (
        f"{runs[0].data}: {images['labelled']} labels, {images['unlabelled']:,} unlabelled, "
        f"{images['test']:,} test pictures; seed {runs[0].config.seed}, {averaged}weights of step "
        f"{result.step:,} of {result.steps:,}{best}"
    )
    table = Table(title=escape(visible(title)), title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("run", vertical="top", no_wrap=True)
    for head, *_ in COLUMNS.values():
        table.add_column(head, justify="right", no_wrap=True)
    for run in runs:
        mark = "\n(test-selected)" if run.result.test_selected else ""
        name = escape(visible(run.title)).replace(" + ", "\n+ ") + mark
        table.add_row(name, *(f"{value}\n[dim]{ends}[/dim]" for value, ends, _ in table_cells(run)))
    console = Console(highlight=False)
    console.print(table)
    console.print(LEGEND, style="dim")
    if any(run.result.test_selected for run in runs):
        console.print(TEST_SELECTED)
    for note in sorted({note for run in runs for note in run.result.notes}):
        console.print(visible(note), style="yellow", markup=False)


def print_checked(
    checked: Checked, values: Mapping[str, Interval], *, as_json: bool, intervals: bool
) -> None:
    """Metrics, reliability and the worst mistakes of predictions beside the truth."""
    probs, y = torch.from_numpy(checked.probs), torch.from_numpy(checked.labels)
    preds = make_predictions(probs.log(), y)
    bins = [row for row in reliability_bins(preds, 10) if row["n"]]
    wrong = [k for k in preds.confidence.argsort(descending=True).tolist() if not preds.right[k]]
    mistakes = [
        {
            "file": checked.files[k],
            "label": checked.classes[int(preds.guess[k])],
            "truth": checked.classes[int(y[k])],
            "confidence": float(preds.confidence[k]),
        }
        for k in wrong[:WORST]
    ]
    if as_json:
        shown = {name: item._asdict() for name, item in values.items()}
        print(json.dumps({**shown, "reliability": bins, "mistakes": mistakes}))
        return
    print_metrics(values, len(y), intervals)
    table = Table("confidence", "pictures", "right", "95 % interval", box=SIMPLE_HEAD)
    for row in bins:
        cells = (f"{row['left']:.1f} to {row['right']:.1f}", f"{row['n']:,}")
        table.add_row(*cells, f"{row['accuracy']:.0%}", f"{row['low']:.0%} to {row['high']:.0%}")
    console = Console(highlight=False)
    console.print(table)
    line = "  {file}: {label} at {confidence:.0%}, in truth {truth}".format
    lines = [line(**one) for one in mistakes]
    verdict = "Its surest mistakes:" if lines else "It made no mistake."
    console.print(visible("\n".join([verdict, *lines])), markup=False, soft_wrap=True)


def print_metrics(values: Mapping[str, Interval], number: int, intervals: bool = True) -> None:
    """The table of one model's metrics on so many images."""
    columns = 3 if intervals else 1
    table = Table(title=f"{number:,} pictures", title_justify="left", pad_edge=False)
    table.add_column("metric")
    for head in ("value", "95 % from", "to")[:columns]:
        table.add_column(head, justify="right")
    units = {"nll": (1.0, "nats", 4), "brier": (1.0, "0 to 2", 4)}
    for name, interval in values.items():
        scale, unit, digits = units.get(name, (100.0, "%", 2))
        numbers = [f"{scale * value:.{digits}f}" for value in interval[:columns]]
        table.add_row(f"{name} ({unit})", *numbers)
    Console(highlight=False).print(table)
