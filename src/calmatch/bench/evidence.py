"""Tables of compact results: the bar, trust, temperatures, averaged weights, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from calmatch import spec
from calmatch.bench import stats, tables
from calmatch.bench.groups import Found, Group, Seeds
from calmatch.bench.measures import QUANTITIES, SPREAD, entry, values
from calmatch.bench.render import Entry, Table
from calmatch.bench.trusting import LIMITS

DETAILS = ("error", "ece", "adaptive_ece", "classwise_ece", "smooth_ece", "nll", "brier", "aurc")
PLAIN = "last weights"  # what the paper judges
CHOSEN = ("averaged, T by labels", "averaged")  # what `calmatch fit` keeps; the first there is
HONEST = ("ece", "ece_views", "ece_seeds", "ece_labels", "ece_oracle")


class Variant(NamedTuple):
    """A row judged in one way: which weights, and which temperature on top."""

    name: str
    error: dict[Seeds, float]  # %
    ece: dict[Seeds, float]  # %
    trust: dict[Seeds, dict[str, list[list[float]]]]


def variants(group: Group) -> list[Variant]:
    """Every way in which the runs of a group were judged."""
    found = []
    for weights in ("last weights", "averaged"):
        for way in ("", "views", "seeds", "labels"):
            parts = {s: _part(run, weights, way) for s, run in group.runs.items()}
            kept = {seeds: part for seeds, part in parts.items() if part}
            if kept:
                error, ece = (
                    {s: 100 * part[metric] for s, part in kept.items()}
                    for metric in ("error", "ece")
                )
                trust = {s: part["trust"] for s, part in kept.items()}
                name = f"{weights}, T by {way}" if way else weights
                found.append(Variant(name, error, ece, trust))
    return found


def _part(run: Any, weights: str, way: str) -> dict[str, Any]:
    """One run's error, ECE and trust; empty where it was not judged so."""
    averaged = run.result["weights"] == "ema"
    if (weights == "averaged") > averaged:
        return {}
    whole = run.result if (weights == "averaged") == averaged else run.result.get("plain")
    if whole is None or "trust" not in whole:
        return {}
    error = whole["metrics"]["error"]["value"]
    if not way:
        return {"error": error, "ece": whole["metrics"]["ece"]["value"], "trust": whole["trust"]}
    part = whole["temperature_scaled"].get(way, {})
    return {**part, "error": error} if "trust" in part else {}


def bar(
    found: Found, base: str, others: Sequence[str], title: str = "The bar, %", brief: bool = False
) -> Table:
    """Is ECE at most half of the base's last weights' at no higher error? Paired by seed.

    Args:
        found: the groups.
        base: the row they are compared with.
        others: rows.
        title: of the table.
        brief: only the base's last weights, and of others what `calmatch fit` keeps.
    """
    rows = []
    for column in found.columns:
        plain = found.at(base, column)
        first = variants(plain)[0] if plain else None
        for row in (base, *others) if first else ():
            group = found.at(row, column)
            kept = judged(group, [PLAIN] if row == base else CHOSEN)
            for one in variants(group) if group else ():
                if one == kept or not brief:
                    rows.append([Entry(column), Entry(row), Entry(one.name), *_against(one, first)])
    heads = ["data", "row", "judged", "error", "ECE", "of its ECE", "ECE change", "error change"]
    note = (
        "Changes against the last weights of plain FreeMatch, mean and 95 % Student interval over "
        "pairs of seeds. The bar: at most half of its ECE, an interval of the change under zero, "
        "and an error that is not higher; `noise` where it is higher, but by an interval that "
        "holds zero."
    )
    return Table(title, [*heads, "met"], rows, [note], words=3)


