"""`calmatch fit` as a person uses it: one line, an honest answer, and what goes wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import calmatch.fit as fits
from calmatch import augment, console, nets, posthoc
from calmatch import files as files_module
from calmatch.augment import normalise
from calmatch.cli import main
from calmatch.data.batches import folds
from calmatch.data.dataset import build
from calmatch.data.folder import ImageFolder, decode_folder, read_folder
from calmatch.fit import crossval
from calmatch.fit import plan as plan_module
from calmatch.fit.crossval import cautious_temperature, cross_validate
from calmatch.fit.plan import (
    FitPlan,
    _plan_head,
    _plan_whole,
    choose_network,
    head_config,
    make_plan,
    whole_network_config,
)
from calmatch.model import load_model
from calmatch.options import FitOptions
from calmatch.runs import Run
from calmatch.training import frozen as frozen_module
from calmatch.training import recipes
from calmatch.training.config import Config
from calmatch.training.frozen import FeatureStore, FrozenRun, freeze_network
from calmatch.training.loop import _resume, new_training, train, train_in_memory, train_together
from calmatch.training.setup import build_parts
from conftest import ALONE

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(ALONE, "CALMATCH_CACHE", str(tmp_path / "cache"))


def blobs(folder: Path, each: int = 5, spare: int = 60, foreign: int = 0, classes: int = 3) -> Path:
    """Class folders of coloured blobs, and others that belong to no class."""
    made = build(f"synthetic(classes={classes}, per_class=120, size=16, noise=60)")
    strange = build("synthetic(classes=5, per_class=40, size=16, noise=60, seed=9)")
    for k in range(classes):
        rows = (made.labels == k).nonzero()[:, 0]
        for n, row in enumerate(rows[: each + spare // classes].tolist()):
            place = folder / (f"kind {k}" if n < each else "unlabelled") / f"{k}-{n}.png"
            save(made.images[row], place)
    for n in range(foreign):
        save(strange.images[n], folder / "unlabelled" / f"foreign-{n}.png")
    return folder


def save(image: torch.Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)


def options(root: Path, **changes: Any) -> FitOptions:
    settings: dict[str, Any] = {"net": "tiny", "steps": 20, "device": "cpu", "size": 16}
    return FitOptions(root, **settings | changes)


def fit(wanted: FitOptions, out: Path, *, quiet: bool = False) -> Run:
    return fits.fit(dataclasses.replace(wanted, out=out, quiet=quiet))


def accuracy(folder: Path, classes: int = 3) -> float:
    """On pictures the model has never met."""
    made = build(f"synthetic(classes={classes}, per_class=120, size=16, noise=60)")
    found = load_model(folder).probabilities(made.test_images).argmax(1)
    return float((found == made.test_labels).double().mean())


def test_one_line_makes_a_folder_that_every_other_command_reads(tmp_path, capsys):
    root = blobs(tmp_path / "pics")
    (root / "kind 0" / "broken.png").write_bytes(b"rubbish")
    run = str(tmp_path / "run")
    words = ["fit", str(root), "--out", run, "--net", "tiny", "--steps", "20", "--frozen"]
    assert main(words) == 0
    said = capsys.readouterr()
    for line in ("1/6 reading pictures", "4/6 judging", "judged labels wrong", "the labels alone"):
        assert line in said.err
    for line in ("Of 100 new pictures", "95 % interval", "cannot promise", "calmatch predict"):
        assert line in said.out
    assert "broken.png" in said.out
    files = {path.name for path in (tmp_path / "run").iterdir()}
    arrays = {"predictions.npz", "unlabelled.npz", "examples.npz"}
    papers = {"config.json", "environment.json", "split.json", "metrics.jsonl", "fit.json"}
    assert files >= arrays | papers | {"model.safetensors", "model.json", "report.html"}
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["judged_on"] == "crossfit"
    assert result["skipped"][0][0] == "kind 0/broken.png"
    with np.load(tmp_path / "run" / "predictions.npz") as found:
        assert len(found["files"]) == len(found["labels"]) == len(found["log_probs"]) == 15
        named = [name.split("/")[0] for name in found["files"]]
        assert named == [f"kind {label}" for label in found["labels"]]
    assert main(words) == 0
    assert "finished already" in capsys.readouterr().err
    assert main([*words, "--seed", "1"]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert main(["predict", run, str(root), "-o", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 75
    assert main(["report", run]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "There is no folder"),
        (["pics", "--minutes", "0"], "--minutes must be more than 0"),
        (["pics", "--method", "freematsch"], "Did you mean 'freematch'"),
        (["pics", "--labels", "no.csv"], "Cannot read"),
        (["pics", "--out", "pics/run"], "lies among the pictures"),
        (["pics", "--strict"], "cannot be decoded"),
        (["pics", "--method", "simmatch", "--frozen"], "--no-frozen"),
        (["pics", "--from", "pics"], "There is no model"),
        (["pics", "--hold", "0"], "between 0 and 1"),
        (["pics", "--hold", "0.1", "--frozen"], "of so few labels is none"),
        (["pics", "--frozen", "--no-frozen"], "or neither"),
        (["pics", "--looks", "6"], "at most 5"),
        (["pics", "--looks", "2", "--no-frozen"], "for a frozen network"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, words, sentence, monkeypatch, capsys):
    root = blobs(tmp_path / "pics", spare=6)
    (root / "unlabelled" / "broken.png").write_bytes(b"rubbish")
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *words, "--net", "tiny", "--steps", "2"]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_an_interrupted_fit_continues_and_ends_the_same(tmp_path, monkeypatch):
    root = blobs(tmp_path / "pics")
    whole = fit(options(root), tmp_path / "whole", quiet=True)
    calls: list[Path] = []
    train = fits.train

    def stopping(config: Config, out: Path, *, quiet: bool) -> Any:
        calls.append(out)
        if len(calls) == 2:
            raise console.Stopped(15)
        return train(config, out, quiet=quiet)

    monkeypatch.setattr(fits, "train", stopping)
    with pytest.raises(console.Stopped):
        fit(options(root), tmp_path / "cut", quiet=True)
    monkeypatch.setattr(fits, "train", train)
    done = fit(options(root), tmp_path / "cut", quiet=True)
    assert done.result["metrics"] == whole.result["metrics"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


def test_a_damaged_checkpoint_is_spoken_of_within_a_fit_too(tmp_path, capsys):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "000000003.safetensors").write_bytes(b"cut")
    with console.silence():
        run = new_training(Config(dataset="synthetic", labels=16, net="tiny", device="cpu"))
        assert _resume([run], [tmp_path], True) == [0]
    assert "Going back" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_device_makes_the_batches_smaller(tmp_path, monkeypatch, capsys):
    root = blobs(tmp_path / "pics", spare=12)
    train = fits.train

    def full(config: Config, out: Path, *, quiet: bool) -> Any:
        if config.batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(config, out, quiet=quiet)

    monkeypatch.setattr(fits, "train", full)
    fit(options(root, steps=4, batch=8), tmp_path / "run")
    assert "trying again with batches of 4" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "fit.json").read_text())["plan"]["batch"] == 4


@pytest.mark.slow
def test_a_fifth_of_foreign_pictures_does_not_ruin_it(tmp_path):
    clean = blobs(tmp_path / "clean", each=4, spare=120)
    mixed = blobs(tmp_path / "mixed", each=4, spare=120, foreign=30)
    right = [
        accuracy(fit(options(root, steps=80), tmp_path / f"run-{root.name}", quiet=True).folder)
        for root in (clean, mixed)
    ]
    assert right[0] > 0.85
    assert right[1] > right[0] - 0.06


@pytest.mark.slow
def test_many_labels_are_held_out_and_promise_something(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "HOLD_FROM", 60)
    root = blobs(tmp_path / "pics", each=110, spare=0)
    run = fit(options(root, steps=80, hold=0.5), tmp_path / "run", quiet=True)
    assert run.result["judged_on"] == "holdout"
    assert run.result["pictures"]["test"] >= 100
    promise = load_model(run.folder).selective
    assert promise is not None
    assert promise.threshold is not None


@pytest.mark.slow
def test_a_model_may_be_continued_with_a_new_class(tmp_path):
    first = fit(options(blobs(tmp_path / "two", classes=2)), tmp_path / "first", quiet=True)
    more = blobs(tmp_path / "three", classes=3)
    again = fit(options(more, net=None, size=None, start=first.folder), tmp_path / "more")
    assert load_model(again.folder).classes == ("kind 0", "kind 1", "kind 2")
    assert "pretrained=" in again.config.net
    with pytest.raises(ValueError, match="also knows 'kind 2'"):
        fit(options(tmp_path / "two", net=None, start=again.folder), tmp_path / "less", quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, 1])
def test_a_frozen_run_equals_its_joined_network(tmp_path, number):
    """Head on stored features and network on pictures give the same probabilities."""
    root = blobs(tmp_path / "pics", spare=30)
    run = fit(options(root, frozen=True, looks=number), tmp_path / "run", quiet=True)
    assert run.config.looks == (number or 5)
    assert ("looks" in json.loads((run.folder / "model.json").read_text())) == (number is None)
    frozen = freeze_network(run.config, build_parts(run.config), True)
    parts = frozen.parts(frozen.base.split)
    train_in_memory(run.config, parts)
    images = next(frozen.base.batches.sources["u"].batches(20))
    plain = frozen.store.plain(torch.tensor(frozen.base.split.unlabelled[:20]))
    ours = parts.judged.eval()((plain - _mean(frozen)) / _std(frozen)).logits
    theirs = load_model(run.folder).logits(images)
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("method", ["simmatch", "comatch", "bam", "crmatch"])
def test_layers_of_a_method_learn_from_stored_features_too(tmp_path, method):
    """The run's model predicts as the run did, unless it would need those layers."""
    config = recipes.digits_40(method, ema=0.5, steps=4, eval_every=4, chunk=2)
    config = config.replace(net="small(width=2)", device="cpu", frozen=1)
    if method == "crmatch":
        with pytest.raises(ValueError, match="crmatch turns pictures"):
            train(config, tmp_path / "run", quiet=True)
        return
    run = train(config, tmp_path / "run", quiet=True)
    frozen = freeze_network(config, build_parts(config), True)
    parts = frozen.parts(frozen.base.split)
    before = [layer.detach().clone() for layer in parts.net.heads.parameters()]
    train_in_memory(config, parts)
    after = list(parts.net.heads.parameters())
    assert before
    assert not any(map(torch.equal, before, after))
    if method == "bam":
        assert not (run.folder / "model.json").exists()
        with pytest.raises(ValueError, match="no model"):
            load_model(run.folder)
        return
    images = next(frozen.base.sets["test"][0].batches(20))
    found = load_model(run.folder).probabilities(images).log()
    wanted = torch.from_numpy(np.load(run.folder / "predictions.npz")["log_probs"][:20])
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)


