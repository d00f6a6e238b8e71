"""Tables from run folders: runs in rows and columns, means over seeds, ranks, paired tests."""

import csv
import functools
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from calmatch import spec
from calmatch.bench import paper, stats
from calmatch.bench.render import Entry, Mark, Table
from calmatch.runs import BestOnTest, Run, load_run
from calmatch.training.config import FREE_FIELDS, Config

# neither seeds nor these decide which row a run belongs to
IGNORED_FIELDS = {*FREE_FIELDS, *"seed split_seed log_every checkpoint_every chunk".split()}
# nor do these decide which row of a suite it is: flags of `bench` change them
CHANGED_BY_FLAGS = tuple("steps protocol net precision warmup eval_every".split())
SHOWN_GAPS = 6  # cells without a run that are named
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
    order: Mapping[str, int] = {}  # the suite's rows and columns, whatever of them is there

    @property
    def rows(self) -> list[str]:
        return self._sorted(group.row for group in self.groups)

    @property
    def columns(self) -> list[str]:
        return self._sorted(group.column for group in self.groups)

    def _sorted(self, names: Iterable[str]) -> list[str]:
        last = len(self.order)  # what tells a row apart stands after its name: "bam (steps=20)"
        return sorted(dict.fromkeys(names), key=lambda n: self.order.get(paper.bare_row(n), last))

    def at(self, row: str, column: str) -> Group | None:
        return next((g for g in self.groups if (g.row, g.column) == (row, column)), None)

    def only(self, column: str) -> Self:
        if column not in self.columns:
            raise ValueError(f"There is no column {column!r}.{spec.nearest(column, self.columns)}")
        return self._replace(groups=[group for group in self.groups if group.column == column])

    def base(self, group: Group) -> Group | None:
        """The same method without penalty and with its own loss, in the same column."""
        config = group.config
        if not (config.penalty or config.unlabelled_loss):
            return None
        bare = config_key(config.replace(penalty="", unlabelled_loss="", cap_threshold=0.0))
        return next((other for other in self.groups if config_key(other.config) == bare), None)


@functools.cache
def config_key(config: Config, *also_ignored: str) -> str:
    """What a run is, apart from its seeds and from the fields that are to be ignored too."""
    ignored = {*IGNORED_FIELDS, *also_ignored}
    return json.dumps([item for item in config.dump().items() if item[0] not in ignored])


def gather_runs(paths: Iterable[Path], suite: str | None = None) -> RunTable:
    """The finished runs in or under some folders; those of one suite alone, in its order."""
    return arrange_runs(*load_runs(paths), suite)


def arrange_runs(runs: Sequence[Run], known: Sequence[str], suite: str | None = None) -> RunTable:
    """Runs by the rows and columns of a suite, or of any; what is known of them is noted first."""
    notes = [*known]
    cells: dict[str, paper.Cell] = {}  # by what no flag changes
    for name in [suite] if suite else paper.SUITES:
        for each in paper.suite_cells(name, [0]):
            cells.setdefault(config_key(each.config, *CHANGED_BY_FLAGS), each)
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        by_key.setdefault(config_key(run.config), []).append(run)
    rows = [(config_key(same[0].config, *CHANGED_BY_FLAGS), same) for same in by_key.values()]
    others = sum(len(same) for key, same in rows if key not in cells)
    if suite and others:
        notes.append(f"Not of the suite {suite} and left out: {others} runs.")
        rows = [(key, same) for key, same in rows if key in cells]
    order = {key: place for place, key in enumerate(cells)}
    groups, changes = [], set()
    for key, same in sorted(rows, key=lambda row: order.get(row[0], len(order))):
        config = same[0].config
        row, column = _row_title(config), f"{config.dataset}_{config.labels}"
        if cell := cells.get(key):
            row, column = cell.row, cell.column
            own = {field: getattr(config, field) for field in CHANGED_BY_FLAGS[:3]}
            changes |= {f"{k}={v}" for k, v in own.items() if v != getattr(cell.config, k)}
        groups.append(Group(row, column, config, _by_seed(same, notes)))
    if not groups:
        of = f" of the suite {suite}" if suite else ""
        raise ValueError(f"There is no finished run{of} to show; name run folders or their folder.")
    if changes:
        chosen = " (weights chosen on the TEST set)" if "protocol=paper" in changes else ""
        notes.append(f"Not as the suite says: {', '.join(sorted(changes))}{chosen}.")
    there = {(group.row, group.column) for group in groups}
    gaps = [f"{c.row} on {c.column}" for c in cells.values() if (c.row, c.column) not in there]
    if suite and gaps:
        notes.append(f"Not run yet: {spec.first_names(gaps, SHOWN_GAPS)}.")
    names = dict.fromkeys(name for cell in cells.values() for name in (cell.row, cell.column))
    return RunTable(_tell_apart(groups), notes, {name: k for k, name in enumerate(names)})


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The finished runs under these folders, folds apart, and a note about unfinished ones."""
    folders: dict[Path, bool] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"There is no folder {path}.")
        folders |= dict(_walk_runs(path))
    runs = [load_run(folder) for folder, done in sorted(folders.items()) if done]
    waiting = len(folders) - len(runs)
    note = f"Not finished and left out: {waiting} of {len(folders)} runs."
    return [run for run in runs if not run.config.fold], [note] if waiting else []


def _walk_runs(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Run folders and whether they are finished; what lies inside a run is not looked at."""
    left = [folder]  # not by calls: folders may lie deeper than Python calls
    while left:
        here = left.pop()
        with os.scandir(here) as scan:
            entries = {entry.name: entry for entry in scan}
        if "config.json" in entries:
            yield here, "result.json" in entries
        else:
            left += [here / e.name for e in entries.values() if e.is_dir(follow_symlinks=False)]


