"""The numbers behind the report's charts, and the same as tables."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calmatch import metrics, ops
from calmatch.runs import BINS, logit_gap, probabilities

Floats = NDArray[np.float64]
GRID = 64  # points of a density
WIDTH = 0.05  # of the smooth curve at least: SmoothECE's own can be too fine to look at
RIVALS = 5  # classes beside the true one in the logit densities of many classes
MATRIX = 60  # classes of the confusion matrix at most
CHOICE = 100  # classes at most whose logit densities are on a page


class Predictions(NamedTuple):
    """Predictions and truth, with what every chart starts from."""

    log_probs: Tensor  # [N, C]
    probs: Tensor  # [N, C]
    labels: Tensor  # [N]
    confidence: Tensor  # [N]
    guess: Tensor  # [N]
    right: Tensor  # [N] 0 or 1


def make_predictions(log_probs: Tensor, labels: Tensor) -> Predictions:
    """From log-probabilities [N, C] and class ids [N]."""
    probs, y = metrics.check(probabilities(log_probs), labels)
    confidence, right = metrics.top(probs, y)
    return Predictions(log_probs, probs, y, confidence, probs.argmax(1), right)


def reliability_bins(preds: Predictions, number: int = BINS) -> list[dict[str, Any]]:
    """The reliability diagram: every bin's count, confidence, accuracy and its interval."""
    means = metrics.reliability(preds.probs, preds.labels, number)
    low, high = metrics.wilson(means.accuracy.nan_to_num(0.0).numpy(), means.number.numpy())
    columns = [*(part.tolist() for part in means[1:]), low, high]
    rows: list[dict[str, Any]] = []
    for k, n in enumerate(means.number.tolist()):
        rows.append({"left": k / number, "right": (k + 1) / number, "n": int(n)})
        if n:
            values = (column[k] for column in columns)
            rows[k] |= zip(("confidence", "accuracy", "low", "high"), values, strict=True)
    return rows


def ece_by_chance(preds: Predictions) -> dict[str, float]:
    """ECE that a calibrated model with these confidences would show by chance alone."""
    confidence, random = preds.confidence.numpy(), np.random.default_rng(0)
    place = ops.bin_of(preds.confidence, BINS).numpy()
    claimed = np.bincount(place, confidence, BINS)
    drawn = [
        np.abs(np.bincount(place, random.random(len(place)) < confidence, BINS) - claimed).sum()
        for _ in range(200)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975]) / len(place)
    return {"low": float(low), "high": float(high)}


def smooth_reliability(preds: Predictions, points: int, resamples: int) -> dict[str, Any]:
    """Accuracy as a smooth function of confidence, with a pointwise 95 % bootstrap band.

    Points that too few images are near to are left out; without resamples there is no band.
    """
    own, value = metrics.smooth_width(preds.confidence, preds.right)
    width = max(own, WIDTH)
    at = torch.linspace(0, 1, points, dtype=torch.float64)
    accuracy, density = metrics.smooth_accuracy(preds.confidence, preds.right, width, at)
    near = density * len(preds.right) * width * (2 * torch.pi) ** 0.5  # images under the kernel
    seen = near >= 5  # a curve through fewer says nothing
    columns = {"at": at, "accuracy": accuracy}
    if resamples:
        low, high = map(torch.from_numpy, _band(preds, width, at.numpy(), resamples))
        columns |= {"low": low, "high": high}
    curve: dict[str, Any] = {name: column[seen].tolist() for name, column in columns.items()}
    curve["density"] = (density / density.max()).tolist()
    return {**curve, "width": width, "value": float(value)}


