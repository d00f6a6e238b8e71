"""`calmatch bench`, `table` and `figure`: a suite's runs, its tables and figures, in one folder."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from calmatch import spec
from calmatch.bench import stats
from calmatch.bench.engine import (
    Job,
    SpeedKey,
    SuiteProgress,
    estimate_seconds,
    find_throughput,
    format_duration,
    job_command,
    job_state,
    known_throughputs,
    last_log_lines,
    local_workers,
    measure_throughput,
    run_locally,
    speed_keys,
)
from calmatch.bench.paper import Cell, find_published, suite_cells
from calmatch.bench.render import RENDERERS
from calmatch.bench.tables import (
    QUANTITIES,
    RANKED,
    Group,
    RunTable,
    build_tables,
    gather_runs,
    rank_scores,
    seed_values,
    selected_on_test,
)
from calmatch.console import Stopped, catch_signals, message
from calmatch.files import write
from calmatch.options import BenchOptions, FigureOptions, TableOptions
from calmatch.training.config import Config

SHOWN_FAILURES = 8  # failed runs whose last lines are printed


class Failed(Exception):
    """Some runs failed; the others are done."""

    exit_code = 1


def run_suite(options: BenchOptions) -> None:
    """One suite, from its list of runs to its table."""
    if not options.minutes > 0:
        raise ValueError(f"--minutes must be more than 0, not {options.minutes:g}.")
    if options.jobs < 0:
        raise ValueError("--jobs must be at least 1, or 0 to let the machine decide.")
    chosen = choose_cells(options)
    todo = [make_job(cell, options.out) for cell in chosen]
    if options.index is not None:
        become_job(todo, options.index)
    states = [job_state(job) for job in todo]  # another config in a folder is told before hours
    if options.dry_run:
        print_preview(options, chosen, todo, states)
        return
    if done := states.count("finished"):
        message(f"{done} of {len(todo)} runs are finished already.", options.quiet)
    board = run_jobs(options, todo)
    print(_counted(board))
    if board.counts()["left"]:
        print(
            f"Time is up; the same command goes on. Tables until then: calmatch table {options.out}"
        )
    else:
        write_summary(options, todo)
    report_failures(board)


def choose_cells(options: BenchOptions) -> list[Cell]:
    """The cells asked for, each folder once, changed as asked."""
    found: dict[Path, Cell] = {}
    wanted = options.only.lower().split(",")
    for cell in suite_cells(options.suite, options.seeds or None):
        name = f"{cell.row} {cell.column} {cell.folder}".lower()
        if any(text.strip() in name for text in wanted):
            config = cell.config
            if options.steps is not None:
                config = shorten(config, options.steps)
            if options.protocol:
                config = config.replace(protocol=options.protocol)
            found.setdefault(cell.folder, cell._replace(config=config))
    if not found:
        raise ValueError(f"No run of {options.suite} has {options.only!r} in its name.")
    return list(found.values())


def shorten(config: Config, steps: int) -> Config:
    """The same run with fewer steps, to try a suite out: intervals and warm-up shrink with it."""
    if steps < 1:
        raise ValueError("--steps must be at least 1.")
    names = ("warmup", "log_every", "eval_every", "checkpoint_every")
    lengths = {name: getattr(config, name) for name in names}
    shrunk = {k: max(1, round(v * steps / config.steps)) if v else 0 for k, v in lengths.items()}
    return config.replace(steps=steps, **shrunk)


def make_job(cell: Cell, out: Path) -> Job:
    return Job(str(cell.folder), cell.config, out / cell.folder)


def become_job(todo: Sequence[Job], index: int) -> None:
    """Become one run: its signals, its exit code. What an array job of a cluster starts."""
    if not 0 <= index < len(todo):
        raise ValueError(f"--index must lie between 0 and {len(todo) - 1}, not {index}.")
    words = [word for word in job_command(todo[index]) if word != "--quiet"]
    os.execv(words[0], words)


def print_preview(
    options: BenchOptions, chosen: Sequence[Cell], todo: Sequence[Job], states: Sequence[str]
) -> None:
    """The runs, how they stand, and how long the rest will take."""
    width = {name: max(len(str(getattr(c, name))) for c in chosen) for name in ("row", "column")}
    for k, (cell, job, state) in enumerate(zip(chosen, todo, states, strict=True)):
        print(
            f"{k:>3}  {cell.row:<{width['row']}}  {cell.column:<{width['column']}}  "
            f"seed {cell.seed}  {state:<9}  {job.folder}",
            flush=True,
        )
    for source, numbers in protocol_sources(chosen).items():
        print(f"Protocol of {numbers}: {source}.")
    counts = Counter(states)
    print(f"{len(todo)} runs: {', '.join(f'{n} {state}' for state, n in counts.items())}.")
    ahead = [job for job, state in zip(todo, states, strict=True) if state != "finished"]
    if ahead:
        print(_estimate(ahead, todo, options))


def protocol_sources(chosen: Sequence[Cell]) -> dict[str, str]:
    """Each source of a protocol, and the numbers of the runs that follow it, as 0-2, 6-8."""
    found: dict[str, list[list[int]]] = {}
    for k, cell in enumerate(chosen):
        spans = found.setdefault(cell.source, [])
        if spans and spans[-1][1] == k - 1:
            spans[-1][1] = k
        else:
            spans.append([k, k])
    return {
        source: ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)
        for source, spans in found.items()
    }


def _estimate(ahead: Sequence[Job], every: Sequence[Job], options: BenchOptions) -> str:
    places = local_workers(len(every), options.jobs)
    paces = known_throughputs(every)
    kinds: dict[SpeedKey, Job] = {}
    for job in ahead:
        if not find_throughput(job.config, paces):
            kinds.setdefault(speed_keys(job.config)[-1], job)
    for number, (key, job) in enumerate(kinds.items(), 1):
        message(
            f"Measuring a few steps of {job.name} ({number} of {len(kinds)}) ...", options.quiet
        )
        if found := measure_throughput(job.config, places[0]):
            paces[key] = found
    seconds, unknown = estimate_seconds(ahead, paces)
    if unknown == len(ahead):
        return "Time: unknown; no step of these runs could be measured here (is the data there?)."
    at_once = min(sum(place.together for place in places), len(ahead))
    words = f"Time: about {format_duration(seconds / at_once)} here, "
    words += f"{at_once} at once; {format_duration(seconds)} of one place in all"
    return words + (f"; {unknown} more runs are unknown." if unknown else ".")


def run_jobs(options: BenchOptions, todo: Sequence[Job]) -> SuiteProgress:
    """Run what is not finished on the engine asked for."""
    with (
        catch_signals(collect=True) as asked,
        SuiteProgress(options.suite, todo, options.quiet) as board,
    ):
        if options.engine == "ray":
            from calmatch.bench.ray import run_on_ray

            env = {"OMP_NUM_THREADS": "1"}
            env |= {k: v for k, v in os.environ.items() if k == "CALMATCH_DATA"}
            run_on_ray(todo, board, asked, options.address, options.jobs, env)
        else:
            places = local_workers(len(todo), options.jobs)
            run_locally(todo, board, places, asked, options.minutes)
    if asked:
        print(_counted(board))
        raise Stopped(asked[0])
    return board


def _counted(board: SuiteProgress) -> str:
    counts = board.counts()
    return f"{board.title}: " + ", ".join(f"{n} {state}" for state, n in counts.items()) + "."


def report_failures(board: SuiteProgress) -> None:
    """Name the failed runs and their last lines."""
    failed = [item for item in board.items.values() if item.state == "failed"]
    for item in failed[:SHOWN_FAILURES]:
        message(f"\nfailed: {item.job.folder} ({item.note.partition(':')[0]})")
        for line in last_log_lines(item.job.folder):
            message(f"  {line}")
    if failed:
        names = ", ".join(str(item.job.folder) for item in failed[:SHOWN_FAILURES])
        names += f" and {len(failed) - SHOWN_FAILURES} more" if len(failed) > SHOWN_FAILURES else ""
        raise Failed(
            f"{len(failed)} of {len(board.items)} runs failed: {names}. "
            f"Their whole logs are in run.log there; the same command tries them again."
        )


def write_summary(options: BenchOptions, todo: Sequence[Job]) -> None:
    """The suite's tables and figures, from the runs that are finished."""
    done = [job.folder for job in todo if job_state(job) == "finished"]
    if not done:
        return
    pass  # IMPORT GONE  # draws; not needed before

    changed = options.steps is not None or options.protocol is not None
    name = None if changed else options.suite
    for line in write_all(done, options.out / options.suite, name):
        print(line)


