"""Tables from run folders: runs grouped into rows and columns, means over seeds, ranks, comparisons."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calmatch import spec
from calmatch.bench import stats
from calmatch.bench.paper import PUBLISHED_NOTES, SUITES, Published, find_published, suite_cells
from calmatch.bench.render import Entry, Mark, Table
from calmatch.runs import FREE_FIELDS, Run, best_on_test, load_run
from calmatch.training.config import Config
from calmatch.training.loop import scale_with_labels

SEEDS = ("seed", "split_seed")
# neither seeds nor these decide which row a run belongs to
IGNORED_FIELDS = {*SEEDS, *FREE_FIELDS, "log_every", "checkpoint_every", "chunk"}
Seeds = tuple[int, int]  # seed and split_seed: what two rows are paired by


class Group(NamedTuple):
    """The runs of one row in one column, by seed."""

    row: str
    column: str
    config: Config
    runs: dict[Seeds, Run]


class RunTable(NamedTuple):
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

    def only(self, column: str) -> RunTable:
        """One column alone."""
        if column not in self.columns:
            raise ValueError(f"There is no column {column!r}.{spec.nearest(column, self.columns)}")
        return self._replace(groups=[group for group in self.groups if group.column == column])

    def base(self, group: Group) -> Group | None:
        """The same method without penalty and with its own loss, in the same column."""
        config = group.config
        if not (config.penalty or config.unlabelled_loss):
            return None
        bare = config_key(config.replace(penalty="", unlabelled_loss="", aware=0.0))
        return next((other for other in self.groups if config_key(other.config) == bare), None)


@functools.cache
def config_key(config: Config) -> str:
    """What a run is, apart from its seeds."""
    return json.dumps([item for item in config.dump().items() if item[0] not in IGNORED_FIELDS])


def run_identity(config: Config) -> str:
    """What a run is, its seeds included."""
    return f"{config.seed} {config.split_seed} {config_key(config)}"


def gather_runs(paths: Iterable[Path], suite: str | None = None) -> RunTable:
    """The finished runs in or under some folders.

    Args:
        paths: run folders, or folders that hold some at any depth.
        suite: keep this suite's cells alone, in its order.
    """
    runs, notes = load_runs(paths)
    return group_runs([run for run in runs if not run.config.fold], notes, suite)


def group_runs(finished: Sequence[Any], notes: list[str], suite: str | None = None) -> RunTable:
    """Runs as groups, in the order of their suites."""
    known: dict[str, tuple[str, str]] = {}
    for name in [suite] if suite else SUITES:
        for cell in suite_cells(name, [0]):
            known.setdefault(config_key(cell.config), (cell.row, cell.column))
    order = {name: place for place, name in enumerate(known)}
    by_key: dict[str, list[Any]] = {}
    for run in finished:
        by_key.setdefault(config_key(run.config), []).append(run)
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
        row, column = known.get(name) or (_row_title(config), f"{config.dataset}_{config.labels}")
        groups.append(Group(row, column, config, _by_seed(by_key[name], notes)))
    return RunTable(_tell_apart(groups), notes)


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The finished runs under these folders, and what a reader should know of the others."""
    folders: dict[Path, bool] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"There is no folder {path}.")
        folders |= dict(_walk_runs(path))
    notes = []
    waiting = sum(not done for done in folders.values())
    if waiting:
        notes.append(f"Not finished and left out: {waiting} of {len(folders)} runs.")
    return [load_run(folder) for folder, done in sorted(folders.items()) if done], notes


