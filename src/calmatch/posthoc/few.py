"""Few labels, many unlabelled images: how wrong is it, which temperature, would more labels help?

At the right temperature mean confidence is accuracy, so error and temperature are one unknown. It
has a prior, learned over datasets (prior.json, by research/trust.py) from what unlabelled images
show; held-out labels update it; error, interval and promise are read off the posterior. Everything
takes arrays, and log-probabilities as the model that is used would give them.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import special

from calmatch import posthoc
from calmatch.metrics import Interval
from calmatch.posthoc import TEMPERATURES, check_log_probs, check_logits, log_softmax

Estimate = Interval
STEPS = 241  # of log temperature
SURPRISE = 0.02  # share of datasets of which five times less is known than learned: labels decide
TYPICAL_CLASSES = 8  # of a dataset; the prior's spread is said of so many
FEWEST = 10  # unlabelled images above a threshold, that it may be promised


@functools.cache
def read_prior() -> Mapping[str, Any]:
    """What was learned over datasets, and how."""
    return dict(json.loads(Path(__file__).with_name("prior.json").read_text()))


def expected_accuracy(
    agreement: float,
    echo: float,
    labels_a_class: float,
    prior: Mapping[str, Any] | None = None,
    parts: float | None = None,
    classes: int = TYPICAL_CLASSES,
) -> float:
    """The accuracy of a model, by two or three shares of the unlabelled images.

    On how many models of disjoint halves of its labels agree (Jiang et al. (2022) have accuracy
    equal agreement, for networks that differ in their seeds alone); and on how many models agree
    with it that learned as many labels of other images, drawn by its own confidence (echo). Labels
    that happen to be easy raise the first and not the accuracy; the second knows no luck, but does
    not see mistakes that all make; models of a network's last layer and of its earlier ones make
    other mistakes (parts). The same shares promise more of fewer than five classes and less of more
    than ten. logit(accuracy) = a + b logit(agreement) + c logit(echo) + d l + e l² + f log(5 / k) +
    g log(k / 10) + h logit(parts), where l = log(labels a class / 4) and logarithms of k classes
    are not below 0; learned over tasks of 2 to 10 labels a class and of 2 to 100 classes.
    """
    numbers = np.array(_learned(prior, parts)["accuracy"])
    known = accuracy_inputs(agreement, echo, labels_a_class, classes, parts)
    return float(special.expit(numbers @ known))


def accuracy_inputs(
    agreement: float, echo: float, labels_a_class: float, classes: int, parts: float | None = None
) -> list[float]:
    """What `expected_accuracy` weighs."""
    more = float(np.log(np.clip(labels_a_class, 2, 10) / 4))
    fewer, many = (
        max(0.0, float(np.log(x))) for x in (5 / max(2, classes), min(100, classes) / 10)
    )
    inputs = [1.0, logit(agreement), logit(echo), more, more * more, fewer, many]
    return inputs if parts is None else [*inputs, logit(parts)]


def optimism(labels_a_class: float, prior: Mapping[str, Any] | None = None) -> float:
    """How much too right a model looks, in logits, at the temperature that held-out labels like.

    They are predicted by models of fewer labels: with two a class it looks worse than it is, with
    ten a little better, and with many as it is. Learned over the same tasks.
    """
    more = float(np.log(np.clip(labels_a_class, 2, 10) / 4))
    fading = min(1.0, 10 / labels_a_class)
    return fading * float(np.dot((prior or read_prior())["optimism"], [1.0, more, more * more]))


def _learned(prior: Mapping[str, Any] | None, parts: float | None) -> Mapping[str, Any]:
    """What holds where students of a network's parts were compared, or were not."""
    learned = prior or read_prior()
    return learned if parts is None else {**learned, **learned["parts"]}


def spread_at(classes: int) -> float:
    """How much less is known than of eight classes: the mistakes of many average out."""
    return float((TYPICAL_CLASSES / np.clip(classes, 2, 100)) ** (1 / 3))


def logit(share: Any, least: float = 0.003) -> Any:
    """Of a share that counts as neither 0 nor 1."""
    return special.logit(np.clip(share, least, 1 - least))


