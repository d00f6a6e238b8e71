import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from calmatch import metrics
from conftest import Golden

FILE = Golden("metrics")
GOLDEN_KEYS = {
    "ece": "ece_exact",
    "max_ce": "mce",
    "adaptive_ece": "aece_keep_smallest",
    "classwise_ece": "cece_exact_allK",
    "brier": "brier_exact",
    "nll": "nll",
    "smooth_ece": "smece",
}
BINNED = ("ece", "max_ce", "adaptive_ece", "classwise_ece")


def case(name):
    if f"{name}/probs" in FILE:
        return FILE[f"{name}/probs"], FILE[f"{name}/labels"]
    return (FILE[f"{name}/logits_x16"] / 16.0).double().softmax(1), FILE[f"{name}/labels"]


@pytest.mark.parametrize("metric", GOLDEN_KEYS)
@pytest.mark.parametrize("name", FILE.meta["cases"])
def test_metrics_equal_the_reference_implementations(metric, name):
    probs, labels = case(name)
    bins = {"bins": int(FILE[f"{name}/n_bins"])} if metric in BINNED else {}
    value = float(metrics.METRICS[metric](probs, labels, **bins))
    tolerance = 1e-4 if metric == "smooth_ece" else 1e-9
    assert value == pytest.approx(float(FILE[f"{name}/{GOLDEN_KEYS[metric]}"]), abs=tolerance)


def random_case(n=400, classes=6, seed=0, sharp=2.0):
    generator = torch.Generator().manual_seed(seed)
    probs = (sharp * torch.randn(n, classes, generator=generator, dtype=torch.float64)).softmax(1)
    return probs, torch.randint(classes, (n,), generator=generator)


def test_ece_and_nll_equal_torchmetrics_and_sklearn():
    probs, labels = random_case()
    theirs = multiclass_calibration_error(probs, labels, 6, n_bins=15, norm="l1")
    assert float(metrics.ece(probs, labels)) == pytest.approx(float(theirs), abs=1e-6)
    assert float(metrics.nll(probs, labels)) == pytest.approx(log_loss(labels, probs), abs=1e-12)


def test_smooth_ece_equals_its_authors_package():
    import relplot

    for seed in range(5):
        probs, labels = random_case(seed=seed, sharp=1 + seed)
        confidence, guess = probs.max(1)
        theirs = relplot.smECE(confidence.numpy(), (guess == labels).double().numpy())
        assert float(metrics.smooth_ece(probs, labels)) == pytest.approx(theirs, abs=1e-4)


def test_debiased_ece_is_near_zero_where_ece_is_not():
    """On perfectly calibrated predictions plain ECE is only sampling noise (Kumar et al. 2019)."""
    generator = torch.Generator().manual_seed(0)
    plain, debiased = [], []
    for _ in range(40):
        top = 0.5 + 0.5 * torch.rand(500, generator=generator, dtype=torch.float64)
        labels = (torch.rand(500, generator=generator) > top).long()
        probs = torch.stack([top, 1 - top], 1)
        plain.append(float(metrics.ece(probs, labels)))
        debiased.append(float(metrics.debiased_ece(probs, labels)) ** 2)
    assert np.mean(plain) > 0.03
    assert np.mean(debiased) < 0.001


def test_debiased_ece_by_its_definition():
    probs, labels = random_case(300)
    confidence, guess = (t.numpy() for t in probs.max(1))
    right = (guess == labels.numpy()).astype(float)
    total = 0.0
    for part in np.array_split(np.argsort(confidence), 15):
        gap = confidence[part].mean() - right[part].mean()
        noise = right[part].mean() * (1 - right[part].mean()) / (len(part) - 1)
        total += len(part) / 300 * (gap**2 - noise)
    assert float(metrics.debiased_ece(probs, labels)) == pytest.approx(max(0, total) ** 0.5)


def test_aurc_and_ks_by_their_definitions():
    probs, labels = random_case(50)
    confidence, guess = probs.max(1)
    order = confidence.argsort(descending=True)
    wrong = (guess != labels).double()[order]
    risks = [float(wrong[: k + 1].mean()) for k in range(50)]
    assert float(metrics.aurc(probs, labels)) == pytest.approx(np.mean(risks))
    up = confidence.sort().indices
    walk = ((guess == labels).double() - confidence)[up].cumsum(0).abs().max() / 50
    assert float(metrics.ks(probs, labels)) == pytest.approx(float(walk))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(2, 7), st.integers(0, 10_000), st.sampled_from([0.1, 1, 9]))
def test_every_metric_is_finite_bounded_and_blind_to_order(n, classes, seed, sharp):
    probs, labels = random_case(n, classes, seed, sharp)
    probs = (probs * 8).round() / 8 if seed % 2 else probs  # ties, exact zeros and ones
    probs = probs / probs.sum(1, keepdim=True).clamp_min(1e-9)
    probs[probs.sum(1) == 0] = 1 / classes
    shuffle = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for name, metric in metrics.METRICS.items():
        value = float(metric(probs, labels))
        assert np.isfinite(value), name
        assert -1e-12 <= value <= (40 if name == "nll" else 2 if name == "brier" else 1 + 1e-9), (
            name
        )
        assert float(metric(probs[shuffle], labels[shuffle])) == pytest.approx(value, abs=1e-9), (
            name
        )