def _row_title(config: Config) -> str:
    parts = [config.method, config.unlabelled_loss and f"only {config.unlabelled_loss}"]
    cap = config.cap_threshold
    parts += [config.penalty, f"cap_threshold {cap:g}" if cap else ""]
    name = " + ".join(part for part in parts if part)
    return f"{name} (test-selected)" if config.protocol == "paper" else name


def _by_seed(runs: Sequence[Run], notes: list[str]) -> dict[Seeds, Run]:
    by_seed: dict[Seeds, Run] = {}
    for run in runs:
        first = by_seed.setdefault((run.config.seed, run.config.split_seed), run)
        if first is not run:
            notes.append(f"{run.folder} repeats {first.folder} and is left out.")
    return dict(sorted(by_seed.items()))


def _tell_apart(groups: list[Group]) -> list[Group]:
    """Groups that would share a cell get the settings in which they differ into their names."""
    by_cell: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for group in groups:
        by_cell.setdefault((group.row, group.column), []).append(group.config.dump())
    named = []
    for group in groups:
        same, own = by_cell[group.row, group.column], group.config.dump()
        differ = [f for f in own if f not in IGNORED_FIELDS and len({str(d[f]) for d in same}) > 1]
        if "steps" in differ:  # then these go without saying
            differ = [field for field in differ if field not in ("warmup", "eval_every")]
        words = ", ".join(f"{field}={own[field]}" for field in differ)
        named.append(group._replace(row=f"{group.row} ({words})") if differ else group)
    return named


class Quantity(NamedTuple):
    """A column of numbers: its heading, unit, factor and decimals."""

    head: str
    unit: str
    scale: float = 100.0
    digits: int = 2

    @property
    def short_unit(self) -> str:
        return "nats" if self.scale == 1 else "%"


QUANTITIES: Mapping[str, Quantity] = {
    "error": Quantity("error", "% of test pictures"),
    "ece": Quantity("ECE", "%, 15 bins"),
    "adaptive_ece": Quantity("AECE", "%, bins of equal mass"),
    "classwise_ece": Quantity("CECE", "%, all classes"),
    "nll": Quantity("NLL", "nats", 1.0, 3),
    "smooth_ece": Quantity("smooth ECE", "%"),
    "brier": Quantity("Brier", "%"),
    "aurc": Quantity("AURC", "%"),
    "ece_crossfit": Quantity("ECE, T by test halves", "%, each half by the other's labels"),
    "nll_crossfit": Quantity("NLL, T by test halves", "nats, each half by the other's", 1.0, 3),
    "ece_oracle": Quantity("ECE, oracle T", "%, temperature of the same labels"),
    "nll_oracle": Quantity("NLL, oracle T", "nats, temperature of the same labels", 1.0, 3),
}
DETAILS = "error ece ece_crossfit adaptive_ece classwise_ece nll nll_crossfit".split()
SCALED = "ece ece_crossfit ece_oracle nll nll_crossfit nll_oracle".split()


