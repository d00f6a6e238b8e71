"""How good it is, from few labels: fold models that have not seen them, calibration, promises.

Heads on vectors learn here too: vectors pass for images of one pixel and many channels, so that
batches, loop and evaluation are the ones of whole networks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Generator, Tensor, nn

from calmatch import console, files, methods, metrics, posthoc
from calmatch.core import RandomStream, Transform
from calmatch.data.batches import Resident, Split, folds, leave_fold_out, stream_seed
from calmatch.data.folder import ImageFolder
from calmatch.data.images import Images
from calmatch.fit.plan import PENALTY, refuse_features
from calmatch.nets.classic import Layered
from calmatch.runs import Result
from calmatch.training.config import Config, check_config
from calmatch.training.loop import train, train_in_memory, train_together
from calmatch.training.setup import Material, Parts, Sets, assemble
from calmatch.training.step import Predictor, measure

RESAMPLES = 500  # of the bootstrap


class HeldOut(NamedTuple):
    """Predictions of labelled images by models that have not seen their labels."""

    log_probs: Tensor  # [n, C], before calibration
    labels: Tensor  # [n]
    rows: list[int]  # of the training images, or of the held-out ones
    folds: int  # predicted by so many fold models; 0: held out, by the model itself


def cross_validate(frozen: "FrozenRun", *, quiet: bool = True) -> HeldOut:
    """Refit the head without each fold, not even as unlabelled images, and predict that fold."""
    split, config = frozen.split, frozen.config
    own = frozen.labels[torch.tensor(split.labelled)].tolist()
    log_probs: list[Tensor] = []
    rows: list[int] = []
    number = count_folds(own, config.seed)
    with console.ProgressBar("cross-validation", number, 0, quiet, unit="folds") as bar:
        for fold in range(1, number + 1):
            rest = leave_fold_out(split, own, fold, config.seed)
            parts = frozen.parts(rest._replace(validation=[]))
            train_in_memory(config, parts)
            source = VectorRows(frozen.store, torch.tensor(rest.validation))
            log_probs.append(Predictor(parts, config.eval_batch)(source))
            rows += rest.validation
            bar.update(fold)
    return HeldOut(torch.cat(log_probs), frozen.labels[torch.tensor(rows)], rows, number)


def train_fold_models(config: Config, under: Path, number: int, *, quiet: bool) -> HeldOut:
    """Train a run without each of so many folds of the labels, which it then predicts."""
    settings = [config.replace(fold=fold) for fold in range(1, number + 1)]
    outs = [under / f"fold{one.fold}" for one in settings]
    log_probs, truth = [], []
    rows: list[int] = []
    several = console.unless_out_of_memory(lambda: train_together(settings, outs, quiet=quiet))
    pairs = zip(settings, outs, strict=True)  # one after another where memory is too small
    for run in several or [train(*pair, quiet=quiet) for pair in pairs]:
        held = files.read_arrays(run.folder / "predictions.npz")
        log_probs.append(torch.from_numpy(held["held_log_probs"]))
        truth.append(torch.from_numpy(held["held_labels"]))
        rows += files.read_json(run.folder / "split.json")["validation"]
    return HeldOut(torch.cat(log_probs), torch.cat(truth), rows, number)


def count_folds(labels: Sequence[int], seed: int) -> int:
    """The number of folds the labels make; none is a mistake that says what to do."""
    if number := len(folds(labels, seed)):
        return number
    raise ValueError(
        "No label can be left out to evaluate by: every class has one label. Label at least "
        "two pictures of each class."
    )


class Calibration(NamedTuple):
    """A model's calibration, what it may promise, and its measured quality."""

    scaling: posthoc.Scaling
    conformal: posthoc.Conformal
    selective: posthoc.Selective
    log_probs: Tensor  # [n, C], calibrated; of whole networks without each image's own label
    before: dict[str, metrics.Interval]
    after: dict[str, metrics.Interval]


class Outcome(NamedTuple):
    """What a fit learned, before it is written."""

    own: ImageFolder
    images: Images
    base: Result  # without what the calibration says
    held: HeldOut
    calibration: Calibration
    kept: str  # the candidate
    scores: Mapping[str, float]  # of all candidates, by name
    note: str  # how it was evaluated
    logits: Tensor | None = None  # of all images, where they are known
    teaching: Any = ()  # rows of images whose label would teach most, where that is known


def calibrate(
    held: HeldOut, temperature: float | None = None, error: metrics.Interval | None = None
) -> Calibration:
    """Temperature, prediction sets and operating point from held-out labels.

    A temperature and an error may rest on more than these labels; where they do not, the metrics
    after calibration use, for each image, a temperature chosen without its label.
    """
    z, y = held.log_probs, held.labels
    if temperature is not None:
        scaling = posthoc.Scaling("temperature", {"temperature": temperature}, len(y))
    else:
        scaling = posthoc.crossfit_temperature(z, y)
    log_probs = scaling(z).double()
    for fold in folds([0] * len(y), 0) if temperature is None else ():
        others = torch.ones(len(y), dtype=torch.bool)
        others[fold] = False
        own = posthoc.crossfit_temperature(z[others], y[others])
        log_probs[fold] = own(z[fold]).double()
    probs = log_probs.exp()
    confidence, guess = probs.max(1)
    after = measure_few(log_probs, y, RESAMPLES)
    if error is not None:
        after["error"] = error
    sets = posthoc.conformal(probs, y, cross_fitted=held.folds > 0)
    point = posthoc.selective(confidence, guess == y, cross_fitted=held.folds > 0)
    return Calibration(scaling, sets, point, log_probs.float(), measure_few(z, y, 0), after)


