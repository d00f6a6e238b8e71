"""The numbers behind the report's charts, and the same as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calmatch import metrics, ops
from calmatch.runs import logit_gap, probabilities

Floats = NDArray[np.float64]
BINS = 15
GRID = 64  # points of a density
WIDTH = 0.05  # of the smooth curve at least: SmoothECE's own can be too fine to look at
RIVALS = 5  # classes beside the true one in the logit densities of many classes
MATRIX = 60  # classes of the confusion matrix at most
CHOICE = 100  # classes whose logit densities are kept at most


class Predictions(NamedTuple):
    """Predictions and truth, with what every chart starts from."""

    log_probs: Tensor  # [N, C]
    probs: Tensor  # [N, C]
    labels: Tensor  # [N]
    confidence: Tensor  # [N]
    guess: Tensor  # [N]
    right: Tensor  # [N] 0 or 1


def make_predictions(log_probs: Tensor, labels: Tensor) -> Predictions:
    probs, y = metrics.check(probabilities(log_probs), labels)
    confidence, right = metrics.top(probs, y)
    return Predictions(log_probs, probs, y, confidence, probs.argmax(1), right)


def wilson(share: Floats | float, number: Floats | float, z: float = 1.96) -> tuple[Any, Any]:
    """95 % interval of a share of so many."""
    p, n = np.asarray(share, dtype=np.float64), np.maximum(number, 1e-9)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    spread = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return np.clip(middle - spread, 0, 1), np.clip(middle + spread, 0, 1)


def reliability_bins(found: Predictions, number: int = BINS) -> list[dict[str, Any]]:
    """The reliability diagram: every bin's count, confidence, accuracy and its interval."""
    means = metrics.reliability(found.probs, found.labels, number)
    low, high = wilson(means.accuracy.nan_to_num(0.0).numpy(), means.number.numpy())
    rows = []
    for k, (n, confidence, accuracy) in enumerate(
        zip(*(part.tolist() for part in means), strict=True)
    ):
        row: dict[str, Any] = {"left": k / number, "right": (k + 1) / number, "n": int(n)}
        if n:
            row |= {"confidence": confidence, "accuracy": accuracy, "low": low[k], "high": high[k]}
        rows.append(row)
    return rows


def ece_by_chance(found: Predictions, number: int = BINS, draws: int = 200) -> dict[str, float]:
    """ECE that an honest model with these confidences would show by chance alone."""
    confidence = found.confidence.numpy()
    place = ops.bin_of(found.confidence, number).numpy()
    claimed = np.bincount(place, confidence, number)
    random = np.random.default_rng(0)
    drawn = [
        np.abs(np.bincount(place, random.random(len(place)) < confidence, number) - claimed).sum()
        for _ in range(draws)
    ]
    low, mean, high = np.quantile(drawn, 0.025), np.mean(drawn), np.quantile(drawn, 0.975)
    n = len(place)
    return {"low": float(low / n), "mean": float(mean / n), "high": float(high / n)}


def smooth_reliability(
    found: Predictions, points: int = 101, resamples: int = 500, known: float | None = None
) -> dict[str, Any]:
    """Accuracy as a smooth function of confidence, with a pointwise 95 % bootstrap band.

    Args:
        found: predictions.
        points: of the curve, before those that too few pictures are near to are left out.
        resamples: behind the band; 0: no band.
        known: SmoothECE, where it was measured: its kernel's width is the same number.
    """
    own = error = known or 0.0
    if known is None:
        own, value = metrics.smooth_width(found.confidence, found.right)
        error = float(value)
    width = max(own, WIDTH)
    at = torch.linspace(0, 1, points, dtype=torch.float64)
    accuracy, density = metrics.smooth_accuracy(found.confidence, found.right, width, at)
    near = density * len(found.right) * width * (2 * torch.pi) ** 0.5  # pictures under the kernel
    seen = near >= 5  # a curve through fewer says nothing
    curve = {"at": at[seen].tolist(), "accuracy": accuracy[seen].tolist()}
    if resamples:
        ends = _band(found, width, at.numpy(), resamples)
        curve |= {k: v[seen.numpy()].tolist() for k, v in zip(("low", "high"), ends, strict=True)}
        curve["density"] = (density / density.max()).tolist()
    return {**curve, "width": width, "value": error}


