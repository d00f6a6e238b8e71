"""Confidence corrected after training: scalings, prediction sets, and when to say "not sure".

Every scaling first turns its input into log-probabilities, so logits and log-probabilities give
the same result, and all of it is tensor expressions, so a scaling is exported with its model.
SciPy and scikit-learn are imported where something is fitted: prediction starts sooner."""

import importlib
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from calmatch import ops, spec

if TYPE_CHECKING:
    from calmatch.posthoc.few import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """What `few` holds; prediction does without it."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("calmatch.posthoc.few"), name)


TEMPERATURES = (0.05, 20.0)  # limits; the likelihood alone may ask for 0 or infinity
LOG_ZERO = -104.0  # what a log-probability of minus infinity counts as: float32's smallest number
ODDS_STEPS = 16.0  # isotonic: steps per unit of log-odds
ODDS_LIMIT = 16.0  # isotonic: log-odds beyond +-16 (probability 1e-7) count as that
KNOTS = 1 + 2 * round(ODDS_LIMIT * ODDS_STEPS)
PRIOR_WEIGHT = 2.0  # crossfit_temperature: weight of the prior
TRUST = 0.045  # semi_conformal: how far mean probabilities of a few-label fit may be off
Score = Literal["lac", "aps", "raps"]


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
    return Scaling("identity", labels=len(check_logits(logits, labels)[1]))


def temperature(logits: Any, labels: Any) -> Scaling:
    """Logits divided by the one number that makes the labels most likely (Guo et al., 2017).

    The loss is convex in 1 / temperature, so the minimum is found exactly. Where the labels ask
    for 0 (all right) or infinity (all wrong), it stops at 0.05 or 20.
    """
    z, y = check_logits(logits, labels)
    return Scaling("temperature", {"temperature": _temperature(z, y, 0.0)}, len(y))


def crossfit_temperature(out_of_fold_logits: Any, labels: Any) -> Scaling:
    """Temperature from very few labels, shrunk towards 1.

    Row i must be predicted by a model that was NOT trained on label i (out of fold). Of labels that
    are all right the likelihood alone asks for 0, certainty. So b = 1 / temperature gets a Gamma
    prior with its mode at 1 and weight 2: 2 (b - 1 - log b), which some dozens of labels outweigh.
    """
    z, y = check_logits(out_of_fold_logits, labels)
    return Scaling("temperature", {"temperature": _temperature(z, y, PRIOR_WEIGHT)}, len(y))


def vector(logits: Any, labels: Any) -> Scaling:
    """Each class its own factor and shift of its log-probability; may change the answer.

    Shrunk towards plain temperature scaling, with the weight of one label for each number, so that
    few labels, rare classes and separable ones do no harm.
    """
    from scipy import optimize

    z, y = check_logits(logits, labels)
    classes, n = z.shape[1], len(y)
    plain = np.full(classes, 1 / _temperature(z, y, PRIOR_WEIGHT))
    start = np.concatenate([plain, np.zeros(classes)])
    truth = np.eye(classes)[y]

    def loss(numbers: Any) -> tuple[float, Any]:
        factor, shift = numbers[:classes], numbers[classes:]
        logp = log_softmax(z * factor + shift)
        rest = np.exp(logp) - truth
        away = numbers - start
        value = -float((truth * logp).sum()) + 0.5 * float(away @ away)
        slope = np.concatenate([(rest * z).sum(0), rest.sum(0)]) + away
        return value / n, slope / n

    bounds = [(0.0, 1 / TEMPERATURES[0])] * classes + [(None, None)] * classes
    best = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    values = {"factor": best[:classes].tolist(), "shift": best[classes:].tolist()}
    return Scaling("vector", values, n)


def isotonic(logits: Any, labels: Any) -> Scaling:
    """The top class's confidence through a rising curve; the others share what is left.

    The answer never changes: confidence is not lowered beneath the runner-up's. The curve is
    scikit-learn's, over log-odds rounded to 1/16 (rounding on another device crosses no jump), and
    claims no more than n labels can show: between 1 / (n + 2) and (n + 1) / (n + 2).
    """
    from sklearn.isotonic import IsotonicRegression

    z, y = check_logits(logits, labels)
    n = len(y)
    odds = _odds(torch.from_numpy(z))[0].numpy().clip(-ODDS_LIMIT, ODDS_LIMIT)
    right = (z.argmax(1) == y).astype(np.float64)
    curve = IsotonicRegression(y_min=1 / (n + 2), y_max=(n + 1) / (n + 2), out_of_bounds="clip")
    curve.fit(np.round(odds * ODDS_STEPS) / ODDS_STEPS, right)
    values = {"odds": curve.X_thresholds_.tolist(), "right": curve.y_thresholds_.tolist()}
    return Scaling("isotonic", values, n)


SCALINGS: Mapping[str, Callable[[Any, Any], Scaling]] = {
    scaling.__name__: scaling for scaling in (temperature, vector, isotonic, identity)
}


def temperature_scaled(logits: Any, labels: Any, *, folds: int = 2, seed: int = 0) -> Tensor:
    """Temperature-scaled log-probabilities [N, C] of a test set, each fold by the other folds.

    For tables: no image's label chose its own temperature, so the result is held-out.
    """
    z, y = check_logits(logits, labels)
    if not 2 <= folds <= len(y):
        raise ValueError(f"folds is {folds}, but it must lie between 2 and the {len(y)} labels.")
    fold = np.random.default_rng(seed).permutation(len(y)) % folds
    heat = np.array([_temperature(z[fold != k], y[fold != k], 0.0) for k in range(folds)])
    return torch.from_numpy(log_softmax(z / heat[fold, None]))


def oracle_scaled(logits: Any, labels: Any) -> Tensor:
    """Log-probabilities at the temperature the same labels chose: optimistic, a lower limit."""
    z, y = check_logits(logits, labels)
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
    if not _are_settings(kind, values):
        raise ValueError(f"The {kind} calibration is malformed.")
    return Scaling(kind, values, labels)


def _are_settings(kind: str, values: Mapping[str, Any]) -> bool:
    """Whether a scaling of this kind can work with these values."""
    if kind == "identity":
        return not values
    if kind == "temperature":
        numbers, (low, high) = [*values.values()], TEMPERATURES
        return set(values) == {kind} and are_numbers(numbers) and low <= numbers[0] <= high
    names = ("odds", "right") if kind == "isotonic" else ("factor", "shift")
    if set(values) != set(names) or not all(are_numbers(values[name]) for name in names):
        return False
    x, y = (np.array(values[name]) for name in names)
    if kind == "vector" or len(x) != len(y) or len(x) == 0:
        return len(x) == len(y) > 0
    apart = 0.5 / ODDS_STEPS  # nearer knots would make a jump
    rising = bool((np.diff(x) > apart).all() and (np.diff(y) >= 0).all())
    return rising and len(x) <= KNOTS and bool(y[0] > 0 and y[-1] < 1)


def are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(v) in (int, float) and abs(v) < 1e9 and math.isfinite(v) for v in values
    )


def _apply_isotonic(logp: Tensor, odds: list[float], right: list[float]) -> Tensor:
    place, log_rest, top = _odds(logp)
    x, y = logp.new_tensor(odds), logp.new_tensor(right)
    # A sum of ramps, one for each piece of the curve: plain arithmetic, which every runtime has.
    ramps = ((place[:, None] - x[:-1]) / (x[1:] - x[:-1])).clamp(0, 1)
    wanted = y[0] + (ramps * (y[1:] - y[:-1])).sum(1)
    others = logp.masked_fill(top, -torch.inf) - log_rest[:, None]  # if it is not the top class
    rival = others.amax(1).exp()
    lowest = rival / (1 + rival) * (1 + 1e-5)
    q = torch.maximum(wanted, lowest).clamp(1e-6, 1 - 1e-6)[:, None]
    return torch.where(top, q.log(), others + (-q).log1p()).log_softmax(-1)


_APPLY: Mapping[str, Callable[..., Tensor]] = {
    "temperature": lambda logp, temperature: (logp / temperature).log_softmax(-1),
    "vector": lambda logp, factor, shift: (
        logp * logp.new_tensor(factor) + logp.new_tensor(shift)
    ).log_softmax(-1),
    "isotonic": _apply_isotonic,
    "identity": lambda logp: logp,
}


def _log_probs(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return torch.where(logp == -torch.inf, LOG_ZERO, logp)


def _odds(logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-odds of the top class [N], log-probability of not-it [N], and where it is [N, C]."""
    top = _first(logp)
    log_rest = logp.masked_fill(top, -torch.inf).logsumexp(1)
    return logp.amax(1) - log_rest, log_rest, top


