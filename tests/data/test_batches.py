import json
import os
import re

import numpy as np
import pytest
import torch

from calmatch.data.batches import Order, Resident, Stream, long_tail, place_images, split
from calmatch.data.dataset import build
from calmatch.data.images import CachedImages, cached_array
from calmatch.training.setup import build_parts
from conftest import GOLDEN

SPLITS = json.loads((GOLDEN / "splits.json").read_text())


@pytest.mark.parametrize("case", SPLITS["balanced"])
def test_balanced_splits_are_the_fields(case):
    labels = SPLITS["labels"][case["labels"]]
    parts = split(labels, case["num_labels"], case["seed"], include_labelled=False)
    if case["ulb_num_labels"] is not None:
        per_class = case["ulb_num_labels"] // (max(labels) + 1)
        parts = split(
            labels,
            case["num_labels"],
            case["seed"],
            unlabelled=[per_class] * (max(labels) + 1),
            include_labelled=False,
        )
    assert parts.labelled == case["lb_idx"]
    assert parts.unlabelled[:50] == case["ulb_idx_first50"]
    assert len(parts.unlabelled) == case["n_ulb"]
    assert sum(parts.unlabelled) == case["ulb_idx_sum"]
    weighted = sum(idx * (place + 1) for place, idx in enumerate(parts.unlabelled))
    assert weighted == case["ulb_idx_weighted"]


@pytest.mark.parametrize("case", SPLITS["long_tailed"])
def test_long_tailed_splits_are_the_fields(case):
    labels = SPLITS["labels"][case["labels"]]
    lb = long_tail(case["N1"], case["lb_imb"], 10)
    ulb = long_tail(case["M"], case["ulb_imb"], 10)
    assert lb == case["lb_counts"]
    assert ulb == case["ulb_counts"]
    parts = split(labels, lb, case["seed"], unlabelled=ulb, include_labelled=False)
    assert parts.labelled == case["lb_idx"]
    assert parts.unlabelled == case["ulb_idx"]


@pytest.mark.parametrize("name", SPLITS["counts"])
def test_long_tailed_class_counts_are_the_fields(name):
    numbers = re.search(r"(?:N1=|M=|N|M)(\d+)_gamma=(-?\d+)", name)
    classes = 10 if name.startswith("K10") else 100
    assert long_tail(int(numbers[1]), int(numbers[2]), classes) == SPLITS["counts"][name]


def test_a_split_never_mixes_validation_with_training():
    labels = np.repeat(np.arange(5), 40)
    plain, held = split(labels, 20, 3), split(labels, 20, 3, validation=0.25)
    assert held.labelled == plain.labelled  # asking for validation does not change the labels
    assert len(held.validation) == 50
    assert not set(held.validation) & (set(held.labelled) | set(held.unlabelled))
    assert set(held.labelled) <= set(held.unlabelled)


@pytest.mark.parametrize(
    ("labels", "validation", "words"),
    [(21, 0.0, "multiple of 5"), (2, 0.0, "multiple of 5"), (1000, 0.0, "too few")],
)
def test_impossible_splits_say_what_to_ask_for(labels, validation, words):
    with pytest.raises(ValueError, match=words):
        split(np.repeat(np.arange(5), 40), labels, 0, validation=validation)


def test_unknown_labels_are_unlabelled():
    parts = split([0, 1, 0, 1, -1, -1], 2, 0)
    assert {4, 5} <= set(parts.unlabelled)


def test_digits_are_whole_and_balanced():
    digits = build("digits")
    assert len(digits.images) + len(digits.test_images) == 1797
    assert digits.images.shape[1:] == (3, 16, 16)
    assert digits.images.dtype == torch.uint8
    assert set(digits.test_labels.tolist()) == set(range(10))
    pixels = digits.images.float() / 255
    assert float(pixels.mean()) == pytest.approx(digits.mean[0], abs=0.02)
    assert float(pixels.std()) == pytest.approx(digits.std[0], abs=0.02)