def test_certain_predictions_fall_in_the_last_bin():
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 1])
    bins = metrics.reliability(probs, labels)
    assert bins.number.tolist() == [0.0] * 14 + [3.0]
    assert float(metrics.ece(probs, labels)) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("probs", "labels", "words"),
    [
        (torch.randn(4, 3), [0, 1, 2, 0], "apply softmax"),
        (torch.full((4, 3), float("nan")), [0, 1, 2, 0], "NaN"),
        (torch.full((4, 3), 1 / 3), [0, 1, 3, 0], "0..2"),
        (torch.full((4, 3), 1 / 3), [0, -1, 2, 0], "0..2"),
        (torch.full((4, 3), 1 / 3), [0, 1], "labels must be"),
        (torch.full((4,), 1 / 3), [0, 1, 2, 0], "probs must be"),
        (torch.full((0, 3), 1 / 3), [], "probs must be"),
        (torch.full((4, 3), 1 / 3), [0.0, 1.0, 2.0, 0.0], "integer class ids"),
        (torch.ones(4, 3, dtype=torch.long), [0, 1, 2, 0], "floating-point"),
    ],
)
@pytest.mark.parametrize("metric", metrics.METRICS)
def test_inputs_that_are_not_probabilities_are_refused(metric, probs, labels, words):
    with pytest.raises(ValueError, match=words):
        metrics.METRICS[metric](probs, labels)


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint16", "uint32", "uint64"])
def test_labels_of_any_whole_numbers_are_accepted(kind):
    probs, labels = random_case(200, 10)
    assert metrics.ece(probs, np.asarray(labels).astype(kind)) == metrics.ece(probs, labels)


def test_half_precision_probabilities_are_accepted():
    probs, labels = random_case(200, 10)
    assert float(metrics.ece(probs.half(), labels)) == pytest.approx(
        float(metrics.ece(probs, labels)), abs=0.01
    )


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """Confidence c is right with probability c - 0.1: the true ECE is 0.1."""
    generator = torch.Generator().manual_seed(1)
    covered = []
    for seed in range(60):
        top = 0.6 + 0.4 * torch.rand(400, generator=generator, dtype=torch.float64)
        labels = (torch.rand(400, generator=generator) > top - 0.1).long()
        probs = torch.stack([top, 1 - top], 1)
        value, low, high = metrics.interval("ece", probs, labels, resamples=200, seed=seed)
        assert low <= value <= high
        covered.append(low <= 0.1 <= high)
    assert np.mean(covered) >= 0.8


def test_summary_has_every_metric_with_its_interval_and_is_repeatable():
    probs, labels = random_case(100)
    first, second = (metrics.summary(probs, labels, resamples=20) for _ in range(2))
    assert first == second
    assert set(first) == set(metrics.METRICS)
    assert metrics.summary(probs, labels, resamples=0)["ece"].value == first["ece"].value


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (3, 7), (40, 41), (500, 1000), (9, 9)])
def test_the_wilson_interval_is_scipys(hits, n):
    theirs = binomtest(hits, n).proportion_ci(0.95, "wilson")
    assert metrics.wilson(hits / n, n) == pytest.approx(theirs, abs=1e-5)
    arrays = metrics.wilson(np.array([hits / n] * 2), np.array([n] * 2))
    assert [end[1] for end in arrays] == list(metrics.wilson(hits / n, n))


def test_smoothed_accuracy_is_the_kernel_regression_of_hits_on_confidence():
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(4000, generator=generator, dtype=torch.float64)
    right = (torch.rand(4000, generator=generator) < confidence**2).double()
    at = torch.linspace(0.2, 0.8, 7, dtype=torch.float64)
    accuracy, density = metrics.smooth_accuracy(confidence, right, 0.03, at)
    kernel = torch.exp(-(((at[:, None] - confidence) / 0.03) ** 2) / 2)
    expected = at - (kernel * (confidence - right)).sum(1) / kernel.sum(1)
    torch.testing.assert_close(accuracy, expected, atol=2e-3, rtol=0)
    weight = kernel.mean(1) / 0.03 / (2 * torch.pi) ** 0.5
    torch.testing.assert_close(density, weight, atol=1e-2, rtol=0)


def test_smoothed_accuracy_is_unknown_where_there_are_no_pictures():
    confidence = torch.full((100,), 0.95, dtype=torch.float64)
    accuracy, density = metrics.smooth_accuracy(
        confidence, torch.ones(100), 0.01, torch.tensor([0.1, 0.95])
    )
    assert accuracy[0].isnan()
    assert float(accuracy[1]) == pytest.approx(1.0)
    assert float(density[0]) == pytest.approx(0.0, abs=1e-9)
