"""Statistics over runs: means, Friedman ranks, Nemenyi's distance, paired differences."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Mean(NamedTuple):
    """Mean and sample standard deviation (ddof 1) over seeds; no deviation of a single run."""

    value: float
    sd: float | None
    number: int


def mean(values: Sequence[float]) -> Mean:
    """Mean and sample standard deviation; the paper mixes ddof 0 and 1.

    >>> mean([1.0, 2.0, 3.0])
    Mean(value=2.0, sd=1.0, number=3)
    """
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Mean(float(np.mean(values)), sd, len(values))


class Ranks(NamedTuple):
    """Friedman's mean ranks over settings, lowest best, with his test and Nemenyi's distance."""

    rank: dict[str, float]
    settings: int
    p: float | None  # None: too few rows or settings, or no rank differs
    distance: float  # two rows whose mean ranks differ less cannot be told apart


def friedman(scores: Mapping[str, Sequence[float]]) -> Ranks:
    """Rank the rows in each setting, lowest score first, ties alike; then average over settings."""
    table = np.array(list(scores.values()), dtype=float)  # [rows, settings]
    if table.ndim != 2 or table.shape[0] < 2 or not np.isfinite(table).all():
        raise ValueError("Ranks need two rows at least, each with a number in every setting.")
    ranks = stats.rankdata(table, axis=0)
    rows, settings = table.shape
    means = dict(zip(scores, ranks.mean(1).tolist(), strict=True))
    testable = rows > 2 and settings > 1 and bool((ranks != ranks[0]).any())
    p = float(stats.friedmanchisquare(*table).pvalue) if testable else None
    return Ranks(means, settings, p, nemenyi(rows, settings))


def nemenyi(rows: int, settings: int) -> float:
    """Nemenyi's critical difference of mean ranks at the 5 % level.

    >>> round(nemenyi(10, 12), 2)  # as Demsar (2006) tabulates q = 3.164 for ten rows
    3.91
    """
    q = float(stats.studentized_range.ppf(0.95, rows, np.inf)) / math.sqrt(2)
    return q * math.sqrt(rows * (rows + 1) / (6 * settings))


class Paired(NamedTuple):
    """A difference between two rows, seed by seed."""

    value: float
    low: float
    high: float
    number: int
    better: int  # pairs in which the difference is below zero
    worse: int
    p: float | None  # Wilcoxon's signed-rank test, two-sided; None: all differences are zero


def paired(differences: Sequence[float], resamples: int = 10_000) -> Paired:
    """Mean difference, its 95 % percentile bootstrap interval over pairs, and Wilcoxon's test.

    With three pairs the interval is little more than their range, and Wilcoxon's p cannot fall
    below 0.25: more seeds, or several settings together, are needed to say more.
    """
    values = np.asarray(differences, dtype=float)
    rows = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    low, high = np.quantile(values[rows].mean(1), [0.025, 0.975]).tolist()
    better, worse = int((values < 0).sum()), int((values > 0).sum())
    changed = values[values != 0]
    p = float(stats.wilcoxon(changed, method="auto").pvalue) if len(changed) else None
    return Paired(float(values.mean()), low, high, len(values), better, worse, p)