TABLE_ENDINGS = {"md": "md", "latex": "tex", "html": "html"}


def write_all(folders: Sequence[Path], out: Path, suite: str | None) -> list[str]:
    """Write every table and every figure that the runs allow; a line about each.

    Args:
        folders: of finished runs.
        out: where the files go.
        suite: whose names and published numbers apply; None: the runs are changed ones.
    """
    from calmatch.bench import figures
    from calmatch.report import charts

    out.mkdir(parents=True, exist_ok=True)
    found = gather_runs(folders, suite)
    compare = _is_published(found, suite or "")
    built = build_tables(found, suite=suite or "", compare=compare)
    for kind, ending in TABLE_ENDINGS.items():
        write(out / f"table.{ending}", RENDERERS[kind](built))
    write(out / "table.csv", tidy_csv(found, suite=suite or "", compare=compare))
    lines = [f"Tables:  {out}/table.md, .tex, .html, .csv"]
    drawn, left = [], []
    for name, stem, runs in figures.figures_of(found):
        try:
            content = figures.FIGURES[name].prepare(runs)
        except ValueError as error:  # these runs do not allow it
            left.append(f"No figure {stem}: {error}")
            continue
        write(out / f"{stem}.svg", charts.encode(figures.draw_figure(name, content), ".svg"))
        drawn.append(stem)
    return [*lines, f"Figures: {out}/ {', '.join(f'{name}.svg' for name in drawn)}", *left]