def _mean(frozen: FrozenRun) -> torch.Tensor:
    return 255 * torch.tensor(frozen.statistics[0])[:, None, None]


def _std(frozen: FrozenRun) -> torch.Tensor:
    return 255 * torch.tensor(frozen.statistics[1])[:, None, None]


def test_features_are_computed_once(tmp_path, monkeypatch):
    root = blobs(tmp_path / "pics", spare=12)
    config = head_config(options(root), _plan(), False, "tiny", 16)
    first = freeze_network(config, build_parts(config), True)
    monkeypatch.setattr(frozen_module, "_fill_features", lambda *_: pytest.fail("computed again"))
    again = freeze_network(config, build_parts(config), True)
    assert len(again.store) == len(first.store) == len(first.labels)
    for ours, theirs in zip(first.store.blocks, again.store.blocks, strict=True):
        assert torch.equal(ours.tensor, theirs.tensor)
        assert ours.tensor.shape[1] == 5


def test_features_of_a_picture_are_the_mean_of_its_looks_and_views_have_one(tmp_path):
    config = head_config(options(blobs(tmp_path / "pics", spare=12)), _plan(), False, "tiny", 16)
    config = config.replace(weak="flip|crop(2)", strong="flip|crop(2)")
    one, many = (
        freeze_network(config.replace(looks=number), build_parts(config), True)
        .store.blocks[0]
        .tensor
        for number in (1, 5)
    )
    assert torch.equal(one[:, 1:], many[:, 1:])
    parts = build_parts(config)
    images = torch.cat([*parts.batches.sources["u"].batches(8)])
    rows = torch.tensor(parts.split.unlabelled)
    mean, std = (torch.tensor(v) for v in parts.statistics)
    with torch.inference_mode():
        seen = [
            parts.judged.eval()(normalise(look(images), mean, std)).features
            for look in augment.tta_views(5, config.weak)
        ]
    expected = torch.stack(seen).mean(0)
    assert (one[rows, 0].float() - expected).abs().max() > 0.01
    torch.testing.assert_close(many[rows, 0].float(), expected, atol=1e-3, rtol=1e-3)


