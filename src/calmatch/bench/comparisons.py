"""Comparisons of rows: Friedman ranks, paired differences, the published numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calmatch.bench import published, stats
from calmatch.bench.groups import Found
from calmatch.bench.measures import QUANTITIES, SPREAD, entry, leaky_values, marks, values
from calmatch.bench.render import Entry, Table

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


def beside(found: Found, suite: str) -> list[Table]:
    """Published numbers below ours, the doubtful ones with the reason; a table a quantity.

    Ours stand in both protocols: the published ones were chosen on the test set.
    """
    made = []
    for metric, quantity in QUANTITIES.items():
        doubts: list[str] = []
        rows = []
        for row in found.rows:
            groups = [found.at(row, column) for column in found.columns]
            theirs = [
                _printed(published.find(row, g.column, metric, suite) if g else None, doubts)
                for g in groups
            ]
            if all(item.text == "–" for item in theirs):
                continue
            ours = [list(values(g, metric).values()) if g else [] for g in groups]
            best = [list(leaky_values(g, metric).values()) if g else [] for g in groups]
            rows.append([Entry(row), *map(entry, ours)])
            if any(best):
                rows.append([Entry("    best on test"), *map(entry, best)])
            rows.append([Entry("    published"), *theirs])
        if rows:
            notes = [*published.NOTES, *(f"[{k}] {doubt}." for k, doubt in enumerate(doubts, 1))]
            title = f"{quantity.head} ({quantity.unit}), ours above the published, {SPREAD}"
            made.append(Table(title, ["row", *found.columns], rows, notes))
    nothing = Table("Published numbers", ["row"], [], ["None of these cells is published."])
    return made or [nothing]


def _printed(there: tuple[str, published.Number] | None, doubts: list[str]) -> Entry:
    """A published number with a mark for its doubt; USB's are named."""
    if there is None:
        return Entry("–")
    table, number = there
    if number.doubt and number.doubt not in doubts:
        doubts.append(number.doubt)
    sd = "" if number.sd is None else f" ± {number.sd:.2f}"
    mark = f" [{doubts.index(number.doubt) + 1}]" if number.doubt else ""
    return Entry(f"{number.value:.2f}{sd}{' USB' if table == 'usb' else ''}{mark}")