def _is_published(found: RunTable, suite: str) -> bool:
    """Whether the paper prints a number for one of these cells."""
    return any(find_published(g.row, g.column, "error", suite) for g in found.groups)


TABLE_KINDS = {".md": "md", ".tex": "latex", ".csv": "csv", ".html": "html"}


def table_command(options: TableOptions) -> None:
    """Print or write the tables of some runs."""
    kind: str = options.to or "md"
    if options.out and not options.to:
        if options.out.suffix not in TABLE_KINDS:
            raise ValueError(f"{options.out} should end in {', '.join(TABLE_KINDS)}, or set --to.")
        kind = TABLE_KINDS[options.out.suffix]
    found = gather_runs(options.runs, options.suite)
    suite = options.suite or ""
    if kind == "csv":
        text = tidy_csv(found, suite=suite, compare=options.published)
    else:
        text = RENDERERS[kind](build_tables(found, suite=suite, compare=options.published))
    if options.out:
        _write_file(options.out, text)
        print(f"Table: {options.out}")
    else:
        sys.stdout.write(text)


def figure_command(name: str, options: FigureOptions) -> None:
    """Draw one figure into a file."""
    from calmatch.bench import figures
    from calmatch.report import charts

    if name not in figures.FIGURES:
        raise ValueError(f"There is no figure {name!r}.{spec.nearest(name, figures.FIGURES)}")
    drawing = figures.FIGURES[name]
    if options.published and drawing.published is None:
        raise ValueError(f"The paper prints no numbers for the figure {name}; name run folders.")
    if not (options.runs or options.published or name == "entropy"):
        raise ValueError(f"The figure {name} needs run folders: calmatch figure {name} RUNS ...")
    path = options.out or Path(f"{name}.svg")
    if path.suffix not in charts.FORMATS:
        raise ValueError(f"{path} should end in {', '.join(charts.FORMATS)}.")
    found = gather_runs(options.runs, options.suite) if options.runs else None
    if found and options.column:
        found = found.only(options.column)
    if options.published and drawing.published is not None:
        content = drawing.published()
    elif name == "logits":
        assert found is not None
        content = figures.prepare_logits(found, target=options.target)
    else:
        content = drawing.prepare(found)
    _write_file(path, charts.encode(figures.draw_figure(name, content), path.suffix))
    print(f"Figure: {path}")