def test_features_in_many_blocks_are_those_in_one():
    features = torch.randn(23, 5, 4)
    rows, places = torch.randint(23, (60,)), torch.randint(5, (60,))
    one, many = FeatureStore([features], 2), FeatureStore(features.split(6), 2)
    assert torch.equal(one.take(rows, places), many.take(rows, places))
    assert torch.equal(one.plain(rows), many.plain(rows))


def test_pictures_and_features_stay_in_their_files_beside_a_cpu(tmp_path):
    root = blobs(tmp_path / "pics", spare=40)
    (root / "unlabelled" / "broken.png").write_bytes(b"rubbish")
    config = head_config(options(root), _plan(), False, "tiny", 16)
    parts = build_parts(config)
    sources = [*parts.batches.sources.values(), parts.sets["test"][0]]
    frozen = freeze_network(config, parts, True)
    held = {
        "pictures-": [source.kept.file.tensor for source in sources],
        "features-": [block.tensor for block in frozen.store.blocks],
    }
    for name, tensors in held.items():
        for tensor in tensors:
            place = tensor.untyped_storage().data_ptr()
            assert any(start <= place < end for start, end in _mapped(name))


def _mapped(name: str) -> list[tuple[int, int]]:
    """Address ranges at which the cache's files of this name are mapped."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    ends = [line.split()[0].split("-") for line in lines]
    return [(int(start, 16), int(end, 16)) for start, end in ends]


def _plan(**changes: Any) -> FitPlan:
    settings: dict[str, Any] = {
        "net": "tiny",
        "size": 16,
        "imagenet": False,
        "whole": False,
        "views": 2,
        "head_steps": 10,
        "steps": 10,
        "alone_steps": 10,
        "batch": 8,
        "ratio": 2,
        "lr": 1e-3,
        "ema": 0.9,
        "weak": "crop(1)",
        "strong": "crop(2)|cutout(0.5)",
        "hold": 0.0,
        "holdout": False,
        "most": 0,
    }
    return FitPlan(**settings | changes)


def test_a_head_is_judged_only_by_models_that_did_not_see_the_label(tmp_path):
    """Wrong labels must not be learned and then counted as right."""
    root = blobs(tmp_path / "pics", each=8, spare=30)
    config = head_config(options(root), _plan(head_steps=60), True, "tiny", 16)
    frozen = freeze_network(config, build_parts(config), True)
    shuffled = frozen.labels.clone()
    known = (shuffled >= 0).nonzero()[:, 0]
    shuffled[known] = shuffled[
        known[torch.randperm(24, generator=torch.Generator().manual_seed(0))]
    ]
    frozen.labels = shuffled
    split = frozen.base.split
    found = cross_validate(frozen, config, split)
    assert sorted(found.rows) == sorted(split.labelled)
    assert (found.log_probs.argmax(1) != found.labels).double().mean() > 0.4


def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as on a card, where sisters judge."""
    choose = make_plan

    def chosen(*given: Any) -> FitPlan:
        return dataclasses.replace(choose(*given), hold=0.0)

    monkeypatch.setattr(fits, "make_plan", chosen)


