"""When to answer: the lowest confidence at which a wanted accuracy is promised, or no promise.

Learn then Test (Angelopoulos et al., 2021) over the labels sorted by confidence. Among the k most
confident labels, w are wrong. "Accuracy above the k-th confidence is below the target" is rejected
when so few errors would be rare: P(Binomial(k, 1 - accuracy) <= w) <= 1 - certainty. One walks from
the most confident labels down and stops at the first k that is not rejected.

Why walking over sorted labels is valid. Let t be the highest bad threshold. The labels above it are
a plain random sample of the pictures above it, of which exactly 1 - accuracy are wrong (where
confidence is continuous). Their number is one of the k that are tested, every worse k comes after
it, and it is rejected by mistake with probability 1 - certainty at most.

A walk that starts at the smallest k must not meet one error there. So with more labels there are
more walks, starting at twice, four times ... as many, and 1 - certainty is divided among them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from calmatch.posthoc.scaling import numbers


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
    c, r = _check(confidence, right)
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


def _check(confidence: Any, right: Any) -> tuple[Any, Any]:
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
    if not numbers(shares) or not all(0 <= value <= 1 + 1e-6 for value in shares):
        raise wrong
    counts = [saved["labels"], saved["missing"]]
    if any(type(v) is not int or v < 0 for v in counts) or type(saved["cross_fitted"]) is not bool:
        raise wrong
    return Selective(**saved)