def seed_values(group: Group | None, metric: str) -> dict[Seeds, float]:
    """A quantity of each run by its seeds, in its unit; runs that lack it are left out."""
    scale = QUANTITIES[metric].scale
    name, _, way = metric.rpartition("_")
    values: dict[Seeds, float | None] = {}
    for seeds, run in group.runs.items() if group else ():
        scaled, plain = run.result.temperature_scaled.get(way), run.result.metrics.get(metric)
        values[seeds] = getattr(scaled, name, None) if scaled else getattr(plain, "value", None)
    return {seeds: scale * value for seeds, value in values.items() if value is not None}


def seed_differences(table: RunTable, group: Group, metric: str) -> list[float]:
    """A quantity less that of the same method without penalty, seed by seed; empty: no such run."""
    own, other = seed_values(group, metric), seed_values(table.base(group), metric)
    return [own[seeds] - other[seeds] for seeds in own if seeds in other]


def selected_on_test(run: Run) -> BestOnTest | None:
    """The best evaluation on the test set; None if there was only one to choose from."""
    lines = run.lines("test")
    best = run.result.best_on_test or (BestOnTest.of(lines) if lines else None)
    return best if best and best.evaluations > 1 else None


def build_tables(table: RunTable, *, suite: str = "", compare: bool = False) -> list[Table]:
    """All tables that the runs allow; `compare`: with the published numbers."""
    built = []
    if len(table.columns) > 1:
        built += [grid_table(table, metric) for metric in ("error", "ece")]
    built += [details_table(table, column) for column in table.columns]
    built.append(scaling_table(table))
    optional = [protocol_table(table), rank_table(table), difference_table(table)]
    built += [part for part in optional if part is not None]
    if compare:
        built += published_tables(table, suite)
    built[0] = built[0]._replace(notes=[*built[0].notes, _seeds_note(table), *table.notes])
    return built


NOTES = json.loads(Path(__file__).with_name("notes.json").read_text("utf-8"))
SPREAD, ARROWS, SCALING, ORACLE, PROTOCOLS, PAIRED, PUBLISHED = NOTES.values()


def grid_table(table: RunTable, metric: str) -> Table:
    """One quantity of every row in every column, as the paper's Tables 1 and 2."""
    columns = {column: _column_entries(table, column, metric) for column in table.columns}
    title = f"{QUANTITIES[metric].head} ({QUANTITIES[metric].unit}), {SPREAD}"
    return _table_of(columns, table.rows, title[0].upper() + title[1:], [ARROWS])


def details_table(table: RunTable, column: str) -> Table:
    """Every quantity of one column."""
    columns = {_heading(metric): _column_entries(table, column, metric) for metric in DETAILS}
    return _table_of(columns, table.only(column).rows, f"{column}: {SPREAD}", [ARROWS, SCALING])


def _table_of(
    columns: Mapping[str, Mapping[str, Entry]], rows: Sequence[str], title: str, notes: list[str]
) -> Table:
    lines = [[Entry(r), *(each.get(r, Entry("–")) for each in columns.values())] for r in rows]
    return Table(title, ["row", *columns], lines, notes)


def _heading(metric: str) -> str:
    return f"{QUANTITIES[metric].head} ({QUANTITIES[metric].short_unit})"


def _column_entries(table: RunTable, column: str, metric: str) -> dict[str, Entry]:
    """One column of numbers, row by row, with arrows and marks."""
    digits = QUANTITIES[metric].digits
    groups = {group.row: group for group in table.groups if group.column == column}
    values = {row: list(seed_values(group, metric).values()) for row, group in groups.items()}
    means = {row: stats.mean(numbers).value for row, numbers in values.items() if numbers}
    marks = _mark_best(means, digits)
    entries = {}
    for row, group in groups.items():
        base = table.base(group)
        change = means[row] - means[base.row] if base and {row, base.row} <= means.keys() else 0.0
        arrow = "↓" if change < 0 else "↑" if change > 0 else ""
        entries[row] = _mean_entry(values[row], digits, arrow, marks.get(row, ""))
    return entries