def _write_file(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)


TIDY_FIELDS = (
    "row",
    "column",
    "kind",
    "metric",
    "unit",
    "seed",
    "split_seed",
    "step",
    "runs",
    "value",
    "sd",
    "low",
    "high",
    "p",
    "published",
    "published_sd",
    "doubt",
)


def tidy_csv(found: RunTable, *, suite: str = "", compare: bool = False) -> str:
    """Runs, means, both protocols, paired differences and ranks."""
    packed = io.StringIO()
    writer = csv.DictWriter(packed, TIDY_FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    for group in found.groups:
        for metric in QUANTITIES:
            writer.writerows(_group_lines(found, group, metric, suite, compare))
    writer.writerows(_rank_lines(found))
    return packed.getvalue()


def _group_lines(
    found: RunTable, group: Group, metric: str, suite: str, compare: bool
) -> Iterator[dict[str, Any]]:
    quantity = QUANTITIES[metric]
    first = {"row": group.row, "column": group.column, "metric": metric}
    first["unit"] = "nats" if quantity.scale == 1 else "%"
    own = seed_values(group, metric)
    if not own:
        return
    for (seed, split_seed), value in own.items():
        yield {
            **first,
            "kind": "run",
            "seed": seed,
            "split_seed": split_seed,
            "value": _digits(value),
        }
    for (seed, split_seed), run in group.runs.items():
        best = selected_on_test(run)
        if best and metric in best:
            line = {**first, "kind": "best on test (leaky)", "step": best["step"]}
            line |= {"seed": seed, "split_seed": split_seed}
            yield line | {"value": _digits(quantity.scale * best[metric])}
    total = stats.mean(list(own.values()))
    line = {**first, "kind": "mean", "runs": total.number, "value": _digits(total.value)}
    line["sd"] = "" if total.sd is None else _digits(total.sd)
    if compare and (there := find_published(group.row, group.column, metric, suite)):
        number = there[1]
        line |= {"published": number.value, "published_sd": number.sd, "doubt": number.doubt}
    yield line
    base = found.base(group)
    other = seed_values(base, metric) if base else {}
    shared = [seeds for seeds in own if seeds in other]
    if base and shared:
        test = stats.paired([own[seeds] - other[seeds] for seeds in shared])
        line = {**first, "kind": f"paired minus {base.row}", "runs": test.number}
        line |= {
            "value": _digits(test.value),
            "low": _digits(test.low),
            "high": _digits(test.high),
            "p": test.p,
        }
        yield line


def _rank_lines(found: RunTable) -> Iterator[dict[str, Any]]:
    blocks = rank_scores(found)
    if blocks is None:
        return
    scores, kind = blocks
    for name, metrics in RANKED.items():
        test = stats.friedman({r: [s for m in metrics for s in by[m]] for r, by in scores.items()})
        for row, rank in test.rank.items():
            line = {"row": row, "column": kind, "kind": "mean rank", "metric": name}
            yield line | {"unit": "rank", "value": _digits(rank), "p": test.p}


def _digits(value: float) -> str:
    return f"{value:.6g}"
