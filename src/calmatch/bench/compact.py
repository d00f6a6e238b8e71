"""Compact results: every run a line of JSON, and all tables made from such lines alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calmatch import views
from calmatch.bench import job, trusting
from calmatch.bench.groups import ASIDE, Found, arrange, held_out, identity, load
from calmatch.bench.suites import cells
from calmatch.config import Config
from calmatch.results import Run

CURVE = ("step", "error", "ece", "nll")


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
    """What tells settings apart, seeds aside; the same when Config gets another field."""
    own = {name: value for name, value in changed(config).items() if name not in ASIDE}
    return hashlib.blake2b(json.dumps(own).encode(), digest_size=6).hexdigest()


def changed(config: Config) -> dict[str, Any]:
    """What differs from the usual settings."""
    usual = Config().dump()
    return {name: value for name, value in config.dump().items() if value != usual[name]}


def collect(paths: Iterable[Path], suite: str | None = None) -> list[dict[str, Any]]:
    """The finished runs of some folders as lines; each is paired with the next seed of its row."""
    runs, notes = load(paths)
    folds = held_out(runs)
    todo = []
    for group in arrange(runs, notes, suite).groups:
        runs = list(group.runs.values())
        for place, run in enumerate(runs):
            other = runs[(place + 1) % len(runs)]
            todo.append((run, other if other is not run else None, folds.get(identity(run.config))))
    return [_line(*each) for each in todo]  # one by one: NumPy cannot read in threads on 3.11


def _line(run: Run, other: Run | None, folds: Sequence[Run] | None) -> dict[str, Any]:
    result = {k: v for k, v in run.result.items() if k not in ("classes", "notes", "interval")}
    result["curves"] = {
        "test": [[line[field] for field in CURVE] for line in run.lines("test")],
    }
    if run.config.fold:  # only what it held out matters
        return _framed(run, {**result, "curves": {}})
    if other is not None:
        result["temperature_scaled"]["seeds"] = trusting.by_seeds(run, other)
    if folds:
        for place, found in trusting.by_folds(run, folds).items():
            part = result["plain"] if place == trusting.PLAIN else result
            part["temperature_scaled"]["labels"] = found
    with np.load(run.folder / "predictions.npz", allow_pickle=False) as held:
        labels = torch.from_numpy(held["labels"])
        for place, part in ((trusting.JUDGED, result), (trusting.PLAIN, result.get("plain"))):
            if part is not None:
                part["trust"] = trusting.trust(torch.from_numpy(held[place]), labels)
    if seen := views.load(run.folder):
        result["agreement"] = trusting.estimates(seen)
        result["temperature_scaled"]["views"] = trusting.by_views(run, seen)
    return _framed(run, result)


def _framed(run: Run, result: Mapping[str, Any]) -> dict[str, Any]:
    moments = [moment["unix"] for moment in job.times(run.folder)]
    there = json.loads((run.folder / "environment.json").read_text("utf-8"))
    return {
        "code": code(run.config),
        "config": changed(run.config),
        "device": there["device"],
        "versions": there["versions"],
        "seconds": round(moments[-1] - moments[0], 1) if moments else None,
        "result": _rounded(result),
    }


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
    """Groups from files of lines."""
    return grouped(kept(paths), suite)


def grouped(lines: Sequence[Kept], suite: str | None = None) -> Found:
    """Groups of lines; runs that only judged a fold of the labels are no rows.

    Of a suite its own seeds only, so that its rows can be compared: another may have drawn more.
    """
    runs = [run for run in lines if not run.config.fold]
    if suite:
        own = {(cell.config.seed, cell.config.split_seed) for cell in cells(suite)}
        runs = [run for run in runs if (run.config.seed, run.config.split_seed) in own]
    return arrange(runs, [], suite)
