"""Post-hoc calibration: scalings, prediction sets and the promise of accuracy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import optimize, stats
from sklearn.isotonic import IsotonicRegression

from calmatch import metrics, posthoc
from calmatch.posthoc import scores

KINDS = sorted(posthoc.SCALINGS)


def drawn(n: int, classes: int, heat: float = 1.0, seed: int = 0, spread: float = 2.0):
    """Logits whose right temperature is `heat`, and labels drawn from them."""
    rng = np.random.default_rng(seed)
    z = spread * rng.standard_normal((n, classes))
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    y = (p.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=classes - 1)
    return torch.from_numpy(heat * z), torch.from_numpy(y)


def nll(logp: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.nn.functional.nll_loss(logp, y))


@pytest.mark.parametrize("heat", [0.3, 1.0, 4.0])
def test_temperature_finds_the_heat_that_was_put_in(heat):
    z, y = drawn(20_000, 5, heat)
    assert posthoc.temperature(z, y).values["temperature"] == pytest.approx(heat, rel=0.05)


@given(
    hnp.arrays(np.float64, (12, 3), elements=st.floats(-30, 30)),
    hnp.arrays(np.int64, 12, elements=st.integers(0, 2)),
)
@settings(max_examples=60, deadline=None)
def test_temperature_is_the_minimum_that_a_general_optimiser_finds(z, y):
    z, y = torch.from_numpy(z), torch.from_numpy(y)

    def loss(log_heat: float) -> float:
        return nll((z / math.exp(log_heat)).log_softmax(1), y)

    ends = np.log([0.05, 20.0])
    best = min(optimize.minimize_scalar(loss, bounds=ends, method="bounded").fun, *map(loss, ends))
    assert nll(posthoc.temperature(z, y)(z), y) <= best + 1e-6


@given(
    hnp.arrays(np.float64, (9, 4), elements=st.floats(-200, 200)),
    hnp.arrays(np.int64, 9, elements=st.integers(0, 3)),
    st.sampled_from(KINDS),
)
@settings(max_examples=60, deadline=None)
def test_every_scaling_gives_log_probabilities_and_survives_json(z, y, kind):
    scaling = posthoc.SCALINGS[kind](z, y)
    again = posthoc.load_scaling(json.loads(json.dumps(scaling.dump())))
    logits = torch.from_numpy(z)
    logp = scaling(logits)
    assert torch.equal(again(logits), logp)
    assert torch.isfinite(logp).all()
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(scaling(logits + 7.0), logp)  # logits or log-probabilities
    if kind != "vector":
        top = logp.gather(1, logits.log_softmax(1).argmax(1, keepdim=True))[:, 0]
        torch.testing.assert_close(top, logp.amax(1))  # the answer stays


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "identity"])
def test_scalings_help_an_overconfident_model_on_new_images(kind):
    z, y = drawn(4_000, 6, 3.0)
    scaling = posthoc.SCALINGS[kind](z[:2000], y[:2000])
    new, truth = z[2000:], y[2000:]
    raw, scaled = new.log_softmax(1), scaling(new)
    assert nll(scaled, truth) < nll(raw, truth) - 0.1
    assert metrics.ece(scaled.exp(), truth) < 0.3 * metrics.ece(raw.exp(), truth)


def test_vector_scaling_undoes_a_shift_that_temperature_cannot():
    z, y = drawn(6_000, 4)
    bent = z.log_softmax(1) + torch.tensor([2.0, -1.0, 0.0, 0.0])
    fitted = {k: posthoc.SCALINGS[k](bent[:3000], y[:3000]) for k in ("vector", "temperature")}
    loss = {k: nll(scaling(bent[3000:]), y[3000:]) for k, scaling in fitted.items()}
    assert loss["vector"] < loss["temperature"] - 0.1
    assert loss["vector"] < nll(z[3000:].log_softmax(1), y[3000:]) + 0.01


def test_isotonic_is_scikit_learns_curve():
    z, y = drawn(600, 3, 2.0)
    p = z.softmax(1)
    odds = torch.logit(p.amax(1))
    z = torch.log_softmax(z, 1)
    right = (z.argmax(1) == y).double()
    curve = IsotonicRegression(y_min=1 / 602, y_max=601 / 602).fit((odds * 16).round() / 16, right)
    inside = z[((odds * 16).round() / 16 - odds).abs() < 1e-3]  # on a knot, no interpolation
    theirs = curve.predict((torch.logit(inside.exp().amax(1)) * 16).round() / 16)
    ours = posthoc.isotonic(z, y)(inside).exp().amax(1)
    rival = inside.exp().sort(1).values[:, -2] / (1 - inside.exp().amax(1))
    torch.testing.assert_close(
        ours, torch.from_numpy(theirs).maximum(rival / (1 + rival)), atol=0.01, rtol=0
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [2, 3, 1000])
@pytest.mark.parametrize("case", ["right", "wrong", "one class", "one label", "zeros"])
def test_degenerate_labels_are_harmless(kind, classes, case):
    z, _ = drawn(1 if case == "one label" else 30, classes)
    y = {"right": z.argmax(1), "wrong": z.argmin(1)}.get(case, torch.zeros(len(z)).long())
    if case == "zeros":  # probabilities of exactly 0 and 1
        z = torch.full((30, classes), -torch.inf).double()
        z[:, 1] = 0.0
        y[::2] = 1
    logp = posthoc.SCALINGS[kind](z, y)(z.float())
    assert torch.isfinite(logp).all()
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(len(z)))


def test_few_labels_do_not_make_certainty():
    """The likelihood of 40 labels without an error asks for temperature 0; the prior does not."""
    z, _ = drawn(40, 5)
    y = z.argmax(1)
    assert posthoc.temperature(z, y).values["temperature"] == 0.05
    assert 0.15 < posthoc.crossfit_temperature(z, y).values["temperature"] < 1
    sure = 20.0 * torch.nn.functional.one_hot(y, 5).double()
    assert posthoc.crossfit_temperature(sure, y).values["temperature"] == pytest.approx(1, abs=1e-3)
    wrong = posthoc.crossfit_temperature(sure, (y + 1) % 5).values["temperature"]
    assert 5 < wrong <= 20


@pytest.mark.parametrize("heat", [0.7, 1.0, 2.0, 4.0])
def test_the_prior_pays_off_with_few_labels_and_does_no_harm_with_a_thousand(heat):
    new, truth = drawn(1000, 10, heat, seed=99, spread=6.0)
    loss = {name: [] for name in ("likelihood", "prior")}
    for seed in range(40):
        z, y = drawn(20, 10, heat, seed=seed, spread=6.0)
        loss["likelihood"].append(nll(posthoc.temperature(z, y)(new), truth))
        loss["prior"].append(nll(posthoc.crossfit_temperature(z, y)(new), truth))
    assert np.mean(loss["prior"]) < np.mean(loss["likelihood"]) - 0.05
    z, y = drawn(1000, 10, heat, seed=7)
    fits = (posthoc.temperature, posthoc.crossfit_temperature)
    plain, shrunk = (fit(z, y).values["temperature"] for fit in fits)
    assert plain == pytest.approx(shrunk, rel=0.02)


def test_a_table_temperature_is_blind_to_a_pictures_own_label():
    z, y = drawn(400, 4, 3.0)
    before = posthoc.temperature_scaled(z, y, seed=3)
    changed = y.clone()
    changed[0] = (y[0] + 1) % 4
    moved = (posthoc.temperature_scaled(z, changed, seed=3) - before).abs().amax(1) > 1e-12
    assert not moved[0]
    assert moved.sum() == 200  # exactly the other half
    oracle = posthoc.oracle_scaled(z, y)
    assert nll(oracle, y) <= nll(before, y) < nll(z.log_softmax(1), y)


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        {"kind": "nonsense"},
        {"kind": ["temperature"]},
        {"kind": "temperature"},
        {"kind": "temperature", "temperature": float("nan")},
        {"kind": "temperature", "temperature": True},
        {"kind": "temperature", "temperature": -1},
        {"kind": "temperature", "temperature": "1"},
        {"kind": "temperature", "temperature": 1.0, "more": 1},
        {"kind": "temperature", "temperature": 1.0, "labels": -1},
        {"kind": "vector", "factor": [1.0], "shift": []},
        {"kind": "vector", "factor": [1.0, 1e300], "shift": [0, 0]},
        {"kind": "isotonic", "odds": [1.0, 0.0], "right": [0.1, 0.2]},
        {"kind": "isotonic", "odds": [0.0, 1.0], "right": [0.0, 1.0]},
        {"kind": "isotonic", "odds": [0.0, 1e-300], "right": [0.1, 0.9]},
        {"kind": "isotonic", "odds": [], "right": []},
        {"kind": "identity", "x": 1},
    ],
)
def test_a_malformed_scaling_is_refused_in_a_sentence(saved):
    with pytest.raises(ValueError, match=r"[Cc]alibration .*\.$"):
        posthoc.load_scaling(saved)


@pytest.mark.parametrize(
    ("z", "y", "words"),
    [
        ([[0.0, math.nan]], [0], "NaN"),
        ([[0.0, math.inf]], [0], "plus infinity"),
        ([[-math.inf, -math.inf]], [0], "without any finite"),
        ([[0.0, 1.0]], [2], "0..1; found 2..2"),
        ([[0.0, 1.0]], [-1], "found -1..-1"),
        ([[0.0, 1.0]], [0.5], "integer class ids"),
        ([[0.0]], [0], "C >= 2"),
        (np.zeros((0, 3)), np.zeros(0, np.int64), "at least one"),
        ([[0.0, 1.0]], [0, 1], "labels"),
        ("text", [0], "arrays of numbers"),
    ],
)
def test_bad_logits_and_labels_are_refused(z, y, words):
    with pytest.raises(ValueError, match=words):
        posthoc.temperature(z, y)


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize(("n", "coverage"), [(9, 0.9), (20, 0.9), (100, 0.8)])
def test_sets_keep_their_promise_over_draws(score, n, coverage):
    """Marginal coverage over calibration and test draws, of a model that is badly calibrated."""
    draws = 1000
    z, y = drawn(draws * (n + 1), 5, 3.0, seed=n)
    p = z.softmax(1).view(draws, n + 1, 5)
    y = y.view(draws, n + 1)
    hits = []
    for probs, labels in zip(p, y, strict=True):
        rule = posthoc.conformal(probs[:n], labels[:n], coverage=coverage, score=score)
        hits.append(bool(rule.sets(probs[n:])[0, labels[n]]))
    assert np.mean(hits) >= coverage - 3 * math.sqrt(coverage * (1 - coverage) / draws)


@pytest.mark.parametrize("score", ["aps", "raps"])
def test_randomised_sets_cover_exactly_and_repeatable_ones_at_least(score):
    z, y = drawn(6_000, 8, spread=1.5)
    p = z.softmax(1)
    shares = {}
    for seed in (None, 5):
        rule = posthoc.conformal(p[:3000], y[:3000], coverage=0.8, score=score, seed=seed)
        sets = rule.sets(p[3000:])
        shares[seed] = sets.gather(1, y[3000:, None]).double().mean().item()
        assert sets.any(1).all()
    assert shares[5] == pytest.approx(0.8, abs=0.03)
    assert shares[None] >= 0.78


def test_lac_sets_and_aps_scores_equal_mapies():
    from mapie.classification import SplitConformalClassifier
    from mapie.conformity_scores import APSConformityScore
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 3))
    y = (x @ rng.standard_normal((3, 4)) + rng.gumbel(size=(400, 4))).argmax(1)
    model = LogisticRegression().fit(x[:100], y[:100])
    mapie = SplitConformalClassifier(model, confidence_level=0.85, prefit=True)
    _, sets = mapie.conformalize(x[100:300], y[100:300]).predict_set(x[300:])
    p = torch.from_numpy(model.predict_proba(x))
    rule = posthoc.conformal(p[100:300], y[100:300], coverage=0.85)
    first = p[300:] == p[300:].amax(1, keepdim=True)  # theirs may be empty
    assert torch.equal(rule.sets(p[300:]), torch.from_numpy(sets[:, :, 0]) | first)
    mass, _ = APSConformityScore.get_true_label_cumsum_proba(y, p.numpy(), np.arange(4))
    ours = scores(p, "aps", 0.0, 1, torch.ones(1)).gather(1, torch.from_numpy(y)[:, None])
    np.testing.assert_allclose(ours, mass)  # with a class's own mass in full


def test_scores_by_hand():
    p = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    half = torch.full((1, 1), 0.5)
    assert scores(p, "lac", 0, 1, half).tolist() == [[0.8, 0.5, 0.7]]
    torch.testing.assert_close(scores(p, "aps", 0, 1, half), p.new_tensor([[0.9, 0.25, 0.65]]))
    expected = p.new_tensor([[0.9 + 0.2, 0.25, 0.65 + 0.1]])
    torch.testing.assert_close(scores(p, "raps", 0.1, 1, half), expected)


def test_too_few_labels_promise_nothing_and_say_how_many_are_missing():
    z, y = drawn(8, 3)
    rule = posthoc.conformal(z.softmax(1), y)
    assert (rule.threshold, rule.missing) == (None, 1)
    assert rule.sets(z.softmax(1)).all()
    z, y = drawn(9, 3)
    assert posthoc.conformal(z.softmax(1), y).threshold is not None


@given(
    hnp.arrays(np.float64, (15, 4), elements=st.floats(0, 1)),
    st.sampled_from(["lac", "aps", "raps"]),
    st.floats(0.05, 0.95),
)
@settings(max_examples=80, deadline=None)
def test_sets_hold_the_top_class_grow_with_coverage_and_survive_json(raw, score, coverage):
    p = torch.from_numpy((raw + 1e-3) / (raw + 1e-3).sum(1, keepdims=True))
    y = torch.arange(15) % 4
    rule = posthoc.conformal(p, y, coverage=coverage, score=score)
    sets = rule.sets(p)
    assert sets.gather(1, p.argmax(1, keepdim=True)).all()
    assert sets.gather(1, y[:, None]).sum() >= math.ceil(15 * coverage)  # its own labels, surely
    wider = posthoc.conformal(p, y, coverage=min(0.99, coverage + 0.04), score=score)
    assert (wider.sets(p) >= sets).all()
    again = posthoc.load_rule(json.loads(json.dumps(rule._asdict())), posthoc.Conformal)
    assert torch.equal(again.sets(p), sets)


def test_an_accurate_model_answers_with_one_class():
    z, y = drawn(500, 5, spread=8.0)
    for score in ("lac", "aps", "raps"):
        rule = posthoc.conformal(z.softmax(1), y, coverage=0.7, score=score)
        assert rule.sets(z.softmax(1)).sum(1).double().mean() == 1.0


@pytest.mark.parametrize("change", [{"score": "x"}, {"coverage": 1.0}, {"penalty": -1.0}])
def test_wrong_settings_of_sets_are_refused(change):
    z, y = drawn(20, 3)
    with pytest.raises(ValueError, match=r"\.$"):
        posthoc.conformal(z.softmax(1), y, **change)


def test_a_promise_of_95_percent_needs_59_labels_without_an_error():
    assert posthoc.needed(0.95, 0.95) == 59
    assert 0.95**59 <= 0.05 < 0.95**58
    confidence = np.linspace(0.5, 1, 59)
    rule = posthoc.selective(confidence, np.ones(59))
    assert (rule.threshold, rule.coverage, rule.missing) == (0.5, 1.0, 0)
    assert rule.bound == pytest.approx(0.05 ** (1 / 59))
    few = posthoc.selective(confidence[:40], np.ones(40))
    assert (few.threshold, few.missing, few.labels) == (None, 19, 40)
    spoilt = posthoc.selective(confidence, confidence > 0.51)
    assert (spoilt.threshold, spoilt.missing) == (None, 0)


def _risk(kind: str, confidence: np.ndarray) -> np.ndarray:
    """Chance of an error at a confidence; `rough` rises and falls, against the usual picture."""
    if kind == "steady":
        return np.full_like(confidence, 0.08)
    if kind == "rough":
        return np.where((confidence > 0.75) & (confidence < 0.9), 0.25, 0.03)
    if kind == "upside down":
        return 0.02 + 0.1 * confidence
    return 1 - confidence**0.5


@pytest.mark.parametrize("kind", ["usual", "steady", "rough", "upside down"])
@pytest.mark.parametrize("n", [60, 150, 500])
def test_the_promise_of_accuracy_is_broken_in_at_most_one_draw_of_twenty(kind, n):
    """Finite-sample validity over many label splits, also where confidence misleads."""
    grid = np.linspace(0, 1, 20_001)[:-1] + 0.5 / 20_000
    error_above = _risk(kind, grid)[::-1].cumsum()[::-1] / np.arange(len(grid), 0, -1)
    rng = np.random.default_rng(n)
    draws, broken, silent = 800, 0, 0
    for _ in range(draws):
        c = rng.random(n)
        rule = posthoc.selective(c, rng.random(n) >= _risk(kind, c))
        if rule.threshold is None:
            silent += 1
            continue
        broken += error_above[int(rule.threshold * 20_000)] > 0.05
    assert broken / draws <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / draws)
    if kind == "steady":
        assert silent > 0.9 * draws


def test_the_promise_has_power_where_there_is_something_to_promise():
    """Three quarters of the pictures may be answered; 500 labels find more than half of them."""
    rng = np.random.default_rng(1)
    coverage = []
    for _ in range(100):
        c = rng.random(500)
        coverage.append(posthoc.selective(c, rng.random(500) >= (c < 0.4) * 0.12).coverage)
    assert np.mean(np.array(coverage) > 0) == 1.0
    assert np.mean(coverage) > 0.7


@given(st.integers(0, 300), st.integers(0, 2**32 - 1), st.sampled_from([1, 5, 1000]))
@settings(max_examples=80, deadline=None)
def test_a_threshold_answers_ties_together_and_its_bound_holds(n, seed, levels):
    rng = np.random.default_rng(seed)
    c = np.floor(rng.random(n) * levels) / levels + (1 / levels if levels == 1 else 0)
    right = rng.random(n) < 0.98
    rule = posthoc.selective(c, right)
    again = posthoc.load_rule(json.loads(json.dumps(rule._asdict())), posthoc.Selective)
    assert again == rule
    if rule.threshold is None:
        assert rule.missing == max(0, 59 - n)
        return
    answered = c >= rule.threshold
    assert rule.coverage == answered.mean()
    hits, k = right[answered].sum(), answered.sum()
    exact = stats.binomtest(int(hits), int(k)).proportion_ci(0.9, "exact").low  # one-sided 95 %
    assert rule.bound == pytest.approx(exact)
    assert rule.bound >= 0.95


@pytest.mark.parametrize("n", [59, 117, 118, 200, 1000, 50_000])
def test_labels_without_an_error_are_always_enough(n):
    rule = posthoc.selective(np.full(n, 1.0), np.ones(n, bool))
    assert (rule.coverage, rule.threshold) == (1.0, 1.0)
    assert posthoc.selective(np.zeros(n), np.zeros(n, bool)).threshold is None


@pytest.mark.parametrize(
    ("c", "r", "change", "words"),
    [
        ([0.5], [1, 1], {}, "both"),
        ([1.5], [1], {}, "between 0 and 1"),
        ([math.nan], [1], {}, "between 0 and 1"),
        ([0.5], [2], {}, "True or False"),
        ([0.5], [1], {"accuracy": 1.0}, "accuracy is 1.0"),
        ([0.5], [1], {"certainty": 0.0}, "certainty is 0.0"),
    ],
)
def test_wrong_input_to_the_promise_is_refused(c, r, change, words):
    with pytest.raises(ValueError, match=words):
        posthoc.selective(c, r, **change)


@pytest.mark.parametrize("kind", [posthoc.Conformal, posthoc.Selective])
@pytest.mark.parametrize("key", ["labels", "threshold", "coverage", "cross_fitted"])
@pytest.mark.parametrize("value", ["x", -1e400, [], {}])
def test_malformed_rules_are_refused(kind, key, value):
    z, y = drawn(80, 3, spread=20.0)
    good = {
        posthoc.Conformal: posthoc.conformal(z.softmax(1), y)._asdict(),
        posthoc.Selective: posthoc.selective(z.softmax(1).amax(1), z.argmax(1) == y)._asdict(),
    }[kind]
    posthoc.load_rule(good, kind)
    with pytest.raises(ValueError, match="malformed"):
        posthoc.load_rule(good | {key: value}, kind)
    with pytest.raises(ValueError, match="malformed"):
        posthoc.load_rule([good], kind)
