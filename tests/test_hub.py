"""The Hugging Face Hub: what is pushed says what the run says, and what is pulled is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import yaml

from calmatch import hub, spec
from calmatch.model import load_model
from calmatch.report.charts import reliability_figure
from conftest import ALONE, calmatch, write_random_model
from folders import NASTY, made
from hub_server import serve_hub
from pictures import blobs

LITE = "efficientnet_lite0(pretrained=False)"


def finished(folder: Path, net: str = "tiny", size: int = 16, **settings: object) -> Path:
    """A run folder with a model and without training."""
    made(folder, **({"pictures": 200} | settings))
    write_random_model(folder, net, 5, size)
    note = json.loads((folder / "model.json").read_text("utf-8"))
    root = "pictures(root='/home/somebody/secret/photos')"
    note["provenance"] = {"data": root, "labels": 40}
    item, start = spec.parse(note["net"]), "/home/somebody/secret/start.safetensors"
    note["net"] = spec.write(item._replace(kwargs={**item.kwargs, "pretrained": start}))
    (folder / "model.json").write_text(json.dumps(note), "utf-8")
    return folder


def test_the_card_says_what_the_run_says_and_not_where_it_lay(tmp_path):
    (tmp_path / "out").mkdir()
    notes = ["2 pictures are blurred.", "3 pictures lie in /home/somebody/secret/p itself."]
    run = hub.load_run(finished(tmp_path / "run", classes=NASTY, notes=notes))
    hub.write_repository(run, tmp_path / "out", "somebody/photos")
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    front = yaml.safe_load(card.split("---\n")[1])
    values = front["model-index"][0]["results"][0]["metrics"]
    assert {"type": "error", "value": round(run.result.metrics["error"].value, 6)} in values
    ece = run.result.metrics["ece"]
    assert f"| ECE (15 bins) | {ece.value:.4g} | {ece.low:.4g} to {ece.high:.4g} |" in card
    assert "40 labelled and 200 unlabelled" in card
    assert "<script>" not in card
    assert "- 2 pictures are blurred." in card
    assert (tmp_path / "out" / "reliability.png").stat().st_size > 5000
    assert not any(
        b"secret" in path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()
    )


@pytest.mark.parametrize(("net", "library"), [(LITE, None), (LITE.replace("0", "012"), "calmatch")])
def test_only_a_network_that_timm_has_is_written_as_timms(tmp_path, net, library):
    (tmp_path / "out").mkdir()
    hub.write_repository(hub.load_run(finished(tmp_path / "run", net, 32)), tmp_path / "out", "a/b")
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config.get("library_name") == library
    assert config.get("architecture") == (None if library else "tf_efficientnet_lite0")


@pytest.mark.parametrize(("pictures", "measured"), [(199, False), (200, True)])
def test_the_card_shows_calibration_only_where_fit_would(tmp_path, pictures, measured):
    (tmp_path / "out").mkdir()
    run = hub.load_run(finished(tmp_path / "run", pictures=pictures))
    hub.write_repository(run, tmp_path / "out", "somebody/photos")
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert ("ECE (15 bins)" in card, "smooth ECE" in card) == (measured, measured)
    log_probs, labels = run.predictions()
    title = reliability_figure({"": (log_probs, labels)}).axes[0].get_title()
    assert ("error" in title, "ECE" in title) == (True, measured)
    sure, right = log_probs.exp().amax(1).mean(), (log_probs.argmax(1) == labels).float().mean()
    words = f"on them it was {100 * sure:.0f} % confident and {100 * right:.0f} % right on average"
    assert (words in card) != measured
    assert "| error |" in card


def test_an_address_that_is_none_is_a_sentence():
    for address in ("hf://model", "hf://a/b/c", "hf://a/b@", "hf://../x@1 2"):
        with pytest.raises(ValueError, match="is no model on the Hub"):
            hub.pull(address)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'calmatch\[hub\]'"):
        hub.pull("hf://somebody/photos")


@pytest.mark.slow
def test_a_pushed_model_is_pulled_by_its_commit_and_timm_loads_it_too(tmp_path, monkeypatch):
    run = finished(tmp_path / "run", LITE, 64)
    pictures = blobs(tmp_path / "pictures", each=3, spare=0)
    with serve_hub() as server:
        monkeypatch.setitem(ALONE, "HF_ENDPOINT", server.address)
        monkeypatch.setitem(ALONE, "HF_HOME", str(tmp_path / "home"))
        monkeypatch.setitem(ALONE, "HF_TOKEN", "hf_test")
        done = calmatch("push", run, "somebody/photos")
        assert done.returncode == 0, done.stderr
        address = done.stdout.removeprefix("Pushed: ").strip()
        (_, first) = server.repositories["somebody/photos"][-1]
        assert set(first) == {*hub.MODEL_FILES, "README.md", "config.json", "reliability.png"}
        server.commit("somebody/photos", {"model.json": b"{}"})  # a later commit is broken
        for words, out in (((run,), "here.csv"), ((address,), "there.csv")):
            done = calmatch("predict", *words, pictures, "-o", tmp_path / out)
            assert done.returncode == 0, done.stderr
        assert (tmp_path / "here.csv").read_bytes() == (tmp_path / "there.csv").read_bytes()
        done = calmatch("predict", "hf://somebody/photos", pictures, "-o", tmp_path / "new.csv")
        assert done.returncode == 2
        assert "is not a model of format" in done.stderr
        done = calmatch("predict", "hf://nobody/photos", pictures, "-o", tmp_path / "new.csv")
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
        server.commit("somebody/photos", {"model.json": first["model.json"]})
        code = """
import sys, timm, torch, calmatch
theirs = timm.create_model("hf-hub:somebody/photos", pretrained=True).eval()
ours = calmatch.load(sys.argv[1])
images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
x = (images / 255 - 0.5) / 0.25
with torch.no_grad():
    torch.testing.assert_close(theirs(x), ours.logits(images), atol=1e-3, rtol=1e-3)
assert tuple(theirs.pretrained_cfg["input_size"]) == (3, 64, 64), theirs.pretrained_cfg
assert tuple(theirs.pretrained_cfg["mean"]) == (0.5, 0.5, 0.5)
"""
        command = [sys.executable, "-c", code, str(run)]
        done = subprocess.run(command, capture_output=True, text=True, env=ALONE)
        assert done.returncode == 0, done.stderr
    offline = calmatch("predict", address, pictures, "-o", tmp_path / "again.csv")
    assert offline.returncode == 0, offline.stderr  # a commit that was pulled before


def test_names_of_timm_become_ours_and_a_broken_file_is_left_for_the_check(tmp_path, monkeypatch):
    import windows  # what a file that is mapped means there

    run = finished(tmp_path / "run", "tiny", 16)
    hub._take_timm_names(run / "model.safetensors")
    load_model(run)  # it had our names before
    weights = safetensors.torch.load_file(run / "model.safetensors")
    bare = {key.replace("/", "."): value for key, value in weights.items()}
    data = safetensors.torch.save(bare)
    del weights, bare  # Windows replaces no file that is mapped
    (run / "model.safetensors").write_bytes(data)
    monkeypatch.setattr(os, "replace", windows.replace_closed)
    hub._take_timm_names(run / "model.safetensors")
    monkeypatch.undo()
    renamed = safetensors.torch.load_file(run / "model.safetensors")
    assert all(key.startswith(hub.PREFIX) for key in renamed)
    (run / "model.safetensors").write_bytes(b"not this")
    hub._take_timm_names(run / "model.safetensors")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_model(run)