@pytest.mark.parametrize("place", ["copy", "result", "together"])
def test_a_fit_judged_by_sisters_continues_where_it_was_cut(tmp_path, monkeypatch, place):
    _card(monkeypatch)
    asked = options(blobs(tmp_path / "pics", each=2, spare=12), steps=4)
    whole = fit(asked, tmp_path / "whole", quiet=True)

    def cut(*_: Any, **__: Any) -> None:
        raise console.Stopped(15)

    def half(path: Path, *content: Any) -> None:
        if path == tmp_path / "cut" / "result.json":
            cut()
        write(path, *content)

    write = files_module.write
    with monkeypatch.context() as patch:
        if place == "copy":
            patch.setattr(fits.shutil, "copytree", cut)
        elif place == "result":
            patch.setattr(fits.files, "write", half)
        else:
            patch.setattr(crossval, "train_together", _once(train_together, cut))
        with pytest.raises(console.Stopped):
            fit(asked, tmp_path / "cut", quiet=True)
    done = fit(asked, tmp_path / "cut", quiet=True)
    assert done.result["metrics"] == whole.result["metrics"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


def _once(real: Any, other: Any) -> Any:
    """`real` for a run alone, `other` for several."""
    return lambda settings, *rest, **named: (real if len(settings) == 1 else other)(
        settings, *rest, **named
    )


def test_sisters_that_do_not_fit_side_by_side_are_trained_in_turn(tmp_path, monkeypatch):
    _card(monkeypatch)
    asked = options(blobs(tmp_path / "pics", each=2, spare=12), steps=4)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(crossval, "train_together", _once(train_together, full))
    run = fit(asked, tmp_path / "run", quiet=True)
    held = json.loads((run.folder / "fit.json").read_text())["plan"]
    assert held["batch"] == run.config.batch  # not halved
    assert len(list((run.folder / "work" / "both").iterdir())) == 3


def test_a_whole_network_is_judged_only_by_sisters_that_did_not_see_the_label(
    tmp_path, monkeypatch
):
    """Wrong labels must not be learned and then counted as right; the model itself sees all."""
    _card(monkeypatch)
    root = blobs(tmp_path / "pics", each=6, spare=30)
    names = sorted(path for path in root.rglob("*.png") if path.parent.name != "unlabelled")
    kinds = [f"kind {k % 3}" for k in range(len(names))]  # no picture says its label
    table = tmp_path / "labels.csv"
    lines = [f"{path.relative_to(root)},{kind}" for path, kind in zip(names, kinds, strict=True)]
    table.write_text("\n".join(["file,label", *lines]))
    run = fit(options(root, labels=table, steps=60), tmp_path / "run", quiet=True)
    with np.load(run.folder / "predictions.npz", allow_pickle=False) as held:
        assert sorted(held["files"].tolist()) == [str(path.relative_to(root)) for path in names]
        assert (held["raw_log_probs"].argmax(1) != held["labels"]).mean() > 0.4
    assert run.result["judged_on"] == "crossfit"
    assert run.config.fold == 0
    assert run.config.dataset.count("hold=0.0") == 1
    assert run.result["pictures"]["labelled"] == len(names)


@pytest.mark.parametrize(
    ("each", "device", "method", "frozen", "whole"),
    [
        (2, "cuda", "freematch", None, False),  # two labels a class mislead a whole network
        (3, "cuda", "freematch", None, True),
        (2, "cuda", "simmatch", None, True),  # whose layers a frozen network could not train
        (2, "cuda", "freematch", False, True),
        (3, "cuda", "freematch", True, False),
        (3, "mps", "freematch", None, True),
        (3, "cpu", "freematch", None, False),
        (3, "cpu", "freematch", False, True),
    ],
)
def test_a_pretrained_network_learns_whole_on_a_card_with_labels_enough(
    tmp_path, monkeypatch, each, device, method, frozen, whole
):
    images, found = decode_folder(read_folder(blobs(tmp_path / "pics", each=each)), 16)
    monkeypatch.setattr(plan_module, "pick_device", lambda _: torch.device(device))
    monkeypatch.setattr(plan_module, "choose_network", lambda *_: ("tiny", True, []))
    monkeypatch.setattr(plan_module, "_plan_head", lambda wish, plan, *_: plan)
    flags = {"frozen": frozen is True, "no_frozen": frozen is False}
    asked = options(tmp_path / "pics", method=method, **flags)
    made = make_plan(asked, found, images, 64, 16)
    assert made.whole == whole
    assert made.hold == (0.5 if whole and device != "cuda" else 0.0)  # 0: sisters judge, or heads
    if whole and device == "cuda":
        assert made.batch == 3 * each - 3  # what every sister has


def test_a_plan_of_another_version_is_refused_in_a_sentence(tmp_path):
    root = blobs(tmp_path / "pics")
    asked = options(root)
    (tmp_path / "run").mkdir()
    held = {"options": asked.dump(), "plan": {"notes": [], "gone": False}}
    (tmp_path / "run" / "fit.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match="Another version planned"):
        fit(asked, tmp_path / "run", quiet=True)


def test_fewer_folds_need_labels_that_insist_more_to_move_the_temperature():
    """Models of two folds saw half of the labels: they are worse than the one they judge for."""
    chance = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20, 10, generator=chance)
    labels = torch.where(torch.arange(20) < 13, logits.argmax(1), logits.argmin(1))
    heats = [
        cautious_temperature(logits, labels, folds).values["temperature"]
        for folds in (2, 3, 4, 5, 0)
    ]
    best = posthoc.crossfit_temperature(logits, labels).values["temperature"]
    assert 1 < heats[0] < heats[1] < heats[2] == heats[3] == heats[4] < best


@pytest.mark.parametrize("counts", [(4, 4, 4), (1, 2, 9), (2, 2), (30, 3, 1)])
def test_folds_hold_every_label_once_but_the_only_ones(counts):
    labels = [k for k, count in enumerate(counts) for _ in range(count)]
    found = folds(labels, 0)
    places = sorted(place for fold in found for place in fold)
    assert places == [k for k, label in enumerate(labels) if counts[label] > 1]
    for fold in found:
        left = [labels[k] for k in range(len(labels)) if k not in fold]
        assert set(left) == set(labels)  # every class keeps a label to learn from


def test_the_plan_says_what_it_does_without_pretrained_weights(tmp_path, monkeypatch):
    def nothing(*_: object) -> None:
        raise ValueError("The hub cannot be reached.")

    monkeypatch.setattr(nets, "build", nothing)
    net, ready, notes = choose_network(options(tmp_path, net=None), 200, torch.device("cpu"))
    assert net.startswith("small")
    assert not ready
    assert "learns from scratch" in notes[0]
    assert "The hub cannot be reached" in notes[0]


def test_steps_follow_the_minutes_and_huge_folders_are_sampled(tmp_path, monkeypatch):
    root = blobs(tmp_path / "pics", spare=30)
    found = read_folder(root)
    images, found = decode_folder(found, 16)
    monkeypatch.setattr(plan_module, "_time_head", lambda *_: (0.01, 0.02))
    many = found._replace(labels=(*found.labels, *([-1] * 50_000)))
    made = _plan_head(options(root, steps=None, minutes=10), _plan(), many, torch.zeros(50_045, 1))
    shown = 5_000  # pictures that the page asks the model about
    assert made.most == (0.5 * 600 / 0.01 - shown) / 5 - 15
    assert made.views == 2
    assert "unlabelled pictures" in made.notes[-1]
    quick = _plan_head(options(root, steps=None, minutes=1), _plan(), found, images)
    assert quick.head_steps == 100
    assert quick.views == 6


@pytest.mark.parametrize(
    ("pretrained", "hold", "steps"), [(True, 0.0, 2000), (False, 0.0, 5000), (True, 0.2, 5000)]
)
def test_a_pretrained_network_judged_by_sisters_learns_no_longer_than_they_bear(
    tmp_path, monkeypatch, pretrained, hold, steps
):
    root = blobs(tmp_path / "pics", spare=30)
    found = read_folder(root)
    monkeypatch.setattr(plan_module, "_time_step", lambda *_: 1e-4)
    start = _plan(whole=True, imagenet=pretrained, hold=hold)
    many = torch.zeros(100_000, 1)
    made = _plan_whole(options(root, steps=None, minutes=10), start, found, many)
    assert made.steps == steps
    settings = whole_network_config(options(root), made, alone=False)
    assert (settings.compile is False) == (steps <= 2000)  # a short run does not earn it back


def run_example(name: str, *words: str | Path, timeout: float = 900) -> str:
    command = [sys.executable, EXAMPLES / name, *map(str, words)]
    place = str(EXAMPLES) + os.pathsep + os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ALONE | {"PYTHONPATH": place},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["research_run.py", "own_method.py"])
