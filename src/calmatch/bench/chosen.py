"""Does a margin help? Judged at the last step, and at the step that the test set chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from calmatch.bench import stats
from calmatch.bench.groups import Found, Group
from calmatch.bench.measures import QUANTITIES, leaky
from calmatch.bench.render import Entry, Table
from calmatch.results import Run

EVERY = "all"
SHOWN = ("ece", "error")
CHOICES = ("last step", "best on test")  # honest, leaky


class Change(NamedTuple):
    """What a margin changes in pairs of runs, by quantity and by who chooses the step."""

    row: str
    column: str
    found: dict[tuple[str, str], stats.Paired]


def changes(found: Found, method: str, names: Sequence[str]) -> list[Change]:
    """Rows `METHOD + NAME` against `METHOD`: one method alone, and all methods together."""
    made = []
    columns = (*found.columns, EVERY) if len(found.columns) > 1 else found.columns
    for name in names:
        kept = [group for group in found.groups if group.row.endswith(f" + {name}")]
        alone = [group for group in kept if group.row == f"{method} + {name}"]
        both = [(f"{method} + {name}", alone), (f"all methods + {name}", kept)]
        for title, groups in both[: 1 + (kept != alone)]:
            for column in columns:
                pairs = _pairs(found, (g for g in groups if column in (EVERY, g.column)))
                if pairs:
                    made.append(Change(title, column, _judged(pairs)))
    return made


def _pairs(found: Found, groups: Iterable[Group]) -> list[tuple[Run, Run]]:
    """Runs with and without it, of the same seeds, where both were judged both ways."""
    return [
        (run, base.runs[seeds])
        for group in groups
        if (base := found.base(group))
        for seeds, run in group.runs.items()
        if seeds in base.runs and leaky(run) and leaky(base.runs[seeds])
    ]


def _judged(pairs: Sequence[tuple[Run, Run]]) -> dict[tuple[str, str], stats.Paired]:
    kinds = [(metric, choice) for choice in CHOICES for metric in SHOWN]
    return {
        kind: stats.paired([_value(one, *kind) - _value(other, *kind) for one, other in pairs])
        for kind in kinds
    }


def _value(run: Run, metric: str, choice: str) -> float:
    """In %, at the last step or at the best on the test set."""
    if choice == CHOICES[0]:
        value = run.result["metrics"][metric]["value"]
    else:
        best = leaky(run)
        assert best is not None
        value = best[metric]
    return QUANTITIES[metric].scale * float(value)


def table(some: Sequence[Change]) -> Table | None:
    """The changes in numbers; none without any."""
    if not some:
        return None
    rows = []
    for row, column, found in some:
        pairs = next(iter(found.values())).number
        rows.append([Entry(row), Entry(column), Entry(str(pairs)), *map(_told, found.values())])
    notes = [
        "Mean change against the same method without it, 95 % percentile bootstrap over pairs of "
        "runs, and in how many of them it is lower. The last step is honest. The best step on the "
        "test set is LEAKY, and how the paper chooses: a run that is spoilt later is judged before "
        "that. Both judge the weights that the run keeps (averaged, where there are such); "
        "evaluations on the way compute like the run does, so they differ from the last by a "
        "tenth of a point."
    ]
    heads = [f"{QUANTITIES[metric].head}, {choice}" for metric, choice in some[0].found]
    title = "What a margin changes, by who chooses the step, percentage points"
    return Table(title, ["row", "data", "pairs", *heads], rows, notes, words=2)


def _told(test: stats.Paired) -> Entry:
    span = f" ({test.low:+.1f} to {test.high:+.1f})" if test.number > 1 else ""
    return Entry(f"{test.value:+.1f}{span}; {test.better}")
