"""A run's result in sentences and console tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from calmatch.metrics import Interval
from calmatch.report.summary import Predictions, wilson
from calmatch.runs import Run

EVALUATED_ON = {
    "test": "test pictures",
    "crossfit": "labelled pictures, each judged by a model that did not see its label",
    "holdout": "held-out labelled pictures",
}
SHORT_NAMES = {
    "test": "test pictures",
    "crossfit": "labelled pictures",
    "holdout": "held-out pictures",
}


def evaluated_on(run: Run) -> str:
    return str(run.result.get("judged_on", "test"))


def name_images(run: Run) -> str:
    """What the judged pictures are called in a sentence."""
    return SHORT_NAMES.get(evaluated_on(run), "judged pictures")


def percent_points(share: float) -> str:
    """A share as percent, one digit behind the point."""
    return f"{100 * share:.1f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 2 or value == 0 else f"{value:.1f}"


def describe_headline(
    run: Run, measured: Mapping[str, Any], chance: Mapping[str, float]
) -> list[str]:
    """Error, calibration error, and whether it could be chance."""
    error, ece, over = measured["error"], measured["ece"], measured["over"]
    first = (
        f"Of 100 {name_images(run)}, about {_number(100 * error['value'])} are classified wrongly "
        f"(95 % interval {percent_points(error['low'])} to {percent_points(error['high'])})."
    )
    second = (
        f"Confidence is off by {percent_points(ece['value'])} percentage points on average (ECE; 95 % "
        f"interval {percent_points(ece['low'])} to {percent_points(ece['high'])})."
    )
    third = (
        f"With {measured['n']:,} pictures a perfectly honest model would show "
        f"{percent_points(chance['low'])} to {percent_points(chance['high'])} by chance alone, so "
    )
    if ece["value"] <= chance["high"]:
        return [first, second, third + "no dishonesty can be shown here."]
    if not measured["over_shown"]:
        return [first, second, third + "this is more than chance, in both directions."]
    side = "too sure of itself" if over > 0 else "not sure enough of itself"
    return [first, second, third + f"this is more than chance: the model is {side}."]


def short_verdict(measured: Mapping[str, Any], chance: Mapping[str, float]) -> str:
    """The calibration in two or three words."""
    if measured["ece"]["value"] <= chance["high"]:
        return "no fault shown"
    if not measured["over_shown"]:
        return "off, both ways"
    return "too sure" if measured["over"] > 0 else "not sure enough"


def compare_runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which run is best at what, and how far that can be believed."""
    sentences = []
    for key, what in (("error", "lowest error"), ("ece", "lowest calibration error (ECE)")):
        best = min(runs, key=lambda run: run[key]["value"])
        ends = f"{percent_points(best[key]['low'])} to {percent_points(best[key]['high'])}"
        rivals = [run for run in runs if run is not best and run[key]["low"] <= best[key]["high"]]
        others = f"{len(rivals)} other intervals overlap" if rivals[1:] else "another one overlaps"
        doubt = f"; {others}" if rivals else ""
        sentences.append(
            f"{best['title']} has the {what}: {percent_points(best[key]['value'])} % ({ends}{doubt})."
        )
    return [*sentences, "Each is one run: another seed can change more than these intervals say."]


def describe_promise(selective: Mapping[str, Any]) -> str:
    """What a model's operating point promises, or why it promises nothing."""
    if not {"threshold", "accuracy", "certainty", "labels"} <= set(selective):
        return ""
    wanted = f"{100 * selective['accuracy']:g} % accuracy"
    if selective["threshold"] is None:
        missing = selective.get("missing") or 0
        more = f"at least {missing:,} more labels are needed" if missing else "it errs too often"
        return f"No operating point promises {wanted} with {selective['labels']:,} labels: {more}."
    rough = " The labels were cross-fitted, so it is approximate." if _rough(selective) else ""
    return (
        f"Above {percent_points(selective['threshold'])} % confidence it promises {wanted}, with a "
        f"certainty of {100 * selective['certainty']:g} %, from {selective['labels']:,} "
        f"labels.{rough}"
    )


def _rough(selective: Mapping[str, Any]) -> bool:
    return bool(selective.get("cross_fitted"))


def describe_calibration(model: Mapping[str, Any]) -> str:
    """How the confidence was corrected after training, in a line."""
    scaling, sets = model.get("calibration") or {}, model.get("conformal") or {}
    said = []
    if scaling.get("kind", "identity") != "identity":
        value = f" {scaling['temperature']:.3g}" if "temperature" in scaling else ""
        said.append(f"{scaling['kind']}{value} from {scaling.get('labels', 0):,} labels")
    if sets.get("threshold") is not None:
        said.append(f"prediction sets ({sets.get('score')}) of {100 * sets['coverage']:g} %")
    return "; ".join(said)


def describe_before(measured: Mapping[str, float]) -> str:
    """What was measured before the confidence was corrected."""
    if not {"ece", "nll"} <= set(measured):
        return ""
    return f"ECE {percent_points(measured['ece'])} %, NLL {measured['nll']:.2f} nats"


def describe_example(found: Predictions) -> str:
    """What a stated confidence is worth, at the level that most mistakes are made under."""
    for low, high in ((0.85, 0.95), (0.95, 0.995), (0.7, 0.9), (0.5, 0.8)):
        some = (found.confidence > low) & (found.confidence <= high)
        number = int(some.sum())
        if number >= 30:
            right = float(found.right[some].mean())
            ends = [percent_points(float(end)) for end in wilson(right, number)]
            return (
                f"Where it says {percent_points(float(found.confidence[some].mean()))} % (the {number:,} "
                f"pictures between {100 * low:g} and {100 * high:g} %), it is right in "
                f"{percent_points(right)} % ({ends[0]} to {ends[1]})."
            )
    return ""


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


def print_runs(runs: Sequence[Run]) -> None:
    """The table of runs."""
    table = Table(title=_table_title(runs), title_justify="left", box=SIMPLE_HEAD, padding=0)
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


def _table_title(runs: Sequence[Run]) -> str:
    first = runs[0]
    pictures = first.result["pictures"]
    return (
        f"{first.data}: {pictures['labelled']} labels, {pictures['unlabelled']:,} "
        f"unlabelled, {pictures['test']:,} test pictures; seed {first.config.seed}, "
        f"{_chosen_weights(first)}"
    )


def _chosen_weights(run: Run) -> str:
    averaged = "averaged " if run.result["weights"] == "ema" else ""
    best = "" if run.result["selected"] == "last" else f", {run.result['selected']}"
    return f"{averaged}weights of step {run.result['step']:,} of {run.result['steps']:,}{best}"


def print_metrics(found: Mapping[str, Interval], pictures: int, intervals: bool = True) -> None:
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