def test_the_small_examples_run(tmp_path, name):
    assert "ECE" in run_example(name, tmp_path / "runs", "--steps", "3")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 80


@pytest.mark.slow
def test_the_tour_ends_with_few_errors(tmp_path):
    said = run_example("own_pictures.py", tmp_path / "tour")
    wrong = float(said.rpartition("In truth ")[2].partition("%")[0])
    assert wrong < 20
    assert (tmp_path / "tour" / "run" / "report.html").is_file()
    assert (tmp_path / "tour" / "run" / "model.onnx").is_file()


@pytest.mark.slow
def test_the_tour_on_eurosat(tmp_path):
    archive = Path(os.environ.get("CALMATCH_DATA", "/nowhere")) / "EuroSAT.zip"
    if not archive.is_file():
        pytest.skip("CALMATCH_DATA has no EuroSAT.zip")
    said = run_example("own_pictures.py", tmp_path / "tour", "--eurosat", archive, "--minutes", "3")
    assert float(said.rpartition("In truth ")[2].partition("%")[0]) < 30


@pytest.mark.slow
def test_a_fifth_of_foreign_pictures_does_not_ruin_eurosat(tmp_path):
    """Digits among satellite pictures, against the same fit without them, two draws of pictures."""
    archive = Path(os.environ.get("CALMATCH_DATA", "/nowhere")) / "EuroSAT.zip"
    if not archive.is_file():
        pytest.skip("CALMATCH_DATA has no EuroSAT.zip")
    wrong = np.array([_with_foreign(archive, draw, tmp_path / str(draw)) for draw in (3, 4)])
    clean, mixed = wrong.mean(0)
    assert mixed < clean + 0.05


