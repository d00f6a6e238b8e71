"""A model is data: what it says, what it refuses, and that no code of it is ever run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import calmatch
from calmatch import methods, nets, posthoc
from calmatch.core import Method
from calmatch.model import OWN_PREDICTION, load_model, save_calibration
from calmatch.training.loop import train
from conftest import GOLDEN, write_random_model

FAMILIES = [
    ("tiny", 16),
    ("small(width=8)", 16),
    ("wrn_28_2", 32),
    ("vit_tiny_patch2_32", 16),
    ("efficientnet_lite0(pretrained=False)", 32),
    ("efficientnet_lite012(pretrained=False)", 32),
    ("timm.resnet18", 32),
    ("timm.vit_tiny_patch16_224(img_size=32)", 32),
]


def pictures(n: int, size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("method", ["simmatch", "bam"])
def test_a_loaded_model_says_what_the_run_said(tiny, tmp_path, method):
    run = train(tiny(method), tmp_path / "run", quiet=True)
    loaded = calmatch.load(run.folder)
    images = calmatch.data.build("synthetic").test_images
    log_probs, _ = run.predictions()
    torch.testing.assert_close(loaded.logits(images).log_softmax(1), log_probs)
    torch.testing.assert_close(loaded.probabilities(images, batch=7), log_probs.exp())
    assert loaded.classes == calmatch.data.build("synthetic").classes
    assert loaded.provenance["data"] == "synthetic"
    assert loaded.provenance["labels"] == 16


@pytest.mark.parametrize(("net", "size"), FAMILIES)
def test_every_family_of_networks_loads(tmp_path, net, size):
    body = write_random_model(tmp_path, net, 3, size)
    loaded = load_model(tmp_path)
    images = pictures(3, size)
    with torch.inference_mode():
        expected = body.eval()((images / 255 - 0.5) / 0.25).logits
    torch.testing.assert_close(loaded.logits(images), expected, atol=1e-4, rtol=1e-4)


def test_only_methods_with_an_own_way_to_predict_are_built():
    own = {name for name, kind in methods.METHODS.items() if kind.predict is not Method.predict}
    assert own == set(OWN_PREDICTION)


def test_calibration_and_promises_are_kept_and_used(tmp_path):
    write_random_model(tmp_path, "tiny", 3, 8)
    images = pictures(200, 8)
    raw = load_model(tmp_path)
    logits = raw.logits(images)
    truth = logits.argmax(1)
    scaling = posthoc.Scaling("temperature", {"temperature": 0.1}, 200)
    probs = scaling(logits).exp()
    sets = posthoc.conformal(probs, truth, score="aps")
    point = posthoc.selective(probs.amax(1)[:100], np.ones(100))
    save_calibration(tmp_path, scaling, sets, point, {"labels": 200, "data": "folder"})
    loaded = load_model(tmp_path)
    torch.testing.assert_close(loaded.probabilities(images), probs)
    assert (loaded.conformal, loaded.selective) == (sets, point)
    assert loaded.provenance == {"seed": 5, "labels": 200, "data": "folder"}
    assert "yours" in loaded.note["licence"]
    answers = loaded.answer(probs)
    assert [a.label for a in answers] == [loaded.classes[k] for k in truth]
    assert all(a.set[0] == a.label for a in answers)
    inside = sets.sets(probs)
    assert [set(a.set) for a in answers] == [
        {loaded.classes[k] for k in row.nonzero()[:, 0].tolist()} for row in inside
    ]
    assert [a.sure for a in answers] == (probs.amax(1) >= point.threshold).tolist()
    with pytest.raises(ValueError, match="repeatable"):
        save_calibration(tmp_path, scaling, sets._replace(seed=1))
    assert load_model(tmp_path).conformal == sets


def test_a_model_says_the_mean_of_its_tta_views(tmp_path):
    write_random_model(tmp_path, "tiny", 3, 8)
    images, plain = pictures(9, 8), load_model(tmp_path)
    note = json.loads((tmp_path / "model.json").read_text())
    note["tta"] = [[8, 0.0, 0.0, 1.0, False], [8, 0.0, 0.0, 1.0, True]]
    (tmp_path / "model.json").write_text(json.dumps(note))
    expected = (plain.logits(images) + plain.logits(images.flip(-1))) / 2
    torch.testing.assert_close(load_model(tmp_path).logits(images), expected)


def test_pictures_of_another_size_or_type_are_refused(tmp_path):
    write_random_model(tmp_path, "tiny", 3, 8)
    loaded = load_model(tmp_path)
    assert loaded.probabilities(pictures(0, 8)).shape == (0, 3)
    for wrong in (pictures(2, 9), pictures(2, 8).float(), pictures(2, 8)[:, :1]):
        with pytest.raises(ValueError, match=r"uint8 pictures \[N, 3, 8, 8\]"):
            loaded.probabilities(wrong)


class Trap:
    def __reduce__(self):
        return os.system, ("touch trapped",)


def test_an_array_of_pictures_is_as_good_as_a_tensor(tmp_path):
    write_random_model(tmp_path, "tiny", 3, 16)
    model, images = load_model(tmp_path), torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(model.probabilities(images.numpy()), model.probabilities(images))


def test_a_pickle_called_safetensors_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_random_model(tmp_path, "tiny", 2, 8)
    for bad in (
        pickle.dumps(Trap()),
        b"",
        b"\x80\x02" * 50,
        struct.pack("<Q", 1 << 60) + b"{}",  # a header larger than any memory
        struct.pack("<Q", 2) + b"{}",
        _header(
            {"net/body.head.bias": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}
        ),
    ):
        (tmp_path / "model.safetensors").write_bytes(bad)
        with pytest.raises(ValueError, match=r"not a safetensors file|does not fit"):
            load_model(tmp_path)
    torch.save({"net/body.head.bias": Trap()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_model(tmp_path)
    assert not (tmp_path / "trapped").exists()


def _header(entries: dict) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


def test_weights_that_are_missing_misshapen_mistyped_or_not_numbers_are_refused(tmp_path):
    write_random_model(tmp_path, "tiny", 2, 8)
    path = tmp_path / "model.safetensors"
    good = safetensors.torch.load(path.read_bytes())  # Windows writes over no mapped file
    name = "net/body.head.bias"
    for change, words in (
        (None, "does not fit"),
        (torch.zeros(3), "does not fit"),
        (torch.zeros(2, dtype=torch.int64), "wrong type"),
        (torch.tensor([0.0, torch.nan]), "NaN"),
    ):
        bad = {k: v for k, v in good.items() if k != name}
        path.write_bytes(safetensors.torch.save(bad if change is None else bad | {name: change}))
        with pytest.raises(ValueError, match=words):
            load_model(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="There is no"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"net": "os.system('touch trapped')"}, "not imported from a file"),
        ({"net": "trap.Net"}, "not imported from a file"),
        ({"method": "trap.Net"}, "not imported from a file"),
        ({"net": "__import__('os')"}, "no net called"),
        ({"net": "smal"}, "Did you mean 'small'"),
        ({"net": "lambda: 0"}, "not a spec"),
        ({"net": 5}, "net is not what"),
        ({"net": "timm.resnet18(checkpoint_path='model.safetensors')"}, "which a file must not"),
        ({"net": "timm.resnet18(pretrained_cfg={'file': 'x'})"}, "does not fit"),
        ({"net": "timm.resnet18(norm_layer={'a': 1})"}, "must not have"),
        ({"net": "timm.no_such_model"}, "timm has no model"),
        ({"net": "timm(name='resnet18')"}, "which a file must not"),
        ({"net": "small(width=1000000000)"}, "must not have"),
        ({"net": "small(width=9000)"}, "does not fit"),
        ({"net": "timm.vit_7b_patch16_dinov3"}, "cannot be built|does not fit"),
        ({"net": "tiny(width='a')"}, "takes a whole number"),
        ({"net": "tiny(pretrained='../../secret.pth', width=8)"}, "does not fit"),
        ({"method": "nothing"}, "no method called"),
        ({"method": "__init__"}, "no method called"),
        ({"method": "x" * 1000}, "no method called"),
        ({"method": "bam"}, "does not fit"),
        ({"method": "bam(samples=1000000000000)"}, "does not fit|cannot be built"),
        ({"classes": ["a"]}, "classes is not"),
        ({"classes": ["a", "a"]}, "classes is not"),
        ({"classes": ["a", 5]}, "classes is not"),
        ({"classes": ["a", "b" * 2000]}, "classes is not"),
        ({"classes": ["a", "b", "c"]}, "does not fit"),
        ({"size": 10**9}, "size is not"),
        ({"size": True}, "size is not"),
        ({"mean": [0, 0]}, "mean is not"),
        ({"std": [0, 1, 1]}, "std is not"),
        ({"std": [float("nan"), 1, 1]}, "std is not"),
        ({"format": 3}, "update calmatch"),
        ({"hook": "x"}, "'hook' is missing or not known"),
        ({"calibration": {"kind": "eval"}}, "names one of"),
        ({"calibration": {"kind": "vector", "factor": [1], "shift": [0]}}, "another number of cl"),
        ({"conformal": {"score": "lac"}}, "malformed"),
        ({"selective": [1]}, "malformed"),
        ({"provenance": "x"}, "provenance is not"),
        ({"tta": []}, "tta is not"),
        ({"tta": [[8, 0.0, 0.0, 1.0, False]] * 17}, "tta is not"),
        ({"tta": [[0, 0.0, 0.0, 1.0, False]]}, "tta is not"),
        ({"tta": [[10**6, 0.0, 0.0, 1.0, False]]}, "tta is not"),
        ({"tta": [[8, 0.5, 0.0, 0.6, False]]}, "tta is not"),
        ({"tta": [[8, -0.5, 0.0, 0.6, False]]}, "tta is not"),
        ({"tta": [[8, float("nan"), 0.0, 1.0, False]]}, "tta is not"),
        ({"tta": [[8, 0.0, 0.0, 0.0, False]]}, "tta is not"),
        ({"tta": [[8, 0, 0, 1, 2]]}, "tta is not"),
    ],
)
def test_a_hostile_model_json_is_one_sentence(tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap.py").write_text("open('trapped', 'w')\nclass Net: pass\n")
    write_random_model(tmp_path, "tiny", 2, 8)
    note = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(note | change))
    with pytest.raises(ValueError, match=words) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value).strip()
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00", "nul", '{"format": 2}'])
def test_a_damaged_model_json_is_one_sentence(tmp_path, text):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.json"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="There is no model in"):
        load_model(tmp_path / "nowhere")


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from(sorted({"net", "method", "classes", "size", "mean", "std", "calibration",
                               "conformal", "selective", "provenance"})), JUNK)  # fmt: skip
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_junk_in_any_entry_never_ends_in_a_fault(tmp_path, key, value):
    if not (tmp_path / "model.safetensors").exists():
        write_random_model(tmp_path, "tiny", 2, 8)
        (tmp_path / "good").write_text((tmp_path / "model.json").read_text())
    note = json.loads((tmp_path / "good").read_text())
    (tmp_path / "model.json").write_text(json.dumps(note | {key: value}))
    with contextlib.suppress(ValueError):  # a sentence, or what happens to be fine
        load_model(tmp_path)


def test_trust_imports_what_a_person_vouches_for(tmp_path, monkeypatch):
    (tmp_path / "vouched.py").write_text(
        "from calmatch.nets.classic import Tiny\nclass Mine(Tiny): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    write_random_model(tmp_path, "tiny", 2, 8)
    note = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(note | {"net": "vouched.Mine"}))
    with pytest.raises(ValueError, match="--trust"):
        load_model(tmp_path)
    assert load_model(tmp_path, trust=True).probabilities(pictures(2, 8)).shape == (2, 2)


def test_loading_leaves_chance_alone_and_downloads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(nets, "_download", lambda name: pytest.fail("a download"))
    write_random_model(tmp_path, "vit_tiny_patch2_32", 2, 8)
    note = json.loads((tmp_path / "model.json").read_text())
    note["net"] = "vit_tiny_patch2_32(pretrained='usb')"
    (tmp_path / "model.json").write_text(json.dumps(note))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    load_model(tmp_path)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.gpu
@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(("net", "size"), FAMILIES)
def test_a_gpu_gives_the_same_probabilities(tmp_path, net, size):
    write_random_model(tmp_path, net, 10, size)
    images = pictures(64, size)
    cpu = load_model(tmp_path).probabilities(images)
    model = load_model(tmp_path, device="cuda")
    torch.testing.assert_close(cpu, model.probabilities(images), atol=1e-4, rtol=0)
    if "efficientnet" in net:  # folded there too
        assert not any(isinstance(layer, nets.Norm) for layer in model.quick.modules())


def test_a_model_answers_for_a_path_an_image_an_array_or_a_list(tmp_path):
    write_random_model(tmp_path, "small(width=4)", 3, 16)
    model = calmatch.load(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    answer = model.predict(tmp_path / "x.png")
    assert answer == model.predict(str(tmp_path / "x.png"))
    assert answer == model.predict(Image.fromarray(pixels)) == model.predict(pixels)
    assert model.predict([pixels, tmp_path / "x.png"])[1].label == answer.label
    turned = Image.Exif()
    turned[274] = 6  # taken with the camera on its side
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=turned)
    deep = np.linspace(0, 40_000, 600).astype(np.uint16).reshape(20, 30)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    for path in (tmp_path / "turned.png", tmp_path / "deep.png"):
        with Image.open(path) as image:
            assert model.predict(image) == model.predict(path)
    assert answer.label in model.classes
    assert model.predict([]) == []
    assert pickle.loads(pickle.dumps(model)).predict(pixels) == answer  # after it has predicted
    for wrong in (3, pixels.astype(float), np.zeros((8, 8, 5), np.uint8)):
        with pytest.raises(ValueError, match=r"array|path"):
            model.predict(wrong)
    with pytest.raises(ValueError, match="at least one pixel"):
        model.predict(pixels[:0, :0])


def test_a_model_file_of_the_first_version_loads_and_says_the_same_for_ever():
    """The files were written on 2026-11-16 and are never written anew: whoever changes the format
    reads the old one too."""
    folder = GOLDEN / "model"
    loaded = load_model(folder)
    images = (torch.arange(5 * 3 * 64).reshape(5, 3, 8, 8) * 37 % 256).byte()
    expected = json.loads((folder / "expected.json").read_text())
    probs = loaded.probabilities(images)
    torch.testing.assert_close(probs, torch.tensor(expected["probabilities"]), atol=1e-5, rtol=0)
    answers = [[answer.label, list(answer.set), answer.sure] for answer in loaded.answer(probs)]
    assert answers == expected["answers"]
