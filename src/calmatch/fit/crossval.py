"""How good it is, from few labels: fold models that have not seen them, calibration, promises."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from calmatch import console, metrics, posthoc
from calmatch.data.batches import Split, folds, leave_fold_out
from calmatch.runs import Run
from calmatch.training.config import Config
from calmatch.training.frozen import FeatureRows, FrozenRun
from calmatch.training.loop import train, train_in_memory, train_together
from calmatch.training.step import measure, predict_source

FoldReport = Callable[[int, Tensor, Tensor], object]  # folds done, log-probabilities, labels so far


class HeldOut(NamedTuple):
    """Predictions of labelled pictures by models that have not seen their labels."""

    log_probs: Tensor  # [n, C], before calibration
    labels: Tensor  # [n]
    rows: list[int]  # of the training pictures, or of the held-out ones
    folds: int  # predicted by so many sister models; 0: held out, by the model itself

    @property
    def crossfit(self) -> bool:
        return self.folds > 0


def cross_validate(
    frozen: FrozenRun,
    config: Config,
    split: Split,
    told: FoldReport | None = None,
    unseen: Collection[int] | None = None,
) -> HeldOut:
    """Refit the head without each fold of labels and predict that fold.

    A fold's pictures serve neither as labelled nor as unlabelled ones while it is held out.

    Args:
        frozen: features, and who makes parts of a run from them.
        config: of the head's training.
        split: all labelled and unlabelled rows.
        told: is shown the predictions after each fold.
        unseen: rows whose labels the network behind the features has not seen, if not all.
    """
    own = frozen.labels[torch.tensor(split.labelled)].tolist()
    log_probs: list[Tensor] = []
    rows: list[int] = []
    cheap = config.replace(compile=False)
    number = count_folds(own, config.seed)
    for fold in range(1, number + 1):
        rest = leave_fold_out(split, own, fold, config.seed)
        held = [row for row in rest.validation if unseen is None or row in unseen]
        if not held:
            continue
        parts = frozen.parts(rest._replace(validation=[]), cheap)
        train_in_memory(cheap, parts)
        pictures = FeatureRows(frozen.store, torch.tensor(held))
        log_probs.append(
            predict_source(
                parts.judged, parts.method, pictures, parts.statistics, config.eval_batch
            )
        )
        rows += held
        if told is not None:
            told(fold, torch.cat(log_probs), frozen.labels[torch.tensor(rows)])
    return HeldOut(torch.cat(log_probs), frozen.labels[torch.tensor(rows)], rows, number)


def train_fold_models(config: Config, under: Path, number: int, *, quiet: bool) -> HeldOut:
    """Train a run without each of so many folds of the labels, which it then predicts.

    Args:
        config: of the run that is judged.
        under: where the sisters go.
        number: of folds.
        quiet: no progress bars and no lines.
    """
    settings = [config.replace(fold=fold) for fold in range(1, number + 1)]
    outs = [under / f"fold{one.fold}" for one in settings]
    log_probs, truth = [], []
    rows: list[int] = []
    for run in _train_side_by_side(settings, outs, quiet):
        with np.load(run.folder / "predictions.npz", allow_pickle=False) as held:
            log_probs.append(torch.from_numpy(held["held_log_probs"]))
            truth.append(torch.from_numpy(held["held_labels"]))
        rows += json.loads((run.folder / "split.json").read_text("utf-8"))["validation"]
    return HeldOut(torch.cat(log_probs), torch.cat(truth), rows, number)


def _train_side_by_side(settings: Sequence[Config], outs: Sequence[Path], quiet: bool) -> list[Run]:
    """Side by side, or one after another where memory is too small for that."""
    try:
        return train_together(settings, outs, quiet=quiet)
    except (RuntimeError, MemoryError) as error:
        if not console.is_out_of_memory(error):
            raise
    console.free_device_memory()  # the error, which held tensors, is gone
    return [train(one, out, quiet=quiet) for one, out in zip(settings, outs, strict=True)]


def count_folds(labels: Sequence[int], seed: int) -> int:
    """The number of folds the labels make; none is a mistake that says what to do."""
    if number := len(folds(labels, seed)):
        return number
    raise ValueError(
        "No label can be left out to judge by: every class has one label. Label at least "
        "two pictures of each class."
    )


def cautious_temperature(log_probs: Tensor, labels: Tensor, folds: int = 0) -> posthoc.Scaling:
    """The temperature nearest to 1 that the labels do not speak against.

    Forty labels know the best temperature only to about a fifth, and sister models that saw fewer
    labels ask for too warm a one. So it moves from the best one towards 1 (no change) until the
    labels are e times less likely, and no further; e² times where there were three folds and e³
    times where there were two, whose models saw half of the labels (docs/log.md has the numbers).
    """
    best = posthoc.crossfit_temperature(log_probs, labels)
    warm = float(best.values["temperature"])
    z = log_probs.double()

    def loss(share: float) -> float:
        logp = (z / warm**share).log_softmax(-1)
        return float(-logp.gather(1, labels[:, None]).sum())

    low, high = 0.0, 1.0  # the share of the way from 1 to the best
    worst = loss(1.0) + (max(1, 5 - folds) if folds else 1)
    if loss(0.0) <= worst:
        return posthoc.Scaling("temperature", {"temperature": 1.0}, len(labels))
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if loss(middle) <= worst else (middle, high)
    return posthoc.Scaling("temperature", {"temperature": warm**high}, len(labels))


class Calibration(NamedTuple):
    """A model's calibration, what it may promise, and its measured quality."""

    scaling: posthoc.Scaling
    conformal: posthoc.Conformal
    selective: posthoc.Selective
    log_probs: Tensor  # [n, C], calibrated without each picture's own label
    before: dict[str, metrics.Interval]
    after: dict[str, metrics.Interval]


