"""Prediction sets that hold the true class as often as promised: LAC, APS and RAPS.

Split conformal prediction is a score, a quantile and a comparison. MAPIE wraps estimators of its
own and torchcp brings a trainer; either would be a dependency larger than the lines below, so MAPIE
is what the tests compare with instead.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from calmatch.metrics import check
from calmatch.posthoc.scaling import numbers

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
        chance = _chance(len(probs), self.seed, 1).to(probs.device)
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
    table = scores(p, score, price, free, _chance(n, seed, 0).to(p.device))
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


def _chance(n: int, seed: int | None, stream: int) -> Tensor:
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
    if not numbers(values) or not 0 < saved["coverage"] < 1:
        raise wrong
    return Conformal(**saved)
