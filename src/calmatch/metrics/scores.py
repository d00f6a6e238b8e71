"""Inputs and their checks; error, likelihood, Brier score and selective risk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-3  # how far a row may be from summing to 1 (half precision rounds that much)


def check(probs: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Tensors of valid inputs; a ValueError that says what is wrong with others."""
    try:
        p, y = torch.as_tensor(probs), torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError("probs and labels must be arrays of numbers.") from error
    if p.ndim != 2 or p.shape[0] == 0 or p.shape[1] < 2:
        raise ValueError(f"probs must be [N, C] with N >= 1 and C >= 2, not {tuple(p.shape)}.")
    if y.shape != p.shape[:1]:
        raise ValueError(f"labels must be [{len(p)}] class ids, not {tuple(y.shape)}.")
    if not p.is_floating_point():
        raise ValueError(f"probs must be floating-point numbers, not {p.dtype}.")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"labels must be integer class ids, not {y.dtype}.")
    p = p.float() if p.dtype in (torch.float16, torch.bfloat16) else p
    total = p.sum(1)
    if not bool(torch.isfinite(total).all()):
        raise ValueError("probs contain NaN or infinite values.")
    if float(p.min()) < 0 or float((total - 1).abs().max()) > TOLERANCE:
        raise ValueError(
            "probs must be probabilities (non-negative, rows summing to 1); "
            "apply softmax first if these are logits."
        )
    y = y.to(p.device, torch.long)
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= p.shape[1]:
        raise ValueError(f"labels must lie in 0..{p.shape[1] - 1}; found {low}..{high}.")
    return p, y


def checked(measure: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Check the inputs once; `raw` is the measure for inputs known to be valid."""

    @functools.wraps(measure)
    def metric(probs: Any, labels: Any, **settings: Any) -> Tensor:
        return measure(*check(probs, labels), **settings)

    metric.raw = measure  # type: ignore[attr-defined]
    return metric


@checked
def error(probs: Tensor, labels: Tensor) -> Tensor:
    """Share of pictures whose most probable class is wrong.

    >>> round(float(error([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], [0, 1, 1])), 4)
    0.3333
    """
    return (probs.argmax(1) != labels).to(torch.float64).mean()


@checked
def top_k(probs: Tensor, labels: Tensor, *, k: int = 5) -> Tensor:
    """Share of pictures whose class is not among the k most probable."""
    k = min(k, probs.shape[1])
    hit = probs.topk(k, 1).indices == labels[:, None]
    return 1 - hit.any(1).to(torch.float64).mean()


@checked
def nll(probs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood in nats; probabilities below 2.2e-16 count as that."""
    true = probs.gather(1, labels[:, None])[:, 0].to(torch.float64)
    return -true.clamp_min(torch.finfo(torch.float64).eps).log().mean()


@checked
def brier(probs: Tensor, labels: Tensor) -> Tensor:
    """Squared distance to the one-hot label, summed over classes."""
    true = probs.gather(1, labels[:, None])[:, 0].to(torch.float64)
    return (probs.square().sum(1, dtype=torch.float64) - 2 * true + 1).mean()


@checked
def aurc(probs: Tensor, labels: Tensor) -> Tensor:
    """Area under the risk-coverage curve: error among the k most confident, averaged over k.

    Tied confidences count as being in random order, so the value does not depend on the order.
    """
    confidence, right = top(probs, labels)
    _, group, counts = confidence.neg().unique(return_inverse=True, return_counts=True)
    wrong = torch.zeros_like(counts, dtype=torch.float64).index_add_(0, group, 1 - right)
    expected = (wrong / counts).repeat_interleave(counts)
    ranks = torch.arange(1, len(right) + 1, device=right.device)
    area: Tensor = (expected.cumsum(0) / ranks).mean()
    return area


def top(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Top confidence and whether it is right, in float64."""
    confidence, guess = probs.max(1)
    return confidence.to(torch.float64), (guess == labels).to(torch.float64)
