"""`calmatch fit` as a person uses it: one line, a plain answer, and what goes wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import calmatch.fit as fits
from calmatch import console, nets
from calmatch.cli import main
from calmatch.data.folder import read_folder
from calmatch.data.images import ImageFiles
from calmatch.fit import crossval, features, portfolio, whole
from calmatch.model import load_model, write_model
from calmatch.options import FitOptions
from calmatch.runs import Run, load_examples
from calmatch.training.config import Config
from calmatch.training.loop import _resume, train_together
from calmatch.training.step import new_training
from pictures import accuracy, blobs, fit_into, options


@pytest.fixture(scope="module")
def pics(tmp_path_factory) -> Path:
    """Three classes with five labels each, only read; tests that change pictures make their own."""
    return blobs(tmp_path_factory.mktemp("fit") / "pics")


@pytest.fixture(scope="module")
def fitted(pics, tmp_path_factory) -> dict[str, Run]:
    """A fit of each kind, only read."""
    folder = tmp_path_factory.mktemp("fitted")
    asked = {
        "frozen": options(pics, frozen=True, tta=3),
        "no_frozen": options(pics, no_frozen=True),
    }
    return {how: fit_into(wanted, folder / how) for how, wanted in asked.items()}


def test_one_line_makes_a_folder_that_every_other_command_reads(tmp_path, capsys):
    root = blobs(tmp_path / "pics")
    (root / "kind 0" / "broken.png").write_bytes(b"rubbish")
    run = str(tmp_path / "run")
    words = ["fit", str(root), "--out", run, "--net", "tiny", "--size", "16", "--frozen"]
    assert main(words) == 0
    said = capsys.readouterr()
    for line in ("1/5 reading pictures", "4/5 evaluating", "transductive", "logistic regression"):
        assert line in said.err
    for line in ("Of 100 new pictures", "95 % interval", "calmatch predict"):
        assert line in said.out
    assert "broken.png" in said.out
    names = {path.name for path in (tmp_path / "run").iterdir()}
    arrays = {"predictions.npz", "unlabelled.npz", "examples.npz"}
    papers = {"config.json", "environment.json", "fit.json"}
    assert names >= arrays | papers | {"model.safetensors", "model.json", "report.html"}
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["evaluated_on"] == "crossfit"
    assert result["title"] == "3 classes from 15 labels: pics"
    assert result["best_on_test"] is None  # no number of the training set is shown as a result
    assert result["skipped"][0][0] == "kind 0/broken.png"
    with np.load(tmp_path / "run" / "predictions.npz") as arrays:
        assert len(arrays["files"]) == len(arrays["labels"]) == len(arrays["log_probs"]) == 15
        named = [name.split("/")[0] for name in arrays["files"]]
        assert named == [f"kind {label}" for label in arrays["labels"]]
    assert main(words) == 0
    assert "finished already" in capsys.readouterr().err
    assert main([*words, "--seed", "1"]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert main(["predict", run, str(root), "-o", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 75
    assert main(["report", run]) == 0
    assert accuracy(tmp_path / "run") > 0.8


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "There is no folder"),
        (["pics", "--minutes", "0"], "--minutes must be more than 0"),
        (["pics", "--method", "freematsch"], "Did you mean 'freematch'"),
        (["pics", "--labels", "no.csv"], "Cannot read"),
        (["pics", "--out", "pics/run"], "lies among the pictures"),
        (["pics", "--strict", "--frozen"], "cannot be decoded"),
        (["pics", "--method", "remixmatch", "--frozen"], "--no-frozen"),
        (["pics", "--method", "crmatch", "--frozen"], "--no-frozen"),
        (["pics", "--from", "pics"], "leave out --net"),
        (["pics", "--hold", "0"], "between 0 and 1"),
        (["pics", "--hold", "0.1", "--frozen"], "for a whole network"),
        (["pics", "--address", "auto", "--frozen"], "add --engine ray"),
        (["pics", "--frozen", "--no-frozen"], "or neither"),
        (["pics", "--tta", "13"], "between 1 and 12"),
        (["pics", "--tta", "2", "--no-frozen"], "for a frozen network"),
        (["pics", "--batch", "0"], "--batch must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, words, sentence, monkeypatch, capsys):
    root = blobs(tmp_path / "pics", spare=6)
    (root / "unlabelled" / "broken.png").write_bytes(b"rubbish")
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *words, "--net", "tiny", "--size", "16"]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize("how", ["--frozen", "--no-frozen"])
def test_a_label_of_each_class_is_too_few_before_anything_is_learned(tmp_path, how, capsys):
    words = ["fit", str(blobs(tmp_path / "pics", each=1)), how, "--net", "tiny", "--size", "16"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    assert "Label at least two" in capsys.readouterr().err
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_options_of_another_fit_are_named_as_they_are_typed(pics, tmp_path, capsys):
    run = ["fit", str(pics), "--out", str(tmp_path / "run")]
    assert main([*run, "--net", "tiny", "--size", "16", "--frozen"]) == 0
    capsys.readouterr()
    for more, sentence in (
        (["--from", str(tmp_path / "run"), "--frozen"], "was made without --from"),
        (["--net", "tiny", "--size", "16"], "was made with --frozen"),
        (["--net", "tiny", "--size", "32", "--frozen"], "was made with --size 16"),
    ):
        assert main([*run, *more]) == 2
        assert f"{sentence}; choose another --out" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode there")
def test_a_broken_file_whose_name_is_no_unicode_is_skipped_to_the_end(tmp_path):
    root = blobs(tmp_path / "pics")
    Path(os.fsdecode(os.fsencode(root / "unlabelled") + b"/caf\xe9.png")).write_bytes(b"rubbish")
    run = fit_into(options(root, frozen=True), tmp_path / "run")
    assert len(run.result.skipped) == 1
    assert "caf" in run.result.skipped[0][0]


def test_pictures_that_are_almost_black_are_pointed_out(tmp_path):
    root = blobs(tmp_path / "pics")
    for path in root.rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(path)) // 16).save(path)  # 12 bits, read as 16
    notes = fit_into(options(root, frozen=True), tmp_path / "run").result.notes
    assert any("They are almost black, 1" in note for note in notes)


def test_what_a_refusal_asks_for_can_be_done_in_the_same_folder(tmp_path, capsys):
    root = blobs(tmp_path / "pics", each=1, spare=30)
    words = ["fit", str(root), "--out", str(tmp_path / "run"), "--net", "tiny", "--size", "16"]
    words.append("--frozen")
    assert main(words) == 2
    assert "Label at least two" in capsys.readouterr().err
    blobs(root, spare=0)
    (root / "bad.png").write_bytes(b"rubbish")
    assert main([*words, "--strict"]) == 2
    assert "bad.png cannot be decoded" in capsys.readouterr().err
    (root / "bad.png").unlink()
    assert main(words) == 0
    capsys.readouterr()
    (root / "kind 0" / "0-0.png").rename(root / "kind 1" / "0-0.png")
    assert main(words) == 2
    assert "labels have changed" in capsys.readouterr().err


def test_a_class_of_one_label_gets_no_promise(tmp_path, capsys):
    root = blobs(tmp_path / "pics", spare=90)
    whole = fit_into(options(root, frozen=True), tmp_path / "whole")
    assert load_model(whole.folder).selective.threshold is not None
    for path in sorted((root / "kind 2").iterdir())[1:]:
        path.rename(root / "unlabelled" / f"more-{path.name}")
    words = ["fit", str(root), "--out", str(tmp_path / "run"), "--net", "tiny", "--size", "16"]
    assert main([*words, "--frozen"]) == 0
    assert load_model(tmp_path / "run").selective.threshold is None
    assert "says nothing of kind 2" in capsys.readouterr().out
    shutil.rmtree(root / "unlabelled")  # the labels alone would promise something by now
    words = ["fit", str(root), "--out", str(tmp_path / "known"), "--net", "tiny", "--size", "16"]
    assert main([*words, "--frozen"]) == 0
    assert load_model(tmp_path / "known").selective.missing >= 1
    assert "even its surest" not in capsys.readouterr().out


def test_class_folders_are_called_alike_however_accents_are_written(tmp_path):
    root = blobs(tmp_path / "pics")
    for k, form in enumerate(("NFC", "NFD")):
        (root / f"kind {k}").rename(root / unicodedata.normalize(form, "Kröte"))
    assert read_folder(root).classes == ("Kröte", "kind 2")


def test_a_method_asked_for_learns_the_last_layer(pics, tmp_path):
    run = fit_into(options(pics, frozen=True, method="fixmatch", steps=60), tmp_path / "run")
    assert run.result.kept == "fixmatch"
    assert set(run.result.scores) == {"transductive", "logistic regression", "fixmatch"}
    assert accuracy(run.folder) > 0.5


def test_a_method_is_not_misled_where_few_directions_carry_the_classes():
    """As with a pretrained network: large directions tell classes apart, hundreds of small ones
    are noise, which whitening makes as large."""
    random = np.random.default_rng(0)
    truth = random.integers(0, 5, 600)
    spread = 1 / np.arange(1, 201) ** 0.5
    middles = random.normal(size=(5, 200)) * spread * (np.arange(200) < 12) * 2
    vectors = (middles[truth] + random.normal(size=(600, 200)) * spread).astype(np.float32)
    rows = np.sort(np.concatenate([np.flatnonzero(truth == c)[:4] for c in range(5)]))
    seen, bar = portfolio.Features([vectors], None), console.ProgressBar("", 1, 0, True)
    plain = portfolio.fit_logistic(seen, rows, truth[rows], 5, bar)
    asked = FitOptions(Path(), method="fixmatch", quiet=True)
    head = fits._fit_method_head(asked, seen, rows, truth[rows], plain)

    def error(candidate):
        weights = candidate.weights
        return float(((vectors @ weights[:-1] + weights[-1]).argmax(1) != truth).mean())

    assert error(head) < error(plain) + 0.03
    assert head.error.low <= error(head) <= head.error.high


def test_labels_are_asked_for_also_where_a_sample_is_predicted(pics, tmp_path, monkeypatch):
    """Pictures that would teach most may not be in the sample; of none the page cannot be made."""
    monkeypatch.setattr("calmatch.runs.sample_rows", lambda rows, seed: rows[:1])
    run = fit_into(options(pics, frozen=True), tmp_path / "run")
    examples = load_examples(run.folder)
    assert len(set(examples.asked_files)) > 5
    assert len(examples.asked_log_probs) == len(examples.asked_files)


def test_the_model_says_of_the_pool_what_the_student_says(pics, fitted):
    """The network with its joined head, views and all, against the vectors it was made of."""
    run = fitted["frozen"]
    model = load_model(run.folder)
    with np.load(run.folder / "unlabelled.npz") as arrays:
        names, log_probs = arrays["files"].tolist(), torch.from_numpy(arrays["log_probs"])
    assert len(model.note["tta"]) == 3
    files = ImageFiles(pics, tuple(names), model.size, squash=True)
    pixels = files.take(range(len(names)))
    assert torch.allclose(model.probabilities(pixels), log_probs.exp(), atol=2e-3)


def test_a_model_is_measured_on_labelled_pictures_and_so_is_its_table(
    pics, fitted, tmp_path, capsys
):
    run, new = str(fitted["frozen"].folder), blobs(tmp_path / "new", each=20, spare=6)
    words = ["--resamples", "20", "--quiet"]
    assert main(["evaluate", run, str(new), *words]) == 0
    said = capsys.readouterr().out
    for line in ("60 pictures", "error (%)", "ece (%)", "confidence", "mistake"):
        assert line in said
    assert main(["predict", run, str(new), "-o", str(tmp_path / "out.csv"), "--probs"]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [key for key in rows[0] if key.startswith("p(")] == [f"p(kind {k})" for k in range(3)]
    for row in rows:
        probs = [float(row[f"p(kind {k})"]) for k in range(3)]
        assert sum(probs) == pytest.approx(1, abs=1e-4)
        assert max(probs) == pytest.approx(float(row["confidence"]), abs=1e-4)
    names = sorted(p for p in new.rglob("*.png") if p.parent.name != "unlabelled")
    lines = [f"{p.relative_to(new).as_posix()},{p.parent.name}" for p in names]
    truth = tmp_path / "truth.csv"
    truth.write_text("\n".join(["file,label", *lines]))
    capsys.readouterr()
    values = []
    for asked in (
        [run, str(new)],
        [run, str(new), "--labels", str(truth)],
        [str(tmp_path / "out.csv"), "--labels", str(truth)],
    ):
        assert main(["evaluate", *asked, "--json", *words]) == 0
        values.append(json.loads(capsys.readouterr().out))
    for name in ("error", "ece", "nll"):
        numbers = [value[name]["value"] for value in values]
        assert numbers == pytest.approx([numbers[0]] * 3, abs=2e-3)
    wrong = round(60 * values[0]["error"]["value"])
    assert len(values[0]["mistakes"]) == min(wrong, 10)
    assert sum(row["n"] for row in values[0]["reliability"]) == 60


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["RUN", "PICS", "--labels", "strange.csv"], "does not know 'dragon'"),
        (["RUN", "--labels", "strange.csv"], "--labels belongs to RUN PICTURES"),
        (["strange.csv", "--labels", "strange.csv"], "not a table that"),
        (["RUN", "nowhere"], "There is no"),
        (["RUN", "PICS"], "The model learned from all of these"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    pics, fitted, tmp_path, monkeypatch, words, sentence, capsys
):
    first = sorted(pics.rglob("*.png"))[0].relative_to(pics).as_posix()
    (tmp_path / "strange.csv").write_text(f"file,label\n{first},dragon\n")
    monkeypatch.chdir(tmp_path)
    places = {"RUN": str(fitted["frozen"].folder), "PICS": str(pics)}
    assert main(["evaluate", *(places.get(word, word) for word in words)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("how", ["frozen", "no_frozen"])
def test_a_model_is_not_measured_on_what_it_learned_from(pics, fitted, how, tmp_path, capsys):
    """A person's table of the truth often names the labels of the fit too."""
    known, free = (sorted((pics / place).iterdir()) for place in ("kind 0", "unlabelled"))
    lines = [f"{p.relative_to(pics).as_posix()},kind 0" for p in (*known, *free[:7])]
    (tmp_path / "truth.csv").write_text("\n".join(["file,label", *lines]))
    words = ["--labels", str(tmp_path / "truth.csv"), "--resamples", "0"]
    assert main(["evaluate", str(fitted[how].folder), str(pics), *words]) == 0
    said = capsys.readouterr()
    assert "7 pictures" in said.out
    assert f"Left out are {len(known)} pictures that the model learned from" in said.err


