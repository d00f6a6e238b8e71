"""The loop: it alone owns time. What happens in a step is written here, in order."""

from __future__ import annotations

import copy
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from calmatch import checkpoint, evaluate, log, optim, parallel, results
from calmatch import config as configs
from calmatch.capture import Captured
from calmatch.config import Config
from calmatch.core import Batch
from calmatch.data.batches import stream_seed
from calmatch.heads import freeze
from calmatch.setup import Parts, pick_device, prepare


class Stopped(Exception):
    """A signal asked the run to end; its checkpoint is written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Stopped by signal {number}; the same command continues.")
        self.exit_code = 128 + number


@dataclass
class Training:
    """Everything that changes while a run goes on."""

    config: Config
    parts: Parts
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    predict: evaluate.Predictor
    step: int = 0
    sums: log.Sums = field(default_factory=log.Sums)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_value: float | None = None
    best_step: int | None = None

    def advance(self, batch: Batch) -> None:
        """One training step."""
        config = self.config
        self._seed(stream_seed(config.seed, 6, self.step))  # dropout and drop-path
        rate = optim.factor(self.step, config.steps, config.warmup, config.schedule)
        optim.set_rate(self.optimizer, rate)
        self.learn(batch)
        self.sums.steps += 1
        self.step += 1

    def _seed(self, seed: int) -> None:
        """Seed what the step draws from; torch.manual_seed spends a millisecond on the rest."""
        torch.default_generator.manual_seed(seed)
        if self.parts.device.type != "cpu":
            torch.get_device_module(self.parts.device).manual_seed(seed)

    def learn(self, batch: Batch) -> None:
        """What a step does on the device: nothing in it depends on the host."""
        parts = self.parts
        values, state = self.objective(batch)
        values["loss"].backward()
        parts.method.commit(state)
        if self.config.clip:
            nn.utils.clip_grad_norm_(parts.net.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if parts.momentum:
            follow(parts.ema, parts.net, parts.momentum)
        self.sums.add(values)

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, for a checkpoint."""
        found = {f"net/{k}": v for k, v in self.parts.net.state_dict().items()}
        if self.parts.momentum:
            found |= {f"ema/{k}": v for k, v in self.parts.ema.state_dict().items()}
        found |= {f"method/{k}": v for k, v in self.parts.method.state_dict().items()}
        found |= {f"best/{k}": v for k, v in self.best.items()}
        found |= {f"sums/{k}": v for k, v in self.sums.totals.items()}
        for name, parameter in self.parts.net.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        return found

    def restore(self, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint."""
        held = {k: v.to(self.parts.device) for k, v in tensors.items()}
        self.parts.net.load_state_dict(_under("net/", held))
        if self.parts.momentum:
            self.parts.ema.load_state_dict(_under("ema/", held))
        self.parts.method.load_state_dict(_under("method/", held))
        self.best, self.sums.totals = _under("best/", held), _under("sums/", held)
        self.step, self.sums.steps = int(note["step"]), int(note["sums"])
        self.best_value, self.best_step = note["best"], note["best_step"]
        for name, parameter in self.parts.net.named_parameters():
            # fused steps keep their step count on the parameter's device
            own = _under(f"optimizer/{name}/", held)
            for key, value in own.items():  # moments lie in memory as their weights do
                like = parameter.detach() if value.shape == parameter.shape else value
                self.optimizer.state[parameter][key] = torch.empty_like(like).copy_(value)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


@torch.no_grad()
def follow(ema: nn.Module, net: nn.Module, momentum: float) -> None:
    """Move averaged weights towards the net's; counters are copied."""
    pairs = list(zip(ema.state_dict().values(), net.state_dict().values(), strict=True))
    floats = [pair for pair in pairs if pair[0].is_floating_point()]
    torch._foreach_lerp_([a for a, _ in floats], [b for _, b in floats], 1 - momentum)
    for mean, value in pairs:
        if not mean.is_floating_point():
            mean.copy_(value)


def train(config: Config, out: Path | str | None = None, *, quiet: bool = False) -> results.Run:
    """Train one run into its folder, or continue or return the one that is there."""
    return together([config], [out], quiet=quiet)[0]


def together(
    settings: Sequence[Config], outs: Sequence[Path | str | None], *, quiet: bool = False
) -> list[results.Run]:
    """Train runs that differ in their seeds only side by side on one device, each as if alone."""
    for config in settings:
        configs.check(config)
    if len({config.replace(seed=0, split_seed=0) for config in settings}) > 1:
        raise ValueError("Runs that are trained together may differ in seed and split_seed only.")
    folders = [
        Path(out) if out is not None else Path("runs") / results.name(config)
        for config, out in zip(settings, outs, strict=True)
    ]
    if len(set(folders)) < len(folders):
        raise ValueError("Runs that are trained together need a folder each.")
    with ExitStack() as stack:
        stack.enter_context(parallel.started(pick_device(settings[0].device)))
        for folder in folders:
            stack.enter_context(results.held(folder))
        left = []
        for config, folder in zip(settings, folders, strict=True):
            if results.finished(folder, config):
                log.tell(f"{folder} is finished already.", quiet)
            else:
                left.append((config, folder))
        if left:
            with torch.random.fork_rng(), _signals() as asked:
                _train(left, quiet, asked)
        return [results.load(folder) for folder in folders]


def _train(left: Sequence[tuple[Config, Path]], quiet: bool, asked: list[int]) -> None:
    runs = [_begin(config, folder, quiet) for config, folder in left]
    folders = [folder for _, folder in left]
    config, parts = runs[0].config, runs[0].parts
    kept = _resume(runs, folders, quiet)
    advance = _engine(runs, quiet)
    every = config.checkpoint_every or max(1, config.steps // 10)
    title = parts.title + (f" x {len(runs)}" if len(runs) > 1 else "")
    with ExitStack() as stack:
        lines = [stack.enter_context(log.Lines(*each)) for each in zip(folders, kept, strict=True)]
        writers = [stack.enter_context(checkpoint.Writer(f / "checkpoint")) for f in folders]
        bar = stack.enter_context(log.Bar(title, config.steps, runs[0].step, quiet))
        while (step := runs[0].step) < config.steps:
            advance()
            step += 1
            bar.update(step)
            stop = bool(asked)
            for run, book, writer in zip(runs, lines, writers, strict=True):
                if due(step, config.log_every, config.steps):
                    _log(run, book, bar)
                if due(step, config.eval_every, config.steps):
                    _evaluate(run, book, bar)
                if due(step, every, config.steps) or stop:
                    _save(run, writer, book)
            if stop and step < config.steps:
                raise Stopped(asked[0])
    for run, folder in zip(runs, folders, strict=True):
        results.finish(folder, run.config, run.parts, run.best, run.best_step, quiet)
    if asked:
        raise Stopped(asked[0])


def _begin(config: Config, folder: Path, quiet: bool) -> Training:
    parts = prepare(config)
    if config.frozen:
        parts = freeze(config, parts, quiet).parts(parts.split)
    results.begin(folder, config, parts)
    for line in parts.notes:
        log.tell(line, quiet)
    return _start(config, parts)


def _resume(runs: Sequence[Training], folders: Sequence[Path], quiet: bool) -> list[int]:
    """Take up checkpoints of the same step; how much of each metrics.jsonl they cover."""
    limit = None
    while True:
        read = [checkpoint.newest(folder / "checkpoint", limit) for folder in folders]
        steps = [int(found[1]["step"]) if found else 0 for found, _ in read]
        if len(set(steps)) == 1:
            break
        limit = min(steps)  # a kill between two saves: the slower one decides
    kept = []
    for run, folder, (found, complaints) in zip(runs, folders, read, strict=True):
        if found:
            run.restore(*found)
            complaints.append(f"Continuing {folder} at step {run.step:,}.")
        kept.append(int(found[1]["lines"]) if found else 0)
        for line in complaints:
            log.tell(line, quiet)
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


def _start(config: Config, parts: Parts) -> Training:
    objective: nn.Module = parts.objective(parts.net)
    compiled = parts.device.type == "cuda" if config.compile is None else config.compile
    if compiled:
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
    if not math.isfinite(line["loss"]):
        raise ValueError(f"The loss became infinite or NaN before step {run.step}; lower --lr.")
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
        writer.save(run.step, run.tensors(), note)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, to be answered between steps; a second one ends at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise Stopped(number)
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def learn(config: Config, parts: Parts, seen: Callable[[int], object] = bool) -> Training:
    """Train parts in memory, without a folder; `seen` is told each step that is done."""
    with torch.random.fork_rng():
        run = _start(config, parts)
        while run.step < config.steps:
            run.advance(parts.batches[run.step])
            seen(run.step)
    return run
