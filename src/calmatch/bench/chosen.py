"""Does a margin help? Judged at the last step, and at the step that the test set chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from calmatch.bench import stats
from calmatch.bench.groups import Found, Group
from calmatch.bench.measures import QUANTITIES, leaky
from calmatch.bench.render import Entry, Table
from calmatch.results import Run

EVERY = "all"
SHOWN = ("ece", "error")


def selection(found: Found, method: str, names: Sequence[str]) -> Table | None:
    """Rows `METHOD + NAME` against `METHOD`: one method alone and all together, by who chooses."""
    rows = []
    columns = (*found.columns, EVERY) if len(found.columns) > 1 else found.columns
    for name in names:
        kept = [group for group in found.groups if group.row.endswith(f" + {name}")]
        alone = [group for group in kept if group.row == f"{method} + {name}"]
        both = [(f"{method} + {name}", alone), (f"all + {name}", kept)]
        for title, groups in both[: 1 + (kept != alone)]:
            for column in columns:
                some = [group for group in groups if column in (EVERY, group.column)]
                if line := _line(found, some):
                    rows.append([Entry(title), Entry(column), *line])
    if not rows:
        return None
    notes = [
        "Mean change against the same method without it, 95 % percentile bootstrap over pairs of "
        "runs, and in how many pairs it is lower. The last step is honest. The best step on the "
        "test set is LEAKY, and what the paper reports: a run that is spoilt later is judged "
        "before that."
    ]
    heads = ["row", "data", "pairs"]
    heads += [
        f"{QUANTITIES[m].head}, {who}" for who in ("last step", "best on test") for m in SHOWN
    ]
    title = "What a margin changes, by who chooses the step, percentage points"
    return Table(title, heads, rows, notes, words=2)


def _line(found: Found, groups: Iterable[Group]) -> list[Entry]:
    """How many pairs, and what changes in them; empty without any that were judged both ways."""
    pairs = [
        (run, base.runs[seeds])
        for group in groups
        if (base := found.base(group))
        for seeds, run in group.runs.items()
        if seeds in base.runs and leaky(run) and leaky(base.runs[seeds])
    ]
    if not pairs:
        return []
    kinds = [(metric, by_test) for by_test in (False, True) for metric in SHOWN]
    changes = [
        [_value(one, *kind) - _value(other, *kind) for one, other in pairs] for kind in kinds
    ]
    return [Entry(str(len(pairs))), *map(_told, changes)]


def _value(run: Run, metric: str, by_test: bool) -> float:
    """In %, at the last step or at the best on the test set."""
    found = leaky(run) if by_test else None
    value = run.result["metrics"][metric]["value"] if found is None else found[metric]
    return QUANTITIES[metric].scale * float(value)


def _told(changes: Sequence[float]) -> Entry:
    test = stats.paired(changes)
    span = f" ({test.low:+.2f} to {test.high:+.2f})" if test.number > 1 else ""
    return Entry(f"{test.value:+.2f}{span}, {test.better} of {test.number}")