def test_a_resumed_fit_does_not_mix_pictures(tmp_path, monkeypatch):
    root = blobs(tmp_path / "pics")
    asked = options(root, frozen=True)

    def cut(*_: Any, **__: Any) -> None:
        raise console.Stopped(15)

    with monkeypatch.context() as patch:
        patch.setattr(fits, "save_calibration", cut)
        with pytest.raises(console.Stopped):
            fit_into(asked, tmp_path / "run")
    first, other = root / "kind 0" / "0-0.png", root / "kind 1" / "0-0.png"
    first.rename(other)  # another label
    with pytest.raises(ValueError, match="have changed since"):
        fit_into(asked, tmp_path / "run")
    other.rename(first)
    (root / "unlabelled" / "new.png").write_bytes(first.read_bytes())  # another picture
    with pytest.raises(ValueError, match="have changed since"):
        fit_into(asked, tmp_path / "run")


def test_a_damaged_checkpoint_is_spoken_of_within_a_fit_too(tmp_path, capsys):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "000000003.safetensors").write_bytes(b"cut")
    with console.silence():
        run = new_training(Config(dataset="synthetic", labels=16, net="tiny", device="cpu"))
        assert _resume([run], [tmp_path], True) == [0]
    assert "Going back" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_device_makes_the_batches_smaller(tmp_path, monkeypatch):
    root = blobs(tmp_path / "pics", spare=12)
    train = whole.train

    def full(config: Config, out: Path, *, quiet: bool) -> Any:
        if config.batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(config, out, quiet=quiet)

    monkeypatch.setattr(whole, "train", full)
    run = fit_into(options(root, no_frozen=True), tmp_path / "run")
    assert run.config.batch <= 4


