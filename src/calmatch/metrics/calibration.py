"""Calibration: is confidence as large as accuracy? Equal-width, equal-mass, smooth, debiased."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calmatch import ops
from calmatch.metrics.scores import check, checked, top

ROWS = 1 << 24  # entries handled at once, so that memory stays bounded


class Bins(NamedTuple):
    """A reliability diagram: per bin its number of pictures, mean confidence and accuracy."""

    number: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def gap(self) -> Tensor:
        return (self.confidence - self.accuracy).abs()


def reliability(probs: Any, labels: Any, bins: int = 15) -> Bins:
    """Equal-width bins (lo, hi] of the top confidence; empty ones are NaN."""
    confidence, right = top(*check(probs, labels))
    return _means(confidence, right, ops.bin_of(confidence, bins), bins)


@checked
def ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """Expected calibration error: mean over pictures of |confidence - accuracy| of their bin.

    >>> round(float(ece([[0.9, 0.1], [0.2, 0.8]], [0, 0])), 4)
    0.45
    """
    confidence, right = top(probs, labels)
    return _expected(_means(confidence, right, ops.bin_of(confidence, bins), bins))


@checked
def max_ce(probs: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """Largest |confidence - accuracy| over the bins of `ece`."""
    confidence, right = top(probs, labels)
    return _means(confidence, right, ops.bin_of(confidence, bins), bins).gap.nan_to_num(0.0).max()


@checked
def adaptive_ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """ECE over bins of equal mass: edges are interpolated quantiles, the first bin is closed."""
    confidence, right = top(probs, labels)
    ordered = confidence.sort().values
    n = len(ordered)
    places = torch.linspace(0, n, bins + 1, dtype=torch.float64, device=ordered.device)
    places = places.clamp_max(n - 1)
    low = places.floor().long()
    high = (low + 1).clamp_max(n - 1)
    edges = ordered[low] + (places - low) * (ordered[high] - ordered[low])
    index = torch.bucketize(confidence, edges[1:-1].contiguous())
    return _expected(_means(confidence, right, index, bins))


@checked
def classwise_ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """ECE of every class's probability against its frequency, averaged over all classes."""
    n, classes = probs.shape
    sums = probs.new_zeros(2, classes * bins, dtype=torch.float64)
    for start in range(0, n, max(1, ROWS // classes)):  # blocks of rows bound the memory
        p = probs[start : start + max(1, ROWS // classes)]
        index = ops.bin_of(p, bins) + bins * torch.arange(classes, device=p.device)
        counted = p > 0  # an exact zero claims nothing and falls in no bin
        hit = torch.zeros_like(p).scatter_(1, labels[start : start + len(p), None], 1.0)
        columns = torch.stack([p, hit * counted]).flatten(1).to(torch.float64)
        sums.index_add_(1, index.flatten(), columns)
    return (sums[0] - sums[1]).abs().sum() / (n * classes)


@checked
def debiased_ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """Root of the debiased squared calibration error over equal-mass bins (Kumar et al., 2019)."""
    confidence, right = top(probs, labels)
    ordered = confidence.sort().values
    ends = torch.tensor([len(part) for part in ordered.tensor_split(bins)]).cumsum(0)
    ends = ends[(ends > 0) & (ends < len(ordered))].to(ordered.device)
    edges = ((ordered[ends - 1] + ordered[ends]) / 2).unique()
    means = _means(confidence, right, torch.bucketize(confidence, edges), len(edges) + 1)
    noise = means.accuracy * (1 - means.accuracy) / (means.number - 1).clamp_min(1)
    squared = torch.where(means.number > 1, means.gap.square() - noise, 0.0)
    return (means.number * squared).nansum().div(len(ordered)).clamp_min(0).sqrt()


@checked
def smooth_ece(probs: Tensor, labels: Tensor) -> Tensor:
    """SmoothECE (Blasiok and Nakkiran, 2023): error of the residual smoothed at its own width.

    The width is bisected until it meets the error it gives. Steps, grid and kernel (reflected at
    0 and 1, cut at half the range) are those of the authors' package, so that numbers compare.
    """
    return smooth_width(*top(probs, labels))[1]


def smooth_width(confidence: Tensor, right: Tensor) -> tuple[float, Tensor]:
    """The kernel width of `smooth_ece`, and the error it gives; from top confidence and hits."""
    spectrum = functools.lru_cache(lambda points: _spectrum(confidence, right, points))

    def error(width: float) -> Tensor:
        points = _points(width)
        return _smoothed_error(spectrum(points), points, width)

    low, high = 0.0, 1.0
    for _ in range(10):
        width = (low + high) / 2
        small = width < 1e-3 or width < float(error(width))
        low, high = (width, high) if small else (low, width)
    return high, error(high)


def smooth_accuracy(confidence: Tensor, right: Tensor, width: float, at: Tensor) -> Tensor:
    """Kernel-smoothed accuracy (NaN where no pictures are near) and density at some confidences."""
    points = _points(width)
    smooth = _smoothed(_spectrum(confidence, right, points), points, width)
    residual, density = _between(smooth, at.to(torch.float64) * (points - 1))
    accuracy = torch.where(density > 1e-6, at - residual / density, torch.nan).clamp(0, 1)
    return torch.stack([accuracy, density / len(right)])  # [2, len(at)]


def _points(width: float) -> int:
    return max(2000, round(20 / width)) // 2 + 1


def _length(points: int) -> int:
    """A transform length that is fast and holds the mirrored grid and the kernel."""
    return 1 << (4 * points - 4).bit_length()


def _spectrum(confidence: Tensor, right: Tensor, points: int) -> Tensor:
    """Fourier transform of residual and density on a grid mirrored at both ends."""
    place = confidence * (points - 1)
    below = place.long().clamp(0, points - 2)
    share = place - below
    columns = torch.stack([confidence - right, torch.ones_like(right)])
    values = columns.new_zeros(2, points).index_add_(1, below, columns * (1 - share))
    values.index_add_(1, below + 1, columns * share)
    mirror = values.flip(1)
    whole = torch.cat([mirror[:, :-1], values, mirror[:, 1:]], 1)
    spectrum: Tensor = torch.fft.rfft(whole, _length(points))
    return spectrum


@functools.lru_cache(maxsize=64)
def _kernel(width: float, points: int, device: torch.device) -> Tensor:
    """Fourier transform of the Gaussian; bisection asks for few widths, bootstrapping again."""
    axis = torch.linspace(0, 1, points, dtype=torch.float64, device=device)
    kernel = torch.exp(-((axis - 0.5) / width).square() / 2) / (2 * torch.pi) ** 0.5 / width
    spectrum: Tensor = torch.fft.rfft(kernel, _length(points))
    return spectrum


def _smoothed_error(spectrum: Tensor, points: int, width: float) -> Tensor:
    """Mean |kernel-smoothed confidence - accuracy| under the smoothed density."""
    cells = max(round(10 / width), 200)
    mesh = torch.linspace(0, points - 1, cells, dtype=torch.float64, device=spectrum.device)
    residual, density = _between(_smoothed(spectrum, points, width), mesh)
    error: Tensor = residual.abs().sum() / (density + 1e-4).sum()
    return error


def _smoothed(spectrum: Tensor, points: int, width: float) -> Tensor:
    """Residual and density smoothed, on the grid."""
    kernel = _kernel(width, points, spectrum.device)
    smooth: Tensor = torch.fft.irfft(spectrum * kernel, _length(points))
    start = points - 1 + points // 2
    return smooth[:, start : start + points]


def _between(smooth: Tensor, mesh: Tensor) -> Tensor:
    """Linear interpolation at places of the grid."""
    left = mesh.long().clamp_max(smooth.shape[1] - 2)
    return torch.lerp(smooth[:, left], smooth[:, left + 1], mesh - left)


@checked
def ks(probs: Tensor, labels: Tensor) -> Tensor:
    """Kolmogorov-Smirnov distance of cumulated confidence and accuracy (Gupta et al., 2021)."""
    confidence, right = top(probs, labels)
    ordered, order = confidence.sort()
    walk = (right - confidence)[order].cumsum(0)
    last = torch.ones_like(walk, dtype=torch.bool)  # tied confidences are reached together
    last[:-1] = ordered[1:] != ordered[:-1]
    return (walk * last).abs().max() / len(walk)


def _means(confidence: Tensor, right: Tensor, index: Tensor, bins: int) -> Bins:
    columns = torch.stack([torch.ones_like(right), confidence, right])
    number, conf, acc = columns.new_zeros(3, bins).index_add_(1, index, columns)
    return Bins(number, conf / number, acc / number)


def _expected(means: Bins) -> Tensor:
    return (means.number * means.gap).nansum() / means.number.sum()