def _band(found: Predictions, width: float, at: Floats, resamples: int) -> tuple[Floats, Floats]:
    """Ends of the smoothed accuracy over bootstrap resamples, confidence rounded to 1/500.

    A resample is a multinomial draw over (rounded confidence, right or wrong), so all are drawn
    and smoothed at once.
    """
    grid = np.linspace(0, 1, 501)
    place = np.rint(500 * found.confidence.numpy()).astype(int)
    right = found.right.numpy()
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


def risk_coverage(found: Predictions, points: int = 100) -> list[dict[str, float]]:
    """Error among the pictures answered when only those above a confidence are: threshold down."""
    ordered, order = found.confidence.sort(descending=True)
    wrong = (1 - found.right)[order].cumsum(0)
    promised = (1 - ordered).cumsum(0)
    last = torch.ones(len(ordered), dtype=torch.bool)  # tied pictures are answered together
    last[:-1] = ordered[1:] != ordered[:-1]
    ends = last.nonzero()[:, 0]
    if len(ends) > points:
        wanted = torch.linspace(0, len(ordered) - 1, points).round().long()
        ends = ends[torch.searchsorted(ends, wanted).clamp_max(len(ends) - 1)].unique()
    number = (ends + 1).double()
    error = wrong[ends] / number
    low, high = wilson(error.numpy(), number.numpy())
    columns = {
        "coverage": number / len(ordered),
        "n": ends + 1,
        "error": error,
        "low": low,
        "high": high,
        "promised": promised[ends] / number,
        "threshold": ordered[ends],
    }
    lists = [column.tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def most_answers(found: Predictions, error: float) -> dict[str, float] | None:
    """The point with the most answers whose error is at most so much; None where there is none."""
    ordered, order = found.confidence.sort(descending=True)
    wrong = (1 - found.right)[order].cumsum(0)
    fine = wrong / torch.arange(1, len(ordered) + 1) <= error
    fine[:-1] &= ordered[1:] != ordered[:-1]  # tied pictures are answered together
    good = fine.nonzero()[:, 0]
    return at_threshold(found, float(ordered[good[-1]])) if len(good) else None


def at_threshold(found: Predictions, threshold: float) -> dict[str, float] | None:
    """The point of the risk-coverage curve at one threshold; None where nothing is answered."""
    answered = found.confidence >= threshold
    number = int(answered.sum())
    if not number:
        return None
    error = float((1 - found.right)[answered].mean())
    low, high = wilson(error, number)
    place = {"coverage": number / len(answered), "n": number, "threshold": threshold}
    return place | {"error": error, "low": float(low), "high": float(high)}


def confusion_cells(found: Predictions) -> dict[str, Any]:
    """Pictures by truth and guess, as non-empty cells; of many classes those with most errors."""
    classes = found.probs.shape[1]
    flat = np.bincount((found.labels * classes + found.guess).numpy(), minlength=classes**2)
    counts = flat.reshape(classes, classes)
    order = np.arange(classes)
    if classes > MATRIX:
        missed = counts.sum(1) + counts.sum(0) - 2 * counts.diagonal()
        order = np.sort(np.argsort(-missed, kind="stable")[:MATRIX])
    part = counts[np.ix_(order, order)]
    cells = [[int(t), int(p), int(part[t, p])] for t, p in zip(*part.nonzero(), strict=True)]
    off = counts * (1 - np.eye(classes, dtype=counts.dtype))
    pairs = [(int(t), int(p), int(off[t, p])) for t, p in zip(*off.nonzero(), strict=True)]
    pairs.sort(key=lambda pair: (-pair[2], pair))
    return {
        "order": order.tolist(),
        "totals": counts.sum(1)[order].tolist(),
        "cells": cells,
        "pairs": pairs[:100],
    }


def per_class(found: Predictions) -> list[dict[str, Any]]:
    """Of every class: pictures, error with interval, confidence, precision, nearest rival."""
    classes = found.probs.shape[1]
    truth, guess = found.labels.numpy(), found.guess.numpy()
    right, confidence = found.right.numpy(), found.confidence.numpy()
    number = np.bincount(truth, minlength=classes)
    hits = np.bincount(truth, right, classes)
    sure = np.bincount(truth, confidence, classes)
    guessed = np.bincount(guess, minlength=classes)
    missed = np.bincount((truth * classes + guess)[right == 0], minlength=classes**2)
    missed = missed.reshape(classes, classes)
    rows: list[dict[str, Any]] = []
    for k in range(classes):
        row: dict[str, Any] = {"id": k, "n": int(number[k])}
        if number[k]:
            error = 1 - hits[k] / number[k]
            low, high = wilson(error, float(number[k]))
            row |= {"error": error, "low": float(low), "high": float(high)}
            row |= {"confidence": sure[k] / number[k], "over": (sure[k] - hits[k]) / number[k]}
        if guessed[k]:
            row["precision"] = hits[k] / guessed[k]
        if missed[k].any():
            row |= {"rival": int(missed[k].argmax()), "times": int(missed[k].max())}
        rows.append(row)
    return rows


def logit_densities(found: Predictions) -> dict[str, Any]:
    """Densities of every class's logit over the pictures of each true class.

    Log-probabilities keep logit differences; each picture's are shifted to have mean zero. Of very
    many classes those with most mistakes are kept, and the others' lists are empty.
    """
    logs = found.log_probs.double().clamp_min(-100.0)  # a class may have probability zero
    values: Floats = (logs - logs.mean(1, keepdim=True)).numpy()
    grid = _grid(values)
    classes = values.shape[1]
    mistakes = np.bincount(found.labels.numpy(), 1 - found.right.numpy(), classes)
    kept = set(np.argsort(-mistakes, kind="stable")[:CHOICE].tolist())
    rows: list[list[dict[str, Any]]] = []
    for k in range(classes):
        own = values[found.labels.numpy() == k]
        if len(own) < 2 or k not in kept:
            rows.append([])
            continue
        near = np.argsort(-own.mean(0), kind="stable")
        near = near[near != k]
        several = [] if classes <= 10 else [("rest", own[:, near[RIVALS:]].ravel())]
        shown = near if classes <= 10 else near[:RIVALS]
        curves = [(int(j), own[:, j]) for j in (k, *shown)] + several
        rows.append([{"of": j, "y": _density(v, grid), **_range(v)} for j, v in curves])
    return {"x": _short(grid), "classes": rows}


def _range(values: Floats) -> dict[str, float]:
    low, high = np.quantile(values, [0.05, 0.95])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def gaps(found: Predictions, grid: Sequence[float]) -> list[float]:
    """Density of the largest logit distance of each picture."""
    return _density(logit_gap(found.log_probs.double()).clamp_max(200.0).numpy(), np.asarray(grid))


def gap_grid(all_found: Sequence[Predictions], points: int = GRID) -> list[float]:
    """A grid on which the logit distances of several runs can be laid over each other."""
    tops = [logit_gap(found.log_probs.double()).clamp_max(200.0).max() for found in all_found]
    return _short(np.linspace(0, 1.05 * float(max(tops)) + 1e-9, points))


def _grid(values: Floats) -> Floats:
    low, high = np.quantile(values, [0.0005, 0.9995])
    pad = 0.05 * (high - low) + 1e-9
    return np.linspace(low - pad, high + pad, GRID)


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


def thin(lines: Sequence[Mapping[str, Any]], most: int = 200) -> list[Mapping[str, Any]]:
    """At most so many lines, the first and the last among them."""
    if len(lines) <= most:
        return list(lines)
    places = np.linspace(0, len(lines) - 1, most).round().astype(int)
    return [lines[k] for k in places]


ChartTable = dict[str, Any]
Data = Mapping[str, Any]


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """With a plus or a minus, except for what rounds to nothing."""
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return f"{'+' if value > 0 else '−'}{text}"


def make_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> ChartTable:
    return {"head": list(head), "rows": [list(row) for row in rows]}


def reliability_table(runs: Sequence[Data]) -> ChartTable:
    head = ["confidence, %", "pictures", "mean confidence, %", "accuracy, %", "95 % interval"]
    rows = [
        [
            *_named(runs, run),
            f"{percent(row['left'], 0)}–{percent(row['right'], 0)}",
            f"{row['n']:,}",
            percent(row["confidence"]),
            percent(row["accuracy"]),
            f"{percent(row['low'])}–{percent(row['high'])}",
        ]
        for run in runs
        for row in run["bins"]
        if row["n"]
    ]
    return make_table(_headed(runs, head), rows)


def smooth_table(runs: Sequence[Data]) -> ChartTable:
    rows = []
    for run in runs:
        curve = run["smooth"]
        for place in range(0, len(curve["at"]), 5):
            cells = [percent(curve["at"][place], 0), percent(curve["accuracy"][place])]
            ends = [percent(curve[end][place]) for end in ("low", "high") if end in curve]
            rows.append([*_named(runs, run), *cells, "–".join(ends)])
    return make_table(_headed(runs, ["confidence, %", "accuracy, %", "95 % interval"]), rows)


def risk_table(runs: Sequence[Data]) -> ChartTable:
    head = ["answered, %", "error, %", "95 % interval", "promised error, %", "threshold, %"]
    rows = []
    for run in runs:
        step = max(1, len(run["risk"]) // 20)
        shown = run["risk"][::step]
        if shown[-1] is not run["risk"][-1]:
            shown = [*shown, run["risk"][-1]]
        for row in shown:
            ends = f"{percent(row['low'])}–{percent(row['high'])}"
            cells = [percent(row["coverage"]), percent(row["error"]), ends]
            cells += [percent(row["promised"]), percent(row["threshold"], 2)]
            rows.append([*_named(runs, run), *cells])
    return make_table(_headed(runs, head), rows)


def confusion_table(data: Data) -> ChartTable:
    names = data["classes"]
    rows = [[names[t], names[p], f"{n:,}"] for t, p, n in data["confusion"]["pairs"]]
    return make_table(["truth", "taken for", "pictures"], rows)


def logits_table(data: Data) -> ChartTable:
    names = data["classes"]
    rows = [
        [
            names[truth],
            names[row["of"]] if isinstance(row["of"], int) else "all others",
            *(f"{row[key]:.1f}" for key in ("mean", "low", "high")),
        ]
        for truth, several in enumerate(data["logits"]["classes"])
        for row in several
    ]
    return make_table(["truth", "logit of", "mean", "5 % below", "5 % above"], rows)


def tested_table(runs: Sequence[Data]) -> ChartTable:
    rows = [
        [
            *_named(runs, run),
            f"{line['step']:,}",
            line["split"],
            percent(line.get("error")),
            percent(line.get("ece")),
        ]
        for run in runs
        for line in run["tested"]
    ]
    return make_table(_headed(runs, ["step", "set", "error, %", "ECE, %"]), rows)


def trained_table(runs: Sequence[Data]) -> ChartTable:
    rows = [
        [
            *_named(runs, run),
            f"{line['step']:,}",
            percent(line.get("accepted")),
            percent(line.get("agree")),
            percent(line.get("pseudo_accuracy")),
        ]
        for run in runs
        for line in run["trained"]
        if "accepted" in line
    ]
    head = ["step", "in use, %", "agreeing, %", "pseudo-labels right, %"]
    return make_table(_headed(runs, head), rows)


def _headed(runs: Sequence[Data], head: list[str]) -> list[str]:
    return head if len(runs) == 1 else ["run", *head]


def _named(runs: Sequence[Data], run: Data) -> list[str]:
    return [] if len(runs) == 1 else [run["title"]]
