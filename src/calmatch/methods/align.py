"""Distribution alignment: predictions reweighted so that their mean approaches a target."""

from __future__ import annotations

import torch
from torch import Tensor

from calmatch import ops
from calmatch.parallel import average

FLOOR = 1e-6


def follow(mean: Tensor, p: Tensor, momentum: float) -> Tensor:
    """The running mean prediction; it starts with the first batch's (zeros: not started)."""
    now = average(p.mean(0))
    return torch.where(mean.sum() > 0, ops.moving(mean, now, momentum), now)


def aligned(p: Tensor, mean: Tensor, target: Tensor | float) -> Tensor:
    """Predictions [n, C] times target / mean, normalised."""
    return ops.normalise(p * (target + FLOOR) / (mean + FLOOR))


def queued(p: Tensor, queue: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Align to uniform by a queue of batch means; also the new queue and its next place."""
    queue = queue.index_copy(0, place[None], average(p.mean(0))[None])
    return aligned(p, queue.mean(0), 1 / p.shape[-1]), queue, (place + 1) % len(queue)
