"""The loop: it alone owns time. Steps, log lines, evaluations, checkpoints, signals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calmatch import checkpoint, guard, log, optim, parallel, results
from calmatch import config as configs
from calmatch.capture import Captured
from calmatch.config import Config
from calmatch.edge import Asked, Stopped, signals
from calmatch.environment import allow_recompiles, deterministic
from calmatch.features import freeze
from calmatch.setup import Parts, pick_device, prepare
from calmatch.step import Training


def train(config: Config, out: Path | str | None = None, *, quiet: bool = False) -> results.Run:
    """Train one run into its folder, or continue or return the one that is there."""
    return together([config], [out], quiet=quiet)[0]


def together(
    settings: Sequence[Config], outs: Sequence[Path | str | None], *, quiet: bool = False
) -> list[results.Run]:
    """Train runs that differ in their seeds only side by side on one device, each as if alone."""
    for config in settings:
        configs.check(config)
    if len({configs.seedless(config) for config in settings}) > 1:
        raise ValueError("Runs that are trained together may differ in their seeds and fold only.")
    folders = [
        Path(out) if out is not None else Path("runs") / results.name(config)
        for config, out in zip(settings, outs, strict=True)
    ]
    if len(set(folders)) < len(folders):
        raise ValueError("Runs that are trained together need a folder each.")
    with _working(settings[0], folders) as asked:
        left = []
        for config, folder in zip(settings, folders, strict=True):
            if results.finished(folder, config):
                log.tell(f"{folder} is finished already.", quiet)
            else:
                left.append((config, folder))
        if left:
            _train(left, quiet, asked)
        return [results.load(folder) for folder in folders]


def first(config: Config, folder: Path, steps: int, *, quiet: bool = False) -> None:
    """Only the first steps of a run, for their lines."""
    with _working(config, [folder]) as asked:
        _train([(config, folder)], quiet, asked, steps)


@contextmanager
def _working(config: Config, folders: Sequence[Path]) -> Iterator[Asked]:
    """What holds while runs train; the signals that come meanwhile."""
    with ExitStack() as stack:
        stack.enter_context(deterministic(config.deterministic))
        stack.enter_context(parallel.started(pick_device(config.device)))
        for folder in folders:
            stack.enter_context(results.held(folder))
        stack.enter_context(torch.random.fork_rng())
        yield stack.enter_context(signals())


def _train(
    left: Sequence[tuple[Config, Path]], quiet: bool, asked: Asked, until: int | None = None
) -> None:
    """To the end; where numbers stop being finite, back to a checkpoint, or out with a sentence."""
    while fault := _attempt(left, quiet, asked, until):
        guard.settle(fault, *left[fault.run], fresh, asked, quiet)


def _attempt(
    left: Sequence[tuple[Config, Path]], quiet: bool, asked: Asked, until: int | None
) -> guard.Fault | None:
    """Train from the newest checkpoints on, to the end or to a step in between."""
    runs = [_begin(config, folder, quiet) for config, folder in left]
    folders = [folder for _, folder in left]
    config, parts = runs[0].config, runs[0].parts
    kept = _resume(runs, folders, quiet)
    advance = _engine(runs, quiet)
    title = parts.title + (f" x {len(runs)}" if len(runs) > 1 else "")
    with ExitStack() as stack:
        stack.enter_context(asked.patience())
        lines = [stack.enter_context(log.Lines(*each)) for each in zip(folders, kept, strict=True)]
        writers = [
            stack.enter_context(checkpoint.Writer(f / "checkpoint", config.saves)) for f in folders
        ]
        bar = stack.enter_context(log.Bar(title, config.steps, runs[0].step, quiet))
        while (step := runs[0].step) < (until or config.steps):
            advance()
            step += 1
            bar.update(step)
            stop = bool(asked)
            logs = due(step, config.log_every, config.steps)
            measures = due(step, config.eval_every, config.steps)
            saves = due(step, config.saves, config.steps) or stop
            if (logs or measures or saves) and (fault := guard.look(runs)):
                return fault
            for run, book, writer in zip(runs, lines, writers, strict=True):
                if logs:
                    _log(run, book, bar)
                if measures:
                    _evaluate(run, book, bar)
                if saves:
                    _save(run, writer, book)
            if stop:
                raise Stopped(asked[0])
    if until is not None:
        return None
    for run, folder in zip(runs, folders, strict=True):
        results.finish(folder, run.config, run.parts, run.best, run.best_step, quiet)
    return None


def _begin(config: Config, folder: Path, quiet: bool) -> Training:
    run = fresh(config, quiet)
    results.begin(folder, config, run.parts)
    for line in run.parts.notes:
        log.tell(line, quiet)
    return run


def _resume(runs: Sequence[Training], folders: Sequence[Path], quiet: bool) -> list[int]:
    """Take up checkpoints of the same step; how much of each metrics.jsonl they cover."""
    limit = None
    said: list[str] = []
    while True:
        read = [checkpoint.newest(folder / "checkpoint", limit) for folder in folders]
        said += [line for _, complaints in read for line in complaints]
        steps = [int(found[1]["step"]) if found else 0 for found, _ in read]
        if len(set(steps)) == 1:
            break
        limit = min(steps)  # a kill between two saves: the slower one decides
    kept = []
    for line in said:
        log.warn(line)
    for run, folder, (found, _) in zip(runs, folders, read, strict=True):
        if found:
            run.restore(*found)
            log.tell(f"Continuing {folder} at step {run.step:,}.", quiet)
        kept.append(int(found[1]["lines"]) if found else 0)
    return kept


def _engine(runs: Sequence[Training], quiet: bool) -> Callable[[], None]:
    """How a step is made: replayed from one captured graph on a CUDA device, else step by step."""
    wanted = runs[0].config.engine
    able = runs[0].parts.device.type == "cuda" and parallel.world() == 1
    if wanted == "captured" and not able:
        raise ValueError("engine=captured needs one CUDA device; use --engine auto.")
    if able and wanted != "eager":
        return Captured(runs, quiet).advance

    def advance() -> None:
        for run in runs:
            run.advance(run.parts.batches[run.step])

    return advance


def due(step: int, every: int, total: int) -> bool:
    """Whether something done every so many steps, and at the end, is due."""
    return step == total or (every > 0 and step % every == 0)


def fresh(config: Config, quiet: bool = True) -> Training:
    """A run before its first step."""
    parts = prepare(config)
    if config.frozen:
        parts = freeze(config, parts, quiet).parts(parts.split)
    return _start(config, parts)


def _start(config: Config, parts: Parts) -> Training:
    objective: nn.Module = parts.objective(parts.net)
    compiled = parts.device.type == "cuda" if config.compile is None else config.compile
    if compiled:
        allow_recompiles()
    if compiled is True:  # the net alone is compiled by the captured step
        objective.compile(fullgraph=True)
    if parallel.world() > 1:
        objective = nn.parallel.DistributedDataParallel(objective, static_graph=True)
    groups = optim.groups(
        parts.net, config.lr, config.weight_decay, config.layer_decay, parts.method.optim
    )
    optimizer = optim.build(config.optimizer, groups, config.momentum, parts.device)
    return Training(config, parts, objective, optimizer, results.predictor(config, parts))


def _log(run: Training, lines: log.Lines, bar: log.Bar) -> None:
    rate = float(run.optimizer.param_groups[0]["lr"])
    line = {"step": run.step, "kind": "train", "lr": rate, **run.sums.read()}
    lines.write(line)
    bar.note(line)


def _evaluate(run: Training, lines: log.Lines, bar: log.Bar) -> None:
    """Measure the weights of now; keep them if they are the best so far where that is asked."""
    measured = results.measure(run.parts, run.predict)
    for split, values in measured.items():
        lines.write({"step": run.step, "kind": split, **values})
        bar.note(values)
    if (metric := configs.selection(run.config)) is None:
        return
    value = measured["test" if run.config.protocol == "paper" else "validation"][metric]
    if run.best_value is None or value < run.best_value:
        run.best_value, run.best_step = value, run.step
        run.best = copy.deepcopy(dict(run.parts.judged.state_dict()))


def _save(run: Training, writer: checkpoint.Writer, lines: log.Lines) -> None:
    if parallel.rank() == 0:
        note: dict[str, Any] = {"lines": lines.size(), "sums": run.sums.steps}
        note |= {"best": run.best_value, "best_step": run.best_step}
        note["rollbacks"] = run.rollbacks
        writer.save(run.step, run.tensors(), note)


def learn(config: Config, parts: Parts, seen: Callable[[int], object] = bool) -> Training:
    """Train parts in memory, without a folder; `seen` is told each step that is done."""
    with torch.random.fork_rng():
        run = _start(config, parts)
        while run.step < config.steps:
            run.advance(parts.batches[run.step])
            seen(run.step)
    return run