def test_order_visits_every_row_equally_and_never_twice_in_a_batch():
    order = Order(rows=23, batch=5, seed=1, stream=2)
    counts = torch.zeros(23)
    for step in range(400):
        rows = order[step]
        assert len(rows.unique()) == 5
        counts[rows] += 1
    assert counts.min() > 0.8 * counts.mean()


def test_batches_depend_on_seed_and_step_alone(tiny):
    config = tiny()
    first, second = build_parts(config).batches, build_parts(config).batches
    forwards = [first[k] for k in range(9)]
    for k in (8, 0, 5, 3):  # any order, as after a restart
        again = second[k]
        assert torch.equal(again.x[0], forwards[k].x[0])
        assert torch.equal(again.u[1], forwards[k].u[1])
        assert torch.equal(again.u_id, forwards[k].u_id)
    other = build_parts(config.replace(seed=1)).batches[0]
    assert not torch.equal(other.u_id, forwards[0].u_id)


def test_labels_belong_to_their_pictures(tiny):
    parts = build_parts(tiny(weak="identity", strong="identity"))
    batch = parts.batches[3]
    mean, std = (torch.tensor(v)[:, None, None] for v in parts.statistics)
    dataset = build("synthetic")
    for picture, y, row in zip(batch.x[0], batch.y, batch.x_id, strict=True):
        source = parts.split.labelled[int(row)]
        assert int(dataset.labels[source]) == int(y)
        back = (picture * std + mean) * 255
        torch.testing.assert_close(back.round().to(torch.uint8), dataset.images[source])
    for picture, row in zip(batch.u[0], batch.u_id, strict=True):
        source = parts.split.unlabelled[int(row)]
        back = (picture * std + mean) * 255
        torch.testing.assert_close(back.round().to(torch.uint8), dataset.images[source])


def test_a_batch_larger_than_its_set_is_cut_and_said(tiny):
    parts = build_parts(tiny(batch=100, ratio=1))
    assert len(parts.batches[0].y) == 16
    assert any("16 labelled pictures, so batches hold 16" in note for note in parts.notes)


@pytest.mark.parametrize("kind", ["resident", "stream", "cached"])
def test_every_source_gives_the_same_pictures_whoever_asks(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path))
    images = torch.arange(40 * 12, dtype=torch.int64).to(torch.uint8).view(40, 3, 2, 2)
    rows = torch.arange(38, 0, -3)
    held: torch.Tensor | CachedImages = images
    if kind == "cached":
        fill = lambda array: np.copyto(array, images.numpy())  # noqa: E731
        held = CachedImages(
            cached_array("some", tuple(images.shape), fill), torch.arange(40), "some"
        )
    wanted = "auto" if kind == "cached" else kind
    source = place_images(held, rows, torch.device("cpu"), wanted, 0.5, 0)
    source.plan = lambda number: torch.arange(4 * number, 4 * number + 4)
    assert len(source) == len(rows)
    assert torch.equal(torch.cat(list(source.batches(5))), images[rows])
    assert torch.equal(source.chunk(1), images[rows[4:8]])
    assert torch.equal(
        torch.cat(list(source.some(torch.tensor([2, 0])).batches(5))), images[rows[[2, 0]]]
    )


@pytest.mark.parametrize("system", ["macOS", "Windows"])
def test_where_the_system_does_not_say_its_free_memory_four_gigabytes_are_assumed(
    system, monkeypatch
):
    for name in ("sysconf", "sysconf_names"):
        monkeypatch.delattr(os, name, raising=False)
    if system == "macOS":  # it has other names
        monkeypatch.setattr(os, "sysconf_names", {"SC_PAGE_SIZE": 29}, raising=False)
    images = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1, 3, 2000, 2000)  # 12 MB each
    for number, kind in ((1, Resident), (400, Stream)):
        rows = torch.zeros(number, dtype=torch.int64)
        assert type(place_images(images, rows, torch.device("cpu"), "auto", 0.5, 0)) is kind