def _against(one: Variant, first: Variant | None) -> list[Entry]:
    assert first is not None
    shared = [seeds for seeds in one.ece if seeds in first.ece]
    changes = {
        name: [getattr(one, name)[s] - getattr(first, name)[s] for s in shared]
        for name in ("ece", "error")
    }
    share = sum(one.ece[s] for s in shared) / max(1e-9, sum(first.ece[s] for s in shared))
    spans = {name: stats.student(change) for name, change in changes.items()}
    means = {name: stats.mean(change).value for name, change in changes.items()}
    words = [f"{means[n]:+.2f} ({low:+.2f} to {high:+.2f})" for n, (low, high) in spans.items()]
    met = share <= 0.5 and spans["ece"][1] < 0 and spans["error"][0] <= 0
    told = ("yes" if means["error"] <= 0 else "noise") if met else "no"
    numbers = [entry(list(part.values())) for part in (one.error, one.ece)]
    said = ["–"] * 3 if one == first else [*words, told]
    return [*numbers, Entry(f"{share:.2f}"), *map(Entry, said)]


def sure(found: Found, rows: Sequence[str], limit: float = 0.95) -> Table:
    """Of the predictions made with so much confidence, how many are right?"""
    lines = [
        [Entry(column), Entry(row), Entry(one.name), *_above(one, limit)]
        for column in found.columns
        for row in rows
        if (group := found.at(row, column))
        for one in variants(group)
    ]
    heads = ["data", "row", "judged", "of all", "mean confidence", "right"]
    title = f"Predictions made with at least {limit:.0%} confidence, %, {SPREAD}"
    return Table(title.replace("%", " %", 1), heads, lines, (), words=3)


def judged(group: Group | None, names: Sequence[str]) -> Variant | None:
    """The first of these variants that the group has."""
    there = {one.name: one for one in variants(group)} if group else {}
    return next((there[name] for name in names if name in there), None)


def unaveraged(found: Found) -> Found:
    """The same runs judged by their last weights, where they kept both."""
    groups = []
    for group in found.groups:
        runs = {
            seeds: run._replace(result={**run.result, **run.result["plain"], "best_on_test": NONE})
            for seeds, run in group.runs.items()
            if "plain" in run.result
        }
        if runs:
            groups.append(group._replace(runs=runs))
    return found._replace(groups=groups)


NONE = {"evaluations": 0}


def details(found: Found, column: str) -> Table:
    """Every quantity of one column."""
    made = tables.details(found, column, DETAILS)
    return made._replace(notes=[*made.notes, span(found.only(column))])


def span(found: Found) -> str:
    """What a deviation says about its mean."""
    number = max(len(group.runs) for group in found.groups)
    if number < 2:
        return "One run: no deviation and no interval."
    far = stats.reach(number)
    return f"95 % interval of a mean of {number} runs (Student): ± {far:.2f} times its deviation."


def short(found: Found, base: str, default: str, limit: float = 0.95) -> Table:
    """For the README: what sure predictions are worth, plainly."""
    rows = []
    shown = ((base, [PLAIN], "FreeMatch"), (default, CHOSEN, "calmatch fit"))
    for column in found.columns:
        for row, names, word in shown:
            if one := judged(found.at(row, column), names):
                numbers = [entry(list(part.values()), 1) for part in (one.error, one.ece)]
                rows.append([Entry(column), Entry(word), *numbers, *_above(one, limit)[::2]])
    sure = f"at least {limit:.0%} sure".replace("%", " %")
    heads = ["data", "trained by", "error, %", "ECE, %", f"{sure}, % of all", "of these right, %"]
    return Table("", heads, rows, (), words=2)


def _above(one: Variant, limit: float) -> list[Entry]:
    """Predictions at least so sure: their share of all, mean confidence, how many are right."""
    place = LIMITS.index(limit)
    above = [trust["above"][place] for trust in one.trust.values()]
    tested = [sum(line[0] for line in trust["bins"]) for trust in one.trust.values()]
    shares = [100 * line[0] / number for line, number in zip(above, tested, strict=True)]
    told, right = ([100 * line[k] for line in above if line[0]] for k in (1, 2))
    return [entry(part, 1) for part in (shares, told, right)]


