"""Promises: sets that hold the true class, and answers only where they are right often enough."""

import math
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from calmatch.posthoc.scaling import are_counts, are_numbers

TRUST = 0.045  # semi_conformal: how far mean probabilities of a few-label fit may be off
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
    cross_fitted: bool = False  # rests on fold models' predictions: approximate

    def sets(self, probs: Tensor) -> Tensor:
        """Which classes are in each image's set: bool [N, C].

        The most probable class always is, so that no set is empty; that can only raise coverage.
        Randomised sets depend on the order of the rows.
        """
        if self.threshold is None:
            return torch.ones_like(probs, dtype=torch.bool)
        first = torch.arange(probs.shape[1], device=probs.device) == probs.argmax(1, keepdim=True)
        own = _uniform_rows(probs.shape[0], self.seed, 1).to(probs.device)
        return (scores(probs, self.score, self.penalty, self.free, own) <= self.threshold) | first

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
    """Sets that hold the true class of a new image with probability >= `coverage`.

    That probability is over the sample of the calibration labels and of the new image together,
    which must be exchangeable (a random sample of the same images), and the labels must neither
    train the model nor choose its calibration. It is an average over images: a rare class or a
    hard kind of image may be covered less.

    The threshold is the ceil((n + 1) coverage)-th smallest score of the n labels. With fewer than
    coverage / (1 - coverage) labels there is no such score; then sets are everything, and `missing`
    says how many labels are lacking.

    Args:
        probs: [N, C], calibrated.
        labels: [N] class ids.
        coverage: the promise.
        score: `lac` (smallest sets on average), `aps` (larger sets where it is harder), or `raps`
            (aps with `penalty` added for each rank after the first `free` ones).
        penalty: of raps.
        free: ranks of raps that cost nothing.
        seed: randomises aps and raps: a class's own probability counts in a random part, as in the
            papers, which makes coverage exact. By default it does not count: a class's score is
            the mass of the classes above it, which is repeatable and puts the first class in.
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

    def dump(self) -> dict[str, Any]:
        """Plain JSON; `load_selective` reads it back."""
        return self._asdict()


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
    errors = np.cumsum(wrong)[ks - 1]
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
    """Where tests begin: the fewest labels that can be enough, doubled while there are as many."""
    starts: list[int] = []
    for walks in range(1, 65):
        least = needed(1 - error, 1 - doubt / walks)
        if least * 2 ** (walks - 1) > n:
            break
        starts = [least * 2**i for i in range(walks)]
    return starts


def load_conformal(saved: Any) -> Conformal:
    """From what `dump` gave; a ValueError in one sentence for anything else."""
    rule = _rule_fields(saved, Conformal)
    if not (
        rule
        and rule["score"] in get_args(Score)
        and are_counts([rule[key] for key in ("labels", "missing", "free", "seed")])
        and are_numbers([rule[key] for key in ("coverage", "penalty", "threshold")])
        and 0 < rule["coverage"] < 1
    ):
        raise ValueError("The prediction sets (conformal) are malformed.")
    return Conformal(**saved)


def load_selective(saved: Any) -> Selective:
    """From what `dump` gave; a ValueError in one sentence for anything else."""
    rule = _rule_fields(saved, Selective)
    names = "coverage bound accuracy certainty threshold".split()
    if not (
        rule
        and are_numbers([rule[name] for name in names])
        and all(0 <= rule[name] <= 1 + 1e-6 for name in names)
        and are_counts([rule["labels"], rule["missing"]])
    ):
        raise ValueError("The operating point (selective) is malformed.")
    return Selective(**saved)


def _rule_fields(saved: Any, kind: type[Conformal] | type[Selective]) -> dict[str, Any]:
    """The fields of a rule, 0 for what may be None; nothing if they are not the rule's.

    Those with a default may be missing: an older version knew fewer.
    """
    if not isinstance(saved, dict) or set(saved) - set(kind._fields):
        return {}
    saved = kind._field_defaults | saved
    if set(saved) != set(kind._fields):
        return {}
    if not all(type(saved[key]) is bool for key in ("cross_fitted", "learned") if key in saved):
        return {}
    optional = ("threshold", "seed")
    return {key: 0 if value is None and key in optional else value for key, value in saved.items()}
