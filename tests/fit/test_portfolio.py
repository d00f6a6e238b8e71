"""Classifiers on frozen features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from calmatch import augment, nets, posthoc
from calmatch.console import ProgressBar
from calmatch.data.folder import decode_folder, read_folder
from calmatch.fit import features, portfolio
from calmatch.fit.portfolio import Embedding, Features, Teachers
from pictures import blobs


def clusters(classes=5, each=60, width=64, spread=0.7, seed=0):
    """Features of well apart classes, most of them unlabelled: features, labels, truth."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(classes, width))
    truth = np.repeat(np.arange(classes), each)
    x = np.maximum(centres[truth] + spread * random.normal(size=(len(truth), width)), 0)
    stages = random.normal(size=(len(truth), 12)) + centres[truth, :12]
    labels = np.full(len(truth), -1)
    for k in range(classes):
        labels[random.permutation(np.flatnonzero(truth == k))[:4]] = k
    return Features([x.astype(np.float32)], [stages.astype(np.float32)]), labels, truth


def bar():
    return ProgressBar("", 1, 0, True)


def fitted(features, labels, classes):
    rows = np.flatnonzero(labels >= 0)
    embedding = Embedding.fit(features)
    teachers = Teachers(embedding.spaces(features), classes)
    return embedding, teachers, portfolio.fit_transductive(teachers, rows, labels[rows], bar())


def test_unlabelled_images_teach_the_student():
    features, labels, truth = clusters(spread=2.8)
    _, teachers, student = fitted(features, labels, 5)
    rows = np.flatnonzero(labels >= 0)
    plain = portfolio.fit_logistic(features, rows, labels[rows], 5, bar())
    free = labels < 0
    guess = (teachers.inputs @ student.weights[:-1] + student.weights[-1]).argmax(1)
    base = (features.last[0] @ plain.weights[:-1] + plain.weights[-1]).argmax(1)
    wrong, usual = ((g[free] != truth[free]).mean() for g in (guess, base))
    assert wrong < usual
    low, high = student.error[1:]
    assert low <= wrong <= high


@pytest.mark.parametrize("classes", [2, 10, 11, 1000])
def test_ten_classes_or_fewer_have_the_same_components(classes):
    own = np.array(portfolio.components_of(classes)) / portfolio.COMPONENTS
    assert (own == 1).all() if classes <= 10 else (own > 1).all()
    assert (own <= portfolio.WIDEST).all()


def test_echo_is_high_where_any_labels_would_do_and_low_where_they_decide():
    echoes = []
    for spread in (0.3, 4.0):
        features, labels, _ = clusters(spread=spread)
        _, _, student = fitted(features, labels, 5)
        echoes.append(student.signs["echo"])
    assert echoes[0] > 0.97
    assert 0.2 < echoes[1] < 0.8


def test_the_networks_head_computes_the_embedding():
    features, labels, _ = clusters(width=128)
    embedding, teachers, _ = fitted(features, labels, 5)
    head = nets.build("embedded(on='tiny', size=8, width=100)", 5, 8)
    width = embedding.components[-1]
    for name, value in (
        ("stage_mean", embedding.stage_mean),
        ("stage_scale", embedding.stage_scale),
        ("stage_weight", np.float32(embedding.stage_weight)),
        ("mean", embedding.mean),
        ("axes", embedding.axes[:, :width]),
        ("scale", embedding.scale(width)),
    ):
        setattr(head, name, torch.as_tensor(np.asarray(value)))
    pooled = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(*features, strict=True)]
    assert torch.allclose(head.embed(pooled), torch.from_numpy(teachers.inputs), atol=1e-4)


def test_logistic_regression_is_scikit_learns():
    features, labels, _ = clusters()
    x = features.last[0]
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    rows = np.flatnonzero(labels >= 0)
    targets = np.eye(5, dtype=np.float32)[labels[rows]]
    weights = portfolio.fit_linear(x[rows], targets, 1 / (0.1 * len(rows)), 500)
    theirs = LogisticRegression(C=0.1, max_iter=2000, tol=1e-8).fit(x[rows], labels[rows])
    ours = portfolio.softmax(x @ weights[:-1] + weights[-1])
    assert np.abs(ours - theirs.predict_proba(x)).max() < 2e-3


def test_students_side_by_side_are_those_one_by_one():
    """Within 1e-3 in probability: what L-BFGS leaves undone."""
    features, labels, _ = clusters(spread=1.9)
    rows = np.flatnonzero(labels >= 0)
    teachers = Teachers(Embedding.fit(features).spaces(features), 5)
    cases = [(rows[side], labels[rows][side]) for side in portfolio.halves_of(labels[rows], 0)]
    cases += [(rows[rest], labels[rows][rest]) for _, rest in portfolio.folds_of(labels[rows], 0)]
    alone = [one_student(teachers, *case) for case in cases]
    assert max(np.abs(alone[0] - other).max() for other in alone[1:]) > 0.05  # they do differ
    for own, wanted in zip(teachers.teach(cases), alone, strict=True):
        probs = portfolio.softmax(teachers.inputs @ own[:-1] + own[-1])
        assert np.abs(probs - wanted).max() < 1e-3