@pytest.mark.slow
def test_a_fifth_of_foreign_pictures_does_not_ruin_it(tmp_path):
    clean = fit_into(options(blobs(tmp_path / "clean"), frozen=True), tmp_path / "one")
    mixed = blobs(tmp_path / "mixed", foreign=15)
    other = fit_into(options(mixed, frozen=True), tmp_path / "two")
    assert accuracy(other.folder) > accuracy(clean.folder) - 0.1


@pytest.mark.slow
def test_many_labels_are_held_out_and_promise_something(tmp_path, monkeypatch):
    monkeypatch.setattr(fits.plan, "HOLD_FROM", 60)
    root = blobs(tmp_path / "pics", each=80, spare=6)
    run = fit_into(options(root, steps=300, no_frozen=True), tmp_path / "run")
    assert run.result.evaluated_on == "holdout"
    assert run.result.images["test"] >= 48
    model = load_model(run.folder)
    assert model.selective is not None


@pytest.mark.parametrize("how", ["frozen", "no_frozen"])
def test_a_model_may_be_continued_with_a_new_class(fitted, tmp_path, how):
    first = fitted[how]
    more = blobs(tmp_path / "more", classes=4)
    asked = options(more, net=None, size=None, start=first.folder, frozen=how == "frozen")
    second = fit_into(asked, tmp_path / "second")
    assert len(second.result.classes) == 4
    assert second.config.net.partition("(")[0] == first.config.net.partition("(")[0]