def _mean_entry(
    values: Iterable[float], digits: int = 2, arrow: str = "", mark: Mark = ""
) -> Entry:
    numbers = list(values)
    if not numbers:
        return Entry("–")
    mean = stats.mean(numbers)
    sd = "" if mean.sd is None else f" ± {mean.sd:.{digits}f}"
    return Entry(f"{mean.value:.{digits}f}{sd}{arrow and ' ' + arrow}", mark)


def _mark_best(means: Mapping[str, float], digits: int) -> dict[str, Mark]:
    """Best and second by the numbers as they are shown, so that ties share a mark."""
    rounded = {row: round(value, digits) for row, value in means.items()}
    order = sorted(set(rounded.values()))[:2]
    if len(order) < 2:  # one row, or all alike
        return {}
    marks: dict[float, Mark] = {order[0]: "best", order[1]: "second"}
    return {row: marks[value] for row, value in rounded.items() if value in marks}


def _seeds_note(table: RunTable) -> str:
    """How many runs each number is made of."""
    number = max(len(group.runs) for group in table.groups)
    fewer = [f"{g.row} on {g.column} ({len(g.runs)})" for g in table.groups if len(g.runs) < number]
    pairs = [seeds for group in table.groups for seeds in group.runs]
    seeds, splits = (sorted({pair[k] for pair in pairs}) for k in (0, 1))
    named = f"Seeds: {', '.join(map(str, seeds))}"
    if len(seeds) < len(splits):
        named = f"Label splits: {', '.join(map(str, splits))}; seed {seeds[0]}"
    return f"{named}; {number} runs a cell." + (f" Fewer: {', '.join(fewer)}." if fewer else "")


def protocol_table(table: RunTable) -> Table | None:
    """What choosing the step on the test set hides: last step against best step."""
    rows = []
    for group in table.groups:
        pairs = [(run.result.metrics, selected_on_test(run)) for run in group.runs.values()]
        chosen = [(held_out, best) for held_out, best in pairs if best]
        if not chosen or group.config.protocol == "paper":
            continue
        line = [Entry(group.row), Entry(group.column)]
        for metric in ("error", "ece"):
            line.append(_mean_entry(100 * held_out[metric].value for held_out, _ in chosen))
            line.append(_mean_entry(100 * getattr(best, metric) for _, best in chosen))
        gains = [100 * (held_out["error"].value - best.error) for held_out, best in chosen]
        rows.append([*line, _mean_entry(gains)])
    heads = ["row", "data", "error, held-out", "error, test-selected", "ECE, held-out"]
    heads += ["ECE, same step", "flattered by"]
    title = f"Held-out and test-selected protocol, %, {SPREAD}"
    return Table(title, heads, rows, [PROTOCOLS], words=2) if rows else None


def scaling_table(table: RunTable) -> Table:
    """ECE and NLL before and after temperature scaling, held-out and as a bound."""
    present = [metric for metric in SCALED if any(seed_values(g, metric) for g in table.groups)]
    rows = [
        [Entry(group.row), Entry(group.column)]
        + [_mean_entry(seed_values(group, m).values(), QUANTITIES[m].digits) for m in present]
        for group in table.groups
    ]
    heads = ["row", "data", *map(_heading, present)]
    title = f"What one temperature would do, {SPREAD}"
    return Table(title, heads, rows, [f"{SCALING} {ORACLE}"], words=2)


UNRANKED = "supervised"  # shown beside the paper's ten rows
Scores = Mapping[str, Mapping[str, Sequence[float]]]  # row -> metric -> one number a setting


def rank_table(table: RunTable) -> Table | None:
    """Friedman ranks for error, ECE and both; settings are columns, or seeds if there is one."""
    scores, kind = rank_scores(table)
    if len(scores) < 2:
        return None
    tests = friedman_tests(scores)
    marks = {name: _mark_best(test.rank, 2) for name, test in tests.items()}
    rows = [
        [Entry(row)]
        + [Entry(f"{test.rank[row]:.2f}", marks[n].get(row, "")) for n, test in tests.items()]
        for row in sorted(scores, key=lambda row: tests["all"].rank[row])
    ]
    notes = [
        f"{name}: {test.settings} settings, Friedman's p "
        f"{'–' if test.p is None else f'{test.p:.2g}'}; mean ranks less than {test.distance:.2f} "
        "apart cannot be told apart (Nemenyi, 95 %)."
        for name, test in tests.items()
    ]
    notes.append("'all' counts error and ECE of the same runs as two settings, as the paper does.")
    ranked = [row for row in table.rows if paper.bare_row(row) != UNRANKED]
    if dropped := [row for row in ranked if row not in scores]:
        notes.append(f"Not in every setting and left out: {', '.join(dropped)}.")
    if len(ranked) < len(table.rows):
        notes.append(f"{UNRANKED} is not ranked, as in the paper.")
    return Table(f"Friedman ranks over {kind}, lowest best", ["row", *tests], rows, notes)


