"""`calmatch export`: other runtimes give the probabilities of the model, calibration included."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from calmatch import augment, export, posthoc
from calmatch.data.images import square_image
from calmatch.model import Model, load_model, save_calibration
from calmatch.training.loop import train
from conftest import calmatch, write_random_model
from test_model import FAMILIES, pictures

onnxruntime = pytest.importorskip("onnxruntime")


def run(path, to: str, images: torch.Tensor) -> torch.Tensor:
    """As somebody without calmatch would."""
    if to == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(["probabilities"], {"images": images.numpy()})[0])
    return torch.export.load(path).module()(images)[0]


def calibrated(folder, kind: str, size: int) -> Model:
    """A model whose calibration does something."""
    logits = load_model(folder).logits(pictures(120, size, seed=1))
    truth = torch.where(torch.arange(120) % 3 == 0, logits.argsort(1)[:, -2], logits.argmax(1))
    save_calibration(folder, posthoc.SCALINGS[kind](logits, truth))
    return load_model(folder)


def same(folder, to: str, loaded: Model) -> None:
    path = export.export(loaded, folder / f"model.{to}", to)
    for n in (1, 2, 9):
        images = pictures(n, loaded.size, seed=n)
        exported, expected = run(path, to, images), loaded.probabilities(images)
        torch.testing.assert_close(exported, expected, atol=1e-4, rtol=0)
    assert not list(folder.glob(".*.part"))


def test_onnx_takes_bytes_includes_the_calibration_and_explains_itself(tmp_path):
    write_random_model(tmp_path, "tiny", 4, 8)
    same(tmp_path, "onnx", calibrated(tmp_path, "isotonic", 8))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (entry,), answers = session.get_inputs(), session.get_outputs()
    assert (entry.name, entry.type, entry.shape[1]) == ("images", "tensor(uint8)", 3)
    assert all(isinstance(entry.shape[k], str) for k in (0, 2, 3))
    assert [answer.name for answer in answers] == ["probabilities", "set", "sure"]
    assert [answer.type for answer in answers[1:]] == ["tensor(bool)"] * 2
    assert answers[0].shape[1] == 4
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == [f"class {k}" for k in range(4)]
    assert json.loads(facts["calibration"])["kind"] == "isotonic"
    assert json.loads(facts["provenance"]) == {"seed": 5}
    assert "the middle, bilinear, to 8 x 8" in facts["preprocessing"]


@pytest.mark.slow
def test_pt2_takes_bytes_includes_the_calibration_and_explains_itself(tmp_path):
    write_random_model(tmp_path, "tiny", 4, 8)
    same(tmp_path, "pt2", calibrated(tmp_path, "vector", 8))
    extra = {"classes": "", "preprocessing": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    assert json.loads(extra["classes"]) == [f"class {k}" for k in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_tta_is_exported(tmp_path, to):
    write_random_model(tmp_path, "tiny", 4, 8)
    alone = load_model(tmp_path).probabilities(pictures(9, 8))
    note = json.loads((tmp_path / "model.json").read_text())
    note["tta"] = augment.tta_views(5, 8)
    (tmp_path / "model.json").write_text(json.dumps(note))
    loaded = load_model(tmp_path)
    assert (loaded.probabilities(pictures(9, 8)) - alone).abs().max() > 0.01
    same(tmp_path, to, loaded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(posthoc.SCALINGS))
@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_every_kind_of_calibration_is_exported(tmp_path, kind, to):
    write_random_model(tmp_path, "tiny", 4, 8)
    loaded = calibrated(tmp_path, kind, 8)
    raw = loaded.logits(pictures(50, 8)).softmax(1)
    moved = (loaded.probabilities(pictures(50, 8)) - raw).abs().max()
    assert (moved > 0.01) == (kind != "identity")
    same(tmp_path, to, loaded)


@pytest.mark.slow
@pytest.mark.parametrize(("net", "size"), FAMILIES[1:])
@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_every_family_of_networks_is_exported(tmp_path, net, size, to):
    write_random_model(tmp_path, net, 5, size)
    same(tmp_path, to, calibrated(tmp_path, "isotonic", size))


@pytest.mark.slow
def test_a_method_with_an_own_way_to_predict_is_exported_with_it(tiny, tmp_path):
    train(tiny("bam"), tmp_path / "run", quiet=True)
    same(tmp_path / "run", "onnx", load_model(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_the_command_says_where_the_file_is_and_nothing_else(tmp_path, to):
    write_random_model(tmp_path, "tiny", 3, 8)
    done = calmatch("export", tmp_path, "--to", to, "-o", tmp_path / "mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"Exported: {tmp_path / 'mine'}\n"
    assert run(tmp_path / "mine", to, pictures(2, 8)).shape == (2, 3)


def test_a_file_that_disagrees_with_the_model_is_not_written(tmp_path, monkeypatch):
    write_random_model(tmp_path, "tiny", 3, 8)
    loaded = load_model(tmp_path)
    for wrong in (0.001, np.nan):
        true = export.Calibrated(loaded).eval()
        other = lambda x, wrong=wrong: (true(x)[0] + wrong, *true(x)[1:])  # noqa: E731, B023
        program = SimpleNamespace(module=lambda other=other: other)
        monkeypatch.setattr(torch.export, "load", lambda data, program=program: program)
        with pytest.raises(ValueError, match="differs from the model"):
            export.export(loaded, tmp_path / "model.pt2", "pt2")
    assert not (tmp_path / "model.pt2").exists()


def test_mistakes_are_one_sentence(tmp_path):
    write_random_model(tmp_path, "tiny", 3, 8)
    loaded = load_model(tmp_path)
    with pytest.raises(ValueError, match="no export to 'tflite'"):
        export.export(loaded, tmp_path / "x", "tflite")
    with pytest.raises(ValueError, match="cannot be written"):
        export.export(loaded, tmp_path / "no" / "x.onnx")


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize(
    ("high", "wide"), [(20, 20), (33, 47), (150, 61), (7, 9), (9, 200), (301, 40), (64, 64)]
)
def test_resizing_in_the_graph_is_pillows(high, wide, squash):
    draw = np.random.default_rng(high)
    coarse = Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    image = coarse.resize((wide, high), Image.Resampling.BICUBIC)  # with edges and overshoot
    expected = torch.from_numpy(square_image(image, 20, squash))
    pixels = torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())[None]
    away = (export.resize_square(pixels, 20, squash)[0].int() - expected.int()).abs()
    assert int(away.max()) <= 1
    assert float(away.float().mean()) < 0.25  # by the order of the two passes, which varies


@pytest.mark.parametrize(
    ("to", "squash", "tta"),
    [
        ("onnx", True, 2),
        ("pt2", False, 1),
        pytest.param("onnx", False, 1, marks=pytest.mark.slow),
        pytest.param("pt2", True, 3, marks=pytest.mark.slow),
    ],
)
def test_jpeg_bytes_of_any_size_get_the_answers_of_predict(tmp_path, to, squash, tta):
    write_random_model(tmp_path, "tiny", 4, 24)
    probs = load_model(tmp_path).probabilities(pictures(200, 24, seed=3))
    labels = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    rule = posthoc.Selective(float(probs.amax(1).median()), 0.5, 0.9, 200, 0)
    save_calibration(tmp_path, None, posthoc.conformal(probs, labels, score="aps"), rule)
    note = json.loads((tmp_path / "model.json").read_text())
    note |= {"squash": squash, "tta": augment.tta_views(tta, 24)}
    (tmp_path / "model.json").write_text(json.dumps(note))
    loaded = load_model(tmp_path)
    path, sure = export.export(loaded, tmp_path / f"model.{to}", to), []
    if to == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    else:
        program = torch.export.load(path).module()
    for number, size in enumerate([(60, 41), (24, 24), (25, 90), (130, 128)] * 3):
        draw = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        file = tmp_path / f"{number}.jpg"
        Image.fromarray(draw).resize(size).save(file, quality=90)
        bytes_in = torch.from_numpy(np.asarray(Image.open(file)).transpose(2, 0, 1).copy())[None]
        if to == "onnx":
            out = [torch.from_numpy(x) for x in session.run(None, {"images": bytes_in.numpy()})]
        else:
            out = list(program(bytes_in))
        answer = loaded.predict(file)
        assert loaded.classes[int(out[0].argmax())] == answer.label
        assert abs(float(out[0].max()) - answer.confidence) < 0.01
        names = {loaded.classes[k] for k in out[1][0].nonzero()[:, 0].tolist()}
        assert names == set(answer.set)
        assert bool(out[2]) == answer.sure
        sure.append(answer.sure)
    assert len(set(sure)) == 2  # both kinds were seen


@pytest.mark.parametrize("away", [-4e-6, 0.0, 1e-9, 4e-6])
def test_who_lies_at_the_threshold_is_sure_in_every_runtime(tmp_path, away):
    """A threshold is some picture's confidence, in float64; runtimes differ in the last digits."""
    write_random_model(tmp_path, "tiny", 4, 24)
    images = pictures(9, 24, seed=5)
    best = load_model(tmp_path).probabilities(images).amax(1).sort().values
    assert float((best[1:] - best[:-1]).min()) > 3e-5  # nobody else is near
    point = float(best[4]) + away
    save_calibration(tmp_path, None, None, posthoc.Selective(point, 0.5, 0.9, 200, 0))
    loaded = load_model(tmp_path)
    path = export.export(loaded, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    sure = session.run(["sure"], {"images": images.numpy()})[0].tolist()
    assert sure == [answer.sure for answer in loaded.answer(loaded.probabilities(images))]
    assert sum(sure) == 5