def one_student(teachers, rows, labels):
    """What a student says, taught as the module's docstring has it, in double precision."""
    n, y = len(teachers.inputs), np.eye(5)[labels]
    rest = np.setdiff1d(np.arange(n), rows)
    taught = np.zeros((n, 5))
    for space in map(np.float64, teachers.spaces):
        sharp = portfolio.SHARPNESS * np.sqrt(space.shape[1])
        prototypes = unit(y.T @ space[rows])
        for _ in range(portfolio.ROUNDS):
            weights = portfolio.softmax(sharp * space[rest] @ prototypes.T)
            sums = portfolio.LABEL_WEIGHT * y.T @ space[rows] + weights.T @ space[rest]
            prototypes = unit(0.7 * prototypes + 0.3 * unit(sums))
        taught += portfolio.softmax(sharp * space @ prototypes.T) / len(teachers.spaces) / 2
    start = np.zeros((n, 5))
    start[rows] = y / y.sum(0)
    mass = start
    for _ in range(portfolio.DIFFUSION_ROUNDS):
        mass = start + portfolio.DIFFUSION * (teachers.graph @ mass)
    taught += np.maximum(mass, 1e-9) / np.maximum(mass, 1e-9).sum(1, keepdims=True) / 2
    taught[rows] = y
    layer = LogisticRegression(C=1 / (portfolio.DECAY * n), tol=1e-10, max_iter=10_000)
    inputs, targets = np.repeat(teachers.inputs, 5, 0), np.tile(np.arange(5), n)
    layer.fit(inputs, targets, sample_weight=taught.ravel())
    return layer.predict_proba(teachers.inputs)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("c", [1e-3, 0.1, 1.0])
def test_regressions_side_by_side_count_their_own_rows(c):
    """Folds of logistic regression, within 2e-3 of scikit-learn's on the rows that each counts."""
    features, labels, _ = clusters()
    x = features.last[0]
    rows = np.flatnonzero(labels >= 0)
    targets = np.eye(5, dtype=np.float32)[labels[rows]]
    counted = np.stack([rest for _, rest in portfolio.folds_of(labels[rows], 0)])
    several = np.broadcast_to(targets, (len(counted), *targets.shape))
    decays = 1 / (c * counted.sum(1))
    together = portfolio.fit_linear(x[rows], several, decays, counted=counted)
    for own, seen in zip(together, counted, strict=True):
        theirs = LogisticRegression(C=c, max_iter=5000, tol=1e-9).fit(
            x[rows[seen]], labels[rows[seen]]
        )
        probs = portfolio.softmax(x @ own[:-1] + own[-1])
        assert np.abs(probs - theirs.predict_proba(x)).max() < 2e-3


@pytest.mark.parametrize("seed", range(3))
def test_no_candidate_wins_by_noise(seed):
    random = np.random.default_rng(seed)
    truth = random.integers(0, 4, 40)
    logits = 2 * np.eye(4)[truth] + random.normal(size=(40, 4))

    def candidate(name, noise):
        shifted = (logits + noise * random.normal(size=logits.shape)).astype(np.float32)
        log_probs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        rows = np.arange(40)
        heat, error = posthoc.FewLabelTemperature(1.0, 0.1, 40), posthoc.Estimate(0, 0, 1)
        return portfolio.Candidate(name, shifted, True, log_probs, truth, rows, heat, error, {})

    first, like, worse = candidate("a", 0.0), candidate("b", 0.05), candidate("c", 3.0)
    assert portfolio.choose([first, like, worse]) is first
    assert portfolio.choose([worse, first]) is first


@pytest.mark.parametrize(
    ("counts", "each"), [((4, 4), 30), ((1, 4, 4), 20), ((40, 4), 50), ((3,) * 30, 4), ((2, 2), 3)]
)
def test_odd_sets_end_with_finite_numbers(counts, each):
    random = np.random.default_rng(0)
    truth = np.repeat(np.arange(len(counts)), [each + n for n in counts])
    x = np.maximum(random.normal(size=(len(truth), 32)) + 3 * np.eye(len(counts), 32)[truth], 0)
    labels = np.full(len(truth), -1)
    for k, number in enumerate(counts):
        labels[np.flatnonzero(truth == k)[:number]] = k
    _, _, student = fitted(Features([x.astype(np.float32)]), labels, len(counts))
    assert np.isfinite(student.weights).all()
    assert 0 <= student.error[1] <= student.error[0] <= student.error[2] <= 1
    assert np.isfinite(student.fitted.temperature)


def test_features_are_computed_once_and_are_the_networks(tmp_path, monkeypatch):
    extractor = portfolio.load_extractor("tiny", 16, torch.device("cpu"))
    extractor = extractor.showing(augment.tta_views(3, 16))
    source = extractor.views.source
    images, _ = decode_folder(read_folder(blobs(tmp_path / "pics")), source, squash=True)
    first = features.compute_blocks(extractor, images, True).some()
    monkeypatch.setattr(features, "_compute", lambda *_: pytest.fail("computed again"))
    again = features.compute_blocks(extractor, images, True).some()
    assert len(first.last) == 3
    assert all(np.array_equal(a, b) for a, b in zip(first.last, again.last, strict=True))
    pixels = images.take(range(len(images)))
    mean, std = torch.tensor(extractor.mean), torch.tensor(extractor.std)
    for view, ours in zip(extractor.views(pixels), first.last, strict=True):
        theirs = extractor.body(augment.normalise(view, mean, std)).features.detach().numpy()
        assert np.abs(ours - theirs).max() < 2e-3  # half precision


def test_stages_of_a_pretrained_network_are_means_and_deviations_of_its_maps():
    extractor = portfolio.load_extractor("efficientnet_lite0", 64, torch.device("cpu"))
    images = torch.randn(2, 3, 64, 64)
    last, stages = nets.pooled_features(extractor.body, images)
    assert torch.allclose(last, extractor.body(images).features, atol=1e-5)
    _, maps = extractor.body.model.forward_intermediates(images, indices=3)
    assert torch.allclose(stages[:, : maps[0].shape[1]], maps[0].mean((2, 3)))
    deep = maps[-1]
    log = deep.std((2, 3), correction=0).add(1e-3).log()
    assert torch.allclose(stages[:, -deep.shape[1] :], log, atol=2e-2)
