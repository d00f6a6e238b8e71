"""The same answer again: replays, deterministic runs, and what a run records of its machine."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch

from calmatch import cli, console
from calmatch.methods.fixmatch import FixMatch
from calmatch.options import ReplayOptions
from calmatch.training import cuda_graph, replay
from calmatch.training.loop import train
from calmatch.training.setup import WORKSPACE, deterministic, package_version


@pytest.fixture
def folder(tiny, tmp_path):
    """A finished run of a second."""
    return train(tiny(steps=20), tmp_path / "run", quiet=True).folder


def change(folder, place, key, value):
    """Another number in a line of the log."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[place][key] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_replay_is_the_same_byte_for_byte(folder, typed):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    replayed = typed("replay", folder)
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout == (
        "The same, byte for byte: 8 lines of metrics.jsonl, 60 predictions.\n"
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_first_steps_alone_are_compared_line_by_line(folder, capsys):
    assert cli.main(["replay", str(folder), "--steps", "12", "--quiet"]) == 0
    assert "The same, byte for byte: 4 lines of metrics.jsonl." in capsys.readouterr().out
    change(folder, -1, "nll", 99.0)  # after step 12
    assert cli.main(["replay", str(folder), "--steps", "12", "--quiet"]) == 0
    assert "byte for byte" in capsys.readouterr().out


def test_a_run_of_another_device_is_replayed_on_the_one_there_is(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "device": "abacus"}))
    assert cli.main(["replay", str(folder), "--steps", "6", "--quiet"]) == 2
    assert "no device 'abacus'" in capsys.readouterr().err
    assert cli.main(["replay", str(folder), "--steps", "6", "--quiet", "--device", "cpu"]) == 0


def test_an_unfinished_run_is_replayed_as_far_as_it_came(folder, capsys):
    (folder / "result.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])  # cut by a kill
    assert cli.main(["replay", str(folder), "--quiet"]) == 0
    assert "byte for byte: 3 lines" in capsys.readouterr().out


def test_a_small_difference_is_told_and_within_the_tolerance(folder, capsys):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    change(folder, 0, "loss", lines[0]["loss"] + 1e-4)
    environment = json.loads((folder / "environment.json").read_text())
    environment["versions"]["torch"] = "1.0"
    (folder / "environment.json").write_text(json.dumps(environment))
    assert cli.main(["replay", str(folder), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"Largest difference \S+e-05: loss of the train line at step 5\.", out)
    assert f"torch 1.0 -> {package_version('torch')}" in out
    assert "Within the tolerance of 0.001." in out


@pytest.mark.parametrize(
    ("place", "key", "value"), [(0, "loss", 9.0), (0, "histogram", [1.0] * 4), (2, "agree", "x")]
)
def test_a_large_difference_is_exit_code_1_and_no_traceback(folder, capsys, place, key, value):
    change(folder, place, key, value)
    assert cli.main(["replay", str(folder), "--steps", "12", "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert key in out
    assert "further away than the tolerance of 0.001" in err
    assert "Traceback" not in err


def test_other_predictions_are_noticed(folder):
    path = folder / "predictions.npz"
    with replay.np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["log_probs"] = arrays["log_probs"][:, ::-1]
    replay.np.savez(path, **arrays)
    with pytest.raises(console.Failed, match="tolerance"):
        replay.replay_run(ReplayOptions(folder, quiet=True))


@pytest.mark.parametrize("steps", ["1", "21", "-1"])
def test_steps_without_a_line_are_refused(folder, capsys, steps):
    assert cli.main(["replay", str(folder), "--steps", steps]) == 2
    assert "no line to compare" in capsys.readouterr().err


def test_what_is_not_a_run_is_refused(tmp_path, capsys):
    assert cli.main(["replay", str(tmp_path)]) == 2
    (tmp_path / "fault.json").write_text("{")
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_records_what_its_result_depends_on(folder):
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["device"] == "cpu"
    assert environment["deterministic"] is True  # a CPU is
    assert environment["threads"] == torch.get_num_threads()
    assert environment["versions"]["torch"]
    assert {"cpu", "matmul_precision", "ranks", "python"} <= environment.keys()


def test_deterministic_settings_end_with_the_run():
    name = WORKSPACE
    before = (os.environ.get(name), torch.backends.cudnn.benchmark)
    sdp = torch.backends.cuda.cudnn_sdp_enabled()
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ[name]
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert before == (os.environ.get(name), torch.backends.cudnn.benchmark)
    assert sdp == torch.backends.cuda.cudnn_sdp_enabled()
    undecided = RuntimeError("some_cuda does not have a deterministic implementation, but you set")
    with pytest.raises(ValueError, match=r"some_cuda .* drop --deterministic"):  # noqa: SIM117
        with deterministic(True):
            raise undecided
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


class Greedy(FixMatch):
    """Asks for more memory than there is."""

    def forward(self, net, ema, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_names_the_settings_to_lower(tmp_path, capsys):
    words = ["train", "digits_40", "--method", f"{__name__}.Greedy", "--steps", "3", "--quiet"]
    assert cli.main([*words, "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    for setting in ("--batch", "--ratio", "--chunk", "--eval-batch", "--memory"):
        assert setting in err


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `create`"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("MPS backend out of memory"), False),
    ],
)
def test_only_errors_of_memory_are_told_as_such(error, full):
    assert console.is_out_of_memory(error) == full
    assert not full or "--batch" in console._sentence(error, "predict")


class Branch:
    """A run whose step cannot be captured."""

    default = None

    def __init__(self, cause):
        self.cause, self.undone = cause, False

    def snapshot(self):
        return {}

    def undo(self, before, failed):
        self.undone = failed

    def warm(self):
        try:
            raise self.cause
        finally:  # as the end of a capture does
            raise RuntimeError("operation failed due to a previous error during capture")


def test_a_device_that_is_full_while_a_step_is_captured_is_named_as_such(monkeypatch):
    for name, value in {"CUDAGraph": object, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    captured = cuda_graph.CapturedStep([], quiet=True)
    captured.branches = [Branch(torch.OutOfMemoryError("CUDA out of memory."))]
    with pytest.raises(torch.OutOfMemoryError):
        captured._capture()
    assert not captured.failed
    captured.branches = [Branch(TypeError("something else"))]
    captured._capture()
    assert captured.failed
    assert captured.branches[0].undone


def test_a_strangers_run_is_a_sentence_and_not_a_traceback(tmp_path, capsys):
    words = ["train", "digits_40", "--steps", "4", "--log-every", "2", "--quiet"]
    assert cli.main([*words, "--out", str(tmp_path / "run")]) == 0
    for name, junk in (
        ("environment.json", "[]"),
        ("metrics.jsonl", '{"step": 2}\n'),
        ("predictions.npz", "rubbish"),
    ):
        path = tmp_path / "run" / name
        whole = path.read_bytes()
        path.write_text(junk)
        capsys.readouterr()
        assert cli.main(["replay", str(tmp_path / "run"), "--quiet"]) == 2, name
        assert capsys.readouterr().err.strip().startswith("calmatch: ")
        path.write_bytes(whole)
    (tmp_path / "run" / "environment.json").write_text('{"threads": 1000000000}')
    assert cli.main(["replay", str(tmp_path / "run"), "--quiet"]) == 0
