"""`calmatch bench`, `table` and `figure`: a suite's runs, its tables and figures, in one folder."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from calmatch import spec
from calmatch.bench import engine, paper, render, tables
from calmatch.bench.engine import Job, SuiteProgress
from calmatch.console import Failed, Stopped, catch_signals, message
from calmatch.files import write
from calmatch.nets import NETS
from calmatch.options import BenchOptions, FigureOptions, TableOptions
from calmatch.training.config import Config

SHOWN_FAILURES = 8  # failed runs whose last lines are printed


def run_suite(options: BenchOptions) -> None:
    """One suite, from its list of runs to its table."""
    if not options.minutes > 0:
        raise ValueError(f"--minutes must be more than 0, not {options.minutes:g}.")
    if options.jobs < 0:
        raise ValueError("--jobs must be at least 1, or 0 to let the machine decide.")
    cells = choose_cells(options)
    jobs = [Job(str(cell.folder), cell.config, options.out / cell.folder) for cell in cells]
    if options.index is not None:  # become one run, as an array job does: its signals, its code
        if not 0 <= options.index < len(jobs):
            last = len(jobs) - 1
            raise ValueError(f"--index must lie between 0 and {last}, not {options.index}.")
        words = [word for word in engine.job_command(jobs[options.index]) if word != "--quiet"]
        os.execv(words[0], words)
    states = [engine.job_state(job) for job in jobs]  # refuses another config before hours pass
    if options.dry_run:
        _print_preview(cells, jobs, states)
        return
    if done := states.count("finished"):
        message(f"{done} of {len(jobs)} runs are finished already.", options.quiet)
    progress = _run_jobs(options, jobs)
    if progress.counts()["left"]:
        again = "Time is up; the same command goes on."
        print(f"{again} Tables until then: calmatch table {options.out}")
    elif folders := [job.folder for job in jobs if engine.job_state(job) == "finished"]:
        for part, table in split_paper(folders, options.suite).items():
            out = options.out / options.suite
            write_all(table, out if part == options.suite else out / part, part)
    _report_failures(progress)


def choose_cells(options: BenchOptions) -> list[paper.Cell]:
    """The cells asked for, each folder once, changed as asked."""
    cells: dict[Path, paper.Cell] = {}
    if options.net and not options.net.startswith("timm."):  # before every run fails alike
        spec.find(spec.parse(options.net).name, NETS, "net")
    wanted = [text.strip() for text in options.only.lower().split(",")]
    for cell in paper.suite_cells(options.suite, options.seeds or None):
        name = f"{cell.row} {cell.column} {cell.folder}".lower()
        if any(text in name for text in wanted):
            config = cell.config if options.steps is None else shorten(cell.config, options.steps)
            changes = {"protocol": options.protocol, "net": options.net}
            config = config.replace(**{field: value for field, value in changes.items() if value})
            cells.setdefault(cell.folder, cell._replace(config=config))
    if not cells:
        raise ValueError(f"No run of {options.suite} has {options.only!r} in its name.")
    return _with_weights(list(cells.values()), options.weights)


def _with_weights(cells: list[paper.Cell], weights: Path | None) -> list[paper.Cell]:
    """The cells whose network starts pretrained, from this file."""
    if weights is None:
        return cells
    if not weights.is_file():
        raise ValueError(f"There is no weights file {weights}.")
    items = {net: spec.parse(net) for net in {cell.config.net for cell in cells}}
    started = {net: item for net, item in items.items() if "pretrained" in item.kwargs} or items
    if len(started) > 1:
        known = ", ".join(sorted(item.name for item in started.values()))
        raise ValueError(f"One file cannot start {known}; choose cells with --only, or set --net.")
    ((net, item),) = started.items()
    text = spec.write(item._replace(kwargs={**item.kwargs, "pretrained": str(weights.resolve())}))
    return [
        c._replace(config=c.config.replace(net=text)) if c.config.net == net else c for c in cells
    ]


def shorten(config: Config, steps: int) -> Config:
    """The same run with fewer steps, to try a suite out: intervals and warm-up shrink with it."""
    if steps < 1:
        raise ValueError("--steps must be at least 1.")
    names = ("warmup", "log_every", "eval_every", "checkpoint_every")
    lengths = {name: getattr(config, name) for name in names}
    shrunk = {k: max(1, round(v * steps / config.steps)) if v else 0 for k, v in lengths.items()}
    return config.replace(steps=steps, **shrunk)


def _print_preview(cells: Sequence[paper.Cell], jobs: Sequence[Job], states: Sequence[str]) -> None:
    """The runs and how they stand, below the sources of their protocols."""
    wide, wider = max(len(cell.row) for cell in cells), max(len(cell.column) for cell in cells)
    source = ""
    for k, (cell, job, state) in enumerate(zip(cells, jobs, states, strict=True)):
        if cell.source != source:
            source = cell.source
            print(f"Protocol: {source}.")
        name = f"{cell.row:<{wide}}  {cell.column:<{wider}}  seed {cell.seed}"
        print(f"{k:>3}  {name}  {state:<9}  {job.folder}", flush=True)
    print(f"{len(jobs)} runs: {', '.join(f'{n} {s}' for s, n in Counter(states).items())}.")


def _run_jobs(options: BenchOptions, jobs: Sequence[Job]) -> SuiteProgress:
    """Run what is not finished on the engine asked for."""
    with (
        catch_signals(collect=True) as signals,
        SuiteProgress(options.suite, jobs, options.quiet) as progress,
    ):
        if options.engine == "ray":
            from calmatch.bench.ray import run_on_ray

            env = {"OMP_NUM_THREADS": "1"}
            env |= {k: v for k, v in os.environ.items() if k == "CALMATCH_DATA"}
            run_on_ray(jobs, progress, signals, options.address, options.jobs, env)
        else:
            workers = engine.local_workers(len(jobs), options.jobs)
            engine.run_locally(jobs, progress, workers, signals, options.minutes)
    print(f"{options.suite}: {', '.join(f'{n} {s}' for s, n in progress.counts().items())}.")
    if signals:
        raise Stopped(signals[0])
    return progress


def _report_failures(progress: SuiteProgress) -> None:
    """Name the failed runs and their last lines."""
    failed = [item for item in progress.items.values() if item.state == "failed"]
    for item in failed[:SHOWN_FAILURES]:
        message(f"\nfailed: {item.job.folder} ({item.note.partition(':')[0]})")
        for line in engine.last_log_lines(item.job.folder):
            message(f"  {line}")
    if failed:
        names = spec.first_names([str(item.job.folder) for item in failed], SHOWN_FAILURES)
        again = "Their whole logs are in run.log there; the same command tries them again."
        raise Failed(f"{len(failed)} of {len(progress.items)} runs failed: {names}. {again}")


def split_paper(paths: Sequence[Path], suite: str | None) -> dict[str, tables.RunTable]:
    """Runs by the suite whose tables they make; those of the whole paper by the paper's tables."""
    known = tables.load_runs(paths)
    whole = tables.arrange_runs(*known, suite)
    if suite != "paper":
        return {suite or "": whole}
    parts = {}
    for name in paper.PARTS:
        with suppress(ValueError):  # no run of this part
            part = tables.arrange_runs(*known, name)
            parts[name] = part._replace(notes=[n for n in part.notes if "Not of" not in n])
    said = [note for note in whole.notes if "Not of" in note]
    if absent := [name for name in paper.PARTS if name not in parts]:
        said.append(f"No run yet of {', '.join(absent)}.")
    next(iter(parts.values())).notes.extend(said)
    return parts


