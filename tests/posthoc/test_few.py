"""Few labels and many unlabelled images: error, temperature, promises, gain."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calmatch import posthoc
from calmatch.posthoc.few import SURPRISE, _deviations, logit

PRIOR = {
    "accuracy": [0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0],  # halfway from agreement to echo
    "optimism": [0.0, 0.0, 0.0],
    "sd": 0.2,
    "blind_sd": 0.4,
    "widening": 1.0,
    "floor": 0.01,
    "gain": [0.1, 0.02],
}


def drawn(n: int, heat: float, seed: int = 0, classes: int = 6):
    """Log-probabilities whose right temperature is `heat`, and labels drawn from them."""
    rng = np.random.default_rng(seed)
    z = 2 * rng.standard_normal((n, classes))
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    y = (p.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=classes - 1)
    return torch.from_numpy(heat * z).log_softmax(1), torch.from_numpy(y), float(p.max(1).mean())


def test_without_labels_mean_confidence_is_the_accuracy_that_agreement_and_echo_stand_for():
    free, _, _ = drawn(500, 1.7)
    fitted = posthoc.few_label_temperature(free, agreement=0.8, echo=0.8, prior=PRIOR)

    def confidence(heat: float) -> float:
        return float((free / heat).softmax(1).amax(1).mean())

    assert confidence(fitted.temperature) == pytest.approx(0.8, abs=0.01)
    reach = logit(confidence(fitted.end(-1))) - logit(confidence(fitted.end(1)))
    rare = SURPRISE / (1 + SURPRISE)  # sets of which five times less is known
    spread = PRIOR["sd"] * np.cbrt(8 / 6)  # of six classes less is known than of eight
    assert reach == pytest.approx(2 * spread * np.sqrt(1 - rare + 25 * rare), rel=0.1)
    assert fitted.labels == 0


@pytest.mark.parametrize("known", [{"agreement": 0.8}, {"echo": 0.8}, {}])
def test_where_agreement_or_echo_is_unknown_nothing_is_assumed(known):
    free, _, _ = drawn(300, 1.7)
    fitted = posthoc.few_label_temperature(free, **known, prior=PRIOR)
    assert fitted.temperature == pytest.approx(1, abs=0.01)
    assert fitted.log_sd == pytest.approx(PRIOR["blind_sd"], rel=0.02)


@pytest.mark.parametrize("shares", [(0.3, 0.4), (0.9, 0.95)])
def test_with_many_labels_the_prior_does_not_matter(shares):
    free, y, accuracy = drawn(8000, 1.7)
    known = dict(zip(("agreement", "echo"), shares, strict=True))
    fitted = posthoc.few_label_temperature(free, free, y, **known, prior=PRIOR)
    likeliest = posthoc.temperature(free, y).values["temperature"]
    assert fitted.temperature == pytest.approx(likeliest, rel=0.03)
    error = posthoc.few_label_error(fitted, free, free, y, prior=PRIOR)
    assert error.value == pytest.approx(1 - accuracy, abs=0.01)
    assert error.low < 1 - accuracy < error.high


def test_the_same_shares_promise_less_of_many_classes():
    learned = [posthoc.expected_accuracy(0.6, 0.7, 4, None, 0.7, k) for k in (2, 8, 50)]
    assert learned == sorted(learned, reverse=True)
    assert learned[0] > learned[2] + 0.15
    assert learned[1] == posthoc.expected_accuracy(0.6, 0.7, 4, parts=0.7)
    own = PRIOR | {"accuracy": [0.0, 0.5, 0.5, 0.0, 0.0, 0.0, -0.4]}
    free, _, _ = drawn(500, 1.7, classes=20)
    fitted = posthoc.few_label_temperature(free, agreement=0.8, echo=0.8, prior=own)
    confidence = float((free / fitted.temperature).softmax(1).amax(1).mean())
    assert logit(confidence) == pytest.approx(logit(0.8) - 0.4 * np.log(20 / 10), abs=0.06)


@pytest.mark.parametrize(("each", "moved"), [(4, 0.5), (10, 0.5), (10_000, 0.0)])
def test_what_held_out_labels_flatter_is_taken_off_unless_labels_are_many(each, moved):
    free, y, accuracy = drawn(8000, 1.7)
    own = PRIOR | {"optimism": [0.5, 0.0, 0.0]}
    known = {"agreement": 0.8, "echo": 0.8, "labels_a_class": each}
    fitted = posthoc.few_label_temperature(free, free, y, **known, prior=own)
    confidence = float((free / fitted.temperature).softmax(1).amax(1).mean())
    assert logit(confidence) == pytest.approx(logit(accuracy) - moved, abs=0.08)


def test_the_posterior_is_the_one_that_numerical_integration_gives():
    free, y, _ = drawn(30, 1.3)
    fitted = posthoc.few_label_temperature(free, free, y, prior=PRIOR)
    logs = np.linspace(-2, 2, 4001)
    fits = [-0.5 * (x / 0.4) ** 2 for x in logs]
    for k, x in enumerate(logs):
        fits[k] -= float(torch.nn.functional.nll_loss(free / np.exp(x), y, reduction="sum"))
        fits[k] -= float((free / np.exp(x)).logsumexp(1).sum())
    weights = np.exp(np.array(fits) - max(fits))
    mean = (weights * logs).sum() / weights.sum()
    spread = np.sqrt((weights * (logs - mean) ** 2).sum() / weights.sum())
    assert np.log(fitted.temperature) == pytest.approx(mean, abs=0.01)
    assert fitted.log_sd == pytest.approx(spread, rel=0.05)


def test_intervals_and_promises_hold_as_often_as_they_say_where_the_prior_is_true():
    held, kept = [], []
    for seed in range(80):
        rng = np.random.default_rng(seed)
        free, y, accuracy = drawn(300, 1.0, seed)
        heat = float(np.exp(0.5 * rng.standard_normal()))
        share = 1 / (1 + np.exp(-logit(accuracy) - PRIOR["sd"] * rng.standard_normal()))
        own, few = free * heat, torch.arange(40)
        fitted = posthoc.few_label_temperature(
            own, own[few], y[few], agreement=share, echo=share, prior=PRIOR
        )
        error = posthoc.few_label_error(fitted, own, own[few], y[few], prior=PRIOR)
        held.append(error.low <= 1 - accuracy <= error.high)
        rule = posthoc.few_label_promise(fitted, own, accuracy=0.8)
        sure = (own / fitted.temperature).softmax(1).amax(1) >= (rule.threshold or 2)
        kept.append(not sure.any() or float(free.softmax(1).amax(1)[sure].mean()) >= 0.8)
    assert 0.92 <= np.mean(held) <= 0.99
    assert np.mean(kept) >= 0.92


def test_a_promise_is_kept_where_the_temperature_is_known_and_gives_up_where_it_is_not():
    free, y, _ = drawn(4000, 1.0)
    known = posthoc.FewLabelTemperature(1.0, 0.02, 40)
    rule = posthoc.few_label_promise(known, free, accuracy=0.9)
    assert rule.threshold is not None
    top, guess = free.exp().max(1)
    sure = top >= rule.threshold
    assert float((guess == y)[sure].double().mean()) >= 0.89
    assert float(sure.double().mean()) == pytest.approx(rule.coverage, abs=1e-6)
    unknown = posthoc.few_label_promise(known._replace(log_sd=2.0), free, accuracy=0.9)
    assert unknown.threshold is None
    assert posthoc.load_rule(rule._asdict(), posthoc.Selective) == rule


def test_semi_conformal_sets_cover_and_are_steadier_than_conformal_ones():
    free, y, _ = drawn(4000, 1.0)
    p = free.exp()
    covered: dict[str, list[float]] = {"semi": [], "split": []}
    for seed in range(60):
        rows = torch.from_numpy(np.random.default_rng(seed).permutation(4000)[:40])
        for name, rule in (
            ("semi", posthoc.semi_conformal(p[rows], y[rows], p)),
            ("split", posthoc.conformal(p[rows], y[rows])),
        ):
            covered[name].append(float(rule.sets(p).gather(1, y[:, None]).double().mean()))
    assert np.mean(covered["semi"]) == pytest.approx(0.9, abs=0.02)
    assert np.std(covered["semi"]) < 0.7 * np.std(covered["split"])


def test_semi_conformal_sets_of_many_labels_cover_even_if_probabilities_are_wrong():
    free, y, _ = drawn(20_000, 3.0)  # three times too sure
    p = free.exp()
    rule = posthoc.semi_conformal(p[:10_000], y[:10_000], p)
    covered = rule.sets(p[10_000:]).gather(1, y[10_000:, None])
    assert float(covered.double().mean()) == pytest.approx(0.9, abs=0.015)


def test_the_expected_gain_grows_with_disagreement_and_labels():
    few, many = (posthoc.expected_gain(0.6, 4, more, prior=PRIOR) for more in (1, 4))
    assert many.value == pytest.approx(0.04)
    assert few.value < many.value
    assert posthoc.expected_gain(1.0, 4, 4, prior=PRIOR).value == 0
    assert many.high - many.value == pytest.approx(_deviations(0.95) * 0.02 * 0.4)


@pytest.mark.parametrize("seed", range(3))
def test_ppi_mean_is_that_of_the_authors(seed):
    ppi_py = pytest.importorskip("ppi_py")
    rng = np.random.default_rng(seed)
    guess = rng.random(2000)
    truth = (rng.random(2000) < guess**1.5).astype(float)
    ours = posthoc.ppi_mean(truth[:60], guess[:60], guess[60:])
    low, high = ppi_py.ppi_mean_ci(truth[:60], guess[:60], guess[60:], alpha=0.05)
    assert ours.low == pytest.approx(float(low[0]), abs=1e-9)
    assert ours.high == pytest.approx(float(high[0]), abs=1e-9)


@pytest.mark.parametrize("isotonic", [False, True])
def test_ppi_intervals_hold_the_mean_and_are_narrower_than_labels_alone(isotonic):
    holds, width = [], []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        guess = rng.random(1200)
        truth = (rng.random(1200) < guess**2).astype(float)
        got = posthoc.ppi_mean(truth[:200], guess[:200], guess[200:], isotonic=isotonic)
        holds.append(got.low <= 1 / 3 <= got.high)
        width.append((got.high - got.low) / (2 * 1.96 * truth[:200].std() / np.sqrt(200)))
    assert 0.91 <= np.mean(holds) <= 0.99
    assert np.mean(width) < 0.9


def test_the_learned_numbers_say_how_they_were_made():
    prior = posthoc.read_prior()
    assert set(PRIOR) <= set(prior)
    assert "research/trust.py" in prior["made_by"]
    assert len(prior["datasets"]) >= 8
    shares = [posthoc.expected_accuracy(share, share, 4) for share in (0.3, 0.6, 0.9)]
    assert shares == sorted(shares)
    assert 0.2 < shares[0] < shares[2] < 0.97
