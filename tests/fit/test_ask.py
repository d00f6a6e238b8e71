"""Which image to label next: the data is covered, doubt attracts, and random ones stay random."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from calmatch.fit import ask, portfolio


def clusters(number: int = 90, kinds: int = 6, seed: int = 0) -> tuple[list[Any], Any]:
    """Unit vectors around centres, in a random order, and whose they are."""
    draw = np.random.default_rng(seed)
    kind = draw.permutation(np.arange(number) % kinds)
    rows = np.eye(12)[kind] + 0.12 * draw.standard_normal((number, 12))
    return [np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)], kind


def questions(spaces: list[Any], **settings: Any) -> ask.Questions:
    return ask.Questions(spaces, portfolio.Teachers(spaces, 2).graph, **settings)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_questions_cover_the_data(seed):
    spaces, kind = clusters(seed=seed)
    asked = questions(spaces).next([], n=6, fair=0)
    assert set(kind[asked.rows]) == set(range(6))
    assert not asked.fair.any()


def test_what_the_model_doubts_is_asked_for():
    spaces, kind = clusters()
    probs = np.full((90, 2), 0.5, np.float32)
    probs[kind != 4] = (0.99, 0.01)
    asked = questions(spaces).next([int(np.flatnonzero(kind == 0)[0])], probs, 3, fair=0)
    assert set(kind[asked.rows]) == {4}


def test_with_very_many_labels_nothing_labelled_is_asked_for(monkeypatch):
    monkeypatch.setattr(ask, "MOST", 20)
    spaces, _ = clusters()
    known, probs = np.arange(80), np.full((90, 2), 0.5, np.float32)
    chosen = ask.ask(spaces, known, probs, 8, seed=0)
    assert len(chosen) == 8
    assert not set(chosen) & set(known)


def test_a_duplicate_of_an_answered_image_is_asked_for_last():
    spaces, _ = clusters(number=30)
    spaces[0][15:] = spaces[0][:15]
    asked = questions(spaces).next([0], n=29, fair=0).rows.tolist()
    firsts = [k % 15 for k in asked[:14]]
    assert sorted(firsts) == list(range(1, 15))


def test_one_in_five_is_drawn_at_random_and_they_are_a_random_sample():
    spaces, _ = clusters()
    chooser = questions(spaces, seed=3)
    asked = chooser.next([], n=25)
    assert np.flatnonzero(asked.fair).tolist() == [4, 9, 14, 19, 24]
    sample = chooser.fair_rows(asked.rows)
    assert set(asked.rows[asked.fair]) <= set(sample.tolist()) <= set(asked.rows.tolist())
    assert sample.tolist() == chooser.order[: len(sample)].tolist()
    again = chooser.next(asked.rows[:7].tolist(), n=3)
    assert again.fair.tolist() == [False, False, True]
    assert chooser.next(range(90), n=5).rows.tolist() == []
    assert sorted(chooser.next(range(88), n=5).rows.tolist()) == [88, 89]
    assert len(chooser.fair_rows(range(90))) == 90


def test_the_error_rests_on_random_images_alone():
    spaces, kind = clusters(number=180)
    teachers = portfolio.Teachers(spaces, 6)
    chooser = ask.Questions(spaces, teachers.graph)
    rows = chooser.next([], n=40).rows
    fair = chooser.fair_rows(rows)
    learned = ask.learn(teachers, rows, kind[rows], fair)
    assert sorted(learned.truth) == sorted(kind[np.intersect1d(rows, fair)])
    assert (learned.probs(teachers.inputs).argmax(1) == kind).mean() > 0.95
    assert learned.error.low <= 0.02 <= learned.error.high
    wrong = kind[rows].copy()
    own = np.flatnonzero(np.isin(rows, fair))
    wrong[own] = (wrong[own] + 1) % 6  # the random ones say that it knows nothing
    assert ask.learn(teachers, rows, wrong, fair).error.value > learned.error.value + 0.05


def test_a_class_with_one_label_that_is_held_out_counts_as_wrong():
    spaces, kind = clusters(number=60, kinds=3)
    rows = np.concatenate([np.flatnonzero(kind == c)[: (4, 4, 1)[c]] for c in range(3)])
    learned = ask.learn(portfolio.Teachers(spaces, 3), rows, kind[rows], rows)
    alone = learned.truth == 2
    assert alone.sum() == 1
    assert learned.held[alone].argmax() != 2
    assert (learned.held[~alone].argmax(1) == learned.truth[~alone]).mean() > 0.8


@pytest.mark.slow
def test_after_a_label_of_2000_images_the_model_is_new_within_two_seconds():
    draw = np.random.default_rng(0)
    kind = draw.integers(0, 10, 2000)
    last = np.abs(0.5 * draw.standard_normal((10, 1280))[kind] + draw.standard_normal((2000, 1280)))
    features = portfolio.Features([np.asarray(last, np.float32)])
    spaces = portfolio.Embedding.fit(features).spaces(features)
    teachers = portfolio.Teachers(spaces, 10)
    chooser, rows = ask.Questions(spaces, teachers.graph), draw.permutation(2000)[:80]
    began = time.process_time()  # more than an idle machine's wall clock: two cores add up
    learned = ask.learn(teachers, rows, kind[rows], rows[:16])
    chooser.next(rows, learned.probs(teachers.inputs), 8)
    assert time.process_time() - began < 2.0
