"""calmatch.Classifier behaves as a scikit-learn estimator, on vectors and on pictures."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits, make_blobs
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import calmatch
from calmatch import metrics
from calmatch.estimator import as_bytes

EXPECTED = {
    "check_classifiers_classes": "it uses -1 as a class, which means unlabelled here, as in "
    "sklearn.semi_supervised",
}


@pytest.mark.slow
@parametrize_with_checks(
    [calmatch.Classifier(steps=30)], expected_failed_checks=lambda estimator: EXPECTED
)
def test_scikit_learn_accepts_it(estimator, check):
    check(estimator)


@pytest.fixture
def blobs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, truth = make_blobs(300, centers=3, n_features=5, cluster_std=2.0, random_state=0)
    y = np.full(300, -1)
    for k in range(3):
        y[np.flatnonzero(truth == k)[:6]] = k
    return x, y, truth


def test_minus_one_means_unlabelled_as_a_float_too(blobs):
    x, y, _ = blobs
    whole, parts = (calmatch.Classifier(steps=20).fit(x, some) for some in (y, y.astype(float)))
    assert parts.classes_.tolist() == [0.0, 1.0, 2.0]
    assert np.array_equal(whole.predict_proba(x), parts.predict_proba(x))


def test_vectors_with_unlabelled_rows_names_pickle_and_clone(blobs):
    x, y, truth = blobs
    names = np.array(["ash", "birch", "cedar"], dtype=object)
    texts = np.array([names[k] if k >= 0 else -1 for k in y], dtype=object)
    made = calmatch.Classifier(steps=40, random_state=3).fit(x, texts)
    assert made.classes_.tolist() == names.tolist()
    probs = made.predict_proba(x)
    assert probs.shape == (300, 3)
    assert "<svg" in made._repr_mimebundle_()["text/html"]  # what a notebook asks for
    np.testing.assert_allclose(probs.sum(1), 1)
    assert (made.predict(x) == names[truth]).mean() > 0.9
    again = clone(made).fit(x, texts)
    np.testing.assert_array_equal(again.predict_proba(x), probs)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(made)).predict_proba(x), probs)
    assert len(made.held_out_.labels) == 18


def test_it_works_in_a_pipeline_and_in_cross_validation(blobs):
    x, _, truth = blobs
    chain = make_pipeline(StandardScaler(), calmatch.Classifier(steps=20))
    assert cross_val_score(chain, x, truth, cv=2).mean() > 0.9


@pytest.mark.slow
def test_vectors_are_classified_about_as_well_as_by_scikit_learn_and_calibrated():
    x, truth = load_digits(return_X_y=True)
    y = np.full(len(truth), -1)
    for k in range(10):
        y[np.flatnonzero(truth == k)[:10]] = k
    probs = calmatch.Classifier().fit(x, y).predict_proba(x[y < 0])
    known = (
        LogisticRegression(max_iter=1000).fit(x[y >= 0], y[y >= 0]).score(x[y < 0], truth[y < 0])
    )
    assert 1 - float(metrics.error(probs, truth[y < 0])) > known - 0.05
    assert float(metrics.ece(probs, truth[y < 0])) < 0.1


def test_mistakes_are_sentences(blobs):
    x, y, _ = blobs
    with pytest.raises(ValueError, match="No row has a label"):
        calmatch.Classifier().fit(x, np.full(300, -1))
    with pytest.raises(ValueError, match="one class"):
        calmatch.Classifier().fit(x, np.where(y == 0, 0, -1))
    with pytest.raises(ValueError, match="no method called 'freematsch'"):
        calmatch.Classifier(method="freematsch").fit(x, y)
    with pytest.raises(ValueError, match=r"layer of its own.*use freematch"):
        calmatch.Classifier(method="bam").fit(x, y)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        calmatch.Classifier(steps=0).fit(x, y)
    with pytest.raises(ValueError, match="Pictures are"):
        calmatch.Classifier().fit(np.zeros((4, 8, 8, 5)), [0, 1, 0, 1])


def test_a_second_fit_knows_nothing_of_the_first(blobs):
    x, y, _ = blobs
    made = calmatch.Classifier(steps=20)
    made.shape_, made.model_ = (8, 8), object()  # as after a fit to pictures
    made.fit(x, y)
    assert made.predict(x).shape == (len(x),)
    assert not hasattr(made, "model_")


@pytest.mark.parametrize("shape", [(4, 9, 7), (4, 9, 7, 3), (4, 3, 9, 7)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_pictures_come_in_many_forms(shape, kind):
    x = np.zeros(shape, kind)
    x[0] = 255 if kind is np.uint8 else 1.0
    with pytest.raises(ValueError, match="bytes, or numbers in"):
        as_bytes(np.full((2, 4, 4), 1.00001), False)  # neither bytes nor shares
    pixels = as_bytes(x, kind is np.float32)
    assert pixels.shape == (4, 9, 7, 3)
    assert (pixels[0] == 255).all()
    assert (pixels[1:] == 0).all()


def test_the_scale_of_pictures_is_that_of_fit(monkeypatch):
    shown: list[int] = []
    monkeypatch.setattr(
        calmatch.Classifier, "_fit_pictures", lambda self, x, ids: shown.append(int(x.max()))
    )
    dark = np.zeros((4, 8, 8), np.int64)
    dark[0] = 1
    for x in (dark, dark.astype(np.uint8), dark / 2, dark + 254.0):
        calmatch.Classifier().fit(x, [0, 1, -1, -1])
    assert shown == [1, 1, 128, 255]
    assert as_bytes(dark, False).max() == as_bytes(1.0 * dark, False).max() == 1


@pytest.mark.slow
def test_pictures_are_learned_through_the_same_door_as_folders():
    dataset = calmatch.data.build("synthetic(classes=2, per_class=40, size=16)")
    x = dataset.images.permute(0, 2, 3, 1).numpy()
    truth = dataset.labels.numpy()
    y = np.full(len(truth), -1)
    for k in range(2):
        y[np.flatnonzero(truth == k)[:6]] = k
    made = calmatch.Classifier(net="tiny", steps=40, device="cpu").fit(x, y)
    assert made.score(x, truth) > 0.9
    assert made.result_.evaluated_on == "crossfit"
    np.testing.assert_allclose(made.predict_proba(x).sum(1), 1)
    back = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(back.predict_proba(x), made.predict_proba(x))
    with pytest.raises(ValueError, match="Pictures were"):
        made.predict(x[:, :8])


def test_it_asks_for_rows_without_a_label_that_are_unlike_each_other():
    draw = np.random.default_rng(0)
    kind = np.arange(120) % 4
    x = 4 * np.eye(6)[kind] + draw.standard_normal((120, 6))
    y = np.where(np.arange(120) < 8, kind, -1)
    asked = calmatch.Classifier(steps=20).fit(x, y).ask(5)
    assert len(set(asked.tolist())) == 5
    assert (y[asked] == -1).all()
    with pytest.raises(ValueError, match="n must be"):
        calmatch.Classifier(steps=20).fit(x, y).ask(0)
