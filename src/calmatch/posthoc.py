"""Confidence corrected after training: scalings, prediction sets, and when to say "not sure".

Every scaling first turns its input into log-probabilities, so logits and log-probabilities give
the same result, and all of it is tensor expressions, so a scaling is exported with its model.
SciPy and scikit-learn are imported where something is fitted: prediction starts a second earlier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from calmatch.metrics import check

TEMPERATURES = (0.05, 20.0)  # of temperatures; the likelihood alone may ask for 0 or infinity
LOG_ZERO = -104.0  # what a log-probability of minus infinity counts as: float32's smallest number
ODDS_STEPS = 16.0  # isotonic: steps per unit of log-odds
ODDS_LIMIT = 16.0  # isotonic: log-odds beyond +-16 (probability 1e-7) are not told apart
KNOTS = 1 + 2 * round(ODDS_LIMIT * ODDS_STEPS)
PRIOR_WEIGHT = 2.0  # crossfit_temperature: weight of the prior


@dataclass(frozen=True)
class Scaling:
    """A fitted scaling: logits [N, C] in, log-probabilities [N, C] out."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    labels: int = 0  # how many it was fitted on

    def __call__(self, logits: Tensor) -> Tensor:
        return _APPLY[self.kind](_log_probs(logits), **self.values)

    def dump(self) -> dict[str, Any]:
        """Plain JSON; `load` reads it back."""
        return {"kind": self.kind, **self.values, "labels": self.labels}


def identity(logits: Any, labels: Any) -> Scaling:
    """Nothing is changed."""
    return Scaling("identity", labels=len(_check_logits(logits, labels)[1]))


def temperature(logits: Any, labels: Any) -> Scaling:
    """Logits divided by the one number that makes the labels most likely (Guo et al., 2017).

    The loss is convex in 1 / temperature, so the minimum is found exactly. Where the labels ask
    for 0 (all right) or infinity (all wrong), it stops at 0.05 or 20.
    """
    z, y = _check_logits(logits, labels)
    return Scaling("temperature", {"temperature": _temperature(z, y, 0.0)}, len(y))


def crossfit_temperature(out_of_fold_logits: Any, labels: Any) -> Scaling:
    """Temperature from very few labels, shrunk towards 1.

    Row i must be predicted by a model that was NOT trained on label i (out of fold). A model fits
    its own training labels, so they would make it look better calibrated than it is.

    The likelihood alone is useless here: with 40 labels, all classified correctly, its maximum is
    at temperature 0, certainty. So 1 / temperature gets a Gamma prior with its mode at 1 and
    weight 2, that is the penalty 2 (b - 1 - log b) on the summed loss, b = 1 / temperature. It is
    convex in b, so the minimum exists and is unique whatever the labels. Without evidence the
    temperature stays 1; halving it costs 0.6 nats and doubling it 0.4, less than a single label
    that is wrong at confidence 0.5, so that the prior stops mattering after some dozens.

    The fold models saw fewer labels than the final one, so the temperature found is, if anything,
    too warm (too modest) for it.
    """
    z, y = _check_logits(out_of_fold_logits, labels)
    return Scaling("temperature", {"temperature": _temperature(z, y, PRIOR_WEIGHT)}, len(y))


def vector(logits: Any, labels: Any) -> Scaling:
    """Each class its own factor and shift of its log-probability; may change the answer.

    Shrunk towards plain temperature scaling, with the weight of one label for each number, so that
    few labels, rare classes and separable ones do no harm.
    """
    from scipy import optimize

    z, y = _check_logits(logits, labels)
    classes, n = z.shape[1], len(y)
    start = np.concatenate(
        [np.full(classes, 1 / _temperature(z, y, PRIOR_WEIGHT)), np.zeros(classes)]
    )
    truth = np.zeros(z.shape)
    truth[np.arange(n), y] = 1.0

    def loss(numbers: Any) -> tuple[float, Any]:
        factor, shift = numbers[:classes], numbers[classes:]
        logp = log_softmax(z * factor + shift)
        rest = np.exp(logp) - truth
        away = numbers - start
        value = -float((truth * logp).sum()) + 0.5 * float(away @ away)
        slope = np.concatenate([(rest * z).sum(0), rest.sum(0)]) + away
        return value / n, slope / n

    bounds = [(0.0, 1 / TEMPERATURES[0])] * classes + [(None, None)] * classes
    found = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    values = {"factor": found[:classes].tolist(), "shift": found[classes:].tolist()}
    return Scaling("vector", values, n)


