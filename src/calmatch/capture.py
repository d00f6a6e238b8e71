"""The whole training step as one CUDA graph: the host feeds chunks of batches and presses play.

Objective, backward, commit, optimizer, EMA and log sums are captured once. A chunk of many steps'
batches lies in fixed buffers on the device; which step is due is a counter there too. Dropout draws
from a generator of the run's own, which is seeded by (seed, step) before each replay, so a run
continues with the same numbers. Several runs are branches of one graph and fill each other's gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from calmatch import log, memory, ops
from calmatch.core import Batch
from calmatch.data.batches import stream_seed
from calmatch.flat import Flat

if TYPE_CHECKING:
    from calmatch.step import Training

WARM = 3  # eager steps before the capture, undone afterwards
Values = tuple[dict[str, Tensor], dict[str, Tensor]]


class Captured:
    """Replays the step of one or more runs; where it cannot be captured they step eagerly, aloud.

    Runs must be at the same step and differ in nothing that changes shapes.
    """

    def __init__(self, runs: Sequence[Training], quiet: bool = False) -> None:
        self.quiet = quiet
        self.lanes = [Lane(run) for run in runs]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = False

    def advance(self) -> None:
        """One training step of every run."""
        if not self.failed:
            for lane in self.lanes:
                lane.feed()
            if self.graph is None:
                self._capture()
        for lane in self.lanes:
            lane.due(self.failed)
        if self.graph is not None:
            self.graph.replay()

    def _capture(self) -> None:
        """Warm up, capture, and undo the warm-up; give up where that fails."""
        before = [lane.snapshot() for lane in self.lanes]
        try:
            graph = torch.cuda.CUDAGraph()
            for lane in self.lanes:
                lane.warm()
                with lane.own_chance():
                    graph.register_generator_state(lane.default)
            with torch.cuda.graph(graph):
                self._branches()
            self.graph = graph
        except Exception as error:  # whatever a plug-in may do: the eager step still works
            if memory.behind(error):  # but not where it would find the device as full
                raise torch.OutOfMemoryError(str(error)) from error
            self.failed = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            log.tell(
                f"The step cannot be captured ({reason}); running it step by step.", self.quiet
            )
            torch.cuda.synchronize()
        for lane, snapshot in zip(self.lanes, before, strict=True):
            lane.undo(snapshot, self.failed)

    def _branches(self) -> None:
        """Each run's step on a stream of its own, all joined at the end."""
        main = torch.cuda.current_stream()
        others = [torch.cuda.Stream() for _ in self.lanes[1:]]
        for stream in others:
            stream.wait_stream(main)
        for lane, stream in zip(self.lanes, [main, *others], strict=True):
            with torch.cuda.stream(stream), lane.own_chance():
                lane.body()
        for stream in others:
            main.wait_stream(stream)


