"""A run's result in sentences that a person who never heard of ECE understands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calmatch.report.summary import Judged, wilson
from calmatch.results import Run

JUDGED = {
    "test": "test pictures",
    "crossfit": "labelled pictures, each judged by a model that did not see its label",
    "holdout": "held-out labelled pictures",
}
SHORT = {"test": "test pictures", "crossfit": "labelled pictures", "holdout": "held-out pictures"}


def judged_on(run: Run) -> str:
    return str(run.result.get("judged_on", "test"))


def pictures(run: Run) -> str:
    """What the judged pictures are called in a sentence."""
    return SHORT.get(judged_on(run), "judged pictures")


def points(share: float) -> str:
    """A share as percent, one digit behind the point."""
    return f"{100 * share:.1f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 2 or value == 0 else f"{value:.1f}"


def headline(run: Run, measured: Mapping[str, Any], chance: Mapping[str, float]) -> list[str]:
    """Error, calibration error, and whether it could be chance."""
    error, ece, over = measured["error"], measured["ece"], measured["over"]
    first = (
        f"Of 100 {pictures(run)}, about {_number(100 * error['value'])} are classified wrongly "
        f"(95 % interval {points(error['low'])} to {points(error['high'])})."
    )
    second = (
        f"Confidence is off by {points(ece['value'])} percentage points on average (ECE; 95 % "
        f"interval {points(ece['low'])} to {points(ece['high'])})."
    )
    third = (
        f"With {measured['n']:,} pictures a perfectly honest model would show "
        f"{points(chance['low'])} to {points(chance['high'])} by chance alone, so "
    )
    if ece["value"] <= chance["high"]:
        return [first, second, third + "no dishonesty can be shown here."]
    if not measured["over_shown"]:
        return [first, second, third + "this is more than chance, in both directions."]
    side = "too sure of itself" if over > 0 else "not sure enough of itself"
    return [first, second, third + f"this is more than chance: the model is {side}."]


def verdict(measured: Mapping[str, Any], chance: Mapping[str, float]) -> str:
    """The calibration in two or three words."""
    if measured["ece"]["value"] <= chance["high"]:
        return "no fault shown"
    if not measured["over_shown"]:
        return "off, both ways"
    return "too sure" if measured["over"] > 0 else "not sure enough"


def comparison(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which run is best at what, and how far that can be believed."""
    sentences = []
    for key, what in (("error", "lowest error"), ("ece", "lowest calibration error (ECE)")):
        best = min(runs, key=lambda run: run[key]["value"])
        ends = f"{points(best[key]['low'])} to {points(best[key]['high'])}"
        rivals = [run for run in runs if run is not best and run[key]["low"] <= best[key]["high"]]
        others = f"{len(rivals)} other intervals overlap" if rivals[1:] else "another one overlaps"
        doubt = f"; {others}" if rivals else ""
        sentences.append(
            f"{best['title']} has the {what}: {points(best[key]['value'])} % ({ends}{doubt})."
        )
    return [*sentences, "Each is one run: another seed can change more than these intervals say."]


def promise(selective: Mapping[str, Any]) -> str:
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
        f"Above {points(selective['threshold'])} % confidence it promises {wanted}, with a "
        f"certainty of {100 * selective['certainty']:g} %, from {selective['labels']:,} "
        f"labels.{rough}"
    )


def _rough(selective: Mapping[str, Any]) -> bool:
    return bool(selective.get("cross_fitted"))


def calibration(model: Mapping[str, Any]) -> str:
    """How the confidence was corrected after training, in a line."""
    scaling, sets = model.get("calibration") or {}, model.get("conformal") or {}
    said = []
    if scaling.get("kind", "identity") != "identity":
        value = f" {scaling['temperature']:.3g}" if "temperature" in scaling else ""
        said.append(f"{scaling['kind']}{value} from {scaling.get('labels', 0):,} labels")
    if sets.get("threshold") is not None:
        said.append(f"prediction sets ({sets.get('score')}) of {100 * sets['coverage']:g} %")
    return "; ".join(said)


def before(measured: Mapping[str, float]) -> str:
    """What was measured before the confidence was corrected."""
    if not {"ece", "nll"} <= set(measured):
        return ""
    return f"ECE {points(measured['ece'])} %, NLL {measured['nll']:.2f} nats"


def example(found: Judged) -> str:
    """What a stated confidence is worth, at the level that most mistakes are made under."""
    for low, high in ((0.85, 0.95), (0.95, 0.995), (0.7, 0.9), (0.5, 0.8)):
        some = (found.confidence > low) & (found.confidence <= high)
        number = int(some.sum())
        if number >= 30:
            right = float(found.right[some].mean())
            ends = [points(float(end)) for end in wilson(right, number)]
            return (
                f"Where it says {points(float(found.confidence[some].mean()))} % (the {number:,} "
                f"pictures between {100 * low:g} and {100 * high:g} %), it is right in "
                f"{points(right)} % ({ends[0]} to {ends[1]})."
            )
    return ""