def _band(preds: Predictions, width: float, at: Floats, resamples: int) -> tuple[Floats, Floats]:
    """Ends of the smoothed accuracy over bootstrap resamples, confidence rounded to 1/500.

    A resample is a multinomial draw over (rounded confidence, right or wrong), so all are drawn
    and smoothed at once.
    """
    grid = np.linspace(0, 1, 501)
    place = np.rint(500 * preds.confidence.numpy()).astype(int)
    right = preds.right.numpy()
    counts = np.concatenate([np.bincount(place, share, 501) for share in (right, 1 - right)])
    draws = np.random.default_rng(0).multinomial(len(right), counts / len(right), resamples)
    hits, misses = draws[:, :501], draws[:, 501:]
    mirrored = np.stack([grid, -grid, 2 - grid])  # at 0 and 1
    kernel = np.exp(-(((at[:, None, None] - mirrored) / width) ** 2) / 2).sum(1)  # [points, 501]
    residual = (hits * (grid - 1) + misses * grid) @ kernel.T
    near = (hits + misses) @ kernel.T
    accuracy = np.clip(at - residual / np.maximum(near, 1e-12), 0, 1)  # [resamples, points]
    low, high = np.quantile(accuracy, [0.025, 0.975], axis=0)
    return low, high


def risk_coverage(preds: Predictions, points: int = 100) -> list[dict[str, float]]:
    """Error among the images answered when only those above a confidence are: threshold down."""
    ordered, wrong, ends = _answered(preds)
    if len(ends) > points:
        wanted = torch.linspace(0, len(ordered) - 1, points).round().long()
        ends = ends[torch.searchsorted(ends, wanted).clamp_max(len(ends) - 1)].unique()
    number = (ends + 1).double()
    error = wrong[ends] / number
    low, high = metrics.wilson(error.numpy(), number.numpy())
    columns = {"coverage": number / len(ordered), "n": ends + 1, "error": error}
    promised = (1 - ordered).cumsum(0)[ends] / number
    columns |= {"low": low, "high": high, "promised": promised, "threshold": ordered[ends]}
    lists = [column.tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def _answered(preds: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence, most first; errors so far; and the places of thresholds.

    A threshold lies behind tied images, which are answered together.
    """
    ordered, order = preds.confidence.sort(descending=True)
    ends = torch.cat([ordered.diff().nonzero()[:, 0], torch.tensor([len(ordered) - 1])])
    return ordered, (1 - preds.right)[order].cumsum(0), ends


def most_answers(preds: Predictions, error: float) -> dict[str, float] | None:
    """The point with the most answers whose error is at most so much; None where there is none."""
    ordered, wrong, ends = _answered(preds)
    fine = ends[wrong[ends] / (ends + 1) <= error]
    return at_threshold(preds, float(ordered[fine[-1]])) if len(fine) else None


def at_threshold(preds: Predictions, threshold: float) -> dict[str, float] | None:
    """The point of the risk-coverage curve at one threshold; None where nothing is answered."""
    answered = preds.confidence >= threshold
    number = int(answered.sum())
    if not number:
        return None
    error = float((1 - preds.right)[answered].mean())
    low, high = map(float, metrics.wilson(error, number))
    point = {"coverage": number / len(answered), "n": number, "threshold": threshold}
    return point | {"error": error, "low": low, "high": high}


def stated_level(preds: Predictions) -> dict[str, float] | None:
    """What a stated confidence is worth, at the level that most mistakes are made under."""
    for over, to in ((0.85, 0.95), (0.95, 0.995), (0.7, 0.9), (0.5, 0.8)):
        some = (preds.confidence > over) & (preds.confidence <= to)
        number = int(some.sum())
        if number >= 30:
            confidence, right = (float(x[some].mean()) for x in (preds.confidence, preds.right))
            low, high = map(float, metrics.wilson(right, number))
            level = {"over": over, "to": to, "n": number, "confidence": confidence}
            return level | {"right": right, "low": low, "high": high}
    return None


def confusion_cells(preds: Predictions) -> dict[str, Any]:
    """Images by truth and guess, as non-empty cells; of many classes those with most errors."""
    counts, off = _confusions(preds)
    order = np.sort(np.argsort(-(off.sum(0) + off.sum(1)), kind="stable")[:MATRIX])
    part = counts[np.ix_(order, order)]
    pairs = sorted(_cells(off), key=lambda pair: (-pair[2], pair))
    totals = counts.sum(1)[order].tolist()
    return {"order": order.tolist(), "totals": totals, "cells": _cells(part), "pairs": pairs[:100]}


def _confusions(preds: Predictions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Images by truth and guess, and the wrong ones alone: [C, C] each."""
    classes = preds.probs.shape[1]
    flat = np.bincount((preds.labels * classes + preds.guess).numpy(), minlength=classes**2)
    counts = flat.reshape(classes, classes)
    return counts, counts * (1 - np.eye(classes, dtype=counts.dtype))


def _cells(counts: NDArray[np.int64]) -> list[list[int]]:
    places = zip(*counts.nonzero(), strict=True)
    return [[int(row), int(column), int(counts[row, column])] for row, column in places]


def per_class(preds: Predictions) -> list[dict[str, Any]]:
    """Of every class: images, error with interval, confidence, precision, nearest rival."""
    counts, missed = _confusions(preds)
    hits, number, guessed = counts.diagonal(), counts.sum(1), counts.sum(0)
    sure = np.bincount(preds.labels.numpy(), preds.confidence.numpy(), len(counts))
    rows: list[dict[str, Any]] = []
    for k in range(len(counts)):
        row: dict[str, Any] = {"id": k, "n": int(number[k])}
        if number[k]:
            error = 1 - hits[k] / number[k]
            low, high = map(float, metrics.wilson(error, float(number[k])))
            row |= {"error": error, "low": low, "high": high}
            row |= {"confidence": sure[k] / number[k], "over": (sure[k] - hits[k]) / number[k]}
        if guessed[k]:
            row["precision"] = hits[k] / guessed[k]
        if missed[k].any():
            row |= {"rival": int(missed[k].argmax()), "times": int(missed[k].max())}
        rows.append(row)
    return rows


def logit_densities(preds: Predictions) -> dict[str, Any]:
    """Densities of every class's logit over the images of each true class.

    Log-probabilities keep logit differences; each image's are shifted to have mean zero. Of very
    many classes those with most mistakes are chosen, and the others' lists are empty.
    """
    logs = preds.log_probs.double().clamp_min(-100.0)  # a class may have probability zero
    values: Floats = (logs - logs.mean(1, keepdim=True)).numpy()
    low, high = np.quantile(values, [0.0005, 0.9995])
    pad = 0.05 * (high - low) + 1e-9
    grid = np.linspace(low - pad, high + pad, GRID)
    labels, classes = preds.labels.numpy(), values.shape[1]
    mistakes = np.bincount(labels, 1 - preds.right.numpy(), classes)
    chosen = set(np.argsort(-mistakes, kind="stable")[:CHOICE].tolist())
    rows = [
        _class_densities(values[labels == k], k, grid) if k in chosen else []
        for k in range(classes)
    ]
    return {"x": _short(grid), "classes": rows}


def _class_densities(values: Floats, truth: int, grid: Floats) -> list[dict[str, Any]]:
    """Of the true class, its nearest rivals and, where there are many, all others together."""
    if len(values) < 2:
        return []
    few = values.shape[1] <= 10
    near = np.argsort(-values.mean(0), kind="stable")
    near = near[near != truth]
    curves: list[tuple[int | str, Floats]]
    curves = [(int(k), values[:, k]) for k in (truth, *(near if few else near[:RIVALS]))]
    curves += [] if few else [("rest", values[:, near[RIVALS:]].ravel())]
    rows = []
    for name, logits in curves:
        low, high = map(float, np.quantile(logits, [0.05, 0.95]))
        ends = {"mean": float(logits.mean()), "low": low, "high": high}
        rows.append({"of": name, "y": _density(logits, grid), **ends})
    return rows


def gap_densities(several: Sequence[Predictions], points: int) -> list[list[float]]:
    """A grid for all runs, and over it each one's density of the images' largest logit distance."""
    gaps = [logit_gap(preds.log_probs.double()).clamp_max(200.0).numpy() for preds in several]
    grid = _short(np.linspace(0, 1.05 * max(float(gap.max()) for gap in gaps) + 1e-9, points))
    return [grid, *(_density(gap, np.asarray(grid)) for gap in gaps)]


def _density(values: Floats, grid: Floats) -> list[float]:
    """Gaussian kernel density with Silverman's width, from a fine histogram."""
    step = (grid[1] - grid[0]) / 4
    edges = np.arange(grid[0] - step / 2, grid[-1] + step, step)
    counts, _ = np.histogram(values, edges)
    middle = (edges[1:] + edges[:-1]) / 2
    spread = min(float(values.std()), float(np.subtract(*np.quantile(values, [0.75, 0.25]))) / 1.34)
    width = max(0.9 * (spread or float(values.std())) * len(values) ** -0.2, 2 * step)
    kernel = np.exp(-(((grid[:, None] - middle) / width) ** 2) / 2) / width / (2 * np.pi) ** 0.5
    return _short(kernel @ counts / len(values))


def _short(values: Floats) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def thin(lines: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """At most so many lines, the first and the last among them."""
    places = np.linspace(0, len(lines) - 1, min(most, len(lines))).round().astype(int)
    return [lines[k] for k in places]


Data = Mapping[str, Any]


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage, without the sign; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.{digits}f}"


def signed(value: float) -> str:
    """With a plus or a minus, except for what rounds to nothing."""
    text = f"{value:+.1f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


RUN_CELLS = {  # what stands in a run's tables, as `_cell` reads it; the page has the columns' heads
    "reliability": "left-right.0 n confidence accuracy low-high",
    "smooth": "at.0 accuracy low-high",
    "risk": "coverage error low-high promised threshold.2",
    "tested": "step split error ece",
    "trained": "step accepted agree pseudo_accuracy",
}


def chart_tables(data: Data) -> dict[str, list[list[str]]]:
    """The numbers of every chart as text; of several runs, each row begins with the run's title."""
    names, runs = data.get("classes", ()), data["runs"]
    own, first = [(run["title"], _run_rows(run)) for run in runs], 0 if len(runs) > 1 else 1
    tables: dict[str, list[list[str]]] = {}
    for key in RUN_CELLS:
        tables[key] = [[title, *row][first:] for title, of_run in own for row in of_run[key]]
    if "confusion" not in data:
        return tables
    pairs = [[names[t], names[p], f"{n:,}"] for t, p, n in data["confusion"]["pairs"]]
    logits = []
    for truth, rows in enumerate(data["logits"]["classes"]):
        for row in rows:
            of = names[row["of"]] if isinstance(row["of"], int) else "all others"
            logits.append([names[truth], of, *(f"{row[k]:.1f}" for k in ("mean", "low", "high"))])
    return {**tables, "confusion": pairs, "logits": logits}


def _run_rows(run: Data) -> dict[str, list[list[str]]]:
    """The rows of each of a run's tables."""
    names = [name for name in ("at", "accuracy", "low", "high") if name in run["smooth"]]
    curve = {name: run["smooth"][name][::5] for name in names}
    points = [dict(zip(curve, values, strict=True)) for values in zip(*curve.values(), strict=True)]
    risk = run["risk"][:: max(1, len(run["risk"]) // 20)]
    risk = risk if risk[-1] is run["risk"][-1] else [*risk, run["risk"][-1]]
    bins = [row for row in run["bins"] if row["n"]]
    trained = [line for line in run["trained"] if "accepted" in line]
    lists = {**run, "reliability": bins, "smooth": points, "risk": risk, "trained": trained}
    return {
        key: [[_cell(row, name) for name in names.split()] for row in lists[key]]
        for key, names in RUN_CELLS.items()
    }


def _cell(row: Data, name: str) -> str:
    """A count, a word or a share: `at.0` has no decimals, `low-high` is a range, where it is."""
    if name in ("n", "step", "split"):
        return str(row[name]) if name == "split" else f"{row[name]:,}"
    keys, _, digits = name.partition(".")
    shown = [key for key in keys.split("-") if key in row or key == keys]
    return "–".join(percent(row.get(key), int(digits or 1)) for key in shown)