def _first(scores: Tensor) -> Tensor:
    """Where the most probable class is: bool [N, C]."""
    return torch.arange(scores.shape[1], device=scores.device) == scores.argmax(1, keepdim=True)


def check_logits(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Log-probabilities [N, C] in float64 and labels [N], as arrays."""
    try:
        z, y = torch.as_tensor(logits).detach().cpu(), torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError("logits and labels must be arrays of numbers.") from error
    if z.ndim != 2 or z.shape[1] < 2 or y.shape != z.shape[:1] or len(y) == 0:
        shapes = f"at least one; these are {tuple(z.shape)} and {tuple(y.shape)}"
        raise ValueError(f"Scaling needs logits [N, C >= 2] and labels [N], {shapes}.")
    return check_log_probs(z), ops.check_ids(y, z.shape[1]).numpy()


def check_log_probs(logits: Tensor) -> Any:
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
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def mean_confidence(z: Any, heat: float) -> float:
    """Of the top class at a temperature."""
    return float(np.exp(log_softmax(z / heat).max(1)).mean())


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
    cross_fitted: bool = False  # rests on fold models' predictions: approximate

    def sets(self, probs: Tensor) -> Tensor:
        """Which classes are in each image's set, the first one always: bool [N, C]."""
        if self.threshold is None:
            return torch.ones_like(probs, dtype=torch.bool)
        own = _uniform_rows(probs.shape[0], self.seed, 1).to(probs.device)
        table = scores(probs, self.score, self.penalty, self.free, own)
        return (table <= self.threshold) | _first(probs)


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
    """Sets that hold the true class of a new image with probability >= `coverage`.

    That probability is over the sample of the calibration labels (calibrated probs [N, C], labels
    [N]) and of the new image together, which must be exchangeable (a random sample of the same
    images), and the labels must neither train the model nor choose its calibration. It is an
    average over images: a rare class or a hard kind of image may be covered less. With fewer than
    coverage / (1 - coverage) labels sets are everything; `missing` says how many are lacking.

    Args:
        score: `lac` (smallest sets on average), `aps` (larger sets where it is harder), or `raps`
            (aps with `penalty` added for each rank after the first `free` ones).
        seed: a class's own probability counts in a random part, as in the papers of aps and raps:
            coverage is exact. By default it does not count, which is repeatable.
        cross_fitted: noted in the result: the predictions are out of fold, by fold models.
    """
    if score not in get_args(Score):
        raise ValueError(f"There is no score {score!r}; known: {', '.join(get_args(Score))}.")
    if not 0 < coverage < 1:
        raise ValueError(f"coverage is {coverage}, but it must lie between 0 and 1, both excluded.")
    if penalty < 0 or free < 0:
        raise ValueError("penalty and free must not be negative.")
    from calmatch.metrics import check  # prediction does without

    p, y = check(probs, labels)
    n = len(y)
    price = penalty if score == "raps" else 0.0
    table = scores(p, score, price, free, _uniform_rows(n, seed, 0).to(p.device))
    own = table.gather(1, y[:, None])[:, 0].double().sort().values
    rank = math.ceil((n + 1) * coverage - 1e-9)
    threshold = float(own[rank - 1]) if rank <= n else None
    missing = max(0, math.ceil(coverage / (1 - coverage) - 1e-9) - n)
    return Conformal(score, coverage, threshold, n, missing, price, free, seed, cross_fitted)


def semi_conformal(
    probs: Any, labels: Any, free: Any, *, coverage: float = 0.9, cross_fitted: bool = True
) -> Conformal:
    """Sets by the probabilities of unlabelled images, corrected by the labelled ones.

    If probabilities are right, coverage at a threshold is the mean probability in the sets, known
    well from many unlabelled images (free, [N, C]). What the labels (probs [n, C]) show above it is
    added with a weight that grows with n from 0 to 1. Many labels: asymptotically exact, whatever
    the probabilities. Few: as good as these, and steadier than `conformal`, whose promise for n
    labels is exact on average over draws, not for the draw at hand. Score: lac.
    """
    from calmatch.metrics import check

    p, y = check(probs, labels)
    steps = np.linspace(0, 1, 1001)
    own = (1 - p.double().gather(1, y[:, None])[:, 0]).cpu().numpy()
    hits = (own[:, None] <= steps + 1e-9).mean(0)
    share = TRUST**2 / (TRUST**2 + coverage * (1 - coverage) / len(y))
    claimed = _mass(np.asarray(free, dtype=np.float64), steps)
    covered = claimed + share * (hits - _mass(p.cpu().numpy().astype(np.float64), steps))
    enough = np.flatnonzero(covered >= coverage)
    threshold = float(steps[enough[0]]) if len(enough) else 1.0
    return Conformal("lac", coverage, threshold, len(y), 0, cross_fitted=cross_fitted)


def _mass(probs: Any, steps: Any) -> Any:
    """Mean over images of the probability of all classes whose score is within each step."""
    flat = probs.ravel()
    places = np.searchsorted(steps + 1e-9, 1 - flat)
    return np.bincount(places, flat, len(steps) + 1).cumsum()[: len(steps)] / len(probs)


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
    """A number in [0, 1) for each row; calibration and new images have streams of their own."""
    if seed is None:
        return torch.zeros(1)
    return torch.from_numpy(np.random.default_rng((seed, stream)).random((n, 1)))


class Selective(NamedTuple):
    """Answer when confidence >= threshold; None promises nothing, so nothing is sure."""

    threshold: float | None
    coverage: float  # share of the labels that lie at or above the threshold
    bound: float  # accuracy there is at least this, with the certainty asked for
    labels: int  # how many the promise rests on
    missing: int  # how many more are needed before any promise is possible
    accuracy: float = 0.95
    certainty: float = 0.95
    cross_fitted: bool = False  # rests on fold models' predictions: approximate
    learned: bool = False  # rests on a prior learned over other datasets; coverage is of unlabelled

    def describe(self) -> str:
        """When it answers, or what is missing before it may promise."""
        accuracy, certainty = f"{self.accuracy:.0%}", f"{self.certainty:.0%}"
        if self.threshold is None:
            why = ": even its surest answers are wrong too often. More labels help."
            if self.learned:
                why = " yet: more labels help."
            elif self.missing:
                why = f" yet: of evaluated labels it lacks at least {self.missing}."
            start = f"It cannot promise {accuracy} accuracy with {certainty} certainty"
            return f"{start} at any confidence{why} Until then every answer is marked not sure."
        level = f"{self.threshold:.{2 if self.threshold < 0.995 else 4}f}"
        where = f"Where its confidence is {level} or more ({self.coverage:.0%} of the "
        if self.learned:
            return (
                f"{where}unlabelled pictures), at least {accuracy} of its answers are right, as "
                f"{certainty} of fits to other sets of pictures were; below: not sure."
            )
        rough = " The labels were cross-fitted, so it is approximate." if self.cross_fitted else ""
        return (
            f"{where}held-out labels), it is right at least {accuracy} of the time, with "
            f"{certainty} certainty; below, it says: not sure.{rough}"
        )


def selective(
    confidence: Any,
    right: Any,
    *,
    accuracy: float = 0.95,
    certainty: float = 0.95,
    cross_fitted: bool = False,
) -> Selective:
    """The lowest threshold at which answers are right often enough, promised with certainty.

    `confidence` [N] is that of the top class of each labelled image, `right` [N] whether it was
    right. In at least `certainty` of the samples of labels the threshold has accuracy >= `accuracy`
    on new images of the same kind, or is None. The labels must be a random sample of those images,
    and neither train the model nor choose its calibration. `cross_fitted` is noted in the result:
    the predictions are out of fold, by fold models.
    """
    for name, value in (("accuracy", accuracy), ("certainty", certainty)):
        if not 0 < value < 1:
            raise ValueError(f"{name} is {value}, but it must lie between 0 and 1, both excluded.")
    c, hits = np.asarray(confidence, dtype=np.float64), np.asarray(right)
    if c.ndim != 1 or hits.shape != c.shape:
        raise ValueError(f"confidence and right must be [N] both, not {c.shape} and {hits.shape}.")
    if not np.isfinite(c).all() or (len(c) and (c.min() < 0 or c.max() > 1 + 1e-6)):
        raise ValueError("confidence must be numbers between 0 and 1.")
    if not np.isin(hits, (0, 1)).all():
        raise ValueError("right must be True or False for each picture.")
    n, order = len(c), np.argsort(-c, kind="stable")
    c, hits = c[order], hits[order].astype(bool)
    k = _answered(c, ~hits, 1 - accuracy, 1 - certainty)
    if k == 0:
        missing = max(0, needed(accuracy, certainty) - n)
        return Selective(None, 0.0, 0.0, n, missing, accuracy, certainty, cross_fitted)
    from scipy import special

    correct = int(hits[:k].sum())
    bound = float(special.betaincinv(correct, k - correct + 1, 1 - certainty))
    return Selective(float(c[k - 1]), k / n, bound, n, 0, accuracy, certainty, cross_fitted)


def needed(accuracy: float = 0.95, certainty: float = 0.95) -> int:
    """How many labels without an error show it: the first n with accuracy^n <= 1 - certainty.

    >>> needed(0.95, 0.95)
    59
    """
    return math.ceil(math.log1p(-certainty) / math.log(accuracy) - 1e-9)


def _answered(ordered: Any, wrong: Any, error: float, doubt: float) -> int:
    """How many of the most confident labels fixed-sequence tests can answer; 0: none."""
    from scipy import special

    starts = _starts(len(ordered), error, doubt)
    if not starts:
        return 0
    last = np.append(ordered[1:] != ordered[:-1], True)  # tied labels are answered together
    ks = np.flatnonzero(last) + 1
    passed = special.bdtr(np.cumsum(wrong)[ks - 1], ks, error) <= doubt / len(starts)
    furthest = 0
    for start in starts:
        first = int(np.searchsorted(ks, start))
        walk = passed[first:]
        steps = len(walk) if walk.all() else int(np.argmin(walk))
        if steps:
            furthest = max(furthest, int(ks[first + steps - 1]))
    return furthest


def _starts(n: int, error: float, doubt: float) -> list[int]:
    """Where tests begin: the fewest labels that can be enough, doubled while there are as many."""
    starts: list[int] = []
    for walks in range(1, 65):
        least = needed(1 - error, 1 - doubt / walks)
        if least * 2 ** (walks - 1) > n:
            break
        starts = [least * 2**i for i in range(walks)]
    return starts


Rule = TypeVar("Rule", Conformal, Selective)


def load_rule(saved: Any, kind: type[Rule]) -> Rule:
    """From a model file; fields that an older version did not know have defaults."""
    what, shares = "prediction sets (conformal) are", ["coverage"]
    if kind is Selective:
        what = "operating point (selective) is"
        shares += ["bound", "accuracy", "certainty", "threshold"]
    with suppress(TypeError, ValueError, AttributeError):
        rule: Rule = spec.read_as(saved, kind)
        inside = all(0 <= (getattr(rule, share) or 0) <= 1 + 1e-6 for share in shares)
        useful = kind is Selective or 0 < rule.coverage < 1
        numbers = [value for value in rule if isinstance(value, float)]
        if inside and useful and set(saved) <= set(kind._fields) and are_numbers(numbers):
            return rule
    raise ValueError(f"The {what} malformed.")