class FewLabelTemperature(NamedTuple):
    """A temperature and how well it is known."""

    temperature: float
    log_sd: float  # of its logarithm
    labels: int  # held out, that took part

    def end(self, deviations: float) -> float:
        """So many standard deviations warmer."""
        return float(np.clip(self.temperature * np.exp(deviations * self.log_sd), *TEMPERATURES))


def few_label_temperature(
    free: Any,
    held: Any = None,
    labels: Any = None,
    *,
    agreement: float | None = None,
    echo: float | None = None,
    parts: float | None = None,
    labels_a_class: float = 4.0,
    prior: Mapping[str, Any] | None = None,
) -> FewLabelTemperature:
    """The posterior of the temperature: without labels the prior's, with many their likeliest.

    From log-probabilities [N, C] of unlabelled images (free), and [n, C] of labelled ones (held) by
    models that have not seen their labels [n]. `agreement`, `echo`, `parts` are as in
    `expected_accuracy`; without the first two nothing is known, and the prior is wide around 1. A
    study that leaves datasets out has a `prior` of its own.
    """
    z, learned = check_log_probs(torch.as_tensor(free)), _learned(prior, parts)
    logs = np.linspace(np.log(TEMPERATURES[0]), np.log(TEMPERATURES[1]), STEPS)
    away, rare, n, moved = logs / learned["blind_sd"], -np.inf, 0, logs
    if agreement is not None and echo is not None:
        share = expected_accuracy(agreement, echo, labels_a_class, prior, parts, z.shape[1])
        tops = [posthoc.mean_confidence(z, heat) for heat in np.exp(logs[::8])]
        curve = np.interp(logs, logs[::8], logit(np.array(tops), 1e-9))
        away = (curve - logit(share)) / (learned["sd"] * spread_at(z.shape[1]))
        rare = np.log(SURPRISE / 5) - 0.5 * (away / 5) ** 2
        moved = np.interp(-curve - optimism(labels_a_class, prior), -curve, logs)
    fits = np.logaddexp(-0.5 * away**2, rare)
    if labels is not None:
        z, y = check_logits(held, labels)
        n = len(y)
        for k, heat in enumerate(np.exp(moved)):
            fits[k] += log_softmax(z / heat)[np.arange(len(y)), y].sum()
    weights = np.exp(fits - fits.max())
    weights /= weights.sum()
    mean = float(weights @ logs)
    spread = float(np.sqrt(weights @ (logs - mean) ** 2))
    return FewLabelTemperature(float(np.exp(mean)), learned["widening"] * spread, n)


def few_label_error(
    fitted: FewLabelTemperature,
    free: Any,
    held: Any = None,
    labels: Any = None,
    *,
    level: float = 0.95,
    prior: Mapping[str, Any] | None = None,
) -> Estimate:
    """The error of a model: one minus its mean confidence at the posterior temperature.

    What no temperature can mend (`floor`) is corrected by held-out labels: their mean of "right"
    minus confidence, with the weight that their noise leaves it, of thousands of labels almost all
    (prediction-powered inference). The interval is the posterior's, widened to hold the truth as
    often as it says over the datasets that prior.json names; nothing proves it for another one.
    """
    z, learned = check_log_probs(torch.as_tensor(free)), prior or read_prior()
    floor, reach = learned["floor"], _deviations(level)
    ends = (fitted.end(side * reach) for side in (0, -1, 1))
    value, above, below = (posthoc.mean_confidence(z, heat) for heat in ends)
    if labels is not None:
        z_held, y = check_logits(held, labels)
        top = np.exp(log_softmax(z_held / fitted.temperature).max(1))
        noise = max(float((top * (1 - top)).mean()), 0.01) / len(y)
        shift = float(((z_held.argmax(1) == y) - top).mean()) * floor**2 / (floor**2 + noise)
        value, above, below = value + shift, above + shift, below + shift
    error = 1 - float(np.clip(value, 1 / z.shape[1], 1))
    low = error - float(np.hypot(above - value, reach * floor))
    high = error + float(np.hypot(value - below, reach * floor))
    return Estimate(error, max(0.0, low), min(1.0, high))


