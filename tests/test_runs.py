"""The pictures a run keeps for people to look at."""

from __future__ import annotations

import json
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import folders
from calmatch import metrics, runs, train
from calmatch.data.batches import Resident, Stream
from calmatch.model import load_model
from calmatch.runs import (
    ASKED,
    MISTAKES,
    Predicted,
    load_examples,
    most_informative,
    sample_rows,
    write_examples,
)
from conftest import write_random_model


def made(n, classes, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_probs = (3 * torch.randn(n, classes, generator=generator)).log_softmax(-1)
    labels = torch.randint(classes, (n,), generator=generator)
    pictures = torch.randint(256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    return log_probs, labels, pictures


def test_pictures_of_every_bin_and_the_most_confidently_wrong_are_kept_small(tmp_path):
    log_probs, labels, pictures = made(2000, 10, 96)
    seen = Predicted(log_probs, lambda rows: pictures[rows])
    write_examples(tmp_path, seen, labels, seen._replace(files=[f"é {k}.png" for k in range(2000)]))
    assert (tmp_path / "examples.npz").stat().st_size < 2_000_000  # of noise, which no zip shrinks
    examples = load_examples(tmp_path)
    confidence, guess = log_probs.exp().max(-1)
    wrong = (guess != labels).nonzero()[:, 0]
    worst = wrong[confidence[wrong].argsort(descending=True)[:MISTAKES]]
    assert set(worst.tolist()) <= set(examples.rows)
    filled = ((confidence * 15).ceil() - 1).long().unique()
    assert set(((confidence[examples.rows] * 15).ceil() - 1).long().tolist()) == set(
        filled.tolist()
    )
    assert examples.images.shape == (len(examples.rows), 3, 64, 64)
    assert examples.asked_images.shape == (ASKED, 3, 64, 64)
    assert examples.asked_files == [f"é {k}.png" for k in examples.asked_rows]
    assert (examples.considered, examples.whole) == (2000, 2000)


def test_small_pictures_are_kept_as_they_are(tmp_path):
    log_probs, labels, pictures = made(50, 4, 8)
    write_examples(tmp_path, Predicted(log_probs, lambda rows: pictures[rows]), labels)
    examples = load_examples(tmp_path)
    assert torch.equal(examples.images, pictures[examples.rows])
    assert examples.asked_rows == examples.asked_files == []


def test_a_folder_without_pictures_has_none(tmp_path):
    assert load_examples(tmp_path) is None


def test_labels_are_asked_for_uncertain_pictures_unlike_each_other():
    sure = torch.tensor([[0.98, 0.01, 0.01]]).repeat(50, 1)
    often = torch.tensor([[0.5, 0.5, 0.0]]).repeat(50, 1)
    rare = torch.tensor([[0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    asked = most_informative(torch.cat([sure, often, rare]).log(), 4)
    assert (asked >= 50).sum() == 3
    assert set(asked.tolist()) >= {100, 101}
    assert len(set(asked.tolist())) == 4


def test_no_more_are_asked_for_than_there_are():
    asked = most_informative(torch.full((3, 2), 0.5).log(), 24)
    assert sorted(asked.tolist()) == [0, 1, 2]


@pytest.mark.parametrize("n", [3, 10, 11])
def test_a_sample_of_rows_is_bounded_and_repeatable(n):
    rows = torch.arange(n) * 2
    sampled = sample_rows(rows, seed=3, number=10)
    assert len(sampled) == min(n, 10)
    assert torch.equal(sampled, sample_rows(rows, seed=3, number=10))
    assert set(sampled.tolist()) <= set(rows.tolist())


@pytest.mark.parametrize("kind", ["resident", "stream"])
def test_some_rows_of_a_source_are_those_pictures(kind):
    pictures = made(20, 2, 4)[2]
    rows, device = torch.arange(19, -1, -1), torch.device("cpu")
    whole = (
        Resident(pictures[rows], device)
        if kind == "resident"
        else Stream(pictures, rows, device, workers=0)
    )
    read = torch.cat(list(whole.some(torch.tensor([3, 0, 7])).batches(2)))
    assert torch.equal(read, pictures[[16, 19, 12]])


def test_a_run_asks_for_labels_of_pictures_that_have_none(tiny, tmp_path):
    run = train(tiny(include_labelled=True), tmp_path / "run", quiet=True)
    split = json.loads((run.folder / "split.json").read_text())
    examples = load_examples(run.folder)
    assert set(examples.asked_rows) <= set(split["unlabelled"]) - set(split["labelled"])
    assert len(examples.asked_rows) == ASKED
    assert examples.whole == len(split["unlabelled"]) - len(split["labelled"])
    with np.load(run.folder / "predictions.npz") as held:
        assert max(examples.rows) < len(held["labels"])


def test_a_notebook_shows_numbers_and_reliability_of_run_result_and_model(tmp_path):
    run = folders.made(tmp_path / "run", classes=folders.NASTY, title=f"a {folders.EVIL}")
    write_random_model(run.folder, "tiny", 5, 16)
    for thing in (run, run.result, load_model(run.folder)):
        html = thing._repr_html_()
        ElementTree.fromstring(html)  # well-formed
        assert "<script>" not in html
        assert html.count("<circle") == int((metrics.reliability(*probs_of(run)).number > 0).sum())
    error = run.result.metrics["error"]
    assert f"{error.value:.4f} ({error.low:.4f} to {error.high:.4f})" in run._repr_html_()
    (run.folder / "predictions.npz").write_bytes(b"broken")
    assert "<svg" not in run._repr_html_()


def probs_of(run):
    log_probs, labels = run.predictions()
    return log_probs.double().softmax(-1), labels


def test_the_log_as_a_frame_and_without_pandas_a_sentence(tmp_path, monkeypatch):
    run = folders.made(tmp_path / "run", steps=3)
    frame = run.frame()
    assert frame[frame.kind == "test"].error.tolist() == [n["error"] for n in run.lines("test")]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match="pip install pandas"):
        run.frame()


def test_predictions_whose_labels_are_one_number_are_refused_in_a_sentence(tmp_path):
    np.savez(tmp_path / "p.npz", log_probs=np.zeros((2, 3), np.float32), labels=np.int64(1))
    with pytest.raises(ValueError, match="that fit"):
        runs.read_predictions(tmp_path / "p.npz", 3)
