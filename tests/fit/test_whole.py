"""The whole network as one more candidate, in a few steps of a tiny one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import calmatch.fit as fits
from calmatch.data.images import ImageFiles
from calmatch.fit import portfolio, whole
from calmatch.model import load_model
from calmatch.runs import load_run
from pictures import accuracy, blobs, fit_into, options


@pytest.fixture
def refining(monkeypatch):
    """A CPU counts as quick enough, for few steps."""
    monkeypatch.setattr(fits, "can_refine", lambda *_: True)
    monkeypatch.setattr(whole, "MOST_STEPS", 12)
    monkeypatch.setattr(whole, "FEW_STEPS", 1)


def test_the_whole_network_is_refined_from_the_student(tmp_path, monkeypatch, refining):
    monkeypatch.setattr(portfolio, "choose", lambda candidates: candidates[-1])
    root = blobs(tmp_path / "pics")
    run = fit_into(options(root, frozen=True, tta=2), tmp_path / "run")
    assert run.result.kept == "whole network"
    assert set(run.result.scores) == {"transductive", "logistic regression", "whole network"}
    model = load_model(run.folder)
    with np.load(run.folder / "unlabelled.npz") as arrays:
        names, log_probs = arrays["files"].tolist(), torch.from_numpy(arrays["log_probs"])
    pixels = ImageFiles(root, tuple(names), model.size, squash=True).take(range(len(names)))
    assert torch.allclose(model.probabilities(pixels), log_probs.exp(), atol=2e-3)
    with np.load(run.folder / "predictions.npz") as held:
        assert len(held["files"]) == 15
    assert accuracy(run.folder) > 0.8
    plain = fit_into(options(root, frozen=True, tta=2, seed=1), tmp_path / "plain")
    weights = [load_model(one.folder).network.net.body.body.state_dict() for one in (run, plain)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_it_is_kept_only_if_it_is_better_and_an_interruption_keeps_what_was_trained(
    tmp_path, monkeypatch, refining
):
    def cut(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    asked = options(blobs(tmp_path / "pics"), frozen=True)
    with monkeypatch.context() as patch:
        patch.setattr(fits, "save_calibration", cut)
        with pytest.raises(KeyboardInterrupt):
            fit_into(asked, tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "work" / "refined").iterdir())
    assert kept == ["all.safetensors", *(f"fold{k}.safetensors" for k in range(4))]
    monkeypatch.setattr(whole, "write_checkpoint", lambda *_: pytest.fail("trained again"))
    run = fit_into(asked, tmp_path / "run")
    losses = load_run(run.folder).result.scores
    assert run.result.kept == "transductive" or losses[run.result.kept] < losses["transductive"]


def test_a_minute_that_is_nearly_over_leaves_it_out(tmp_path, monkeypatch, refining):
    monkeypatch.setattr(whole, "FEW_STEPS", 10**6)
    run = fit_into(options(blobs(tmp_path / "pics"), frozen=True), tmp_path / "run")
    assert "whole network" not in run.result.scores
