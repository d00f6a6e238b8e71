"""Small tensor functions shared by methods, losses and metrics."""

from __future__ import annotations

import torch
from torch import Tensor


def ids(target: Tensor) -> Tensor:
    """Class ids [n] of a target that is class ids or probabilities [n, C]."""
    return target if target.ndim == 1 else target.argmax(-1)


def soft(target: Tensor, like: Tensor) -> Tensor:
    """Probabilities [n, C] of a target, with the shape and type of `like`."""
    if target.ndim > 1:
        return target.to(like.dtype)
    return torch.zeros_like(like).scatter(-1, target[:, None], 1.0)


def count(labels: Tensor, classes: int, weight: Tensor) -> Tensor:
    """Weighted number of each class: [classes]."""
    return weight.new_zeros(classes).index_add(0, labels, weight)


def normalise(values: Tensor) -> Tensor:
    """Divide by the sum over the last axis."""
    return values / values.sum(-1, keepdim=True)


def moving(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """Exponential moving average."""
    return momentum * old + (1 - momentum) * new


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Equal-width bin (lo, hi] of each confidence; 0 falls in the first, 1 in the last."""
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    return torch.bucketize(confidence, edges.to(confidence))


def bin_sums(confidence: Tensor, right: Tensor, weight: Tensor, bins: int = 15) -> Tensor:
    """Per bin the sums of weight, weighted confidence and `right`: [3, bins]."""
    columns = torch.stack([weight, weight * confidence, right.to(weight)])
    return columns.new_zeros(3, bins).index_add(1, bin_of(confidence, bins), columns)
