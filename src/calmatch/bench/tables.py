"""Tables from run folders: means over seeds, protocols side by side, ranks, paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from calmatch.bench import published, stats
from calmatch.bench.groups import Found, Group
from calmatch.bench.render import Entry, Table
from calmatch.results import Run, best_on_test


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
}
SPREAD = "mean ± sample standard deviation (ddof 1) over seeds"


def values(group: Group, metric: str) -> dict[tuple[int, int], float]:
    """A quantity of each run by its seeds, in its unit."""
    scale = QUANTITIES[metric].scale
    return {
        seeds: scale * run.result["metrics"][metric]["value"] for seeds, run in group.runs.items()
    }


def leaky(run: Run) -> Mapping[str, float] | None:
    """The best evaluation on the test set; None if there was only one to choose from."""
    found = run.result.get("best_on_test") or best_on_test(run.lines("test"))
    return found if found["evaluations"] > 1 else None


def build(found: Found, *, suite: str = "", compare: bool = False) -> list[Table]:
    """All tables that the runs allow."""
    tables = []
    if len(found.columns) > 1:
        tables += [grid(found, metric) for metric in ("error", "ece")]
    tables += [details(found, column) for column in found.columns]
    optional = [scaled(found), protocols(found), ranks(found), differences(found)]
    tables += [table for table in optional if table is not None]
    if compare:
        tables.append(beside(found, suite))
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
    seeds = sorted({seed for group in found.groups for seed, _ in group.runs})
    less = f" Fewer: {', '.join(fewer)}." if fewer else ""
    return f"Seeds: {', '.join(map(str, seeds))}; {number} runs a cell.{less}"


def entry(values: Sequence[float], digits: int = 2, arrow: str = "", mark: str = "") -> Entry:
    """A mean with its deviation."""
    if not values:
        return Entry("–")
    found = stats.mean(values)
    sd = "" if found.sd is None else f" ± {found.sd:.{digits}f}"
    text = f"{found.value:.{digits}f}{sd}{arrow and ' ' + arrow}"
    return Entry(text, "best" if mark == "best" else "second" if mark == "second" else "")


def marks(means: Mapping[str, float], digits: int) -> dict[str, str]:
    """Best and second by the numbers as they are shown, so that ties share a mark."""
    shown = {row: round(value, digits) for row, value in means.items()}
    order = sorted(set(shown.values()))[:2]
    if len(shown) < 2:
        return {}
    names = dict(zip(order, ("best", "second"), strict=False))
    return {row: names[value] for row, value in shown.items() if value in names}


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


def details(found: Found, column: str) -> Table:
    """Every quantity of one column."""
    quantities = {metric: _column(found, column, metric) for metric in QUANTITIES}
    present = [row for row in found.rows if row in quantities["error"]]
    rows = [[Entry(row), *(part[row] for part in quantities.values())] for row in present]
    heads = [f"{q.head} {'nats' if q.scale == 1 else '%'}" for q in QUANTITIES.values()]
    return Table(f"{column}: {SPREAD}", ["row", *heads], rows, [ARROWS])


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


RANKED = {"error": ["error"], "ECE": ["ece"], "all": ["error", "ece"]}


def ranks(found: Found) -> Table | None:
    """Friedman ranks for error, ECE and both; settings are columns, or seeds if there is one."""
    blocks = scores(found)
    if blocks is None:
        return None
    kept, kind = blocks
    tested = {
        name: stats.friedman({row: [s for m in ms for s in by[m]] for row, by in kept.items()})
        for name, ms in RANKED.items()
    }
    marked = {name: marks(test.rank, 2) for name, test in tested.items()}
    order = sorted(kept, key=lambda row: tested["all"].rank[row])
    rows = [
        [Entry(row)]
        + [
            entry([test.rank[row]], 2, "", marked[name].get(row, ""))
            for name, test in tested.items()
        ]
        for row in order
    ]
    notes = [
        f"{name}: {test.settings} settings, Friedman's p "
        f"{'–' if test.p is None else f'{test.p:.2g}'}; mean ranks less than {test.distance:.2f} "
        "apart cannot be told apart (Nemenyi, 95 %)."
        for name, test in tested.items()
    ]
    notes.append("'all' counts error and ECE of the same runs as two settings, as the paper does.")
    dropped = [row for row in found.rows if row not in kept]
    if dropped:
        notes.append(f"Not in every setting and left out: {', '.join(dropped)}.")
    return Table(f"Friedman ranks over {kind}, lowest best", ["row", *tested], rows, notes)


def scores(found: Found) -> tuple[dict[str, dict[str, list[float]]], str] | None:
    """What ranks are made of: row -> metric -> one number a setting; rows with gaps are left out.

    Settings are the columns (means over seeds), as in the paper; with one column, its seeds.
    """
    several = len(found.columns) > 1
    kept: dict[str, dict[str, list[float]]] = {}
    seeds = sorted({s for group in found.groups for s in group.runs})
    for row in found.rows:
        groups = [found.at(row, column) for column in found.columns]
        whole = [group for group in groups if group is not None]
        if len(whole) < len(found.columns) or not (several or set(whole[0].runs) == set(seeds)):
            continue
        kept[row] = {}
        for metric in ("error", "ece"):
            if several:
                found_means = [stats.mean(list(values(g, metric).values())).value for g in whole]
                kept[row][metric] = found_means
            else:
                kept[row][metric] = [values(whole[0], metric)[s] for s in seeds]
    if len(kept) < 2:
        return None
    return kept, f"{len(found.columns)} columns" if several else f"{len(seeds)} seeds"


def differences(found: Found) -> Table | None:
    """A penalty or loss against the same method without it, seed by seed."""
    rows: list[list[Entry]] = []
    pooled: dict[str, dict[str, list[float]]] = {}
    for group in found.groups:
        base = found.base(group)
        shared = [seeds for seeds in group.runs if base and seeds in base.runs]
        if base is None or not shared:
            continue
        parts = {}
        for metric in ("error", "ece"):
            own, other = values(group, metric), values(base, metric)
            parts[metric] = [own[seeds] - other[seeds] for seeds in shared]
            pooled.setdefault(group.row, {}).setdefault(metric, []).extend(parts[metric])
        rows.append([Entry(group.row), Entry(group.column), *_paired(parts)])
    if len(found.columns) > 1:
        rows += [[Entry(row), Entry("all"), *_paired(parts)] for row, parts in pooled.items()]
    if not rows:
        return None
    notes = [
        "Below zero is better. 95 % percentile bootstrap over pairs; p: Wilcoxon's signed-rank "
        "test, two-sided. Three pairs give no p under 0.25, and about their range as the interval."
    ]
    heads = ["row", "data", "pairs"]
    for metric in ("error", "ECE"):
        heads += [f"{metric} change", "95 % interval", "better/worse", "p"]
    title = "Paired differences per seed against the same method without it, percentage points"
    return Table(title, heads, rows, notes, words=2)


def _paired(parts: Mapping[str, Sequence[float]]) -> list[Entry]:
    line: list[Entry] = []
    for numbers in parts.values():
        test = stats.paired(numbers)
        line += [
            Entry(f"{test.value:+.2f}"),
            Entry(f"{test.low:+.2f} to {test.high:+.2f}" if test.number > 1 else "–"),
            Entry(f"{test.better}/{test.worse}"),
            Entry("–" if test.p is None or test.number < 2 else f"{test.p:.2g}"),
        ]
    return [Entry(str(len(next(iter(parts.values()))))), *line]


def scaled(found: Found) -> Table | None:
    """ECE and NLL before and after temperature scaling."""
    return None


def beside(found: Found, suite: str) -> Table:
    """Published numbers beside ours, the doubtful ones with the reason."""
    rows, doubts = [], []
    for group in found.groups:
        for metric, quantity in QUANTITIES.items():
            there = published.find(group.row, group.column, metric, suite)
            if there is None:
                continue
            table, number = there
            if number.doubt and number.doubt not in doubts:
                doubts.append(number.doubt)
            sd = "" if number.sd is None else f" ± {number.sd:.2f}"
            mark = f" [{doubts.index(number.doubt) + 1}]" if number.doubt else ""
            ours = list(values(group, metric).values())
            line = [group.row, group.column, quantity.head, table]
            theirs = Entry(f"{number.value:.2f}{sd}{mark}")
            gap = Entry(f"{stats.mean(ours).value - number.value:+.2f}")
            rows.append([*map(Entry, line), entry(ours), theirs, gap])
    notes = [*published.NOTES, *(f"[{k}] {doubt}." for k, doubt in enumerate(doubts, 1))]
    if not rows:
        notes = ["None of these cells is published."]
    heads = ["row", "data", "what", "table", "ours", "published", "ours minus published"]
    return Table(f"Ours ({SPREAD}, honest) beside the published, %", heads, rows, notes, words=4)