TABLE_KINDS = {".md": "md", ".tex": "latex", ".csv": "csv"}


def write_all(table: tables.RunTable, out: Path, suite: str) -> None:
    """Write every table and every figure that finished runs allow; print a line about each."""
    from calmatch.bench import figures
    from calmatch.report import charts

    out.mkdir(parents=True, exist_ok=True)
    compare = any(paper.find_published(g.row, g.column, "error", suite) for g in table.groups)
    built = tables.build_tables(table, suite=suite, compare=compare)
    write(out / "table.md", render.markdown(built))
    write(out / "table.tex", render.latex(built))
    write(out / "table.csv", tables.tidy_csv(table, suite=suite, compare=compare))
    print(f"Tables:  {out}/table.md, .tex, .csv")
    drawn, missing = [], []
    for name, stem, part in figures.figures_of(table):
        try:
            content = figures.FIGURES[name].prepare(part)
        except ValueError as error:  # these runs do not allow it
            missing.append(f"No figure {stem}: {error}")
            continue
        charts.save_figure(figures.draw_figure(name, content), out / f"{stem}.svg")
        drawn.append(f"{stem}.svg")
    print("\n".join([f"Figures: {out}/ {', '.join(drawn)}", *missing]))


def table_command(options: TableOptions) -> None:
    """Print or write the tables of some runs."""
    kind: str = options.to or "md"
    if options.out and not options.to:
        if options.out.suffix not in TABLE_KINDS:
            raise ValueError(f"{options.out} should end in {', '.join(TABLE_KINDS)}, or set --to.")
        kind = TABLE_KINDS[options.out.suffix]
    parts = split_paper(options.runs, options.suite)
    if kind == "csv":
        texts = [tables.tidy_csv(t, suite=s, compare=options.published) for s, t in parts.items()]
        text = texts[0] + "".join(each.partition("\n")[2] for each in texts[1:])
        message(note for table in parts.values() for note in table.notes)
    else:
        built = []
        for suite, table in parts.items():
            own = tables.build_tables(table, suite=suite, compare=options.published)
            built += [t._replace(title=f"{suite}: {t.title}") if len(parts) > 1 else t for t in own]
        text = render.RENDERERS[kind](built)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write(options.out, text)
        print(f"Table: {options.out}")
    else:
        sys.stdout.write(text)


def figure_command(name: str, options: FigureOptions) -> None:
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
    suite = options.suite
    if suite == "paper" and drawing.whole:  # the part that the paper draws it of
        suite = "losses" if name == "radar" else "main"
    table = tables.gather_runs(options.runs, suite) if options.runs else None
    if table and options.column:
        table = table.only(options.column)
    target = {"target": options.target} if name == "logits" else {}
    printed = drawing.published if options.published else None
    content = printed() if printed else drawing.prepare(table, **target)
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"Figure: {charts.save_figure(figures.draw_figure(name, content), path)}")