def measure_few(log_probs: Tensor, labels: Tensor, resamples: int) -> dict[str, metrics.Interval]:
    """Every metric; the error with an exact binomial interval, which few labels need."""
    values = measure(log_probs, labels, resamples)
    n = len(labels)
    wrong = round(values["error"].value * n)
    low, high = clopper_pearson(wrong, n)
    return values | {"error": metrics.Interval(wrong / n, low, high)}


def clopper_pearson(wrong: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The Clopper-Pearson interval of a share.

    >>> [round(end, 3) for end in clopper_pearson(0, 40)]
    [0.0, 0.088]
    """
    low, high = stats.binomtest(wrong, n).proportion_ci(level)
    return float(low), float(high)


def log_loss(held: HeldOut) -> float:
    """What decides between two models: the mean log-loss of calibrated predictions."""
    scaled = posthoc.crossfit_temperature(held.log_probs, held.labels)(held.log_probs)
    return float(-scaled.double().gather(1, held.labels[:, None]).mean())


VIEW_NAMES = ("weak", "strong")


class VectorRows(Resident):
    """Some rows of stored views [N, 1 + 2 V, D], as a source of images of one pixel."""

    def __init__(self, store: Tensor, rows: Tensor) -> None:
        super().__init__(rows, store.device)
        self.store = store

    def batches(self, size: int) -> Iterator[Tensor]:
        """The vectors as they are, in order."""
        for rows in self.images.split(size):
            yield self.store[rows, 0][:, :, None, None]


@dataclass
class FrozenRun:
    """Vectors with their views, and the parts of a run on any rows of them."""

    config: Config
    classes: tuple[str, ...]
    split: Split  # all labelled and unlabelled rows
    store: Tensor  # [N, 1 + 2 V, D]: as it is, V weak views, V strong ones
    labels: Tensor  # [N] class ids, -1 unknown
    mean: Tensor  # [D] and deviation, which make stored vectors of those that came
    std: Tensor

    def train(self) -> tuple[Tensor, Tensor]:
        """Weight and bias, on vectors as they came, of a head that learned from all rows."""
        parts = self.parts(self.split)
        train_in_memory(self.config, parts)
        linear = parts.evaluated.get_submodule("body.head")
        assert isinstance(linear, nn.Linear)
        weight, bias = (part.detach().cpu().double() for part in (linear.weight, linear.bias))
        weight = weight / self.std
        return weight, bias - weight @ self.mean

    def parts(self, split: Split) -> Parts:
        """The parts of a run on these rows; a ValueError if the method cannot do without pixels."""
        refuse_features(self.config.method, "use freematch, or train the whole network")
        width, places = self.store.shape[2], (split.labelled, split.unlabelled, ())
        own, pool, none = (VectorRows(self.store, torch.tensor(ids).long()) for ids in places)
        facts = (self.store.device, self.classes, self.labels, split, own, pool)
        sets: Sets = {"test": (none, self.labels[:0])}
        views = {name: self._view(place) for place, name in enumerate(VIEW_NAMES)}
        scale = ([0.0] * width, [1 / 255] * width)  # it undoes the division of bytes by 255
        material = Material(*facts, sets, views, scale, (width, 1, 1))
        return assemble(self.config, material, self._head)

    def _head(self) -> nn.Module:
        """One linear layer that starts at zero: every class equally likely."""
        body = Layered(len(self.classes), self.store.shape[2], nn.Flatten())
        for parameter in body.parameters():
            nn.init.zeros_(parameter)
        return body

    def _view(self, kind: int) -> Transform:
        """What draws one stored view of each row."""
        views = (self.store.shape[1] - 1) // 2

        def transform(rows: Tensor, generator: Generator) -> Tensor:
            which = torch.randint(views, (len(rows),), generator=generator)
            return self.store[rows, 1 + kind * views + which][:, :, None, None]

        return transform


def head_config(
    method: str, penalty: str | None, steps: int | None, seed: int, width: int, batch: int = 64
) -> Config:
    """How a head on vectors of so many features, of variance 1 or so, learns by a method."""
    steps = 300 if steps is None else steps
    penalty = PENALTY if penalty is None else penalty
    rate = min(0.05, 1e-3 * math.sqrt(1280 / width))
    config = Config(method=methods.adapt_momentum(method, steps), steps=steps, lr=rate, seed=seed)
    config = config.replace(penalty=penalty if methods.find(method).u_views else "", batch=batch)
    config = config.replace(ratio=3, ema=0.9, compile=False, device="cpu")
    check_config(config)
    return config


def freeze_vectors(
    config: Config, vectors: Tensor, labels: Tensor, classes: int, views: int = 4
) -> FrozenRun:
    """A run on vectors, centred and scaled: a view adds noise, a strong one also mixes in rows."""
    x = vectors.double()  # one scale for all features: scaling each is the caller's choice
    mean, std = x.mean(0), x.var(0, correction=0).mean().sqrt().clamp_min(1e-12)
    vectors = ((x - mean) / std).float()
    chance = Generator().manual_seed(stream_seed(config.seed, RandomStream.VECTORS))
    stored = [vectors]
    for name in VIEW_NAMES:
        for _ in range(views):
            view = vectors + 0.1 * torch.randn(vectors.shape, generator=chance)
            if name == "strong":
                others = view[torch.randperm(len(view), generator=chance)]
                view = torch.where(torch.rand(view.shape, generator=chance) < 0.2, others, view)
            stored.append(view)
    split = Split((labels >= 0).nonzero()[:, 0].tolist(), list(range(len(vectors))), [])
    names = tuple(str(k) for k in range(classes))
    return FrozenRun(config, names, split, torch.stack(stored, 1), labels, mean, std)
