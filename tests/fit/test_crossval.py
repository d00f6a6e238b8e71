"""How good it is, from few labels."""

from __future__ import annotations

import pytest
import torch

from calmatch.data.batches import folds
from calmatch.fit.crossval import (
    HeldOut,
    calibrate,
    cross_validate,
    freeze_vectors,
)
from calmatch.training.config import Config


@pytest.mark.parametrize("counts", [(4, 4, 4), (1, 2, 9), (2, 2), (30, 3, 1)])
def test_folds_hold_every_label_once_but_the_only_ones(counts):
    labels = [k for k, count in enumerate(counts) for _ in range(count)]
    parts = folds(labels, 0)
    places = sorted(place for fold in parts for place in fold)
    assert places == [k for k, label in enumerate(labels) if counts[label] > 1]
    for fold in parts:
        left = [labels[k] for k in range(len(labels)) if k not in fold]
        assert set(left) == set(labels)  # every class keeps a label to learn from


def test_a_head_is_evaluated_only_by_models_that_did_not_see_the_label():
    """Wrong labels must not be learned and then counted as right."""
    chance = torch.Generator().manual_seed(0)
    vectors = torch.randn(60, 8, generator=chance)
    labels = torch.full((60,), -1)
    labels[:24] = torch.arange(24) % 3  # which no vector says
    config = Config(method="supervised", steps=200, batch=16, lr=0.05, device="cpu", compile=False)
    held = cross_validate(freeze_vectors(config, vectors, labels, 3))
    assert sorted(held.rows) == list(range(24))
    assert (held.log_probs.argmax(1) != held.labels).double().mean() > 0.4


def test_a_temperature_that_rests_on_more_than_the_labels_is_taken():
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    held = HeldOut(logits, logits.argmax(1), list(range(20)), 4)
    calibration = calibrate(held, 2.0, (0.1, 0.05, 0.2))
    assert calibration.scaling.values["temperature"] == 2.0
    assert tuple(calibration.after["error"]) == (0.1, 0.05, 0.2)
