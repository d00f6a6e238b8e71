"""The whole training step as one CUDA graph: the host feeds chunks of batches and presses play.

Objective, backward, commit, optimizer, EMA and log sums are captured once. A chunk of many steps'
batches lies in fixed buffers on the device; which step is due is a counter there too. Dropout draws
from a generator of the run's own, which is seeded by (seed, step) before each replay, so a run
continues with the same numbers, and several runs on one card do not share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from calmatch import log, ops, optim
from calmatch.core import Batch
from calmatch.data.batches import stream_seed
from calmatch.flat import Flat

if TYPE_CHECKING:
    from calmatch.trainer import Training

WARM = 3  # eager steps before the capture, undone afterwards
Values = tuple[dict[str, Tensor], dict[str, Tensor]]


class Captured:
    """Replays a run's step; falls back to the eager one, aloud, where it cannot be captured."""

    def __init__(self, run: Training, quiet: bool = False) -> None:
        self.run, self.quiet = run, quiet
        self.batches = run.parts.batches
        self.size = run.config.chunk
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
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = False

    def advance(self) -> None:
        """One training step."""
        run = self.run
        if self.failed:
            run.advance(self.batches[run.step])
            return
        number, place = divmod(run.step, self.size)
        if number != self.number:
            self._feed(number)
            self.place.fill_(place)
        graph = self.graph or self._capture()
        if graph is None:
            self.advance()
            return
        self.chance.manual_seed(stream_seed(run.config.seed, 6, run.step))
        graph.replay()
        run.step += 1
        run.sums.steps += 1

    def _feed(self, number: int) -> None:
        """Put a chunk's batches and learning rates into the fixed buffers."""
        config = self.run.config
        fresh = self.batches.whole(number)
        if self.chunk is None:
            self.chunk = _each(fresh, torch.clone)
        else:
            torch._foreach_copy_(_tensors(self.chunk), _tensors(fresh))
        first = number * self.size
        rates = [
            optim.factor(first + k, config.steps, config.warmup, config.schedule)
            for k in range(self.size)
        ]
        self.rates.copy_(ops.sent(torch.tensor(rates), self.rates.device))
        self.number = number

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Warm up, capture, and undo the warm-up; None where that fails."""
        run = self.run
        before = {name: tensor.clone() for name, tensor in run.tensors().items()}
        place = self.place.clone()
        try:
            with self._own_chance():
                self._build()
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for number in range(WARM):
                        self.place.copy_(place)
                        self._body(settle=number == 0)
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._body()
            self.graph = graph
        except Exception as error:  # whatever a plug-in may do: the eager step still works
            self.failed = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            log.tell(
                f"The step cannot be captured ({reason}); running it step by step.", self.quiet
            )
            self._give_up()
        for name, tensor in run.tensors().items():  # undo the warm-up
            tensor.copy_(before[name]) if name in before else tensor.zero_()
        self.place.copy_(place)
        if not self.failed:
            self.flat.refresh()
        return self.graph

    def _give_up(self) -> None:
        """Leave the run as the eager step expects it: plain, with a step count a weight."""
        run = self.run
        torch.cuda.synchronize()
        run.optimizer.zero_grad(set_to_none=True)
        run.objective = run.parts.objective(run.parts.net)
        for state in run.optimizer.state.values():
            state |= {k: v.clone() for k, v in state.items() if k == "step"}

    def _build(self) -> None:
        """Flat weights, and the objective over them."""
        run, parts = self.run, self.run.parts
        compiled = run.config.compile is not False
        averaged = parts.ema if parts.momentum else None
        self.flat = Flat(
            parts.net,
            averaged,
            run.optimizer,
            bf16=run.config.precision == "bf16",
            momentum=parts.momentum,
            clip=run.config.clip,
            compiled=compiled,
        )
        self.objective = parts.objective(self.flat.net)
        self.forward: Callable[[nn.Module, Batch, Tensor], Values] = _forward
        if compiled:
            self.forward = torch.compile(_forward, fullgraph=True, dynamic=False)

    def _body(self, settle: bool = False) -> None:
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

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
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
