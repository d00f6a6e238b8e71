"""Compact results: every run a line of JSON, and all tables made from such lines alone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calmatch import evaluate, posthoc, scaled, views
from calmatch.bench import job, stats
from calmatch.bench.groups import Found, Group, arrange, gather, identity, key
from calmatch.bench.measures import QUANTITIES, SPREAD, entry, values
from calmatch.bench.render import Entry, Table
from calmatch.config import Config
from calmatch.judge import temperature
from calmatch.results import Run

JUDGED, PLAIN = "log_probs", "plain_log_probs"  # in predictions.npz
BINS = 20
LIMITS = (0.5, 0.8, 0.9, 0.95, 0.99)  # of confidence
CURVE = ("step", "error", "ece", "nll")
MORE = ("smooth_ece", "brier", "aurc", "adaptive_ece", "classwise_ece")
HONEST = ("ece", "ece_views", "ece_seeds", "ece_labels", "ece_oracle")


class Kept(NamedTuple):
    """A run read from its line: what tables and curves need, no folder behind it."""

    folder: Path
    config: Config
    result: dict[str, Any]

    @property
    def title(self) -> str:
        return str(self.result["title"])

    def lines(self, kind: str = "train") -> list[dict[str, Any]]:
        found = self.result["curves"].get(kind, [])
        return [dict(zip(CURVE, point, strict=True)) for point in found]

    def predictions(self) -> tuple[Tensor, Tensor]:
        raise ValueError("compact results hold no predictions; name run folders instead.")


def code(config: Config) -> str:
    """What tells settings apart, seeds aside."""
    return hashlib.blake2b(key(config).encode(), digest_size=6).hexdigest()


def collect(paths: Iterable[Path], suite: str | None = None) -> list[dict[str, Any]]:
    """The finished runs of some folders as lines; each is paired with the next seed of its row."""
    groups = gather(paths, suite).groups
    folds: dict[str, list[Run]] = {}
    for run in (run for group in groups if group.config.fold for run in group.runs.values()):
        folds.setdefault(identity(run.config.replace(fold=0)), []).append(run)
    todo = []
    for group in groups:
        runs = list(group.runs.values())
        for place, run in enumerate(runs):
            other = runs[(place + 1) % len(runs)]
            todo.append((run, other if other is not run else None, folds.get(identity(run.config))))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda each: _line(*each), todo))


def _line(run: Run, other: Run | None, folds: Sequence[Run] | None) -> dict[str, Any]:
    usual = Config().dump()
    result = {k: v for k, v in run.result.items() if k not in ("classes", "notes", "interval")}
    result["curves"] = {
        "test": [[line[field] for field in CURVE] for line in run.lines("test")],
    }
    if other is not None:
        result["temperature_scaled"]["seeds"] = _by_seeds(run, other)
    if folds:
        for place, found in _by_folds(run, folds).items():
            (result["plain"] if place == PLAIN else result)["temperature_scaled"]["labels"] = found
    with np.load(run.folder / "predictions.npz", allow_pickle=False) as held:
        labels = torch.from_numpy(held["labels"])
        for place, part in ((JUDGED, result), (PLAIN, result.get("plain"))):
            if part is not None:
                part["trust"] = trust(torch.from_numpy(held[place]), labels)
    if seen := views.load(run.folder):
        result["agreement"] = estimates(seen)
        result["temperature_scaled"]["views"] = _by_views(run, seen)
    moments = [moment["unix"] for moment in job.times(run.folder)]
    there = json.loads((run.folder / "environment.json").read_text("utf-8"))
    return {
        "code": code(run.config),
        "config": {k: v for k, v in run.config.dump().items() if v != usual[k]},
        "device": there["device"],
        "versions": there["versions"],
        "seconds": round(moments[-1] - moments[0], 1) if moments else None,
        "result": _rounded(result),
    }


def _by_seeds(run: Run, other: Run) -> dict[str, Any]:
    """The test set scaled by how often another seed agrees on its pictures: no label is used."""
    log_probs, labels = run.predictions()
    theirs = other.predictions()[0]
    scale = posthoc.agreement_temperature(log_probs, theirs, of="first")
    agree = posthoc.agreement(log_probs, theirs).agree
    return _scaled(scale, log_probs, labels) | {"agree": agree}


def _by_views(run: Run, seen: views.Views) -> dict[str, Any]:
    pair = [seen.log_probs[name] for name in views.PAIR]
    scale = posthoc.agreement_temperature(*pair)
    return _scaled(scale, *run.predictions()) | {"agree": posthoc.agreement(*pair).agree}


def _scaled(scale: posthoc.Scaling, log_probs: Tensor, labels: Tensor) -> dict[str, Any]:
    found = scale(log_probs.double())
    heat = {"temperature": scale.values["temperature"], "trust": trust(found, labels)}
    return {**scaled.measured(found, labels), **heat}


def trust(log_probs: Tensor, labels: Tensor) -> dict[str, list[list[float]]]:
    """Pictures, their mean confidence and the share that is right: by bins, and above limits."""
    top, guess = evaluate.probabilities(log_probs).max(1)
    right = (guess == labels).double()
    bins = (top * BINS).long().clamp_max(BINS - 1)
    inside = [bins == k for k in range(BINS)]
    above = [top >= limit for limit in LIMITS]
    return {"bins": _shares(inside, top, right), "above": _shares(above, top, right)}


def _shares(chosen: Sequence[Tensor], top: Tensor, right: Tensor) -> list[list[float]]:
    return [
        [int(some.sum()), float(top[some].mean()), float(right[some].mean())]
        if bool(some.any())
        else [0, 0.0, 0.0]
        for some in chosen
    ]


def _by_folds(run: Run, folds: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """The test set scaled by the temperature that the run's own labels choose, as `fit` does.

    Each label is predicted by a run that did not see it; empty where some were predicted by none.
    """
    with ExitStack() as stack:
        own, *others = (
            stack.enter_context(np.load(one.folder / "predictions.npz", allow_pickle=False))
            for one in (run, *folds)
        )
        truth = np.concatenate([other["held_labels"] for other in others])
        if len(truth) < run.result["pictures"]["labelled"]:
            return {}
        found = {}
        for name in (JUDGED, PLAIN):
            if name not in own:
                continue
            held = name.replace("log_probs", "held_log_probs")
            judged = np.concatenate([other[held] for other in others])
            scale = temperature(torch.from_numpy(judged), torch.from_numpy(truth))
            log_probs, labels = (torch.from_numpy(own[key]) for key in (name, "labels"))
            found[name] = _scaled(scale, log_probs, labels) | {"labels": len(truth)}
        return found


def estimates(seen: views.Views) -> dict[str, float]:
    """How often views agree on unlabelled pictures, and how often they are right, to judge that."""
    plain = seen.log_probs["plain"]
    found = {
        name: posthoc.agreement(plain, seen.log_probs[name]).agree
        for name in seen.log_probs
        if name != "plain"
    }
    found["confidence"] = posthoc.agreement(plain, plain).confidence
    known = seen.truth >= 0
    if bool(known.any()):
        right = (plain.argmax(-1) == seen.truth)[known]
        found["right"] = float(right.double().mean())
    return found


def _rounded(found: Any) -> Any:
    if isinstance(found, float):
        return float(f"{found:.6g}")
    if isinstance(found, Mapping):
        return {name: _rounded(value) for name, value in found.items()}
    return [_rounded(value) for value in found] if isinstance(found, list) else found


def kept(paths: Sequence[Path]) -> list[Kept]:
    """The runs in files of lines."""
    runs = []
    for path in paths:
        for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
                config = Config().replace(**line["config"])
                result = line["result"] | {"device": line["device"], "seconds": line["seconds"]}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a compact result.") from error
            runs.append(Kept(Path(f"{path.stem}/{number}"), config, result))
    return runs


def read(paths: Sequence[Path], suite: str | None = None) -> Found:
    """Groups from files of lines; runs that only judged a fold of the labels are no rows."""
    return arrange([run for run in kept(paths) if not run.config.fold], [], suite)


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


def more(found: Found) -> Table:
    """The quantities that the paper does not report."""
    return _each(found, MORE, f"Further quantities, {SPREAD}", [])


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


def as_published(found: Found) -> Found:
    """Columns under the names of the paper's, to set its numbers beside ours."""
    names: list[Group] = [
        group._replace(column=group.column.replace("_pack", "")) for group in found.groups
    ]
    return found._replace(groups=names)
