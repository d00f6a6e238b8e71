"""Quantities of runs: what is measured, in which unit, and how its mean over seeds is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from calmatch.bench import stats
from calmatch.bench.groups import Group, Seeds
from calmatch.bench.render import Entry, Mark
from calmatch.results import Run, best_on_test
from calmatch.scaled import with_labels


class Quantity(NamedTuple):
    """A column of numbers: its heading, unit and factor."""

    head: str
    unit: str
    scale: float = 100.0
    digits: int = 2


QUANTITIES: Mapping[str, Quantity] = {
    "error": Quantity("error", "% of test pictures"),
    "ece": Quantity("ECE", "%, 15 bins"),
    "adaptive_ece": Quantity("AECE", "%, bins of equal mass"),
    "classwise_ece": Quantity("CECE", "%, all classes"),
    "nll": Quantity("NLL", "nats", 1.0, 3),
    "smooth_ece": Quantity("smooth ECE", "%"),
    "brier": Quantity("Brier", "%"),
    "aurc": Quantity("AURC", "%"),
    "ece_views": Quantity("ECE, T by views", "%, no labels: two views of unlabelled pictures"),
    "nll_views": Quantity("NLL, T by views", "nats, no labels", 1.0, 3),
    "ece_seeds": Quantity("ECE, T by seeds", "%, no labels: two runs' answers on test pictures"),
    "nll_seeds": Quantity("NLL, T by seeds", "nats, no labels", 1.0, 3),
    "ece_labels": Quantity("ECE, T by labels", "%, cross-fitted on the labelled pictures"),
    "nll_labels": Quantity("NLL, T by labels", "nats, cross-fitted on the labels", 1.0, 3),
    "ece_crossfit": Quantity("ECE, T by test halves", "%, each half by the other's labels"),
    "nll_crossfit": Quantity("NLL, T by test halves", "nats, each half by the other's", 1.0, 3),
    "ece_oracle": Quantity("ECE, oracle T", "%, temperature of the same labels"),
    "nll_oracle": Quantity("NLL, oracle T", "nats, temperature of the same labels", 1.0, 3),
}
SPREAD = "mean ± sample standard deviation (ddof 1) over seeds"


def values(group: Group, metric: str) -> dict[Seeds, float]:
    """A quantity of each run by its seeds, in its unit; runs that lack it are left out."""
    scale = QUANTITIES[metric].scale
    found = {seeds: _value(run, metric) for seeds, run in group.runs.items()}
    return {seeds: scale * value for seeds, value in found.items() if value is not None}


def _value(run: Run, metric: str) -> float | None:
    name, _, way = metric.rpartition("_")
    if way in ("views", "seeds", "labels"):
        found = run.result.get("temperature_scaled", {}).get(way)
        return None if found is None else float(found[name])
    if way not in ("crossfit", "oracle"):
        there = run.result["metrics"].get(metric)
        return None if there is None else float(there["value"])
    if "temperature_scaled" not in run.result:  # an older run
        run.result["temperature_scaled"] = with_labels(*run.predictions())
    return float(run.result["temperature_scaled"][way][name])


def leaky(run: Run) -> Mapping[str, float] | None:
    """The best evaluation on the test set; None if there was only one to choose from."""
    found = run.result.get("best_on_test") or best_on_test(run.lines("test"))
    return found if found["evaluations"] > 1 else None


def leaky_values(group: Group, metric: str) -> dict[Seeds, float]:
    """The same at each run's best step on the test set, where that is known."""
    found = {seeds: best for seeds, run in group.runs.items() if (best := leaky(run))}
    scale = QUANTITIES[metric].scale
    return {seeds: scale * best[metric] for seeds, best in found.items() if metric in best}


def head(metric: str) -> str:
    quantity = QUANTITIES[metric]
    return f"{quantity.head} ({'nats' if quantity.scale == 1 else '%'})"


def entry(values: Sequence[float], digits: int = 2, arrow: str = "", mark: Mark = "") -> Entry:
    """A mean with its deviation."""
    if not values:
        return Entry("–")
    found = stats.mean(values)
    sd = "" if found.sd is None else f" ± {found.sd:.{digits}f}"
    text = f"{found.value:.{digits}f}{sd}{arrow and ' ' + arrow}"
    return Entry(text, mark)


def marks(means: Mapping[str, float], digits: int) -> dict[str, Mark]:
    """Best and second by the numbers as they are shown, so that ties share a mark."""
    shown = {row: round(value, digits) for row, value in means.items()}
    order = sorted(set(shown.values()))[:2]
    if len(order) < 2:  # one row, or all alike
        return {}
    names: dict[float, Mark] = dict(zip(order, ("best", "second"), strict=False))
    return {row: names[value] for row, value in shown.items() if value in names}
