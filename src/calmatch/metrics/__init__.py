"""How it is measured: each metric maps all predictions of a split to one number.

Inputs are probabilities [N, C] and class ids [N], tensors or arrays, on any device. Values are
fractions. Nothing here loops over samples, bins or classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calmatch import spec
from calmatch.core import Metric
from calmatch.metrics.calibration import (
    Bins,
    adaptive_ece,
    classwise_ece,
    debiased_ece,
    ece,
    ks,
    max_ce,
    reliability,
    smooth_accuracy,
    smooth_ece,
    smooth_width,
)
from calmatch.metrics.scores import aurc, brier, check, error, nll, top, top_k

__all__ = [
    "METRICS",
    "Bins",
    "Interval",
    "adaptive_ece",
    "aurc",
    "brier",
    "build",
    "check",
    "classwise_ece",
    "debiased_ece",
    "ece",
    "error",
    "interval",
    "ks",
    "max_ce",
    "nll",
    "reliability",
    "smooth_accuracy",
    "smooth_ece",
    "smooth_width",
    "summary",
    "top",
    "top_k",
]

METRICS: Mapping[str, Callable[..., Tensor]] = {
    "error": error,
    "top_k": top_k,
    "nll": nll,
    "brier": brier,
    "ece": ece,
    "adaptive_ece": adaptive_ece,
    "classwise_ece": classwise_ece,
    "max_ce": max_ce,
    "debiased_ece": debiased_ece,
    "smooth_ece": smooth_ece,
    "ks": ks,
    "aurc": aurc,
}


def build(text: str) -> Metric:
    """The metric a spec names, `"ece(bins=10)"` for example."""
    return spec.bind(spec.parse(text), METRICS, "metric", given=2)


class Interval(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


def interval(
    metric: Metric | str,
    probs: Any,
    labels: Any,
    *,
    level: float = 0.95,
    resamples: int = 500,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval over pictures, corrected for the bias that resampling adds.

    Resampled predictions look less calibrated than the sample (duplicates make bins noisier), so
    plain percentiles of ECE would lie too high; the resamples are centred on the value first.
    """
    p, y = check(probs, labels)
    chosen = build(metric) if isinstance(metric, str) else metric
    return _intervals({"": chosen}, p, y, level, resamples, seed)[""]


def _intervals(
    chosen: Mapping[str, Metric], p: Tensor, y: Tensor, level: float, resamples: int, seed: int
) -> dict[str, Interval]:
    """Each resample is drawn once and measured by all metrics."""
    raw = {name: _raw(metric) for name, metric in chosen.items()}
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, list[float]] = {name: [] for name in raw}
    for _ in range(resamples):
        pick = torch.randint(len(y), (len(y),), generator=generator).to(p.device)
        some, labels = p[pick], y[pick]
        for name, metric in raw.items():
            drawn[name].append(float(metric(some, labels)))
    return {k: _centred(float(raw[k](p, y)), drawn[k], level) for k in raw}


def _centred(value: float, drawn: list[float], level: float) -> Interval:
    values = torch.tensor(drawn, dtype=torch.float64)
    tail = (1 - level) / 2
    ends = torch.quantile(values, values.new_tensor([tail, 1 - tail])) + (value - values.mean())
    return Interval(value, max(0.0, min(value, float(ends[0]))), max(value, float(ends[1])))


def summary(
    probs: Any,
    labels: Any,
    metrics: tuple[str, ...] = tuple(METRICS),
    *,
    level: float = 0.95,
    resamples: int = 500,
    seed: int = 0,
) -> dict[str, Interval]:
    """Every metric with its bootstrap interval; `resamples=0` gives the values alone."""
    p, y = check(probs, labels)
    chosen = {name: build(name) for name in metrics}
    if resamples == 0:
        values = {name: float(_raw(metric)(p, y)) for name, metric in chosen.items()}
        return {name: Interval(value, value, value) for name, value in values.items()}
    return _intervals(chosen, p, y, level, resamples, seed)


def _raw(metric: Metric) -> Metric:
    """The metric without its input checks, for inputs that have passed them."""
    if isinstance(metric, functools.partial):
        return functools.partial(_raw(metric.func), *metric.args, **metric.keywords)
    return getattr(metric, "raw", metric)