KINDS = {  # of networks, and a size each takes
    "tiny": 16,
    "small(width=4)": 16,
    "efficientnet_lite0(pretrained=False)": 32,
    "efficientnet_lite012(pretrained=False)": 32,
    "wrn_28_2": 16,
    "vit_tiny_patch2_32": 32,
    "timm.mobilenetv3_small_050(pretrained=False)": 32,
}
QUICK = ("small", "efficientnet_lite0(")  # all layers learn, or the last one


@pytest.mark.parametrize(
    ("net", "frozen"),
    [
        (n, f) if n.startswith(QUICK[f]) else pytest.param(n, f, marks=pytest.mark.slow)
        for n in KINDS
        for f in (False, True)
    ],
)
def test_every_kind_of_network_goes_on_with_its_own_weights(pics, tmp_path, net, frozen):
    """A stranger's weights would be refused; a fresh start would be no start from it."""
    size = KINDS[net]
    text = f'embedded(on="{net}", size={size}, width=4)' if frozen else net
    body = nets.build(text, 2, size)
    entries = {"mean": [0.5] * 3, "std": [0.5] * 3, "versions": {}, "provenance": {}}
    names = {"net": text, "method": "supervised", "classes": ["kind 0", "kind 1"], "size": size}
    (tmp_path / "start").mkdir()
    write_model(tmp_path / "start", nets.Net(body, {}), **names, **entries)
    wanted = {} if frozen else {"hold": 0.3, "steps": 1, "no_frozen": True}
    asked = FitOptions(pics, start=tmp_path / "start", device="cpu", tta=None, **wanted)
    run = fit_into(asked, tmp_path / "run")
    after = load_model(run.folder).network.net.body
    before, after = getattr(body, "body", body), getattr(after, "body", after)
    first = next(name for name, value in body.named_parameters() if value.ndim in (2, 4))
    first = first.removeprefix("body.") if frozen else first
    theirs, ours = (dict(each.named_parameters())[first] for each in (before, after))
    far = float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())
    assert far == 0 if frozen else far < 0.1  # one step away at most


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> tuple[FitOptions, Run]:
    """A fit with fold models in few steps: what is asked, and the run."""
    root = tmp_path_factory.mktemp("few")
    asked = options(blobs(root / "pics", each=2, spare=12), steps=4, no_frozen=True)
    return asked, fit_into(asked, root / "run")


