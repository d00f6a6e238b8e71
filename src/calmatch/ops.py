"""Small tensor functions shared by methods, losses and metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for what the device does now."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
    """Divide by the sum over the last axis; all zeros stay zeros."""
    total = values.sum(-1, keepdim=True)
    return values / total.clamp_min(torch.finfo(values.dtype).tiny)


def moving(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """Exponential moving average."""
    return momentum * old + (1 - momentum) * new


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Equal-width bin (lo, hi] of each confidence; 0 falls in the first, 1 in the last."""
    wide = torch.float32 if confidence.device.type == "mps" else torch.float64
    edges = torch.arange(1, bins, dtype=wide, device=confidence.device) / bins
    return torch.bucketize(confidence, edges.to(confidence.dtype))


def bin_sums(confidence: Tensor, right: Tensor, weight: Tensor, bins: int = 15) -> Tensor:
    """Per bin the sums of weight, weighted confidence and `right`: [3, bins]."""
    columns = torch.stack([weight, weight * confidence, right.to(weight)])
    return columns.new_zeros(3, bins).index_add(1, bin_of(confidence, bins), columns)


def quantile(values: Tensor, level: Tensor) -> Tensor:
    """Linear-interpolated quantile at a level that is a tensor; torch's own looks at its value."""
    ordered = values.sort().values
    place = level * (len(values) - 1)
    below = place.floor().long().clamp(0, max(0, len(values) - 2))[None]
    above = (below + 1).clamp_max(len(values) - 1)
    return torch.lerp(ordered.gather(0, below), ordered.gather(0, above), place - below)[0]


def uniform(generator: Generator, *shape: int) -> Tensor:
    """Uniform numbers in [0, 1) on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device)


def normal(generator: Generator, *shape: int) -> Tensor:
    """Standard normal numbers on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device)


def beta(generator: Generator, alpha: float) -> Tensor:
    """One draw from Beta(alpha, alpha)."""
    both = torch._standard_gamma(
        torch.full((2,), alpha, device=generator.device), generator=generator
    )
    return both[0] / both.sum().clamp_min(1e-30)


def ramp(step: Tensor, length: float) -> Tensor:
    """Rises from 0 at step 0 to 1 at `length`, as a tensor of the default type."""
    return (step / max(length, 1e-9)).clamp(0, 1)


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """Probabilities to the power 1 / temperature, normalised."""
    return normalise(p ** (1 / temperature))


def rows(weight: Tensor, like: Tensor) -> Tensor:
    """A scalar weight for every row of logits [n, C]."""
    return weight.to(like.dtype).expand(len(like))


def hard_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row to its class: [n]."""
    return -logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def soft_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each row to its probabilities: [n]."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def quarter_turns(images: Tensor) -> Tensor:
    """Pictures turned counter-clockwise by 0, 90, 180 and 270 degrees: [4, n, 3, H, W]."""
    return torch.stack([torch.rot90(images, k, (-2, -1)) for k in range(4)])


def unit(features: Tensor) -> Tensor:
    """Rows of length one."""
    return torch.nn.functional.normalize(features, dim=-1)


@torch.no_grad()
def follow(pairs: Sequence[tuple[Tensor, Tensor]], momentum: float) -> None:
    """Move each average towards its value; counters are copied."""
    floats = [pair for pair in pairs if pair[0].is_floating_point()]
    if floats:
        torch._foreach_lerp_([mean for mean, _ in floats], [v for _, v in floats], 1 - momentum)
    for mean, value in pairs:
        if not mean.is_floating_point():
            mean.copy_(value)
