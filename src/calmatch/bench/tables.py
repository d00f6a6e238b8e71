"""Tables from run folders: means over seeds, temperature scaling, protocols side by side."""

from __future__ import annotations

from collections.abc import Sequence

from calmatch.bench import comparisons, stats
from calmatch.bench.groups import Found
from calmatch.bench.measures import QUANTITIES, SPREAD, entry, head, leaky, marks, values
from calmatch.bench.render import Entry, Table

DETAILS = ("error", "ece", "ece_crossfit", "adaptive_ece", "classwise_ece", "nll", "nll_crossfit")
WAYS = ("", "_labels", "_crossfit", "_oracle")
SCALED = tuple(f"{metric}{way}" for metric in ("ece", "nll") for way in WAYS)


def build(found: Found, *, suite: str = "", compare: bool = False) -> list[Table]:
    """All tables that the runs allow."""
    tables = []
    if len(found.columns) > 1:
        tables += [grid(found, metric) for metric in ("error", "ece")]
    tables += [details(found, column) for column in found.columns]
    tables.append(scaled(found))
    optional = [protocols(found), comparisons.ranks(found), comparisons.differences(found)]
    tables += [table for table in optional if table is not None]
    if compare:
        tables += comparisons.beside(found, suite)
    first = tables[0]
    tables[0] = first._replace(notes=[*first.notes, seeds_note(found), *found.notes])
    return tables


def seeds_note(found: Found) -> str:
    """How many runs each number is made of."""
    number = max(len(group.runs) for group in found.groups)
    fewer = [
        f"{group.row} on {group.column} ({len(group.runs)})"
        for group in found.groups
        if len(group.runs) < number
    ]
    both = [seeds for group in found.groups for seeds in group.runs]
    own, drawn = (sorted({seeds[k] for seeds in both}) for k in (0, 1))
    named = f"Seeds: {', '.join(map(str, own))}"
    if len(own) < len(drawn):
        named = f"Draws of the labels: {', '.join(map(str, drawn))}; seed {own[0]}"
    less = f" Fewer: {', '.join(fewer)}." if fewer else ""
    return f"{named}; {number} runs a cell.{less}"


def _column(found: Found, column: str, metric: str) -> dict[str, Entry]:
    """One column of numbers, row by row, with arrows and marks."""
    digits = QUANTITIES[metric].digits
    groups = [group for group in found.groups if group.column == column]
    means = {g.row: stats.mean(list(values(g, metric).values())).value for g in groups}
    marked = marks(means, digits)
    entries = {}
    for group in groups:
        base = found.base(group)
        arrow = ""
        if base and base.row in means and means[base.row] != means[group.row]:
            arrow = "↓" if means[group.row] < means[base.row] else "↑"
        numbers = list(values(group, metric).values())
        entries[group.row] = entry(numbers, digits, arrow, marked.get(group.row, ""))
    return entries


SCALING = (
    "T by test halves: temperature scaling, each half of the test set by the temperature that the "
    "other half's labels chose. T by labels: by the labelled pictures, each predicted by a run "
    "that held it out (--fold)."
)
ORACLE = "Oracle: the temperature the same labels chose, a bound for NLL and no result."
ARROWS = "↓ better, ↑ worse than the same method without it. Best bold, second underlined."


def grid(found: Found, metric: str) -> Table:
    """One quantity of every row in every column, as the paper's Tables 1 and 2."""
    columns = {column: _column(found, column, metric) for column in found.columns}
    rows = [
        [Entry(row), *(entries.get(row, Entry("–")) for entries in columns.values())]
        for row in found.rows
    ]
    quantity = QUANTITIES[metric]
    title = f"{quantity.head} ({quantity.unit}), {SPREAD}"
    return Table(title[0].upper() + title[1:], ["row", *columns], rows, [ARROWS])


def details(found: Found, column: str, metrics: Sequence[str] = DETAILS) -> Table:
    """Every quantity of one column."""
    quantities = {metric: _column(found, column, metric) for metric in metrics}
    present = [row for row in found.rows if row in quantities["error"]]
    rows = [[Entry(row), *(part[row] for part in quantities.values())] for row in present]
    heads = [head(metric) for metric in metrics]
    notes = [ARROWS, *([SCALING] if "ece_crossfit" in metrics else [])]
    return Table(f"{column}: {SPREAD}", ["row", *heads], rows, notes)


def protocols(found: Found) -> Table | None:
    """What choosing the step on the test set hides: last step against best step."""
    rows = []
    for group in found.groups:
        pairs = [(run.result["metrics"], leaky(run)) for run in group.runs.values()]
        chosen = [(honest, best) for honest, best in pairs if best]
        if not chosen or group.config.protocol == "paper":
            continue
        line = [Entry(group.row), Entry(group.column)]
        for metric in ("error", "ece"):
            line.append(entry([100 * honest[metric]["value"] for honest, _ in chosen]))
            line.append(entry([100 * best[metric] for _, best in chosen]))
        gain = [100 * (honest["error"]["value"] - best["error"]) for honest, best in chosen]
        rows.append([*line, entry(gain)])
    if not rows:
        return None
    heads = ["row", "data", "error, honest", "error, best on test", "ECE, honest", "ECE, same step"]
    note = (
        "Honest: the last step, or the one chosen on validation pictures where the run says so. "
        "Best on test is LEAKY: the step is chosen by the error it reports, as the paper does."
    )
    return Table(
        f"Honest and leaky protocol, %, {SPREAD}", [*heads, "flattered by"], rows, [note], words=2
    )


def scaled(found: Found) -> Table:
    """ECE and NLL before and after temperature scaling, honest and as a bound."""
    rows = []
    shown = [metric for metric in SCALED if any(values(group, metric) for group in found.groups)]
    for group in found.groups:
        numbers = [
            entry(list(values(group, metric).values()), QUANTITIES[metric].digits)
            for metric in shown
        ]
        rows.append([Entry(group.row), Entry(group.column), *numbers])
    heads = ["row", "data", *map(head, shown)]
    title = f"What one temperature would do, {SPREAD}"
    return Table(title, heads, rows, [f"{SCALING} {ORACLE}"], words=2)