class Lane:
    """One run's fixed buffers and what happens to them in a step."""

    def __init__(self, run: Training) -> None:
        self.run, self.batches, self.size = run, run.parts.batches, run.config.chunk
        device = run.parts.device
        self.place = torch.zeros((), dtype=torch.long, device=device)
        self.rates = torch.zeros(self.size, device=device)
        groups = run.optimizer.param_groups
        self.lrs: list[Tensor] = [group["lr"] for group in groups]
        self.peaks = [torch.tensor(group["peak"], device=device) for group in groups]
        self.default = torch.cuda.default_generators[torch.cuda.current_device()]
        self.chance = self.default.clone_state()
        self.number = -1
        self.chunk: Batch | None = None

    def feed(self) -> None:
        """Put the chunk that is due into the fixed buffers, with its learning rates."""
        run = self.run
        number, place = divmod(run.step, self.size)
        if number == self.number:
            return
        fresh = self.batches.whole(number)
        if self.chunk is None:
            self.chunk = _each(fresh, torch.clone)
        else:
            torch._foreach_copy_(_tensors(self.chunk), _tensors(fresh))
        steps = range(number * self.size, (number + 1) * self.size)
        rates = [run.rate(k) for k in steps]
        self.rates.copy_(ops.sent(torch.tensor(rates), self.rates.device))
        self.place.fill_(place)
        self.number = number

    def due(self, eagerly: bool) -> None:
        """Count the step that comes, or make it where nothing was captured."""
        run = self.run
        if eagerly:
            run.advance(self.batches[run.step])
            return
        self.chance.manual_seed(stream_seed(run.config.seed, 6, run.step))
        run.step += 1
        run.sums.steps += 1

    def warm(self) -> None:
        """Build what the graph needs, and run it a few times so that all memory is there."""
        run, parts = self.run, self.run.parts
        compiled = run.config.compile is not False
        self.flat = Flat(
            parts.net,
            parts.ema if parts.momentum else None,
            run.optimizer,
            bf16=run.config.precision == "bf16",
            momentum=parts.momentum,
            clip=run.config.clip,
            compiled=compiled,
            apart=run.config.compile == "net",  # evaluations use the run's own as it is
        )
        self.objective = parts.objective(self.flat.net)
        self.forward: Callable[[nn.Module, Batch, Tensor], Values] = _forward
        how: Any = {"fullgraph": True, "dynamic": False, "options": {"combo_kernels": True}}
        if run.config.compile == "net":
            self.flat.net.get_submodule("body").compile(**how)
        elif compiled:
            self.forward = torch.compile(_forward, **how)
        place = self.place.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self.own_chance():
            for number in range(WARM):
                self.place.copy_(place)
                self.body(settle=number == 0)
        torch.cuda.current_stream().wait_stream(side)

    def body(self, settle: bool = False) -> None:
        """What the graph holds; it reads and writes fixed buffers only."""
        assert self.chunk is not None
        here = self.place[None]
        rate = self.rates.index_select(0, here)[0]
        torch._foreach_copy_(self.lrs, torch._foreach_mul(self.peaks, rate))
        values, state = self.forward(self.objective, self.chunk, here)
        values["loss"].backward()
        self.run.parts.method.commit(state)
        if settle:
            self.flat.settle()
        self.flat.advance()
        self.run.sums.add(values)
        self.place.add_(1)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of everything a step changes."""
        found = {name: tensor.clone() for name, tensor in self.run.tensors().items()}
        return found | {"place": self.place.clone()}

    def undo(self, before: dict[str, Tensor], failed: bool) -> None:
        """Be as before the warm-up; after a failure also as the eager step expects it."""
        run = self.run
        for name, tensor in run.tensors().items():
            tensor.copy_(before[name]) if name in before else tensor.zero_()
        self.place.copy_(before["place"])
        if not failed:
            self.flat.refresh()
            return
        run.optimizer.zero_grad(set_to_none=True)
        run.objective = run.parts.objective(run.parts.net)
        for state in run.optimizer.state.values():
            state |= {k: v.clone() for k, v in state.items() if k == "step"}

    @contextmanager
    def own_chance(self) -> Iterator[None]:
        """Draws inside come from this run's generator, then and at every replay."""
        before = self.default.graphsafe_get_state()
        self.default.graphsafe_set_state(self.chance)
        try:
            yield
        finally:
            self.default.graphsafe_set_state(before)


def _forward(objective: nn.Module, chunk: Batch, here: Tensor) -> Values:
    """The objective of one step of a chunk; apart, so that runs share what is compiled."""
    values: Values = objective(_each(chunk, lambda tensor: tensor.index_select(0, here)[0]))
    return values


def _tensors(batch: Batch) -> list[Tensor]:
    return [*batch.x, batch.y, *batch.u, batch.x_id, batch.u_id, batch.step, *batch.draws.values()]


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor changed."""
    return Batch(
        x=tuple(change(view) for view in batch.x),
        y=change(batch.y),
        u=tuple(change(view) for view in batch.u),
        x_id=change(batch.x_id),
        u_id=change(batch.u_id),
        step=change(batch.step),
        draws={name: change(draw) for name, draw in batch.draws.items()},
    )
