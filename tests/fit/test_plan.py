"""What a fit decides before it learns."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from calmatch import nets
from calmatch.data.folder import ImageFolder, decode_folder, read_folder
from calmatch.fit import plan, portfolio
from calmatch.options import DINO, FitOptions, hub_answers, weights_here
from pictures import blobs, options


def job(root: Path, images: int, **changes: Any) -> plan.FitJob:
    """What a fit of so many images is asked for, 40 of them labelled; there are no files."""
    labels = tuple(k % 10 if k < 40 else -1 for k in range(images))
    names = tuple(f"{k}.png" for k in range(images))
    listed = ImageFolder(root, names, labels, tuple("abcdefghij"))
    asked = options(root, **changes)
    return plan.FitJob(asked, root, listed, "tiny", (), None, "", time.monotonic())


def test_the_plan_says_what_it_does_without_pretrained_weights(tmp_path, monkeypatch):
    def nothing(*_: object) -> None:
        raise ValueError("The hub cannot be reached.")

    monkeypatch.setattr(nets, "build", nothing)
    net, ready, notes = plan.choose_network(options(tmp_path, net=None), torch.device("cpu"))
    assert net.startswith("small")
    assert not ready
    assert "learns from scratch" in notes[0]
    assert "The hub cannot be reached" in notes[0]


@pytest.mark.parametrize(
    ("device", "cached", "hub", "first"),
    [
        ("cuda", False, False, plan.SEVERAL),
        ("cuda", True, False, DINO),
        ("cuda", False, True, DINO),
        ("cpu", True, True, plan.SEVERAL),
    ],
)
def test_the_strongest_network_that_can_be_had_comes_first(
    tmp_path, monkeypatch, device, cached, hub, first
):
    monkeypatch.setattr(plan, "weights_here", lambda _: cached)
    monkeypatch.setattr(plan, "hub_answers", lambda: hub)
    monkeypatch.setattr(nets, "build", lambda *_: None)
    net, ready, _ = plan.choose_network(options(tmp_path, net=None), torch.device(device))
    assert net.partition("(")[0] == first
    assert ready


def test_weights_that_cannot_be_had_are_one_sentence_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "weights_here", lambda _: False)
    monkeypatch.setattr(plan, "hub_answers", lambda: False)
    asked = options(tmp_path, net="timm.resnet18")
    with pytest.raises(ValueError, match="does not answer"):
        plan.choose_network(asked, torch.device("cpu"))
    asked = options(tmp_path, net="timm.resnet18(pretrained=False)")
    assert plan.choose_network(asked, torch.device("cpu"))[1] is False


def test_weights_of_another_network_are_not_taken_for_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    file = tmp_path / "models--timm--resnet18d.ra2_in1k" / "snapshots" / "a" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.touch()
    known = {name: weights_here(f"timm.{name}") for name in ("resnet18", "resnet18d")}
    assert known == {"resnet18": False, "resnet18d": True}
    assert weights_here("timm.resnet18d.ra2_in1k")
    assert not weights_here("timm.resnet18d.ra4_e3600_r224_in1k")


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked = threading.Event()

    def silent(*_: Any, **__: Any) -> None:
        asked.wait(20)
        raise OSError

    monkeypatch.setattr("socket.create_connection", silent)
    began = time.monotonic()
    assert not hub_answers(0.1)
    assert time.monotonic() - began < 10
    asked.set()


def test_a_pretrained_network_is_shown_images_as_its_weights_want_them():
    extractor = portfolio.load_extractor("efficientnet_lite0", None, torch.device("cpu"))
    assert extractor.size == 224
    assert extractor.mean == extractor.std == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("seconds", "minutes", "images", "size", "views", "kept"),
    [
        (0.01, 10, 1150, 224, 5, 1150),
        (0.1, 10, 1150, 224, 4, 1150),
        (0.5, 10, 1150, 224, 1, 1150),
        (0.01, 10, 100_000, 224, 5, 6040),
        (0.1, 1, 100_000, 96, 1, 2473),
        (9.0, 1, 1150, 96, 1, 240),
    ],
)
def test_the_size_the_views_and_the_images_are_what_the_minutes_allow(
    tmp_path, monkeypatch, seconds, minutes, images, size, views, kept
):
    monkeypatch.setattr(plan, "time_image", lambda _: seconds)
    monkeypatch.setattr(plan, "time_decoding", lambda *_: 0.001)
    monkeypatch.setattr(plan, "time_candidates", lambda *_: 4.0)
    extractor = portfolio.load_extractor("efficientnet_lite0", None, torch.device("cpu"))
    asked = job(tmp_path, images, net=None, size=None, minutes=minutes)
    made = plan.plan_features(asked, extractor, grey=False)
    assert (made["views"][0][0], len(made["views"]), made["images"]) == (size, views, kept)
    assert f"at {size} px" in made["note"]
    assert ("does without" in made["note"]) == ((size, views, kept) != (224, 5, images))
    area = sum((view[0] / 224) ** 2 for view in made["views"])
    planned = kept * (0.001 + seconds * area)
    assert planned <= 60 * minutes or "longer" in made["note"]


@pytest.mark.parametrize(
    ("seconds", "asked_net", "net", "views"),
    [
        (0.02, None, plan.SEVERAL, plan.SEVERAL_TTA),
        (0.3, None, plan.SEVERAL, 1),
        (0.7, None, plan.ONE, 2),
        (0.7, plan.SEVERAL, plan.SEVERAL, 1),
    ],
)
def test_where_several_networks_take_too_long_one_is_used_unless_they_were_asked_for(
    tmp_path, monkeypatch, seconds, asked_net, net, views
):
    one = portfolio.load_extractor(f"{plan.ONE}(pretrained=False)", None, torch.device("cpu"))
    monkeypatch.setattr(portfolio, "load_extractor", lambda net, *_: one._replace(net=net))
    monkeypatch.setattr(
        plan, "time_image", lambda shown: seconds * (1 if shown.net == plan.SEVERAL else 0.3)
    )
    monkeypatch.setattr(plan, "time_decoding", lambda *_: 0.001)
    monkeypatch.setattr(plan, "time_candidates", lambda *_: 4.0)
    asked = job(tmp_path, 1150, net=asked_net, size=None)
    made = plan.plan_features(asked, one._replace(net=plan.SEVERAL), grey=False)
    assert made["net"] == net
    assert len(made["views"]) == views
    assert f"shown to {net} " in made["note"]


def test_of_very_many_pictures_a_sample_is_looked_at(tmp_path, monkeypatch):
    """Features and probabilities of all would take memory, 8 GiB for 200,000 of 1,000 classes."""
    for name in ("time_image", "time_decoding", "time_candidates"):
        monkeypatch.setattr(plan, name, lambda *_: 1e-9)
    extractor = portfolio.load_extractor("tiny", 16, torch.device("cpu"))
    for images, kept in ((20_000, 20_000), (200_000, 20_040)):
        made = plan.plan_features(job(tmp_path, images, minutes=99), extractor, grey=False)
        assert made["images"] == kept
        assert ("A sample of 20,000" in made["note"]) == (images > kept)


def test_no_view_of_grey_images_is_mirrored(tmp_path):
    extractor = portfolio.load_extractor("tiny", 16, torch.device("cpu"))
    for grey in (False, True):
        made = plan.plan_features(job(tmp_path, 60, minutes=10), extractor, grey)
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
    made = plan.make_plan(asked, own, images, 16, 3600)
    assert made.hold == 0.0  # few labels: fold models
    assert made.batch == 9  # what every fold model has
    assert made.steps <= (plan.MOST_PRETRAINED if pretrained else plan.MOST)


def test_minutes_that_are_too_few_for_a_whole_network_are_said_with_how_many_it_takes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(plan, "_time_step", lambda _: 2.0)
    images, own = decode_folder(read_folder(blobs(tmp_path / "pictures")), 16)
    asked = options(tmp_path / "pictures", steps=None, minutes=1.0)
    made = plan.make_plan(asked, own, images, 16, 60)
    assert (made.steps, made.alone_steps) == (60, 60)
    assert "about 24 minutes instead of 1" in made.notes[-1]  # two ways, all labels and five folds
    assert not any("instead of" in n for n in plan.make_plan(asked, own, images, 16, 36000).notes)


def test_grey_images_are_not_mirrored(tmp_path):
    weak, strong, notes = plan.choose_views(options(tmp_path), 64, True)
    assert "flip" not in weak + strong
    assert "grey" in notes[0]


def test_minutes_begin_with_the_command_however_old_the_process_is(monkeypatch, typed):
    """In a notebook, or in a server that forks, what came before is no part of the promise."""
    began = []

    def fit(_: object, start: float) -> None:
        began.append(start)
        raise ValueError("enough")

    monkeypatch.setattr("calmatch.fit.fit", fit)
    before = time.monotonic()
    assert typed("fit", "nowhere").returncode != 0
    assert before <= began[0] <= time.monotonic()


@pytest.mark.parametrize("name", ["efficientnet_lite9", "timm.nosuchnet"])
def test_a_network_that_is_none_is_a_sentence_before_anything_is_measured(name, monkeypatch):
    monkeypatch.setattr(plan, "hub_answers", lambda: False)
    with pytest.raises(ValueError, match=r"There is no net called|timm has no model"):
        plan.choose_network(FitOptions(Path(), net=name), torch.device("cpu"))


@pytest.mark.parametrize(
    ("method", "why"),
    [("bam", "layer of its own"), ("crmatch", "turns pictures"), ("remixmatch", "turns pictures")],
)
def test_a_method_that_features_cannot_serve_is_refused_before_they_are_computed(
    tmp_path, method, why
):
    asked = options(tmp_path, method=method)
    plan.refuse_idle_options(asked, frozen=False)
    with pytest.raises(ValueError, match=f"{why}.*--no-frozen"):
        plan.refuse_idle_options(asked, frozen=True)


@pytest.mark.parametrize("method", ["comatch", "simmatch", "shrinkmatch"])
def test_a_method_with_layers_beside_the_linear_one_may_learn_on_features(tmp_path, method):
    plan.refuse_idle_options(options(tmp_path, method=method), frozen=True)


def test_as_many_minutes_as_one_likes_are_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_time_step", lambda _: 1e-4)
    images, own = decode_folder(read_folder(blobs(tmp_path / "pictures")), 16)
    asked = options(tmp_path / "pictures", steps=None, minutes=float("inf"))
    assert plan.make_plan(asked, own, images, 16, float("inf")).steps <= plan.MOST


@pytest.mark.parametrize(
    ("name", "value", "address"),
    [
        ("HTTPS_PROXY", "proxy.example:3128", ("proxy.example", 3128)),
        ("HTTPS_PROXY", "http://proxy.example", ("proxy.example", 80)),
        ("HF_ENDPOINT", "https://mirror.example", ("mirror.example", 443)),
        ("HTTPS_PROXY", "http://proxy.example:none", None),
    ],
)
def test_the_hub_is_knocked_at_where_weights_would_come_from(monkeypatch, name, value, address):
    seen = []

    class Socket:
        close = staticmethod(lambda: None)

    def connect(where: Any, timeout: float) -> Socket:
        seen.append(where)
        return Socket()

    for other in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.create_connection", connect)
    assert hub_answers() == bool(address)
    assert seen == ([address] if address else [])