def rank_scores(table: RunTable) -> tuple[Scores, str]:
    """What ranks are made of, and what its settings are; rows with gaps are left out.

    Settings are the columns (means over seeds), as in the paper; with one column, its seeds.
    """
    several = len(table.columns) > 1
    seeds = sorted({seeds for group in table.groups for seeds in group.runs})
    scores: dict[str, dict[str, list[float]]] = {}
    for row in [row for row in table.rows if paper.bare_row(row) != UNRANKED]:
        by_metric = {}
        for metric in ("error", "ece"):
            values = [seed_values(table.at(row, column), metric) for column in table.columns]
            means = [stats.mean(list(numbers.values())).value for numbers in values if numbers]
            one = [values[0][each] for each in seeds if each in values[0]]
            by_metric[metric] = means if several else one
        settings = len(table.columns) if several else len(seeds)
        if all(len(numbers) == settings for numbers in by_metric.values()):
            scores[row] = by_metric
    return scores, f"{len(table.columns)} columns" if several else f"{len(seeds)} seeds"


def friedman_tests(scores: Scores) -> dict[str, stats.Ranks]:
    """Friedman's test of error, of ECE, and of both as if they were twice as many settings."""
    kinds = {"error": ["error"], "ECE": ["ece"], "all": ["error", "ece"]}
    return {
        name: stats.friedman({row: [x for m in ms for x in by[m]] for row, by in scores.items()})
        for name, ms in kinds.items()
    }


def difference_table(table: RunTable) -> Table | None:
    """A penalty or loss against the same method without it, seed by seed."""
    rows = []
    pooled: dict[str, list[list[float]]] = {}
    for group in table.groups:
        parts = [seed_differences(table, group, metric) for metric in ("error", "ece")]
        if all(parts):
            rows.append([Entry(group.row), Entry(group.column), *_paired_entries(parts)])
            for total, part in zip(pooled.setdefault(group.row, [[], []]), parts, strict=True):
                total += part
    if len(table.columns) > 1:
        rows += [[Entry(row), Entry("all"), *_paired_entries(ps)] for row, ps in pooled.items()]
    heads = ["row", "data", "pairs"]
    for metric in ("error", "ECE"):
        heads += [f"{metric} change", "95 % interval", "better/worse", "p"]
    title = "Paired differences per seed against the same method without it, percentage points"
    return Table(title, heads, rows, [PAIRED], words=2) if rows else None


def _paired_entries(parts: Sequence[Sequence[float]]) -> list[Entry]:
    texts = [str(len(parts[0]))]
    for differences in parts:
        test = stats.paired(differences)
        texts += [
            f"{test.value:+.2f}",
            f"{test.low:+.2f} to {test.high:+.2f}" if test.number > 1 else "–",
            f"{test.better}/{test.worse}",
            "–" if test.p is None or test.number < 2 else f"{test.p:.2g}",
        ]
    return [Entry(text) for text in texts]


def published_tables(table: RunTable, suite: str) -> list[Table]:
    """Published numbers below ours, the doubtful ones with the reason; a table a quantity.

    Ours stand in both protocols: the published ones were chosen on the test set.
    """
    built = []
    own = {metric for _, _, metric in paper.PUBLISHED_TABLES.get(suite, ())} or set(QUANTITIES)
    for metric, quantity in [(m, q) for m, q in QUANTITIES.items() if m in own]:
        doubts: list[str] = []
        rows = []
        for row in table.rows:
            groups = [table.at(row, column) for column in table.columns]
            theirs = [_published_entry(group, metric, suite, doubts) for group in groups]
            if all(entry.text == "–" for entry in theirs):
                continue
            ours = [seed_values(group, metric).values() for group in groups]
            best = [[value for _, value in _best_values(g, metric).values()] for g in groups]
            rows.append([Entry(row), *map(_mean_entry, ours)])
            if any(best):
                rows.append([Entry("    test-selected"), *map(_mean_entry, best)])
            rows.append([Entry("    published"), *theirs])
        if rows:
            notes = [*PUBLISHED, *(f"[{k}] {d}." for k, d in enumerate(doubts, 1))]
            title = f"{quantity.head} ({quantity.unit}), ours above the published, {SPREAD}"
            built.append(Table(title, ["row", *table.columns], rows, notes))
    return built or [Table("Published numbers", ["row"], [], ["None of these cells is published."])]