def _with_foreign(archive: Path, draw: int, place: Path) -> list[float]:
    """The error of a fit on 1,500 pictures, and with 375 digits among them."""
    from sklearn.datasets import load_digits

    truth: dict[str, str] = {}
    for root in ("clean", "mixed"):
        (place / root).mkdir(parents=True)
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.endswith(".jpg"))
        for k, name in enumerate(random.Random(draw).sample(names, 1500)):
            truth[f"{k}.jpg"] = Path(name).parent.name
            for root in ("clean", "mixed"):
                (place / root / f"{k}.jpg").write_bytes(file.read(name))
    for k, grey in enumerate(load_digits().images[:375]):
        picture = Image.fromarray((grey * 15.9).astype(np.uint8)).resize((64, 64))
        picture.save(place / "mixed" / f"foreign{k}.png")
    table = place / "labels.csv"
    chosen = [[f for f in truth if truth[f] == c][:4] for c in sorted(set(truth.values()))]
    lines = [f"{f},{truth[f]}" for group in chosen for f in group]
    table.write_text("\n".join(["file,label", *lines]) + "\n")
    wrong = []
    for root in ("clean", "mixed"):
        asked = FitOptions(place / root, table, minutes=3, device="cpu", steps=300)
        run = fit(asked, place / f"run-{root}", quiet=True)
        found = ImageFolder(place / root, tuple(truth), (0,) * len(truth), ("a", "b"))
        images, found = decode_folder(found, 64)
        made = load_model(run.folder)
        guesses = [
            made.classes[k] for k in made.logits(images.take(range(len(images)))).argmax(1).tolist()
        ]
        wrong.append(np.mean([truth[f] != g for f, g in zip(found.names, guesses, strict=True)]))
    return wrong
