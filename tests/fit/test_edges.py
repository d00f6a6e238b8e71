"""Odd sets of pictures: each ends with a sensible model and sentences, or with one sentence."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from calmatch import fit as fits
from calmatch.cli import _parse, main
from calmatch.data.folder import ImageFolder
from calmatch.model import load_model
from calmatch.options import DINO, FitOptions
from calmatch.runs import describe_guessing


def draw(root: Path, counts: list[tuple[int, int]], side: int = 32, grey: bool = False) -> Path:
    """Class k: stripes of its own colour and width; so many labelled and unlabelled pictures."""
    random = np.random.default_rng(0)
    for k, (labelled, free) in enumerate(counts):
        colour = np.random.default_rng(k).integers(40, 255, 3)
        for n in range(labelled + free):
            folder = root / (f"class {k:03d}" if n < labelled else "unlabelled")
            folder.mkdir(parents=True, exist_ok=True)
            wave = np.sin(np.arange(side) * (k + 1) * np.pi / 12 + random.random())
            pixels = np.outer(np.ones(side), 0.5 + 0.5 * wave)[..., None] * colour
            pixels = np.clip(pixels + random.normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)
            image = Image.fromarray(pixels)
            image = image.convert("L") if grey else image
            image.save(folder / f"{k:03d}-{n:03d}.png")
    return root


EDGES = {
    "32 px": ([(4, 20)] * 5, False),
    "grey": ([(4, 20)] * 4, True),
    "two classes": ([(4, 30)] * 2, False),
    "three pictures a class, none unlabelled": ([(3, 0)] * 3, False),
    "a hundred to one": ([(100, 100), (2, 1)], False),
    "one label in a class": ([(1, 10), (4, 10)], False),
    "two labels a class": ([(2, 10)] * 3, False),
}


@pytest.mark.parametrize("edge", EDGES)
def test_an_odd_set_ends_with_a_model_and_sentences(tmp_path, edge, capsys):
    counts, grey = EDGES[edge]
    _fit_and_look(tmp_path, draw(tmp_path / "pics", counts, grey=grey), len(counts), capsys)


@pytest.mark.slow
def test_two_hundred_classes_end_with_a_model_and_sentences(tmp_path, capsys):
    _fit_and_look(tmp_path, draw(tmp_path / "pics", [(2, 3)] * 200), 200, capsys)


@pytest.mark.slow
def test_small_grey_pictures_are_enlarged_for_a_pretrained_network(tmp_path, capsys):
    root = draw(tmp_path / "pics", [(4, 20)] * 4, grey=True)
    _fit_and_look(tmp_path, root, 4, capsys, net="efficientnet_lite0")
    assert load_model(tmp_path / "run").size >= 224


@pytest.mark.slow
def test_a_transformer_of_one_size_is_fitted_and_loaded_as_any_other(tmp_path, capsys):
    """The network that a GPU with a hub gets, without its weights and most of its layers."""
    root = draw(tmp_path / "pics", [(3, 6)] * 2)
    net = f"{DINO}(pretrained=False, img_size=28, depth=3)"
    _fit_and_look(tmp_path, root, 2, capsys, net=net)
    note = load_model(tmp_path / "run").note
    assert note["mean"] == [0.485, 0.456, 0.406]
    assert {view[0] for view in note["tta"]} == {28}


def _fit_and_look(tmp_path, root, classes, capsys, net="tiny"):
    words = ["fit", str(root), "--net", net, "--frozen", "--device", "cpu", "--minutes", "2"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert "Of 100 new pictures about" in said.out
    for line in said.err.splitlines():
        assert "Warning" not in line
    model = load_model(tmp_path / "run")
    answers = model.predict([str(path) for path in sorted(root.rglob("*.png"))[:8]])
    for answer in answers:
        assert 1 / classes - 1e-6 <= answer.confidence <= 1
        assert answer.label in model.classes


def test_without_unlabelled_pictures_the_error_is_what_held_out_labels_show(tmp_path, capsys):
    """Labels that mean nothing, and nothing else to look at: sure of them, wrong about others."""
    root = draw(tmp_path / "pics", [(12, 0)] * 3)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    rows = [f"{name},{'abc'[k % 3]}" for k, name in enumerate(names)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    words = ["fit", str(root), "--labels", str(tmp_path / "labels.csv"), "--net", "tiny"]
    assert main([*words, "--frozen", "--out", str(tmp_path / "run")]) == 0
    assert "No better than guessing" in capsys.readouterr().out


def test_a_class_for_each_label_is_one_sentence(tmp_path, capsys):
    root = draw(tmp_path / "pics", [(1, 5)] * 3)
    words = ["fit", str(root), "--net", "tiny", "--frozen", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "Label at least two pictures of each class" in capsys.readouterr().err


def test_the_command_in_the_report_repeats_the_fit_exactly(tmp_path):
    asked = FitOptions(
        tmp_path / "my pictures",
        tmp_path / "a'b.csv",
        minutes=0.5,
        start=tmp_path / "one",
        method="fixmatch",
        penalty="",
        no_frozen=True,
        steps=7,
        hold=0.25,
        weak="flip|crop(4)",
        seed=3,
        strict=True,
        trust=True,
        device="cpu",
    )
    planned = {"net": "small", "size": 32, "steps": 7, "alone_steps": 7, "batch": 8}
    for settled in (planned, {"net": "small", "views": [[40, 0, 0, False]] * 3}):
        words = shlex.split(fits._command(asked, settled))
        assert words[:2] == ["calmatch", "fit"]
        again = _parse("FitOptions", words[2:], "fit")
        exact = {"size": 40, "tta": 3} if "views" in settled else {"size": 32, "batch": 8}
        assert again.dump() == dataclasses.replace(asked, **exact).dump()  # --from names the net
        assert again.trust == asked.trust
        words = shlex.split(fits._command(dataclasses.replace(asked, start=None), settled))
        assert _parse("FitOptions", words[2:], "fit").net == "small"


def test_a_class_whose_labels_cannot_be_decoded_is_one_sentence(tmp_path, capsys):
    root = draw(tmp_path / "pics", [(4, 8)] * 3)
    broken = sorted(path for path in root.iterdir() if path.is_dir())[1]
    for path in broken.iterdir():
        path.write_bytes(b"no picture")
    words = ["fit", str(root), "--net", "tiny", "--frozen", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"Class {broken.name!r} has no label left whose picture can be decoded" in said


def test_a_model_that_only_knows_the_common_class_says_so():
    own = ImageFolder(Path(), (), (0,) * 49 + (1,), ("a", "b"))
    lines = describe_guessing(0.02, own.known, own.classes)
    assert "always answering 'a', as 98% of the labels do" in lines[0]
    assert not describe_guessing(0.01, own.known, own.classes)
    assert not describe_guessing(0.3, (0, 1) * 20, own.classes)