def _published_entry(group: Group | None, metric: str, suite: str, doubts: list[str]) -> Entry:
    """A published number with a mark for its doubt; USB's are named."""
    cell = paper.find_published(group.row, group.column, metric, suite) if group else None
    if cell is None:
        return Entry("–")
    source, number = cell
    if number.doubt and number.doubt not in doubts:
        doubts.append(number.doubt)
    sd = "" if number.sd is None else f" ± {number.sd:.2f}"
    mark = f" [{doubts.index(number.doubt) + 1}]" if number.doubt else ""
    return Entry(f"{number.value:.2f}{sd}{' USB' if source == 'usb' else ''}{mark}")


def _best_values(group: Group | None, metric: str) -> dict[Seeds, tuple[int, float]]:
    """Each run's best step on the test set and a quantity there, where that is known."""
    runs, scale = group.runs if group else {}, QUANTITIES[metric].scale
    bests = [(seeds, best) for seeds, run in runs.items() if (best := selected_on_test(run))]
    values = {seeds: (best.step, getattr(best, metric, None)) for seeds, best in bests}
    return {seeds: (step, scale * v) for seeds, (step, v) in values.items() if v is not None}


TIDY_FIELDS = (
    "suite row column kind metric unit seed split_seed step runs value sd low high p published "
    "published_sd doubt"
).split()


def tidy_csv(table: RunTable, *, suite: str = "", compare: bool = False) -> str:
    """Runs, means, both protocols, paired differences and ranks, a number a line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, TIDY_FIELDS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in _tidy_lines(table, suite if compare else None):
        numbers = [key for key in ("value", "sd", "low", "high") if line.get(key) is not None]
        shown = {key: f"{line[key]:.6g}" for key in numbers}
        writer.writerow({"suite": suite, **line, **shown})
    return text.getvalue()


def _tidy_lines(table: RunTable, suite: str | None) -> Iterator[dict[str, Any]]:
    """All lines; no suite: without published numbers."""
    for group in table.groups:
        for metric, quantity in QUANTITIES.items():
            cell = {"row": group.row, "column": group.column, "metric": metric}
            cell["unit"] = quantity.short_unit
            for line in _cell_lines(table, group, metric, suite):
                yield cell | line
    scores, kind = rank_scores(table)
    for name, test in (friedman_tests(scores) if len(scores) > 1 else {}).items():
        for row, rank in test.rank.items():
            line = {"row": row, "column": kind, "kind": "mean rank", "metric": name}
            yield line | {"unit": "rank", "value": rank, "p": test.p}


def _cell_lines(
    table: RunTable, group: Group, metric: str, suite: str | None
) -> Iterator[dict[str, Any]]:
    values = seed_values(group, metric)
    if not values:
        return
    for (seed, split), value in values.items():
        yield {"kind": "run", "seed": seed, "split_seed": split, "value": value}
    for (seed, split), (step, value) in _best_values(group, metric).items():
        line = {"kind": "test-selected", "seed": seed, "split_seed": split}
        yield line | {"step": step, "value": value}
    mean = stats.mean(list(values.values()))
    line = {"kind": "mean", "runs": mean.number, **mean._asdict()}
    cell = None if suite is None else paper.find_published(group.row, group.column, metric, suite)
    if cell:
        value, sd, doubt = cell[1]
        line |= {"published": value, "published_sd": sd, "doubt": doubt}
    yield line
    base, differences = table.base(group), seed_differences(table, group, metric)
    if base and differences:
        test = stats.paired(differences)
        yield {"kind": f"paired minus {base.row}", "runs": test.number, **test._asdict()}