def calibrate(judged: HeldOut, resamples: int = 500) -> Calibration:
    """Temperature, prediction sets and operating point from judged labels.

    The metrics after calibration use, for each picture, a temperature found without its label.
    """
    z, y = judged.log_probs, judged.labels
    scaling = cautious_temperature(z, y, judged.folds)
    log_probs = scaling(z).double()
    for fold in folds([0] * len(y), 0):
        others = torch.ones(len(y), dtype=torch.bool)
        others[fold] = False
        log_probs[fold] = cautious_temperature(z[others], y[others], judged.folds)(z[fold]).double()
    probs = log_probs.exp()
    confidence, guess = probs.max(1)
    return Calibration(
        scaling,
        posthoc.conformal(probs, y, cross_fitted=judged.crossfit),
        posthoc.selective(confidence, guess == y, cross_fitted=judged.crossfit),
        log_probs.float(),
        measure_few(z, y, 0),
        measure_few(log_probs, y, resamples),
    )


def measure_few(log_probs: Tensor, labels: Tensor, resamples: int) -> dict[str, metrics.Interval]:
    """Every metric; the error with an exact binomial interval, which few labels need."""
    found = measure(log_probs, labels, resamples)
    n = len(labels)
    wrong = round(found["error"].value * n)
    low, high = clopper_pearson(wrong, n)
    return found | {"error": metrics.Interval(wrong / n, low, high)}


def clopper_pearson(wrong: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The Clopper-Pearson interval of a share.

    >>> [round(end, 3) for end in clopper_pearson(0, 40)]
    [0.0, 0.088]
    """
    tail = (1 - level) / 2
    low: Any = stats.beta.ppf(tail, wrong, n - wrong + 1) if wrong else 0.0
    high: Any = stats.beta.ppf(1 - tail, wrong + 1, n - wrong) if wrong < n else 1.0
    return float(low), float(high)


def log_loss(judged: HeldOut) -> float:
    """What decides between two models: the mean log-loss of calibrated predictions."""
    scaled = cautious_temperature(judged.log_probs, judged.labels, judged.folds)(judged.log_probs)
    return float(-scaled.double().gather(1, judged.labels[:, None]).mean())