def few_label_promise(
    fitted: FewLabelTemperature, free: Any, *, accuracy: float = 0.95, certainty: float = 0.95
) -> posthoc.Selective:
    """The lowest threshold whose answers are right often enough, by a cautious temperature.

    At the temperature that is too warm with the certainty asked for, the mean confidence of the
    unlabelled images above the threshold is still the accuracy promised. It needs no minimum of
    labels, but it is as good as the prior: it held that often over datasets left out of it, and
    fails where agreement misleads (classes that look alike to every model, images of another kind).
    """
    z = check_log_probs(torch.as_tensor(free))
    confidence = np.exp(log_softmax(z / fitted.temperature).max(1))
    order = np.argsort(-confidence, kind="stable")
    cautious = np.exp(log_softmax(z[order] / fitted.end(_deviations(2 * certainty - 1))).max(1))
    means = np.cumsum(cautious) / np.arange(1, len(z) + 1)
    enough = np.flatnonzero(means >= accuracy)
    number = int(enough[-1]) + 1 if len(enough) else 0
    facts = (fitted.labels, 0, accuracy, certainty, True, True)
    if number < FEWEST:
        return posthoc.Selective(None, 0.0, 0.0, *facts)
    threshold = float(confidence[order[number - 1]])
    return posthoc.Selective(threshold, number / len(z), float(means[number - 1]), *facts)


def expected_gain(
    agreement: float,
    labels_a_class: float,
    more: float,
    *,
    level: float = 0.95,
    prior: Mapping[str, Any] | None = None,
) -> Estimate:
    """How far the error will fall with `more` labels a class: settle what models disagree on.

    Each doubling of the labels settles a share of the images on which models of disjoint halves of
    them disagree; the share and its spread are learned over datasets.
    """
    share, spread = (prior or read_prior())["gain"]
    doubt = (1 - agreement) * float(np.log2(1 + more / labels_a_class))
    reach = _deviations(level) * spread
    return Estimate(share * doubt, (share - reach) * doubt, (share + reach) * doubt)


def ppi_mean(
    truth: Any, guess: Any, free: Any, *, level: float = 0.95, isotonic: bool = False
) -> Estimate:
    """The mean of `truth` over all images, from few that are known and a guess of every one.

    PPI++ (Angelopoulos et al., 2023): the mean guess of the unlabelled images, corrected by the
    labelled ones; guesses count as much as they explain, so it is no wider than the labels' own
    normal interval. With `isotonic` the guesses are first bent to fit the labels, monotonically
    (calibrated AIPW), which trusts them fully. The interval is asymptotic: normal, and of some
    dozens of labels too narrow; and if the labels trained the guesses, of no meaning.
    """
    y, f, u = (np.asarray(each, dtype=np.float64) for each in (truth, guess, free))
    if y.ndim != 1 or f.shape != y.shape or u.ndim != 1 or len(y) < 2 or len(u) < 2:
        raise ValueError("truth and guess must be [n] both, and free [N], two of each at least.")
    power = 1.0
    if isotonic:
        from sklearn.isotonic import IsotonicRegression

        curve = IsotonicRegression(out_of_bounds="clip").fit(f, y)
        f, u = curve.predict(f), curve.predict(u)
    elif (spread := float(np.concatenate([f, u]).var(ddof=1))) > 0:
        power = float(np.cov(y, f, ddof=0)[0, 1]) / (spread * (1 + len(y) / len(u)))
        power = min(max(power, 0.0), 1.0)
    value = float(power * u.mean() + (y - power * f).mean())
    variance = power**2 * u.var() / len(u) + (y - power * f).var() / len(y)
    reach = _deviations(level) * float(np.sqrt(variance))
    return Estimate(value, value - reach, value + reach)


def _deviations(level: float) -> float:
    """Standard deviations to either side of a normal interval."""
    return NormalDist().inv_cdf((1 + level) / 2)
