"""Runs end to end: learning, selection, killing, continuing."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.torch
import torch

import ranks
from calmatch import load_run, train, train_seeds
from calmatch.files import lock, write
from calmatch.losses import ceiling
from calmatch.training import checkpoint, loop
from calmatch.training.config import Config, check_config, load_config
from calmatch.training.loop import _save, train_together
from calmatch.training.setup import build_parts
from calmatch.training.step import make_training
from conftest import ALONE

FILES = {
    "config.json",
    "environment.json",
    "split.json",
    "metrics.jsonl",
    "model.safetensors",
    "model.json",
    "predictions.npz",
    "examples.npz",
    "result.json",
    "report.html",
}
NUMBERS = ("predictions.npz", "metrics.jsonl", "examples.npz")


def test_a_run_learns_and_leaves_a_whole_folder(tiny, tmp_path):
    run = train(tiny("fixmatch", steps=60), tmp_path / "run", quiet=True)
    assert {path.name for path in run.folder.iterdir()} >= FILES
    assert run.result.metrics["error"].value < 0.2  # four classes: chance is 0.75
    log_probs, labels = run.predictions()
    assert float((log_probs.argmax(1) != labels).double().mean()) == pytest.approx(
        run.result.metrics["error"].value
    )
    split = json.loads((run.folder / "split.json").read_text())
    assert len(split["labelled"]) == 16
    assert load_run(run.folder).result == run.result


def test_the_log_tells_losses_and_pseudo_labels_apart(tiny, tmp_path):
    run = train(tiny("freematch", penalty="margin(m=1)", steps=30), tmp_path / "run", quiet=True)
    line = run.lines()[-1]
    for key in ("loss", "labelled", "unlabelled/cross_entropy", "unlabelled/margin", "pseudo_ce"):
        assert np.isfinite(line[key]), key
    assert line["pseudo_ce"] + line["min_entropy"] == pytest.approx(
        line["unlabelled/cross_entropy"], abs=1e-6
    )
    assert 0 <= line["accepted"] <= 1
    assert 0 <= line["agree"] <= 1
    assert 0 <= line["pseudo_ece"] <= 1
    assert line["pseudo_accuracy"] > 0.9
    assert sum(line["histogram"]) == pytest.approx(line["accepted"], abs=1e-6)
    assert [line["step"] for line in run.lines()] == [5, 10, 15, 20, 25, 30]
    assert [line["step"] for line in run.lines("test")] == [6, 12, 18, 24, 30]


def test_the_same_config_gives_the_same_bytes_and_another_seed_does_not(tiny, tmp_path):
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = train(tiny(seed=seed), tmp_path / name, quiet=True)
        files.append([(run.folder / f).read_bytes() for f in NUMBERS])
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_a_finished_run_is_returned_and_another_config_is_refused(tiny, tmp_path):
    first = train(tiny(), tmp_path / "run", quiet=True)
    before = (first.folder / "model.safetensors").stat().st_mtime_ns
    assert train(tiny(), tmp_path / "run", quiet=True).result == first.result
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="holds a run with lr="):
        train(tiny(lr=0.5), tmp_path / "run", quiet=True)


def test_training_leaves_the_callers_random_numbers_alone(tiny, tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train(tiny(), tmp_path / "run", quiet=True)
    assert torch.equal(torch.rand(3), expected)


def test_best_keeps_the_weights_of_the_best_validation(tiny, tmp_path):
    config = tiny(steps=24, eval_every=3, validation=0.2, select="best(nll)", lr=0.3)
    run = train(config, tmp_path / "run", quiet=True)
    lines = run.lines("validation")
    best = min(lines, key=lambda line: line["nll"])
    tested = next(line for line in run.lines("test") if line["step"] == best["step"])
    assert run.result.metrics["nll"].value == pytest.approx(tested["nll"])
    assert run.result.step == best["step"]
    assert not run.result.test_selected


def test_choosing_on_the_test_set_is_possible_and_named_so(tiny, tmp_path):
    config = tiny(steps=24, eval_every=3, protocol="paper", lr=0.3)
    run = train(config, tmp_path / "run", quiet=True)
    errors = [line["error"] for line in run.lines("test")]
    assert run.result.metrics["error"].value == pytest.approx(min(errors))
    assert run.result.test_selected
    assert "TEST" in run.result.selected


def test_best_without_pictures_to_choose_on_is_refused(tiny):
    with pytest.raises(ValueError, match="--validation"):
        check_config(tiny(select="best(error)"))


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", "adamw"), ("bf16", "adamw"), ("fp64", "sgd"), ("fp32", "sgd")],
)
def test_every_precision_and_optimizer_learns(tiny, tmp_path, precision, optimizer):
    lr = 0.1 if optimizer == "sgd" else 0.01
    config = tiny(precision=precision, optimizer=optimizer, lr=lr, steps=40, clip=5.0, ema=0.9)
    run = train(config, tmp_path / "run", quiet=True)
    assert run.result.metrics["error"].value < 0.4
    assert run.result.weights == "ema"


def test_ema_follows_the_weights_and_copies_counters(tiny):
    run = make_training(tiny(ema=0.9), build_parts(tiny(net="small(width=4)", ema=0.9)))
    before = {k: v.clone() for k, v in run.parts.ema.state_dict().items()}
    run.advance(run.parts.batches[0])
    for name, now in run.parts.ema.state_dict().items():
        new = run.parts.net.state_dict()[name]
        expected = torch.lerp(before[name], new, 0.1) if new.is_floating_point() else new
        torch.testing.assert_close(now, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"lr": float("nan")}, "finite"),
        ({"lr": "fast"}, "it takes a number"),
        ({"ema": 1.5}, "between 0 and 1"),
        ({"optimizer": "adam"}, "'adamw' or 'sgd'"),
        ({"penalty": "focal(gamma=2)"}, "--unlabelled-loss"),
        ({"penalty": "margn"}, "Did you mean 'margin'"),
        ({"device": "abacus"}, "no device"),
        ({"dataset": "digit"}, "Did you mean 'digits'"),
        ({"net": "smal"}, "Did you mean 'small'"),
        ({"weak": "crop(99)"}, "does not fit"),
        ({"labels": 17}, "multiple of 4"),
        ({"method": "supervised", "penalty": "margin"}, "takes no penalty"),
        ({"select": "best(eces)", "validation": 0.2}, "Did you mean 'ece'"),
        ({"select": "best(ece)", "validation": 0.001}, "holds no pictures"),
        ({"select": "best(ece)", "protocol": "paper"}, "drop --select"),
        ({"lr": 1e30}, r"became infinite or NaN in step \d+;.*--lr"),
        ({"method": "bam(samples=1)"}, "samples is 1"),
        ({"method": "dash(warmup=0)"}, "at least 1"),
        ({"net": "timm.no_such_net"}, "timm has no model"),
    ],
)
def test_mistakes_in_a_config_say_what_to_do(tiny, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        train(tiny(**changes), tmp_path / "run", quiet=True)


def test_a_margin_that_caps_under_the_threshold_is_warned_of(tiny):
    assert ceiling(2, 4) < 0.95
    for penalty, warned in (("margin(m=2)", 1), ("margin(cap=0.9)", 1), ("margin(m=10)", 0)):
        notes = build_parts(tiny("fixmatch", penalty=penalty)).notes
        assert sum("run out of pseudo-labels" in note for note in notes) == warned
    assert not build_parts(tiny("freematch", penalty="margin(m=2)")).notes


def test_config_files_change_the_default_and_code_needs_trust(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("method: freematch\nlr: 0.1\n")
    assert load_config(path, Config(steps=5)) == Config(steps=5, method="freematch", lr=0.1)
    path.write_text("method: my.module.Method\n")
    with pytest.raises(ValueError, match="--trust"):
        load_config(path, Config())
    assert load_config(path, Config(), trust=True).method == "my.module.Method"
    path.write_text("lr: 5e-4\nema: null\n")
    assert load_config(path, Config()).lr == 5e-4
    path.write_text("dataset: timm.models.anything('x')\n")
    with pytest.raises(ValueError, match="--trust"):
        load_config(path, Config())
    path.write_text("net: timm.resnet18\n")
    assert load_config(path, Config()).net == "timm.resnet18"
    for bad in ("- 1", "lrr: 1", "lr: fast", "{", "!!python/object/apply:os.system ['true']"):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"\w"):
            load_config(path, Config())


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save_checkpoint(tmp_path, step, {"a": torch.full((1000,), float(step))}, {})
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert [path.stem for path in paths] == ["000000002", "000000003"]
    data = bytearray(paths[-1].read_bytes())
    data[-100] ^= 1
    paths[-1].write_bytes(data)
    (tensors, note), complaints = checkpoint.newest_checkpoint(tmp_path)
    assert note["step"] == 2
    assert float(tensors["a"][0]) == 2.0
    assert "checksum" in complaints[0]
    paths[-1].write_bytes(data[:500])
    assert checkpoint.newest_checkpoint(tmp_path)[0][1]["step"] == 2
    paths[0].write_bytes(b"")
    state, complaints = checkpoint.newest_checkpoint(tmp_path)
    assert state is None
    assert len(complaints) == 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".damaged"}  # out of the way


def test_damaged_checkpoints_never_push_out_a_whole_one(tmp_path):
    for step in (8, 9):
        (tmp_path / f"{step:09d}.safetensors").write_bytes(b"damaged")
    assert checkpoint.newest_checkpoint(tmp_path)[0] is None
    checkpoint.save_checkpoint(tmp_path, 3, {"a": torch.ones(1)}, {})
    assert checkpoint.newest_checkpoint(tmp_path)[0][1]["step"] == 3


def test_a_checkpoint_is_a_safetensors_file_that_the_library_reads(tmp_path):
    tensors = {
        f"{kind}": torch.arange(6).reshape(2, 3).to(kind) for kind in checkpoint.SAFETENSORS_TYPES
    }
    tensors |= {"number": torch.tensor(2.5), "nothing": torch.zeros(0, 4), "ä": torch.ones(1)}
    last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    checkpoint.save_checkpoint(tmp_path, 7, {**tensors, "last": last}, {"lines": 3})
    read = safetensors.torch.load_file(tmp_path / "000000007.safetensors")
    assert {k: v.dtype for k, v in read.items()} == {
        k: v.dtype for k, v in {**tensors, "last": last}.items()
    }
    assert all(torch.equal(read[k], v) for k, v in {**tensors, "last": last}.items())
    state, _ = checkpoint.newest_checkpoint(tmp_path)
    assert state[1] == {"lines": 3, "step": 7}


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


COMMAND = """
train digits_40 --method freematch --penalty margin(m=10) --net tiny --dataset synthetic
--labels 16 --weak crop(1) --steps 300 --checkpoint-every 20 --log-every 30 --seed 5 --quiet
"""


def start(folder, **streams):
    words = [sys.executable, "-m", "calmatch", *COMMAND.split(), "--out", str(folder)]
    return subprocess.Popen(words, text=True, env=ALONE, **streams)


def checkpoints(folder):
    return sorted((folder / "checkpoint").glob("*.safetensors"))


def test_a_run_killed_at_any_moment_ends_with_the_same_bytes(typed, tmp_path):
    assert typed(*COMMAND.split(), "--out", tmp_path / "whole").returncode == 0
    process = start(tmp_path / "cut")  # one here, hundreds in `make faults`
    while process.poll() is None and not checkpoints(tmp_path / "cut"):
        time.sleep(0.002)
    time.sleep(random.Random(os.getpid()).uniform(0, 0.2))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert typed(*COMMAND.split(), "--out", tmp_path / "cut").returncode == 0
    for name in (*NUMBERS, "model.safetensors", "split.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_stop_signal_writes_a_checkpoint_and_says_how_to_continue(tmp_path, number, code):
    process = start(tmp_path / "run", stderr=subprocess.PIPE)
    while not (tmp_path / "run" / "split.json").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert "continues" in errors
    assert checkpoints(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.ddp
@pytest.mark.parametrize(
    "method",
    [
        "freematch",  # thresholds
        "simmatch(threshold=0.3)",  # banks
        "flexmatch",  # a label for every picture
    ],
)
def test_torchrun_with_two_ranks_writes_the_run_of_one_process(tiny, tmp_path, method):
    changes = {"net": "small(width=4)", "precision": "fp64", "penalty": "margin(m=0.5)"}
    config = tiny(method, steps=20, ema=0.9, **changes)
    (tmp_path / "config.json").write_text(json.dumps(config.dump()))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["-m", "calmatch", "train", tmp_path / "config.json", "--quiet", "--out"]
    command = [*torchrun, "--nproc-per-node", "2", *words, tmp_path / "two"]
    subprocess.run(command, env=ALONE, check=True, timeout=120, stderr=subprocess.DEVNULL)
    ranks.compare(train(config, tmp_path / "one", quiet=True), load_run(tmp_path / "two"))


def test_a_second_process_on_the_same_folder_refuses(tiny, tmp_path):
    with lock(tmp_path / "run"), pytest.raises(ValueError, match="Another process"):
        train(tiny(), tmp_path / "run", quiet=True)


SAME = ("predictions.npz", "metrics.jsonl", "model.safetensors", "result.json")


def test_seeds_trained_together_equal_seeds_trained_alone_and_resume(tiny, tmp_path, monkeypatch):
    config = tiny("freematch", checkpoint_every=2)
    for seed in (3, 4):
        train(config.replace(seed=seed), tmp_path / f"alone/seed{seed}", quiet=True)
    original, saves = _save, []

    def stumbling(run, writer, lines):
        original(run, writer, lines)
        saves.append(run.step)
        if len(saves) == 7:  # the first run has saved step 8, the second has not
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_save", stumbling)
    with pytest.raises(KeyboardInterrupt):
        train_seeds(config, [3, 4], tmp_path / "both", quiet=True)
    monkeypatch.setattr(loop, "_save", original)
    runs = train_seeds(config, [3, 4], tmp_path / "both", quiet=True)
    assert [run.folder.name for run in runs] == ["seed3", "seed4"]
    for seed in (3, 4):
        for name in SAME:
            one, other = (tmp_path / kind / f"seed{seed}" / name for kind in ("alone", "both"))
            assert one.read_bytes() == other.read_bytes(), name


def test_runs_together_must_differ_in_seed_only_and_need_own_folders(tiny, tmp_path):
    with pytest.raises(ValueError, match="may differ in their seeds"):
        train_together([tiny(), tiny(lr=0.1)], [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match="a folder each"):
        train_together([tiny(), tiny(seed=1)], [tmp_path / "a", tmp_path / "a"])


def test_a_process_compiles_every_run_however_many_it_makes(tiny, tmp_path, monkeypatch):
    from torch._dynamo import config

    plain = torch.nn.Module.compile  # by no C++ compiler: not every machine has one
    eager = functools.partialmethod(plain, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", eager)
    monkeypatch.setattr(config, "recompile_limit", 1)
    monkeypatch.setattr(config, "accumulated_recompile_limit", 1)
    for batch in (8, 4):  # a version of the step each
        run = train(tiny(batch=batch, steps=2, compile=True), tmp_path / str(batch), quiet=True)
        assert run.result.steps == 2
