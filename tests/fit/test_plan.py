"""What a fit decides before it learns."""

from __future__ import annotations

import pytest
import torch

from calmatch import nets
from calmatch.data.folder import decode_folder, read_folder
from calmatch.fit import plan, portfolio
from pictures import blobs, options


def test_the_plan_says_what_it_does_without_pretrained_weights(tmp_path, monkeypatch):
    def nothing(*_: object) -> None:
        raise ValueError("The hub cannot be reached.")

    monkeypatch.setattr(nets, "build", nothing)
    net, ready, notes = plan.choose_network(options(tmp_path, net=None), torch.device("cpu"))
    assert net.startswith("small")
    assert not ready
    assert "learns from scratch" in notes[0]
    assert "The hub cannot be reached" in notes[0]


def test_a_pretrained_network_is_shown_images_as_its_weights_want_them():
    extractor = portfolio.load_extractor("efficientnet_lite0", None, torch.device("cpu"))
    assert extractor.size == 224
    assert extractor.mean == extractor.std == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("seconds", "minutes", "size", "views"),
    [(0.01, 10, 224, 5), (0.1, 10, 224, 2), (0.5, 10, 160, 1), (9.0, 1, 96, 1)],
)
def test_the_size_and_views_are_what_the_minutes_allow(
    tmp_path, monkeypatch, seconds, minutes, size, views
):
    monkeypatch.setattr(plan, "time_image", lambda _: seconds)
    extractor = portfolio.load_extractor("efficientnet_lite0", None, torch.device("cpu"))
    asked = options(tmp_path, net=None, size=None, minutes=minutes)
    made = plan.plan_features(asked, extractor, 1150, grey=False)
    assert (made["views"][0][0], len(made["views"])) == (size, views)
    assert f"at {size} px" in made["note"]


def test_no_view_of_grey_images_is_mirrored(tmp_path):
    extractor = portfolio.load_extractor("tiny", 16, torch.device("cpu"))
    for grey in (False, True):
        made = plan.plan_features(options(tmp_path, minutes=10), extractor, 9, grey)
        assert any(flipped for *_, flipped in made["views"]) != grey
        assert ("grey" in made["note"]) == grey


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_pretrained_network_learns_no_longer_than_its_fold_models_bear(
    tmp_path, monkeypatch, pretrained
):
    images, own = decode_folder(read_folder(blobs(tmp_path / "pics", each=4)), 16)
    monkeypatch.setattr(plan, "_time_step", lambda _: 1e-4)
    monkeypatch.setattr(nets, "LITE", ("tiny",) if pretrained else ())
    asked = options(tmp_path / "pics", steps=None, minutes=60)
    made = plan.make_plan(asked, own, images, 16)
    assert made.hold == 0.0  # few labels: fold models
    assert made.batch == 9  # what every fold model has
    assert made.steps <= (plan.MOST_PRETRAINED if pretrained else plan.MOST)


def test_grey_images_are_not_mirrored(tmp_path):
    weak, strong, notes = plan.choose_views(options(tmp_path), 64, True)
    assert "flip" not in weak + strong
    assert "grey" in notes[0]