@pytest.mark.parametrize("place", ["copy", "result", "together"])
def test_a_fit_with_fold_models_continues_where_it_was_cut(few, tmp_path, monkeypatch, place):
    asked, whole = few

    def cut(*_: Any, **__: Any) -> None:
        raise console.Stopped(15)

    write = fits.files.write

    def half(path: Path, *content: Any) -> None:
        if path == tmp_path / "cut" / "result.json":
            cut()
        write(path, *content)

    with monkeypatch.context() as patch:
        if place == "copy":
            patch.setattr("shutil.copytree", cut)
        elif place == "result":
            patch.setattr(fits.files, "write", half)
        else:
            patch.setattr(crossval, "train_together", _once(train_together, cut))
        with pytest.raises(console.Stopped):
            fit_into(asked, tmp_path / "cut")
    done = fit_into(asked, tmp_path / "cut")
    assert done.result.metrics == whole.result.metrics
    weights = [(run.folder / "model.safetensors").read_bytes() for run in (whole, done)]
    assert weights[0] == weights[1]


def _once(real: Any, other: Any) -> Any:
    """`real` for a run alone, `other` for several."""
    return lambda settings, *rest, **named: (real if len(settings) == 1 else other)(
        settings, *rest, **named
    )


def test_fold_models_that_do_not_fit_side_by_side_are_trained_in_turn(few, tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(crossval, "train_together", _once(train_together, full))
    run = fit_into(few[0], tmp_path / "run")
    plan = json.loads((run.folder / "fit.json").read_text())["plan"]
    assert plan["batch"] == run.config.batch  # not halved
    assert len(list((run.folder / "work" / "all-pictures").iterdir())) == 3


@pytest.mark.parametrize("how", ["frozen", "no_frozen"])
def test_labels_are_evaluated_only_by_models_that_did_not_see_them(tmp_path, how):
    """Wrong labels must not be learned and then counted as right; the model itself sees all."""
    root = blobs(tmp_path / "pics", each=6, spare=30)
    names = sorted(path for path in root.rglob("*.png") if path.parent.name != "unlabelled")
    kinds = [f"kind {k % 3}" for k in range(len(names))]  # no picture says its label
    table = tmp_path / "labels.csv"
    lines = [f"{path.relative_to(root)},{kind}" for path, kind in zip(names, kinds, strict=True)]
    table.write_text("\n".join(["file,label", *lines]))
    asked = options(root, labels=table, **{how: True})
    run = fit_into(asked, tmp_path / "run")
    with np.load(run.folder / "predictions.npz", allow_pickle=False) as held:
        assert sorted(held["files"].tolist()) == [str(path.relative_to(root)) for path in names]
        assert (held["raw_log_probs"].argmax(1) != held["labels"]).mean() > 0.4
    assert run.result.evaluated_on == "crossfit"
    assert run.config.fold == 0


def test_labels_that_mean_nothing_are_called_guessing(tmp_path, capsys):
    root = blobs(tmp_path / "pics", each=6, spare=30)
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.png"))
    rows = [f"{name},{k % 6}" for k, name in enumerate(names[::2][:24])]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    words = ["--labels", str(tmp_path / "labels.csv"), "--out", str(tmp_path / "run")]
    assert main(["fit", str(root), *words, "--net", "tiny", "--size", "16", "--frozen"]) == 0
    assert "No better than guessing" in capsys.readouterr().out


def test_a_plan_of_another_version_is_refused_in_a_sentence(few, tmp_path):
    asked, whole = few
    (tmp_path / "run").mkdir()
    held = json.loads((whole.folder / "fit.json").read_text())
    held["plan"] = {"notes": [], "gone": False}
    (tmp_path / "run" / "fit.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match="Another version planned"):
        fit_into(asked, tmp_path / "run")


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_features_that_are_streamed_make_the_same_model(engine, tmp_path, monkeypatch):
    """Of too many images to keep decoded, or on a cluster; a few files are broken."""
    root = blobs(tmp_path / "pics")
    monkeypatch.setattr(features, "BLOCK", 32)
    (root / "unlabelled" / "0-5.png").write_bytes(b"rubbish")
    asked = options(root, frozen=True, tta=2)
    usual = fit_into(asked, tmp_path / "usual")
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(fits.listing, "LARGEST", 0)
    streamed = fit_into(dataclasses.replace(asked, engine=engine), tmp_path / "streamed")
    assert streamed.result.skipped == usual.result.skipped
    assert streamed.result.metrics == usual.result.metrics
    assert not list((tmp_path / "other" / "arrays").glob("pictures-*"))
    strict = dataclasses.replace(asked, strict=True)
    with pytest.raises(ValueError, match=r"0-5\.png cannot be decoded"):
        fit_into(strict, tmp_path / "strict")


def test_a_cluster_is_refused_where_the_whole_network_learns(pics, tmp_path):
    with pytest.raises(ValueError, match="--engine ray is for a frozen network"):
        fit_into(options(pics, no_frozen=True, engine="ray"), tmp_path / "run")


def test_a_frozen_network_with_a_methods_head_stays_frozen_with_from(pics, tmp_path):
    asked = FitOptions(pics, net="tiny", frozen=True, method="fixmatch", steps=5, device="cpu")
    first = fit_into(asked, tmp_path / "first")
    assert not first.config.net.startswith("embedded")
    second = fit_into(FitOptions(pics, start=first.folder, device="cpu"), tmp_path / "second")
    plans = [json.loads((run.folder / "fit.json").read_text())["plan"] for run in (first, second)]
    assert plans[0]["views"] == plans[1]["views"]
    assert "start.safetensors" not in plans[1]["note"]
    assert second.result.scores.keys() == {"transductive", "logistic regression"}