def isotonic(logits: Any, labels: Any) -> Scaling:
    """The top class's confidence through a rising curve; the others share what is left.

    The answer never changes: confidence is not lowered beneath the runner-up's. The curve is
    scikit-learn's, over the log-odds of the confidence rounded to 1/16 (else two near-equal labels
    make a jump, and rounding on another device crosses it), and it claims no more than n labels
    can show: between 1 / (n + 2) and (n + 1) / (n + 2).
    """
    from sklearn.isotonic import IsotonicRegression

    z, y = _check_logits(logits, labels)
    n = len(y)
    odds = _odds(torch.from_numpy(z))[0].numpy().clip(-ODDS_LIMIT, ODDS_LIMIT)
    right = (z.argmax(1) == y).astype(np.float64)
    curve = IsotonicRegression(y_min=1 / (n + 2), y_max=(n + 1) / (n + 2), out_of_bounds="clip")
    curve.fit(np.round(odds * ODDS_STEPS) / ODDS_STEPS, right)
    values = {"odds": curve.X_thresholds_.tolist(), "right": curve.y_thresholds_.tolist()}
    return Scaling("isotonic", values, n)


SCALINGS: Mapping[str, Callable[[Any, Any], Scaling]] = {
    "temperature": temperature,
    "vector": vector,
    "isotonic": isotonic,
    "identity": identity,
}


def temperature_scaled(logits: Any, labels: Any, *, folds: int = 2, seed: int = 0) -> Tensor:
    """Temperature-scaled log-probabilities [N, C] of a test set, each fold by the other folds.

    For tables: no picture's label chose its own temperature, so metrics of the result are honest.
    """
    z, y = _check_logits(logits, labels)
    if not 2 <= folds <= len(y):
        raise ValueError(f"folds is {folds}, but it must lie between 2 and the {len(y)} labels.")
    fold = np.random.default_rng(seed).permutation(len(y)) % folds
    heat = np.array([_temperature(z[fold != k], y[fold != k], 0.0) for k in range(folds)])
    return torch.from_numpy(log_softmax(z / heat[fold, None]))


def oracle_scaled(logits: Any, labels: Any) -> Tensor:
    """Log-probabilities at the temperature the same labels chose: optimistic, a lower limit."""
    z, y = _check_logits(logits, labels)
    return torch.from_numpy(log_softmax(z / _temperature(z, y, 0.0)))


def load_scaling(saved: Any) -> Scaling:
    """A scaling from what `dump` gave; a ValueError in one sentence for anything else."""
    kind = saved.get("kind") if isinstance(saved, dict) else None
    if not isinstance(kind, str) or kind not in _APPLY:
        raise ValueError(f"A calibration names one of {', '.join(_APPLY)} as its kind.")
    values = {key: value for key, value in saved.items() if key not in ("kind", "labels")}
    labels = saved.get("labels", 0)
    if type(labels) is not int or labels < 0:
        raise ValueError("The calibration says a number of labels that is none.")
    if not _VALUE_CHECKS[kind](values):
        raise ValueError(f"The {kind} calibration is malformed.")
    return Scaling(kind, values, labels)


def _is_temperature(values: Mapping[str, Any]) -> bool:
    if set(values) != {"temperature"} or not are_numbers([values["temperature"]]):
        return False
    return bool(TEMPERATURES[0] <= values["temperature"] <= TEMPERATURES[1])


def _is_vector(values: Mapping[str, Any]) -> bool:
    return set(values) == {"factor", "shift"} and _is_pair(values["factor"], values["shift"])


def _is_isotonic(values: Mapping[str, Any]) -> bool:
    if set(values) != {"odds", "right"} or not _is_pair(values["odds"], values["right"]):
        return False
    odds, right = np.array(values["odds"]), np.array(values["right"])
    apart = 0.5 / ODDS_STEPS  # nearer knots would make a jump
    rising = bool((np.diff(odds) > apart).all() and (np.diff(right) >= 0).all())
    return rising and len(odds) <= KNOTS and bool(right[0] > 0 and right[-1] < 1)


def _is_pair(first: Any, second: Any) -> bool:
    return are_numbers(first) and are_numbers(second) and len(first) == len(second) > 0


def are_numbers(values: Any) -> bool:
    """Whether this is a list of finite numbers."""
    return isinstance(values, list) and all(
        type(v) in (int, float) and abs(v) < 1e9 and math.isfinite(v) for v in values
    )


