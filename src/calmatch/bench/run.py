"""What `calmatch bench` does: list the runs, estimate, run what is missing, sum up."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from calmatch.bench import engines, pace
from calmatch.bench import job as jobs
from calmatch.bench.board import Board, clock
from calmatch.bench.groups import identity
from calmatch.bench.job import Job
from calmatch.bench.rows import Cell
from calmatch.bench.suites import cells
from calmatch.config import Config
from calmatch.edge import Stopped, signals
from calmatch.log import tell
from calmatch.options import BenchOptions

SHOWN = 8  # failed runs whose last lines are printed


class Failed(Exception):
    """Some runs failed; the others are done."""

    exit_code = 1


def run(options: BenchOptions) -> None:
    """One suite, from its list of runs to its table."""
    if not options.minutes > 0:
        raise ValueError(f"--minutes must be more than 0, not {options.minutes:g}.")
    if options.jobs < 0:
        raise ValueError("--jobs must be at least 1, or 0 to let the machine decide.")
    chosen = choose(options)
    todo = [job_of(cell, options.out) for cell in chosen]
    if options.index is not None:
        one(todo, options.index)
    states = [jobs.state(job) for job in todo]  # another config in a folder is told before hours
    if options.dry_run:
        preview(options, chosen, todo, states)
        return
    if done := states.count("finished"):
        tell(f"{done} of {len(todo)} runs are finished already.", options.quiet)
    board = execute(options, todo)
    print(_counted(board))
    if board.counts()["left"]:
        print(
            f"Time is up; the same command goes on. Tables until then: calmatch table {options.out}"
        )
    else:
        sum_up(options, todo)
    failures(board)


def choose(options: BenchOptions) -> list[Cell]:
    """The cells asked for, each folder once, changed as asked."""
    found: dict[Path, Cell] = {}
    known = _known(options.known)
    wanted = options.only.lower().split(",")
    for cell in cells(options.suite, options.seeds or None):
        name = f"{cell.row} {cell.column} {cell.folder}".lower()
        if any(text.strip() in name for text in wanted):
            config = cell.config
            if options.steps is not None:
                config = scaled(config, options.steps)
            if options.protocol:
                config = config.replace(protocol=options.protocol)
            if identity(config) not in known:
                found.setdefault(cell.folder, cell._replace(config=config))
    if known:
        tell(f"{len(known)} runs are known from files.", options.quiet)
    if not found:
        raise ValueError(f"No run of {options.suite} has {options.only!r} in its name.")
    return list(found.values())


def _known(files: Sequence[Path]) -> set[str]:
    """The runs that stand in files of compact results."""
    if not files:
        return set()
    from calmatch.bench.compact import kept  # brings post-hoc calibration

    return {identity(run.config) for run in kept(files)}


def scaled(config: Config, steps: int) -> Config:
    """The same run with fewer steps, to try a suite out: intervals and warm-up shrink with it."""
    if steps < 1:
        raise ValueError("--steps must be at least 1.")
    names = ("warmup", "log_every", "eval_every", "checkpoint_every")
    lengths = {name: getattr(config, name) for name in names}
    shrunk = {k: max(1, round(v * steps / config.steps)) if v else 0 for k, v in lengths.items()}
    return config.replace(steps=steps, **shrunk)


def job_of(cell: Cell, out: Path) -> Job:
    return Job(str(cell.folder), cell.config, out / cell.folder)


def one(todo: Sequence[Job], index: int) -> None:
    """Become one run: its signals, its exit code. What an array job of a cluster starts."""
    if not 0 <= index < len(todo):
        raise ValueError(f"--index must lie between 0 and {len(todo) - 1}, not {index}.")
    words = [word for word in jobs.command(todo[index]) if word != "--quiet"]
    os.execv(words[0], words)


def preview(
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
    for source, numbers in sources(chosen).items():
        print(f"Protocol of {numbers}: {source}.")
    counts = Counter(states)
    print(f"{len(todo)} runs: {', '.join(f'{n} {state}' for state, n in counts.items())}.")
    ahead = [job for job, state in zip(todo, states, strict=True) if state != "finished"]
    if ahead:
        print(_estimate(ahead, todo, options))


def sources(chosen: Sequence[Cell]) -> dict[str, str]:
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
    places = engines.slots(len(every), options.jobs)
    paces = pace.known(every)
    kinds: dict[pace.Key, Job] = {}
    for job in ahead:
        if not pace.find(job.config, paces):
            kinds.setdefault(pace.keys(job.config)[-1], job)
    for number, (key, job) in enumerate(kinds.items(), 1):
        tell(f"Measuring a few steps of {job.name} ({number} of {len(kinds)}) ...", options.quiet)
        if found := pace.measure(job.config, places[0]):
            paces[key] = found
    seconds, unknown = pace.estimate(ahead, paces)
    if unknown == len(ahead):
        return "Time: unknown; no step of these runs could be measured here (is the data there?)."
    at_once = min(sum(place.together for place in places), len(ahead))
    words = f"Time: about {clock(seconds / at_once)} here, "
    words += f"{at_once} at once; {clock(seconds)} of one place in all"
    return words + (f"; {unknown} more runs are unknown." if unknown else ".")


def execute(options: BenchOptions, todo: Sequence[Job]) -> Board:
    """Run what is not finished on the engine asked for."""
    with signals(collect=True) as asked, Board(options.suite, todo, options.quiet) as board:
        if options.engine == "ray":
            from calmatch.bench import ray_engine

            env = {"OMP_NUM_THREADS": "1"}
            env |= {k: v for k, v in os.environ.items() if k == "CALMATCH_DATA"}
            ray_engine.run(todo, board, asked, options.address, options.jobs, env)
        else:
            places = engines.slots(len(todo), options.jobs)
            engines.local(todo, board, places, asked, options.minutes)
    if asked:
        print(_counted(board))
        raise Stopped(asked[0])
    return board


def _counted(board: Board) -> str:
    counts = board.counts()
    return f"{board.title}: " + ", ".join(f"{n} {state}" for state, n in counts.items()) + "."


def failures(board: Board) -> None:
    """Name the failed runs and their last lines."""
    failed = [item for item in board.items.values() if item.state == "failed"]
    for item in failed[:SHOWN]:
        tell(f"\nfailed: {item.job.folder} ({item.note.partition(':')[0]})")
        for line in jobs.last_lines(item.job.folder):
            tell(f"  {line}")
    if failed:
        names = ", ".join(str(item.job.folder) for item in failed[:SHOWN])
        names += f" and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
        raise Failed(
            f"{len(failed)} of {len(board.items)} runs failed: {names}. "
            f"Their whole logs are in run.log there; the same command tries them again."
        )


def sum_up(options: BenchOptions, todo: Sequence[Job]) -> None:
    """The suite's tables and figures, from the runs that are finished."""
    done = [job.folder for job in todo if jobs.state(job) == "finished"]
    if not done:
        return
    from calmatch.bench.writeup import write_all  # draws; not needed before

    changed = options.steps is not None or options.protocol is not None
    name = None if changed else options.suite
    for line in write_all(done, options.out / options.suite, name):
        print(line)