def _walk_runs(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Run folders and whether they are finished; what lies inside a run is not looked at."""
    with os.scandir(folder) as entries:
        found = list(entries)
    names = {entry.name for entry in found}
    if "config.json" in names:
        yield folder, "result.json" in names
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk_runs(folder / entry.name)


def _by_seed(runs: Sequence[Run], notes: list[str]) -> dict[Seeds, Run]:
    found: dict[Seeds, Run] = {}
    for run in runs:
        seeds = (run.config.seed, run.config.split_seed)
        if seeds in found:
            notes.append(f"{run.folder} repeats {found[seeds].folder} and is left out.")
        found.setdefault(seeds, run)
    return dict(sorted(found.items()))


def _row_title(config: Config) -> str:
    parts = [config.method, config.unlabelled_loss and f"only {config.unlabelled_loss}"]
    parts += [config.penalty, f"aware {config.aware:g}" if config.aware else ""]
    name = " + ".join(str(part) for part in parts if part)
    return f"{name} (leaky)" if config.protocol == "paper" else name


def _tell_apart(groups: list[Group]) -> list[Group]:
    """Groups that would share a cell get the settings in which they differ into their names."""
    by_cell: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        by_cell.setdefault((group.row, group.column), []).append(group)
    named = []
    for group in groups:
        same = by_cell[group.row, group.column]
        fields: list[dict[str, Any]] = [other.config.dump() for other in same]
        differ = [
            f for f in fields[0] if f not in IGNORED_FIELDS and len({str(d[f]) for d in fields}) > 1
        ]
        own = group.config.dump()
        words = ", ".join(f"{field}={own[field]}" for field in differ)
        named.append(group._replace(row=f"{group.row} ({words})") if differ else group)
    return named


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
    "smooth_ece": Quantity("smooth ECE", "%"),
    "brier": Quantity("Brier", "%"),
    "aurc": Quantity("AURC", "%"),
    "ece_views": Quantity("ECE, T by views", "%, no labels: two views of unlabelled pictures"),
    "nll_views": Quantity("NLL, T by views", "nats, no labels", 1.0, 3),
    "ece_seeds": Quantity("ECE, T by seeds", "%, no labels: two runs' answers on test pictures"),
    "nll_seeds": Quantity("NLL, T by seeds", "nats, no labels", 1.0, 3),
    "ece_labels": Quantity("ECE, T by labels", "%, cross-fitted on the labelled pictures"),
    "nll_labels": Quantity("NLL, T by labels", "nats, cross-fitted on the labels", 1.0, 3),
    "ece_crossfit": Quantity("ECE, T by test halves", "%, each half by the other's labels"),
    "nll_crossfit": Quantity("NLL, T by test halves", "nats, each half by the other's", 1.0, 3),
    "ece_oracle": Quantity("ECE, oracle T", "%, temperature of the same labels"),
    "nll_oracle": Quantity("NLL, oracle T", "nats, temperature of the same labels", 1.0, 3),
}
SPREAD = "mean ± sample standard deviation (ddof 1) over seeds"


def seed_values(group: Group, metric: str) -> dict[Seeds, float]:
    """A quantity of each run by its seeds, in its unit; runs that lack it are left out."""
    scale = QUANTITIES[metric].scale
    found = {seeds: _run_value(run, metric) for seeds, run in group.runs.items()}
    return {seeds: scale * value for seeds, value in found.items() if value is not None}


def _run_value(run: Run, metric: str) -> float | None:
    name, _, way = metric.rpartition("_")
    if way in ("views", "seeds", "labels"):
        found = run.result.get("temperature_scaled", {}).get(way)
        return None if found is None else float(found[name])
    if way not in ("crossfit", "oracle"):
        there = run.result["metrics"].get(metric)
        return None if there is None else float(there["value"])
    if "temperature_scaled" not in run.result:  # an older run
        run.result["temperature_scaled"] = scale_with_labels(*run.predictions())
    return float(run.result["temperature_scaled"][way][name])


def selected_on_test(run: Run) -> Mapping[str, float] | None:
    """The best evaluation on the test set; None if there was only one to choose from."""
    found = run.result.get("best_on_test") or best_on_test(run.lines("test"))
    return found if found["evaluations"] > 1 else None


def selected_on_test_values(group: Group, metric: str) -> dict[Seeds, float]:
    """The same at each run's best step on the test set, where that is known."""
    found = {seeds: best for seeds, run in group.runs.items() if (best := selected_on_test(run))}
    scale = QUANTITIES[metric].scale
    return {seeds: scale * best[metric] for seeds, best in found.items() if metric in best}


def heading(metric: str) -> str:
    quantity = QUANTITIES[metric]
    return f"{quantity.head} ({'nats' if quantity.scale == 1 else '%'})"


def mean_entry(values: Sequence[float], digits: int = 2, arrow: str = "", mark: Mark = "") -> Entry:
    """A mean with its deviation."""
    if not values:
        return Entry("–")
    found = stats.mean(values)
    sd = "" if found.sd is None else f" ± {found.sd:.{digits}f}"
    text = f"{found.value:.{digits}f}{sd}{arrow and ' ' + arrow}"
    return Entry(text, mark)


def mark_best(means: Mapping[str, float], digits: int) -> dict[str, Mark]:
    """Best and second by the numbers as they are shown, so that ties share a mark."""
    shown = {row: round(value, digits) for row, value in means.items()}
    order = sorted(set(shown.values()))[:2]
    if len(order) < 2:  # one row, or all alike
        return {}
    names: dict[float, Mark] = dict(zip(order, ("best", "second"), strict=False))
    return {row: names[value] for row, value in shown.items() if value in names}


DETAILS = ("error", "ece", "ece_crossfit", "adaptive_ece", "classwise_ece", "nll", "nll_crossfit")
WAYS = ("", "_labels", "_crossfit", "_oracle")
SCALED = tuple(f"{metric}{way}" for metric in ("ece", "nll") for way in WAYS)


def build_tables(found: RunTable, *, suite: str = "", compare: bool = False) -> list[Table]:
    """All tables that the runs allow."""
    tables = []
    if len(found.columns) > 1:
        tables += [grid_table(found, metric) for metric in ("error", "ece")]
    tables += [details_table(found, column) for column in found.columns]
    tables.append(scaling_table(found))
    optional = [protocol_table(found), rank_table(found), difference_table(found)]
    tables += [table for table in optional if table is not None]
    if compare:
        tables += published_tables(found, suite)
    first = tables[0]
    tables[0] = first._replace(notes=[*first.notes, seeds_note(found), *found.notes])
    return tables


def seeds_note(found: RunTable) -> str:
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


def _column_entries(found: RunTable, column: str, metric: str) -> dict[str, Entry]:
    """One column of numbers, row by row, with arrows and marks."""
    digits = QUANTITIES[metric].digits
    groups = [group for group in found.groups if group.column == column]
    means = {g.row: stats.mean(list(seed_values(g, metric).values())).value for g in groups}
    marked = mark_best(means, digits)
    entries = {}
    for group in groups:
        base = found.base(group)
        arrow = ""
        if base and base.row in means and means[base.row] != means[group.row]:
            arrow = "↓" if means[group.row] < means[base.row] else "↑"
        numbers = list(seed_values(group, metric).values())
        entries[group.row] = mean_entry(numbers, digits, arrow, marked.get(group.row, ""))
    return entries


SCALING = (
    "T by test halves: temperature scaling, each half of the test set by the temperature that the "
    "other half's labels chose. T by labels: by the labelled pictures, each predicted by a run "
    "that held it out (--fold)."
)
ORACLE = "Oracle: the temperature the same labels chose, a bound for NLL and no result."
ARROWS = "↓ better, ↑ worse than the same method without it. Best bold, second underlined."


def grid_table(found: RunTable, metric: str) -> Table:
    """One quantity of every row in every column, as the paper's Tables 1 and 2."""
    columns = {column: _column_entries(found, column, metric) for column in found.columns}
    rows = [
        [Entry(row), *(entries.get(row, Entry("–")) for entries in columns.values())]
        for row in found.rows
    ]
    quantity = QUANTITIES[metric]
    title = f"{quantity.head} ({quantity.unit}), {SPREAD}"
    return Table(title[0].upper() + title[1:], ["row", *columns], rows, [ARROWS])


def details_table(found: RunTable, column: str, metrics: Sequence[str] = DETAILS) -> Table:
    """Every quantity of one column."""
    quantities = {metric: _column_entries(found, column, metric) for metric in metrics}
    present = [row for row in found.rows if row in quantities["error"]]
    rows = [[Entry(row), *(part[row] for part in quantities.values())] for row in present]
    heads = [heading(metric) for metric in metrics]
    notes = [ARROWS, *([SCALING] if "ece_crossfit" in metrics else [])]
    return Table(f"{column}: {SPREAD}", ["row", *heads], rows, notes)


def protocol_table(found: RunTable) -> Table | None:
    """What choosing the step on the test set hides: last step against best step."""
    rows = []
    for group in found.groups:
        pairs = [(run.result["metrics"], selected_on_test(run)) for run in group.runs.values()]
        chosen = [(honest, best) for honest, best in pairs if best]
        if not chosen or group.config.protocol == "paper":
            continue
        line = [Entry(group.row), Entry(group.column)]
        for metric in ("error", "ece"):
            line.append(mean_entry([100 * honest[metric]["value"] for honest, _ in chosen]))
            line.append(mean_entry([100 * best[metric] for _, best in chosen]))
        gain = [100 * (honest["error"]["value"] - best["error"]) for honest, best in chosen]
        rows.append([*line, mean_entry(gain)])
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


def scaling_table(found: RunTable) -> Table:
    """ECE and NLL before and after temperature scaling, honest and as a bound."""
    rows = []
    shown = [
        metric for metric in SCALED if any(seed_values(group, metric) for group in found.groups)
    ]
    for group in found.groups:
        numbers = [
            mean_entry(list(seed_values(group, metric).values()), QUANTITIES[metric].digits)
            for metric in shown
        ]
        rows.append([Entry(group.row), Entry(group.column), *numbers])
    heads = ["row", "data", *map(heading, shown)]
    title = f"What one temperature would do, {SPREAD}"
    return Table(title, heads, rows, [f"{SCALING} {ORACLE}"], words=2)


RANKED = {"error": ["error"], "ECE": ["ece"], "all": ["error", "ece"]}


def rank_table(found: RunTable) -> Table | None:
    """Friedman ranks for error, ECE and both; settings are columns, or seeds if there is one."""
    blocks = rank_scores(found)
    if blocks is None:
        return None
    kept, kind = blocks
    tested = {
        name: stats.friedman({row: [s for m in ms for s in by[m]] for row, by in kept.items()})
        for name, ms in RANKED.items()
    }
    marked = {name: mark_best(test.rank, 2) for name, test in tested.items()}
    order = sorted(kept, key=lambda row: tested["all"].rank[row])
    rows = [
        [Entry(row)]
        + [
            mean_entry([test.rank[row]], 2, "", marked[name].get(row, ""))
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


def rank_scores(found: RunTable) -> tuple[dict[str, dict[str, list[float]]], str] | None:
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
                found_means = [
                    stats.mean(list(seed_values(g, metric).values())).value for g in whole
                ]
                kept[row][metric] = found_means
            else:
                kept[row][metric] = [seed_values(whole[0], metric)[s] for s in seeds]
    if len(kept) < 2:
        return None
    return kept, f"{len(found.columns)} columns" if several else f"{len(seeds)} seeds"


def difference_table(found: RunTable) -> Table | None:
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
            own, other = seed_values(group, metric), seed_values(base, metric)
            parts[metric] = [own[seeds] - other[seeds] for seeds in shared]
            pooled.setdefault(group.row, {}).setdefault(metric, []).extend(parts[metric])
        rows.append([Entry(group.row), Entry(group.column), *_paired_entries(parts)])
    if len(found.columns) > 1:
        rows += [
            [Entry(row), Entry("all"), *_paired_entries(parts)] for row, parts in pooled.items()
        ]
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


def _paired_entries(parts: Mapping[str, Sequence[float]]) -> list[Entry]:
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


def published_tables(found: RunTable, suite: str) -> list[Table]:
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
                _published_entry(
                    find_published(row, g.column, metric, suite) if g else None, doubts
                )
                for g in groups
            ]
            if all(item.text == "–" for item in theirs):
                continue
            ours = [list(seed_values(g, metric).values()) if g else [] for g in groups]
            best = [list(selected_on_test_values(g, metric).values()) if g else [] for g in groups]
            rows.append([Entry(row), *map(mean_entry, ours)])
            if any(best):
                rows.append([Entry("    best on test"), *map(mean_entry, best)])
            rows.append([Entry("    published"), *theirs])
        if rows:
            notes = [*PUBLISHED_NOTES, *(f"[{k}] {doubt}." for k, doubt in enumerate(doubts, 1))]
            title = f"{quantity.head} ({quantity.unit}), ours above the published, {SPREAD}"
            made.append(Table(title, ["row", *found.columns], rows, notes))
    nothing = Table("Published numbers", ["row"], [], ["None of these cells is published."])
    return made or [nothing]


def _published_entry(there: tuple[str, Published] | None, doubts: list[str]) -> Entry:
    """A published number with a mark for its doubt; USB's are named."""
    if there is None:
        return Entry("–")
    table, number = there
    if number.doubt and number.doubt not in doubts:
        doubts.append(number.doubt)
    sd = "" if number.sd is None else f" ± {number.sd:.2f}"
    mark = f" [{doubts.index(number.doubt) + 1}]" if number.doubt else ""
    return Entry(f"{number.value:.2f}{sd}{' USB' if table == 'usb' else ''}{mark}")
