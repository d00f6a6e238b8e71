"""Does a margin help? Judged at the last step, and at the step that the test set chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from calmatch.bench import stats
from calmatch.bench.groups import Found, Group, Seeds
from calmatch.bench.measures import QUANTITIES, leaky_values, values
from calmatch.bench.render import Entry, Table

EVERY = "all"
SHOWN = ("ece", "error")
CHOICES: Mapping[str, Callable[[Group, str], dict[Seeds, float]]] = {
    "last step": values,  # honest
    "best on test": leaky_values,
}


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
                some = (group for group in groups if column in (EVERY, group.column))
                if judged := _judged(found, some):
                    made.append(Change(title, column, judged))
    return made


def _judged(found: Found, groups: Iterable[Group]) -> dict[tuple[str, str], stats.Paired]:
    """Pairs of runs of the same seeds that were judged both ways; empty without any."""
    kinds = [(metric, choice) for choice in CHOICES for metric in SHOWN]
    gathered: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    for group in groups:
        if base := found.base(group):
            seen = leaky_values(group, SHOWN[0]).keys() & leaky_values(base, SHOWN[0]).keys()
            for (metric, choice), numbers in gathered.items():
                own, other = CHOICES[choice](group, metric), CHOICES[choice](base, metric)
                numbers += [own[seeds] - other[seeds] for seeds in group.runs if seeds in seen]
    return {kind: stats.paired(numbers) for kind, numbers in gathered.items() if numbers}


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