_VALUE_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "temperature": _is_temperature,
    "vector": _is_vector,
    "isotonic": _is_isotonic,
    "identity": lambda values: not values,
}


def _apply_vector(logp: Tensor, factor: list[float], shift: list[float]) -> Tensor:
    return (logp * logp.new_tensor(factor) + logp.new_tensor(shift)).log_softmax(-1)


def _apply_isotonic(logp: Tensor, odds: list[float], right: list[float]) -> Tensor:
    place, log_rest, top = _odds(logp)
    x, y = logp.new_tensor(odds), logp.new_tensor(right)
    # A sum of ramps, one for each piece of the curve: plain arithmetic, which every runtime has.
    ramps = ((place[:, None] - x[:-1]) / (x[1:] - x[:-1])).clamp(0, 1)
    wanted = y[0] + (ramps * (y[1:] - y[:-1])).sum(1)
    others = logp.masked_fill(top, -torch.inf) - log_rest[:, None]  # given that it is not the top
    rival = others.amax(1).exp()
    lowest = rival / (1 + rival) * (1 + 1e-5)
    q = torch.maximum(wanted, lowest).clamp(1e-6, 1 - 1e-6)[:, None]
    return torch.where(top, q.log(), others + (-q).log1p()).log_softmax(-1)


_APPLY: Mapping[str, Callable[..., Tensor]] = {
    "temperature": lambda logp, temperature: (logp / temperature).log_softmax(-1),
    "vector": _apply_vector,
    "isotonic": _apply_isotonic,
    "identity": lambda logp: logp,
}