def free(found: Found) -> Table:
    """ECE as it is, and after temperatures chosen without and with labels."""
    note = (
        "Views: the temperature at which the mean confidence of unlabelled pictures' plain and "
        "strong views equals their agreement. Seeds: on test pictures with the run of the next "
        "seed, no labels. Labels: cross-fitted on the labelled pictures, each predicted by a run "
        "that has not seen it, the rule of `calmatch fit`. Oracle: the test labels' own, a bound."
    )
    return _each(found, HONEST, f"ECE with and without labels, {SPREAD}", [note])


def _each(found: Found, metrics: Sequence[str], title: str, notes: Sequence[str]) -> Table:
    rows = [
        [
            Entry(group.row),
            Entry(group.column),
            *(entry(list(values(group, m).values()), QUANTITIES[m].digits) for m in metrics),
        ]
        for group in found.groups
    ]
    heads = ["row", "data", *(QUANTITIES[metric].head for metric in metrics)]
    return Table(title, heads, rows, notes, words=2)


def agreements(found: Found) -> Table:
    """Does agreement tell accuracy? On unlabelled pictures whose truth we happen to know."""
    rows = []
    for group in found.groups:
        kept = [run.result["agreement"] for run in group.runs.values() if "agreement" in run.result]
        kept = [one for one in kept if "right" in one]
        names = ("right", "weak", "strong", "confidence")
        numbers = [entry([100 * one[name] for one in kept if name in one]) for name in names]
        if kept:
            rows.append([Entry(group.row), Entry(group.column), *numbers])
    heads = ["row", "data", "right", "agrees with weak", "agrees with strong", "confidence"]
    return Table(f"Agreement and accuracy, unlabelled, %, {SPREAD}", heads, rows, (), words=2)


def averaging(found: Found) -> Table:
    """Averaged weights against the last ones of the same runs, paired by seed."""
    rows = []
    last = unaveraged(found)
    for group in last.groups:
        line = [Entry(group.row), Entry(group.column), Entry(str(len(group.runs)))]
        whole = found.at(group.row, group.column)
        assert whole is not None
        for metric in ("error", "ece"):
            own, other = values(whole, metric), values(group, metric)
            test = stats.paired([own[seeds] - other[seeds] for seeds in other])
            interval = f"{test.low:+.2f} to {test.high:+.2f}" if test.number > 1 else "–"
            line += [Entry(f"{test.value:+.2f}"), Entry(interval)]
        rows.append(line)
    heads = ["row", "data", "pairs", "error change", "95 % interval", "ECE change", "95 % interval"]
    title = "Averaged weights minus the last ones of the same runs, percentage points"
    return Table(title, heads, rows, ["Below zero: averaging helps."], words=2)


def cost(found: Found) -> Table:
    """Where the runs were made, and how long they took."""
    rows = []
    for group in found.groups:
        runs: list[Any] = list(group.runs.values())
        seconds = [run.result["seconds"] for run in runs if run.result["seconds"] is not None]
        devices = ", ".join(sorted({run.result["device"] for run in runs}))
        steps = Entry(f"{group.config.steps:,}")
        rows.append(
            [Entry(group.row), Entry(group.column), Entry(devices), steps, entry(seconds, 0)]
        )
    note = "Wall time between the first and the last log line; seeds side by side share it."
    heads = ["row", "data", "device", "steps", "seconds"]
    return Table("Time of a run", heads, rows, [note], words=3)


def as_published(group: Group) -> str:
    """The column under the paper's name, to set its numbers beside ours."""
    dataset = spec.parse(group.config.dataset).kwargs.get("name", group.config.dataset)
    return f"{dataset}_{group.config.labels}"


def named(found: Found, names: Mapping[str, str]) -> Found:
    """Columns under names for people."""
    groups = [
        group._replace(column=names.get(group.column, group.column)) for group in found.groups
    ]
    return found._replace(groups=groups)
