"""Temperature, vector and isotonic scaling: fitted on held-out labels, applied to any logits.

Every scaling first turns its input into log-probabilities, so logits and log-probabilities give
the same result, and all of it is tensor expressions, so a scaling is exported with its model.
SciPy and scikit-learn are imported where something is fitted: prediction starts a second earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

RANGE = (0.05, 20.0)  # of temperatures; the likelihood alone may ask for 0 or infinity
ZERO = -104.0  # what a log-probability of minus infinity counts as: float32's smallest number
GRID = 16.0  # isotonic: steps per unit of log-odds
REACH = 16.0  # isotonic: log-odds beyond +-16 (probability 1e-7) are not told apart
KNOTS = 1 + 2 * round(REACH * GRID)
PRIOR = 2.0  # crossfit_temperature: weight of the prior


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
    return Scaling("identity", labels=len(_check(logits, labels)[1]))


def temperature(logits: Any, labels: Any) -> Scaling:
    """Logits divided by the one number that makes the labels most likely (Guo et al., 2017).

    The loss is convex in 1 / temperature, so the minimum is found exactly. Where the labels ask
    for 0 (all right) or infinity (all wrong), it stops at 0.05 or 20.
    """
    z, y = _check(logits, labels)
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
    z, y = _check(out_of_fold_logits, labels)
    return Scaling("temperature", {"temperature": _temperature(z, y, PRIOR)}, len(y))


def vector(logits: Any, labels: Any) -> Scaling:
    """Each class its own factor and shift of its log-probability; may change the answer.

    Shrunk towards plain temperature scaling, with the weight of one label for each number, so that
    few labels, rare classes and separable ones do no harm.
    """
    from scipy import optimize

    z, y = _check(logits, labels)
    classes, n = z.shape[1], len(y)
    start = np.concatenate([np.full(classes, 1 / _temperature(z, y, PRIOR)), np.zeros(classes)])
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

    bounds = [(0.0, 1 / RANGE[0])] * classes + [(None, None)] * classes
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

    z, y = _check(logits, labels)
    n = len(y)
    odds = _odds(torch.from_numpy(z))[0].numpy().clip(-REACH, REACH)
    right = (z.argmax(1) == y).astype(np.float64)
    curve = IsotonicRegression(y_min=1 / (n + 2), y_max=(n + 1) / (n + 2), out_of_bounds="clip")
    curve.fit(np.round(odds * GRID) / GRID, right)
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
    z, y = _check(logits, labels)
    if not 2 <= folds <= len(y):
        raise ValueError(f"folds is {folds}, but it must lie between 2 and the {len(y)} labels.")
    fold = np.random.default_rng(seed).permutation(len(y)) % folds
    heat = np.array([_temperature(z[fold != k], y[fold != k], 0.0) for k in range(folds)])
    return torch.from_numpy(log_softmax(z / heat[fold, None]))


def oracle_scaled(logits: Any, labels: Any) -> Tensor:
    """Log-probabilities at the temperature the same labels chose: optimistic, a lower limit."""
    z, y = _check(logits, labels)
    return torch.from_numpy(log_softmax(z / _temperature(z, y, 0.0)))


def load(saved: Any) -> Scaling:
    """A scaling from what `dump` gave; a ValueError in one sentence for anything else."""
    kind = saved.get("kind") if isinstance(saved, dict) else None
    if not isinstance(kind, str) or kind not in _APPLY:
        raise ValueError(f"A calibration names one of {', '.join(_APPLY)} as its kind.")
    values = {key: value for key, value in saved.items() if key not in ("kind", "labels")}
    labels = saved.get("labels", 0)
    if type(labels) is not int or labels < 0:
        raise ValueError("The calibration says a number of labels that is none.")
    if not _KEYS[kind](values):
        raise ValueError(f"The {kind} calibration is malformed.")
    return Scaling(kind, values, labels)


def _fine_temperature(values: Mapping[str, Any]) -> bool:
    if set(values) != {"temperature"} or not numbers([values["temperature"]]):
        return False
    return bool(RANGE[0] <= values["temperature"] <= RANGE[1])


def _fine_vector(values: Mapping[str, Any]) -> bool:
    return set(values) == {"factor", "shift"} and _pair(values["factor"], values["shift"])


def _fine_isotonic(values: Mapping[str, Any]) -> bool:
    if set(values) != {"odds", "right"} or not _pair(values["odds"], values["right"]):
        return False
    odds, right = np.array(values["odds"]), np.array(values["right"])
    apart = 0.5 / GRID  # nearer knots would make a jump
    rising = bool((np.diff(odds) > apart).all() and (np.diff(right) >= 0).all())
    return rising and len(odds) <= KNOTS and bool(right[0] > 0 and right[-1] < 1)


def _pair(first: Any, second: Any) -> bool:
    return numbers(first) and numbers(second) and len(first) == len(second) > 0


def numbers(values: Any) -> bool:
    """Whether this is a list of finite numbers."""
    return isinstance(values, list) and all(
        type(v) in (int, float) and abs(v) < 1e9 and math.isfinite(v) for v in values
    )


_KEYS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "temperature": _fine_temperature,
    "vector": _fine_vector,
    "isotonic": _fine_isotonic,
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
    return torch.where(logp == -torch.inf, ZERO, logp)


def _odds(logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-odds of the top class [N], log-probability of not-it [N], and where it is [N, C]."""
    best = logp.argmax(1, keepdim=True)
    top = torch.arange(logp.shape[1], device=logp.device) == best
    log_rest = logp.masked_fill(top, -torch.inf).logsumexp(1)
    return logp.amax(1) - log_rest, log_rest, top


def _check(logits: Any, labels: Any) -> tuple[Any, Any]:
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

    low, high = 1 / RANGE[1], 1 / RANGE[0]
    if slope(low) >= 0:
        return RANGE[1]
    if slope(high) <= 0:
        return RANGE[0]
    return 1 / float(optimize.brentq(slope, low, high, xtol=1e-12, rtol=1e-10))


def log_softmax(z: Any) -> Any:
    """Log-probabilities of an array [N, C]."""
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))