def _log_probs(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return torch.where(logp == -torch.inf, LOG_ZERO, logp)


def _odds(logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-odds of the top class [N], log-probability of not-it [N], and where it is [N, C]."""
    best = logp.argmax(1, keepdim=True)
    top = torch.arange(logp.shape[1], device=logp.device) == best
    log_rest = logp.masked_fill(top, -torch.inf).logsumexp(1)
    return logp.amax(1) - log_rest, log_rest, top


def _check_logits(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Log-probabilities [N, C] in float64 and labels [N], as arrays."""
    try:
        z = torch.as_tensor(logits).detach().cpu().double()
        y = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError("logits and labels must be arrays of numbers.") from error
    if z.ndim != 2 or z.shape[1] < 2 or y.shape != z.shape[:1] or len(y) == 0:
        raise ValueError(
            f"Scaling needs logits [N, C >= 2] and labels [N], at least one; "
            f"these are {tuple(z.shape)} and {tuple(y.shape)}."
        )
    if y.is_floating_point() or y.dtype == torch.bool or y.is_complex():
        raise ValueError(f"labels must be integer class ids, not {y.dtype}.")
    found = checked_logits(z)
    if int(y.min()) < 0 or int(y.max()) >= z.shape[1]:
        raise ValueError(
            f"labels must lie in 0..{z.shape[1] - 1}; found {int(y.min())}..{int(y.max())}."
        )
    return found, y.long().numpy()


def checked_logits(logits: Tensor) -> Any:
    """Log-probabilities [N, C] in float64 as an array."""
    z = logits.detach().cpu().double()
    if z.ndim != 2 or z.shape[1] < 2 or len(z) == 0:
        raise ValueError(f"Scaling needs logits [N, C >= 2]; these are {tuple(z.shape)}.")
    if bool(z.isnan().any()) or bool((z.amax(1).abs() == torch.inf).any()):
        raise ValueError("logits contain NaN, plus infinity, or a row without any finite value.")
    return _log_probs(z).numpy()


def _temperature(z: Any, y: Any, prior: float) -> float:
    """The temperature at which the slope of loss and prior, over 1 / temperature, is zero."""
    from scipy import optimize

    true = z[np.arange(len(y)), y]

    def slope(b: float) -> float:
        p = np.exp(log_softmax(b * z))
        return float(((p * z).sum(1) - true).sum() + prior * (1 - 1 / b))

    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    if slope(low) >= 0:
        return TEMPERATURES[1]
    if slope(high) <= 0:
        return TEMPERATURES[0]
    return 1 / float(optimize.brentq(slope, low, high, xtol=1e-12, rtol=1e-10))


def log_softmax(z: Any) -> Any:
    """Log-probabilities of an array [N, C]."""
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


class Agreement(NamedTuple):
    """How often two predictions of the same pictures agree, and how sure they are."""

    agree: float  # share of pictures whose classes are the same
    confidence: float  # mean over pictures and both predictions
    number: int


def agreement(first: Any, second: Any) -> Agreement:
    """Compare two sets of logits [N, C] of the same pictures, no labels needed.

    >>> agreement([[2.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [1.0, 0.0]]).agree
    0.5
    """
    a, b = _check_pair(first, second)
    same = float((a.argmax(1) == b.argmax(1)).mean())
    return Agreement(same, (_mean_confidence(a, 1.0) + _mean_confidence(b, 1.0)) / 2, len(a))


def agreement_temperature(
    first: Any, second: Any, *, of: Literal["both", "first"] = "both"
) -> Scaling:
    """The temperature at which mean confidence (of both, or the first) equals their agreement.

    Two networks trained apart (other seed, other labels) agree on average as often as they are
    right, if together they are calibrated class by class (Jiang et al., 2022, "Assessing
    generalization of SGD via disagreement"). Then this temperature makes mean confidence equal to
    accuracy, with no label at all.

    It fails where the two share mistakes: two views of one network agree on what that network
    gets wrong, so agreement overstates accuracy and the temperature is too cold. Views that are
    harder than the pictures to be predicted err the other way. Mean confidence is all that is
    matched: it says nothing about single bins.

    Agreement of one or under chance asks for a temperature of 0 or infinity; it stops at 0.05 and
    20. Before that, one picture more on either side is assumed (Laplace).
    """
    from scipy import optimize

    a, b = _check_pair(first, second)
    judged = (a, b) if of == "both" else (a,)
    wanted = (float((a.argmax(1) == b.argmax(1)).sum()) + 1) / (len(a) + 2)

    def surplus(log_heat: float) -> float:
        heat = float(np.exp(log_heat))
        return float(np.mean([_mean_confidence(z, heat) for z in judged])) - wanted

    low, high = (float(np.log(limit)) for limit in TEMPERATURES)
    if surplus(low) <= 0:  # falls with the temperature
        heat = TEMPERATURES[0]
    elif surplus(high) >= 0:
        heat = TEMPERATURES[1]
    else:
        heat = float(np.exp(optimize.brentq(surplus, low, high, xtol=1e-10)))
    return Scaling("temperature", {"temperature": heat}, 0)


def _mean_confidence(z: Any, heat: float) -> float:
    return float(np.exp(log_softmax(z / heat).max(1)).mean())


def _check_pair(first: Any, second: Any) -> tuple[Any, Any]:
    a, b = (checked_logits(torch.as_tensor(each)) for each in (first, second))
    if a.shape != b.shape:
        raise ValueError(
            f"Two predictions of the same pictures have the same shape; these are "
            f"{a.shape} and {b.shape}."
        )
    return a, b


Score = Literal["lac", "aps", "raps"]


class Conformal(NamedTuple):
    """A fitted rule: the classes whose score is at most the threshold, and always the first."""

    score: Score
    coverage: float
    threshold: float | None  # None: too few labels, every class is in every set
    labels: int  # how many the promise rests on
    missing: int  # how many more are needed before sets say anything
    penalty: float = 0.0  # raps: added for each rank past `free`
    free: int = 1
    seed: int | None = None  # randomised scores; None: repeatable ones
    cross_fitted: bool = False  # rests on sister models' predictions: approximate

    def sets(self, probs: Tensor) -> Tensor:
        """Which classes are in each picture's set: bool [N, C].

        The most probable class always is, so that no set is empty; that can only raise coverage.
        Randomised sets depend on the order of the rows.
        """
        if self.threshold is None:
            return torch.ones_like(probs, dtype=torch.bool)
        first = torch.arange(probs.shape[1], device=probs.device) == probs.argmax(1, keepdim=True)
        chance = _uniform_rows(len(probs), self.seed, 1).to(probs.device)
        return (
            scores(probs, self.score, self.penalty, self.free, chance) <= self.threshold
        ) | first

    def dump(self) -> dict[str, Any]:
        """Plain JSON; `load_conformal` reads it back."""
        return self._asdict()


def conformal(
    probs: Any,
    labels: Any,
    *,
    coverage: float = 0.9,
    score: Score = "lac",
    penalty: float = 0.1,
    free: int = 1,
    seed: int | None = None,
    cross_fitted: bool = False,
) -> Conformal:
    """Sets that hold the true class of a new picture with probability >= `coverage`.

    That probability is over the draw of the calibration labels and of the new picture together,
    which must be exchangeable (a random sample of the same pictures), and the labels must neither
    train the model nor choose its calibration. It is an average over pictures: a rare class or a
    hard kind of picture may be covered less.

    The threshold is the ceil((n + 1) coverage)-th smallest score of the n labels. With fewer than
    coverage / (1 - coverage) labels there is no such score; then sets are everything, and `missing`
    says how many labels are lacking.

    Args:
        probs: [N, C] calibrated probabilities of labelled pictures.
        labels: [N] their classes.
        coverage: the promise.
        score: `lac` (smallest sets on average), `aps` (larger sets where it is harder), or `raps`
            (aps with a price on long sets).
        penalty: raps: added to the score for each rank after the first `free` ones.
        free: raps: ranks that cost nothing.
        seed: randomises aps and raps: a class's own probability counts in a random part, as in
            the papers, which makes coverage exact. By default it counts not at all: a class's
            score is the mass of the classes above it. That is repeatable, and the first class,
            with score 0, is in every set of its own accord.
        cross_fitted: kept with the result: the predictions are out of fold, by sister models.
    """
    if score not in get_args(Score):
        raise ValueError(f"There is no score {score!r}; known: {', '.join(get_args(Score))}.")
    if not 0 < coverage < 1:
        raise ValueError(f"coverage is {coverage}, but it must lie between 0 and 1, both excluded.")
    if penalty < 0 or free < 0:
        raise ValueError("penalty and free must not be negative.")
    p, y = check(probs, labels)
    n = len(y)
    price = penalty if score == "raps" else 0.0
    table = scores(p, score, price, free, _uniform_rows(n, seed, 0).to(p.device))
    own = table.gather(1, y[:, None])[:, 0].double().sort().values
    rank = math.ceil((n + 1) * coverage - 1e-9)
    threshold = float(own[rank - 1]) if rank <= n else None
    missing = max(0, math.ceil(coverage / (1 - coverage) - 1e-9) - n)
    return Conformal(score, coverage, threshold, n, missing, price, free, seed, cross_fitted)


def scores(probs: Tensor, score: Score, penalty: float, free: int, own: Tensor) -> Tensor:
    """How unlikely each class is: float64 [N, C]; `own` is the counted share of its own mass."""
    p = probs.double()
    if score == "lac":
        return 1 - p
    ordered, order = p.sort(dim=1, descending=True, stable=True)
    above = ordered.cumsum(1) - ordered
    above[:, 0] = 0.0  # not a rounding error
    ranks = torch.arange(1, p.shape[1] + 1, device=p.device)
    ranked = above + own * ordered + penalty * (ranks - free).clamp_min(0)
    return torch.empty_like(p).scatter_(1, order, ranked)


def _uniform_rows(n: int, seed: int | None, stream: int) -> Tensor:
    """A number in [0, 1) for each row; calibration and new pictures have streams of their own."""
    if seed is None:
        return torch.zeros(1)
    return torch.from_numpy(np.random.default_rng((seed, stream)).random((n, 1)))


def load_conformal(saved: Any) -> Conformal:
    """From what `dump` gave; a ValueError in one sentence for anything else."""
    wrong = ValueError("The prediction sets (conformal) are malformed.")
    if not isinstance(saved, dict) or set(saved) != set(Conformal._fields):
        raise wrong
    threshold, seed = saved["threshold"], saved["seed"]
    if saved["score"] not in get_args(Score) or type(saved["cross_fitted"]) is not bool:
        raise wrong
    counts = [saved["labels"], saved["missing"], saved["free"], *([] if seed is None else [seed])]
    if any(type(value) is not int or value < 0 for value in counts):
        raise wrong
    values = [saved["coverage"], saved["penalty"], *([] if threshold is None else [threshold])]
    if not are_numbers(values) or not 0 < saved["coverage"] < 1:
        raise wrong
    return Conformal(**saved)


class Selective(NamedTuple):
    """Answer when confidence >= threshold; None promises nothing, so nothing is sure."""

    threshold: float | None
    coverage: float  # share of the labels that lie at or above the threshold
    bound: float  # accuracy there is at least this, with the certainty asked for
    labels: int  # how many the promise rests on
    missing: int  # how many more are needed before any promise is possible
    accuracy: float = 0.95
    certainty: float = 0.95
    cross_fitted: bool = False  # rests on sister models' predictions: approximate

    def dump(self) -> dict[str, Any]:
        """Plain JSON; `load_selective` reads it back."""
        return self._asdict()


def needed(accuracy: float = 0.95, certainty: float = 0.95) -> int:
    """How many labels without an error show it: the first n with accuracy^n <= 1 - certainty.

    >>> needed(0.95, 0.95)
    59
    """
    return math.ceil(math.log1p(-certainty) / math.log(accuracy) - 1e-9)


def selective(
    confidence: Any,
    right: Any,
    *,
    accuracy: float = 0.95,
    certainty: float = 0.95,
    cross_fitted: bool = False,
) -> Selective:
    """The lowest threshold at which answers are right often enough, promised with certainty.

    In at least `certainty` of the draws of labels the threshold found has accuracy >= `accuracy`
    on new pictures of the same kind, or is None. The labels must be a random sample of those
    pictures, and neither train the model nor choose its calibration.

    Args:
        confidence: [N] top confidence of each labelled picture.
        right: [N] whether the top class was right.
        accuracy: wanted among answered pictures.
        certainty: how sure to be of it.
        cross_fitted: kept with the result: the predictions are out of fold, by sister models.
    """
    for name, value in (("accuracy", accuracy), ("certainty", certainty)):
        if not 0 < value < 1:
            raise ValueError(f"{name} is {value}, but it must lie between 0 and 1, both excluded.")
    c, r = _check_right(confidence, right)
    n = len(c)
    k = _reached(c, ~r, 1 - accuracy, 1 - certainty)
    if k == 0:
        missing = max(0, needed(accuracy, certainty) - n)
        return Selective(None, 0.0, 0.0, n, missing, accuracy, certainty, cross_fitted)
    from scipy import special

    order = np.argsort(-c, kind="stable")[:k]
    hits = int(r[order].sum())
    bound = float(special.betaincinv(hits, k - hits + 1, 1 - certainty))
    threshold = float(c[order[-1]])
    return Selective(threshold, k / n, bound, n, 0, accuracy, certainty, cross_fitted)


def _reached(confidence: Any, wrong: Any, error: float, doubt: float) -> int:
    """How many of the most confident labels the walks get to; 0: nowhere."""
    from scipy import special

    n = len(confidence)
    starts = _starts(n, error, doubt)
    if not starts:
        return 0
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order]
    last = np.append(ordered[1:] != ordered[:-1], True)  # tied labels are answered together
    ks = np.flatnonzero(last) + 1
    errors = np.cumsum(wrong[order])[ks - 1]
    passed = special.bdtr(errors, ks, error) <= doubt / len(starts)
    furthest = 0
    for start in starts:
        first = int(np.searchsorted(ks, start))
        walk = passed[first:]
        steps = len(walk) if walk.all() else int(np.argmin(walk))
        if steps:
            furthest = max(furthest, int(ks[first + steps - 1]))
    return furthest


def _starts(n: int, error: float, doubt: float) -> list[int]:
    """Where walks begin: the fewest labels that can be enough, doubled while there are as many."""
    starts: list[int] = []
    for walks in range(1, 65):
        least = needed(1 - error, 1 - doubt / walks)
        if least * 2 ** (walks - 1) > n:
            break
        starts = [least * 2**i for i in range(walks)]
    return starts


def _check_right(confidence: Any, right: Any) -> tuple[Any, Any]:
    c, r = np.asarray(confidence, dtype=np.float64), np.asarray(right)
    if c.ndim != 1 or r.shape != c.shape:
        raise ValueError(f"confidence and right must be [N] both, not {c.shape} and {r.shape}.")
    if not np.isfinite(c).all() or (len(c) and (c.min() < 0 or c.max() > 1 + 1e-6)):
        raise ValueError("confidence must be numbers between 0 and 1.")
    if not np.isin(r, (0, 1)).all():
        raise ValueError("right must be True or False for each picture.")
    return c, r.astype(bool)


def load_selective(saved: Any) -> Selective:
    """From what `dump` gave; a ValueError in one sentence for anything else."""
    wrong = ValueError("The operating point (selective) is malformed.")
    if not isinstance(saved, dict) or set(saved) != set(Selective._fields):
        raise wrong
    shares = [saved[key] for key in ("coverage", "bound", "accuracy", "certainty")]
    threshold = saved["threshold"]
    shares += [] if threshold is None else [threshold]
    if not are_numbers(shares) or not all(0 <= value <= 1 + 1e-6 for value in shares):
        raise wrong
    counts = [saved["labels"], saved["missing"]]
    if any(type(v) is not int or v < 0 for v in counts) or type(saved["cross_fitted"]) is not bool:
        raise wrong
    return Selective(**saved)
