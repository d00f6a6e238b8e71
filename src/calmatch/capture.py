"""The whole training step as one CUDA graph: the host feeds chunks of batches and presses play.

Objective, backward, commit, optimizer, EMA and log sums are captured once. A chunk of many steps'
batches lies in fixed buffers on the device; which step is due is a counter there too. Dropout draws
from the device's generator, which is seeded by (seed, step) before each replay, so a run continues
with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from calmatch import log, optim
from calmatch.core import Batch
from calmatch.data.batches import stream_seed

if TYPE_CHECKING:
    from calmatch.trainer import Training

WARM = 3  # eager steps before the capture, undone afterwards


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
        torch.cuda.manual_seed(stream_seed(run.config.seed, 6, run.step))
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
            for buffer, values in zip(_tensors(self.chunk), _tensors(fresh), strict=True):
                buffer.copy_(values)
        first = number * self.size
        rates = [
            optim.factor(first + k, config.steps, config.warmup, config.schedule)
            for k in range(self.size)
        ]
        self.rates.copy_(torch.tensor(rates), non_blocking=True)
        self.number = number

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Warm up, capture, and undo the warm-up; None where that fails."""
        run = self.run
        before = {name: tensor.clone() for name, tensor in run.tensors().items()}
        place = self.place.clone()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM):
                    self.place.copy_(place)
                    self._body()
            torch.cuda.current_stream().wait_stream(side)
            run.optimizer.zero_grad(set_to_none=True)
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
            torch.cuda.synchronize()
            run.optimizer.zero_grad(set_to_none=True)
        for name, tensor in run.tensors().items():  # undo the warm-up
            tensor.copy_(before[name]) if name in before else tensor.zero_()
        self.place.copy_(place)
        return self.graph

    def _body(self) -> None:
        """What the graph holds; it reads and writes fixed buffers only."""
        assert self.chunk is not None
        here = self.place[None]
        batch = _each(self.chunk, lambda tensor: tensor.index_select(0, here)[0])
        rate = self.rates.index_select(0, here)[0]
        torch._foreach_copy_(self.lrs, torch._foreach_mul(self.peaks, rate))
        self.run.learn(batch)
        self.place.add_(1)


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
