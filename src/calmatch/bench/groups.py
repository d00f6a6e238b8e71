"""Run folders gathered into rows and columns: runs that differ only in their seeds are a group."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calmatch import results, spec
from calmatch.bench.suites import SUITES, cells
from calmatch.config import Config
from calmatch.results import Run

SEEDS = ("seed", "split_seed")
# neither seeds nor these decide which row a run belongs to
ASIDE = {*SEEDS, *results.FREE, "log_every", "checkpoint_every", "chunk"}
Seeds = tuple[int, int]  # seed and split_seed: what two rows are paired by


class Group(NamedTuple):
    """The runs of one row in one column, by seed."""

    row: str
    column: str
    config: Config
    runs: dict[Seeds, Run]


class Found(NamedTuple):
    """Groups in the order of their tables, and what a reader should know of those left out."""

    groups: list[Group]
    notes: list[str]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(group.row for group in self.groups))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(group.column for group in self.groups))

    def at(self, row: str, column: str) -> Group | None:
        return next((g for g in self.groups if (g.row, g.column) == (row, column)), None)

    def only(self, column: str) -> Found:
        """One column alone."""
        if column not in self.columns:
            raise ValueError(f"There is no column {column!r}.{spec.nearest(column, self.columns)}")
        return self._replace(groups=[group for group in self.groups if group.column == column])

    def base(self, group: Group) -> Group | None:
        """The same method without penalty and with its own loss, in the same column."""
        config = group.config
        if not (config.penalty or config.unlabelled_loss):
            return None
        bare = key(config.replace(penalty="", unlabelled_loss="", aware=0.0))
        return next((other for other in self.groups if key(other.config) == bare), None)


@functools.cache
def key(config: Config) -> str:
    """What a run is, apart from its seeds."""
    return json.dumps([item for item in config.dump().items() if item[0] not in ASIDE])


def identity(config: Config) -> str:
    """What a run is, its seeds included."""
    return f"{config.seed} {config.split_seed} {key(config)}"


def gather(paths: Iterable[Path], suite: str | None = None) -> Found:
    """The finished runs in or under some folders.

    Args:
        paths: run folders, or folders that hold some at any depth.
        suite: keep this suite's cells alone, in its order.
    """
    runs, notes = load(paths)
    folds = held_out(runs)
    whole = [run for run in runs if not run.config.fold]
    if folds:
        from calmatch.bench import trusting  # brings post-hoc calibration

        for run in whole:
            found = trusting.by_folds(run, folds.get(identity(run.config), ()))
            if trusting.JUDGED in found:
                run.result["temperature_scaled"]["labels"] = found[trusting.JUDGED]
    return arrange(whole, notes, suite)


def held_out(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs that held out a fold of the labels, by the identity of the run with all labels."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.config.fold:
            found.setdefault(identity(run.config.replace(fold=0)), []).append(run)
    return found


def arrange(finished: Sequence[Any], notes: list[str], suite: str | None = None) -> Found:
    """Runs (or `compact.Kept`) as groups, in the order of their suites."""
    known: dict[str, tuple[str, str]] = {}
    for name in [suite] if suite else SUITES:
        for cell in cells(name, [0]):
            known.setdefault(key(cell.config), (cell.row, cell.column))
    order = {name: place for place, name in enumerate(known)}
    by_key: dict[str, list[Any]] = {}
    for run in finished:
        by_key.setdefault(key(run.config), []).append(run)
    if suite:
        strangers = sum(len(runs) for name, runs in by_key.items() if name not in known)
        by_key = {name: runs for name, runs in by_key.items() if name in known}
        if strangers:
            notes.append(f"Not of the suite {suite} and left out: {strangers} runs.")
    if not by_key:
        raise ValueError("There is no finished run to show; name run folders or a folder of them.")
    ranked = sorted(by_key, key=lambda name: order.get(name, len(order)))
    groups = []
    for name in ranked:
        config = by_key[name][0].config
        row, column = known.get(name) or (_title(config), f"{config.dataset}_{config.labels}")
        groups.append(Group(row, column, config, _by_seed(by_key[name], notes)))
    return Found(_apart(groups), notes)


def load(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The finished runs under these folders, and what a reader should know of the others."""
    folders: dict[Path, bool] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"There is no folder {path}.")
        folders |= dict(_walk(path))
    notes = []
    waiting = sum(not done for done in folders.values())
    if waiting:
        notes.append(f"Not finished and left out: {waiting} of {len(folders)} runs.")
    return [results.load(folder) for folder, done in sorted(folders.items()) if done], notes


def _walk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Run folders and whether they are finished; what lies inside a run is not looked at."""
    with os.scandir(folder) as entries:
        found = list(entries)
    names = {entry.name for entry in found}
    if "config.json" in names:
        yield folder, "result.json" in names
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name)


def _by_seed(runs: Sequence[Run], notes: list[str]) -> dict[Seeds, Run]:
    found: dict[Seeds, Run] = {}
    for run in runs:
        seeds = (run.config.seed, run.config.split_seed)
        if seeds in found:
            notes.append(f"{run.folder} repeats {found[seeds].folder} and is left out.")
        found.setdefault(seeds, run)
    return dict(sorted(found.items()))


def _title(config: Config) -> str:
    parts = [config.method, config.unlabelled_loss and f"only {config.unlabelled_loss}"]
    parts += [config.penalty, f"aware {config.aware:g}" if config.aware else ""]
    name = " + ".join(str(part) for part in parts if part)
    return f"{name} (leaky)" if config.protocol == "paper" else name


def _apart(groups: list[Group]) -> list[Group]:
    """Groups that would share a cell get the settings in which they differ into their names."""
    by_cell: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        by_cell.setdefault((group.row, group.column), []).append(group)
    named = []
    for group in groups:
        same = by_cell[group.row, group.column]
        fields: list[dict[str, Any]] = [other.config.dump() for other in same]
        differ = [f for f in fields[0] if f not in ASIDE and len({str(d[f]) for d in fields}) > 1]
        own = group.config.dump()
        words = ", ".join(f"{field}={own[field]}" for field in differ)
        named.append(group._replace(row=f"{group.row} ({words})") if differ else group)
    return named
