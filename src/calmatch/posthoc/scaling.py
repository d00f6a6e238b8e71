"""Scalings: probabilities corrected after training, by held-out labels or without any.

Every scaling first turns its input into log-probabilities, so logits and log-probabilities give
the same result, and all of it is tensor expressions, so a scaling is exported with its model.
SciPy and scikit-learn are imported where something is fitted: prediction starts sooner."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

TEMPERATURES = (0.05, 20.0)  # limits; the likelihood alone may ask for 0 or infinity
LOG_ZERO = -104.0  # what a log-probability of minus infinity counts as: float32's smallest number
ODDS_STEPS = 16.0  # isotonic: steps per unit of log-odds
ODDS_LIMIT = 16.0  # isotonic: log-odds beyond +-16 (probability 1e-7) count as that
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

    Row i must be predicted by a model that was NOT trained on label i (out of fold): a model fits
    its own training labels, so they would make it look better calibrated than it is.

    Of labels that are all right the likelihood alone asks for 0, certainty. So b = 1 / temperature
    gets a Gamma prior with its mode at 1 and weight 2: the penalty 2 (b - 1 - log b) on the summed
    loss, convex. It stops mattering after some dozens of labels. Fold models saw fewer labels than
    the final one, so the temperature is, if anything, too warm for it.
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
    scikit-learn's, over the log-odds of the confidence rounded to 1/16 (else two near-equal labels
    make a jump, and rounding on another device crosses it), and it claims no more than n labels
    can show: between 1 / (n + 2) and (n + 1) / (n + 2).
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
    if not are_counts([labels]):
        raise ValueError("The calibration says a number of labels that is none.")
    if not _are_settings(kind, values):
        raise ValueError(f"The {kind} calibration is malformed.")
    return Scaling(kind, values, labels)


def _are_settings(kind: str, values: Mapping[str, Any]) -> bool:
    """Whether a scaling of this kind can work with these values."""
    if kind == "identity":
        return not values
    if kind == "temperature":
        heat: Any = values.get(kind)
        fine = are_numbers([heat]) and TEMPERATURES[0] <= heat <= TEMPERATURES[1]
        return fine and len(values) == 1
    names = ("odds", "right") if kind == "isotonic" else ("factor", "shift")
    first, second = (values.get(name) for name in names)
    if set(values) != set(names) or not (are_numbers(first) and are_numbers(second)):
        return False
    x, y = np.array(first), np.array(second)
    if kind == "vector" or len(x) != len(y) or len(x) == 0:
        return len(x) == len(y) > 0
    apart = 0.5 / ODDS_STEPS  # nearer knots would make a jump
    rising = bool((np.diff(x) > apart).all() and (np.diff(y) >= 0).all())
    return rising and len(x) <= KNOTS and bool(y[0] > 0 and y[-1] < 1)


def are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(v) in (int, float) and abs(v) < 1e9 and math.isfinite(v) for v in values
    )


def are_counts(values: list[Any]) -> bool:
    return all(type(v) is int and v >= 0 for v in values)


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
    best = logp.argmax(1, keepdim=True)
    top = torch.arange(logp.shape[1], device=logp.device) == best
    log_rest = logp.masked_fill(top, -torch.inf).logsumexp(1)
    return logp.amax(1) - log_rest, log_rest, top


def check_logits(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Log-probabilities [N, C] in float64 and labels [N], as arrays."""
    try:
        z, y = torch.as_tensor(logits).detach().cpu(), torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError("logits and labels must be arrays of numbers.") from error
    if z.ndim != 2 or z.shape[1] < 2 or y.shape != z.shape[:1] or len(y) == 0:
        raise ValueError(
            f"Scaling needs logits [N, C >= 2] and labels [N], at least one; "
            f"these are {tuple(z.shape)} and {tuple(y.shape)}."
        )
    if y.is_floating_point() or y.dtype == torch.bool or y.is_complex():
        raise ValueError(f"labels must be integer class ids, not {y.dtype}.")
    log_probs, low, high = check_log_probs(z), int(y.min()), int(y.max())
    if low < 0 or high >= z.shape[1]:
        raise ValueError(f"labels must lie in 0..{z.shape[1] - 1}; found {low}..{high}.")
    return log_probs, y.long().numpy()


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


def agreement_temperature(first: Any, second: Any) -> Scaling:
    """The temperature at which mean confidence of both equals their agreement; without labels.

    Networks trained apart agree about as often as they are right (Jiang et al., 2022); where they
    share mistakes it is too cold (docs/beyond.md). One image more on either side is assumed.
    """
    a, b = (check_log_probs(torch.as_tensor(each)) for each in (first, second))
    if a.shape != b.shape:
        shapes = f"{a.shape} and {b.shape}"
        raise ValueError(f"Predictions of the same pictures have the same shape, not {shapes}.")
    wanted = (float((a.argmax(1) == b.argmax(1)).sum()) + 1) / (len(a) + 2)
    return Scaling("temperature", {"temperature": matching_temperature((a, b), wanted)}, 0)


def matching_temperature(log_probs: Sequence[Any], confidence: float) -> float:
    """The temperature at which the mean top confidence of all is as asked for, 0.05 to 20."""
    from scipy import optimize

    def surplus(log_heat: float) -> float:
        tops = [np.exp(log_softmax(z / np.exp(log_heat)).max(1)).mean() for z in log_probs]
        return float(np.mean(tops)) - confidence

    low, high = (float(np.log(limit)) for limit in TEMPERATURES)
    if surplus(low) <= 0:  # falls with the temperature
        return TEMPERATURES[0]
    if surplus(high) >= 0:
        return TEMPERATURES[1]
    return float(np.exp(optimize.brentq(surplus, low, high, xtol=1e-10)))
