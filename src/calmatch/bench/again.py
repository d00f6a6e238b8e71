"""Runs made again: without a fold of their labels, and with the same seeds in another session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from calmatch.bench.groups import Found, Group, held_out, identity
from calmatch.bench.measures import SPREAD, entry, values
from calmatch.bench.render import Entry, Table
from calmatch.results import Run


def sisters(runs: Iterable[Run], found: Found) -> Table | None:
    """What fewer labels do: each row beside its runs that did without a fold; none without any."""
    folds = held_out(runs)
    rows = []
    for group in found.groups:
        some = [one for run in group.runs.values() for one in folds.get(identity(run.config), ())]
        if some:
            fewer = _numbered(group, some)
            worst = Entry(f"{max(values(fewer, 'error').values()):.1f}")
            told = [*_both(group), Entry(str(len(some))), *_both(fewer), worst]
            rows.append([Entry(group.row), Entry(group.column), *told])
    heads = ["row", "data", "error", "ECE", "runs without a fold", "error", "ECE", "highest error"]
    notes = ["These sisters judge in `calmatch fit`, so they should be about as good as the model."]
    title = f"The same with fewer labels, %, {SPREAD}"
    return Table(title, heads, rows, notes, words=2) if rows else None


def repeats(runs: Iterable[Run], found: Found) -> Table | None:
    """The same seeds in another session; none without any."""
    made = {identity(run.config): run for run in runs}
    rows = []
    for group in found.groups:
        pairs = {s: made.get(identity(run.config)) for s, run in group.runs.items()}
        other = group._replace(runs={s: run for s, run in pairs.items() if run is not None})
        if other.runs:
            same = group._replace(runs={s: group.runs[s] for s in other.runs})
            number = Entry(str(len(other.runs)))
            rows.append(
                [Entry(group.row), Entry(group.column), number, *_both(same), *_both(other)]
            )
    heads = ["row", "data", "seeds", "error", "ECE", "error, other session", "ECE, other session"]
    notes = [
        "Captured runs in bf16 repeat exactly with `--deterministic` only; the other session's "
        "lines are in results/repeats."
    ]
    title = f"The same seeds twice, %, {SPREAD}"
    return Table(title, heads, rows, notes, words=2) if rows else None


def _numbered(group: Group, runs: Sequence[Run]) -> Group:
    """A group of runs that share their seeds."""
    return group._replace(runs={(number, 0): run for number, run in enumerate(runs)})


def _both(group: Group) -> list[Entry]:
    return [entry(list(values(group, metric).values())) for metric in ("error", "ece")]
