"""How it is measured: each metric maps all predictions of a split to one number.

Inputs are probabilities [N, C] and class ids [N], tensors or arrays, on any device. Values are
fractions. Nothing here loops over samples, bins or classes."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calmatch import files, ops, spec
from calmatch.core import Metric

SUM_TOLERANCE = 1e-3  # how far a row may be from summing to 1 (half precision rounds that much)
FEW = 200  # labels: with fewer, binned calibration errors are mostly noise
ENTRIES = 1 << 24  # handled at once, so that memory stays bounded
NOTEBOOK = Path(__file__).with_name("notebook.html")


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
    y = ops.check_ids(y, p.shape[1]).to(p.device)
    p = p.float() if p.dtype in (torch.float16, torch.bfloat16) else p
    total = p.sum(1)
    if not bool(torch.isfinite(total).all()):
        raise ValueError("probs contain NaN or infinite values.")
    if float(p.min()) < 0 or float((total - 1).abs().max()) > SUM_TOLERANCE:
        rule = "probs must be probabilities (non-negative, rows summing to 1)"
        raise ValueError(f"{rule}; apply softmax first if these are logits.")
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
    """Share of images whose most probable class is wrong.

    >>> round(float(error([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], [0, 1, 1])), 4)
    0.3333
    """
    return (probs.argmax(1) != labels).to(torch.float64).mean()


@checked
def top_k(probs: Tensor, labels: Tensor, *, k: int = 5) -> Tensor:
    """Share of images whose class is not among the k most probable."""
    hit = probs.topk(min(k, probs.shape[1]), 1).indices == labels[:, None]
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


class Bins(NamedTuple):
    """A reliability diagram: per bin its number of images, mean confidence and accuracy."""

    number: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def gap(self) -> Tensor:
        return (self.confidence - self.accuracy).abs()

    @property
    def mean_gap(self) -> Tensor:
        return (self.number * self.gap).nansum() / self.number.sum()


def reliability(probs: Any, labels: Any, bins: int = 15) -> Bins:
    """Equal-width bins (lo, hi] of the top confidence; empty ones are NaN."""
    return _equal_width(*check(probs, labels), bins)


def _equal_width(probs: Tensor, labels: Tensor, bins: int) -> Bins:
    confidence, right = top(probs, labels)
    return _binned(confidence, right, ops.bin_of(confidence, bins), bins)


def _binned(confidence: Tensor, right: Tensor, index: Tensor, bins: int) -> Bins:
    columns = torch.stack([torch.ones_like(right), confidence, right])
    number, conf, acc = columns.new_zeros(3, bins).index_add_(1, index, columns)
    return Bins(number, conf / number, acc / number)


@checked
def ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """Expected calibration error: mean over images of |confidence - accuracy| of their bin.

    >>> round(float(ece([[0.9, 0.1], [0.2, 0.8]], [0, 0])), 4)
    0.45
    """
    return _equal_width(probs, labels, bins).mean_gap


@checked
def max_ce(probs: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """Largest |confidence - accuracy| over the bins of `ece`."""
    return _equal_width(probs, labels, bins).gap.nan_to_num(0.0).max()


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
    return _binned(confidence, right, index, bins).mean_gap


@checked
def classwise_ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> Tensor:
    """ECE of every class's probability against its frequency, averaged over all classes."""
    n, classes = probs.shape
    sums = probs.new_zeros(2, classes * bins, dtype=torch.float64)
    rows = max(1, ENTRIES // classes)
    for p, y in zip(probs.split(rows), labels.split(rows), strict=True):
        index = ops.bin_of(p, bins) + bins * torch.arange(classes, device=p.device)
        counted = p > 0  # an exact zero claims nothing and falls in no bin
        hit = torch.zeros_like(p).scatter_(1, y[:, None], 1.0)
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
    means = _binned(confidence, right, torch.bucketize(confidence, edges), len(edges) + 1)
    noise = means.accuracy * (1 - means.accuracy) / (means.number - 1).clamp_min(1)
    squared = torch.where(means.number > 1, means.gap.square() - noise, 0.0)
    return (means.number * squared).nansum().div(len(ordered)).clamp_min(0).sqrt()


@checked
def ks(probs: Tensor, labels: Tensor) -> Tensor:
    """Kolmogorov-Smirnov distance of cumulated confidence and accuracy (Gupta et al., 2021)."""
    confidence, right = top(probs, labels)
    ordered, order = confidence.sort()
    walk = (right - confidence)[order].cumsum(0)
    last = torch.ones_like(walk, dtype=torch.bool)  # tied confidences are reached together
    last[:-1] = ordered[1:] != ordered[:-1]
    return (walk * last).abs().max() / len(walk)


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
        """Mean |kernel-smoothed confidence - accuracy| under the smoothed density."""
        points, cells = _points(width), max(round(10 / width), 200)
        mesh = torch.linspace(0, points - 1, cells, dtype=torch.float64, device=right.device)
        residual, density = _smoothed(spectrum(points), points, width, mesh)
        value: Tensor = residual.abs().sum() / (density + 1e-4).sum()
        return value

    low, high = 0.0, 1.0
    for _ in range(10):
        width = (low + high) / 2
        small = width < 1e-3 or width < float(error(width))
        low, high = (width, high) if small else (low, width)
    return high, error(high)


def smooth_accuracy(confidence: Tensor, right: Tensor, width: float, at: Tensor) -> Tensor:
    """Kernel-smoothed accuracy (NaN where no images are near) and density at some confidences."""
    points = _points(width)
    spectrum, mesh = _spectrum(confidence, right, points), at.to(torch.float64) * (points - 1)
    residual, density = _smoothed(spectrum, points, width, mesh)
    accuracy = torch.where(density > 1e-6, at - residual / density, torch.nan).clamp(0, 1)
    return torch.stack([accuracy, density / len(right)])  # [2, len(at)]


def _points(width: float) -> int:
    return max(2000, round(20 / width)) // 2 + 1


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


def _smoothed(spectrum: Tensor, points: int, width: float, mesh: Tensor) -> Tensor:
    """Residual and density smoothed, linearly interpolated at places of the grid."""
    kernel = _kernel(width, points, spectrum.device)
    start = points - 1 + points // 2
    smooth: Tensor = torch.fft.irfft(spectrum * kernel, _length(points))[:, start : start + points]
    left = mesh.long().clamp_max(points - 2)
    return torch.lerp(smooth[:, left], smooth[:, left + 1], mesh - left)


@functools.lru_cache(maxsize=64)
def _kernel(width: float, points: int, device: torch.device) -> Tensor:
    """Fourier transform of the Gaussian; bisection asks for few widths, bootstrapping again."""
    axis = torch.linspace(0, 1, points, dtype=torch.float64, device=device)
    kernel = torch.exp(-((axis - 0.5) / width).square() / 2) / (2 * torch.pi) ** 0.5 / width
    spectrum: Tensor = torch.fft.rfft(kernel, _length(points))
    return spectrum


def _length(points: int) -> int:
    """A transform length that is fast and holds the mirrored grid and the kernel."""
    return 1 << (4 * points - 4).bit_length()


_BINNED = (ece, adaptive_ece, classwise_ece, max_ce, debiased_ece)
METRICS: Mapping[str, Callable[..., Tensor]] = {
    metric.__name__: metric for metric in (error, top_k, nll, brier, *_BINNED, smooth_ece, ks, aurc)
}


def build(text: str) -> Metric:
    """The metric a spec names, `"ece(bins=10)"` for example."""
    return spec.bind(spec.parse(text), METRICS, "metric", given=2)


class Interval(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


def summary(
    probs: Any,
    labels: Any,
    metrics: tuple[str, ...] | Mapping[str, Metric] = tuple(METRICS),
    *,
    level: float = 0.95,
    resamples: int = 500,
    seed: int = 0,
) -> dict[str, Interval]:
    """Every metric with its bootstrap interval; `resamples=0` gives the values alone."""
    p, y = check(probs, labels)
    chosen = metrics if isinstance(metrics, Mapping) else {name: build(name) for name in metrics}
    raw = {name: _raw(metric) for name, metric in chosen.items()}
    values = {name: float(metric(p, y)) for name, metric in raw.items()}
    if resamples == 0:
        return {name: Interval(value, value, value) for name, value in values.items()}
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, list[float]] = {name: [] for name in raw}
    for _ in range(resamples):  # each is drawn once and measured by all metrics
        pick = torch.randint(len(y), (len(y),), generator=generator).to(p.device)
        some, truth = p[pick], y[pick]
        for name, metric in raw.items():
            drawn[name].append(float(metric(some, truth)))
    return {name: _centred(value, drawn[name], level) for name, value in values.items()}


def _centred(value: float, drawn: list[float], level: float) -> Interval:
    """The interval of resampled values, shifted to have their mean at the value itself.

    Resampled predictions look less calibrated than the sample (duplicates make bins noisier), so
    plain percentiles of ECE would lie too high.
    """
    draws, tail = torch.tensor(drawn, dtype=torch.float64), (1 - level) / 2
    ends = torch.quantile(draws, draws.new_tensor([tail, 1 - tail])) + (value - draws.mean())
    return Interval(value, max(0.0, min(value, float(ends[0]))), max(value, float(ends[1])))


def _raw(metric: Metric) -> Metric:
    """The metric without its input checks, for inputs that have passed them."""
    if isinstance(metric, functools.partial):
        return functools.partial(_raw(metric.func), *metric.args, **metric.keywords)
    return getattr(metric, "raw", metric)


def interval(metric: Metric | str, probs: Any, labels: Any, **options: Any) -> Interval:
    """A metric with its bootstrap interval over images; options are those of `summary`."""
    chosen = build(metric) if isinstance(metric, str) else metric
    return summary(probs, labels, {"": chosen}, **options)[""]


def wilson(share: Any, number: Any, z: float = 1.96) -> tuple[Any, Any]:
    """95 % interval of a share of so many, numbers or arrays.

    >>> [round(float(end), 3) for end in wilson(0.5, 10)]
    [0.237, 0.763]
    """
    p, n = np.asarray(share, dtype=np.float64), np.maximum(number, 1e-9)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    spread = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return np.clip(middle - spread, 0, 1), np.clip(middle + spread, 0, 1)


def as_html(title: str, rows: Mapping[str, Any], predictions: Any = None) -> str:
    """What a notebook shows: a table, and the reliability of predictions (probs, labels)."""
    columns = [part.tolist() for part in reliability(*predictions)] if predictions else []
    words = {"title": title, "rows": rows, "bins": list(zip(*columns, strict=True))}
    return str(files.template(NOTEBOOK).render(words))


def read_predictions_for_html(folder: Path | None) -> tuple[Tensor, Tensor] | None:
    """Probabilities and labels of a run folder's predictions.npz, where it has a good one."""
    try:
        arrays = files.read_arrays(folder / "predictions.npz") if folder else {}
        return check(torch.from_numpy(arrays["log_probs"]).double().softmax(-1), arrays["labels"])
    except (KeyError, TypeError, ValueError):
        return None
