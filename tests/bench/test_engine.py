"""Suites on one machine: queue, failures, interruptions, array jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from calmatch import cli, load_run, train
from calmatch.bench import BenchOptions, choose_cells, engine, paper, shorten
from calmatch.bench.engine import (
    RUN_LOG,
    Job,
    SuiteProgress,
    Worker,
    job_command,
    job_state,
    last_log_lines,
    local_workers,
    reached_step,
    run_locally,
    saved_step,
)
from calmatch.bench.ray import Coordinator, changed_files, run_attempt
from calmatch.files import lock, write
from conftest import ALONE, calmatch

WORKERS = [Worker({"OMP_NUM_THREADS": "1"})] * 2
FILES = ("result.json", "metrics.jsonl", "predictions.npz", "model.safetensors")


def perform(todo, workers=WORKERS):
    """The local engine in this process."""
    progress = SuiteProgress("test", todo, quiet=True)
    run_locally(todo, progress, workers, [])
    return {job.name: progress.items[job] for job in todo}


def lines_of(folder):
    return (folder / RUN_LOG).read_text().splitlines()


def test_a_failed_run_stops_no_other_and_seeds_that_share_a_process_end_as_if_alone(
    tiny, tmp_path, monkeypatch
):
    fold = tiny(fold=1)  # measured without the bootstrap's seconds
    settings = {"bad": tiny(lr=1e30), "good": fold, "other": fold.replace(seed=1, split_seed=1)}
    bad, good, other = (Job(name, each, tmp_path / name) for name, each in settings.items())
    items = perform([bad, good, other], [Worker({"OMP_NUM_THREADS": "1"}, together=3)])
    assert [item.state for item in items.values()] == ["failed", "finished", "finished"]
    words = "A weight or a moment became infinite or NaN in step 1"
    assert items["bad"].note.startswith(f"exit code 2: calmatch: {words}")
    assert " -m calmatch train " in lines_of(bad.folder)[0]
    assert load_run(good.folder).config == good.config
    assert "engine.train_folders" in lines_of(good.folder)[0]
    assert not (other.folder / RUN_LOG).exists()
    assert (other.folder / "report.html").exists()
    alone = train(other.config, tmp_path / "alone", quiet=True)
    for name in FILES:
        assert (alone.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    # finished ones are kept, the failed one is tried again
    assert words in last_log_lines(bad.folder)[-1]
    before = (good.folder / "result.json").stat().st_mtime_ns
    monkeypatch.setattr(engine, "job_command", lambda job: ["false"])  # it takes no second
    again = perform([bad, good])
    assert [again[name].state for name in ("good", "bad")] == ["kept", "failed"]
    assert (good.folder / "result.json").stat().st_mtime_ns == before
    assert sum(line.startswith("# exit code") for line in lines_of(bad.folder)) == 2


def test_a_run_that_another_process_holds_is_waited_for_and_kept(tiny, tmp_path, monkeypatch):
    job = Job("held", tiny(), tmp_path / "held")
    progress = SuiteProgress("test", [job], quiet=True)
    held = lock(job.folder)
    held.__enter__()
    waited = []

    def finish_elsewhere():
        waited.append(progress.items[job].state)
        if len(waited) == 2:
            (job.folder / "config.json").write_text(json.dumps(job.config.dump()))
            half = {"value": 0.5, "low": 0.4, "high": 0.6}
            metrics = dict.fromkeys(("error", "ece"), half)
            result = {"title": "held", "classes": ["a", "b"], "metrics": metrics}
            (job.folder / "result.json").write_text(json.dumps(result))
            held.__exit__(None, None, None)

    monkeypatch.setattr(progress, "tick", finish_elsewhere)
    monkeypatch.setattr(engine, "start_job", lambda *_: pytest.fail("it was started a second time"))
    run_locally([job], progress, WORKERS, [])
    assert waited[0] == "held"
    assert progress.items[job].state == "kept"


def test_states_tell_finished_half_done_and_new_apart_and_refuse_another_config(tiny, tmp_path):
    job = Job("run", tiny(steps=30), tmp_path / "run")
    assert job_state(job) == "new"
    assert not job.folder.exists()
    job_command(job)
    (job.folder / "checkpoint").mkdir()
    (job.folder / "checkpoint" / "000000020.safetensors").touch()
    assert job_state(job) == "half done"
    assert saved_step(job.folder) == 20
    with lock(job.folder):
        assert job_state(job) == "running"
    for look in (job_state, job_command):
        with pytest.raises(ValueError, match="holds a run with steps=30"):
            look(job._replace(config=tiny(steps=40)))
    assert job_state(job._replace(config=tiny(steps=30, workers=7))) == "half done"


def test_a_run_that_never_began_does_not_keep_its_folder(tiny, tmp_path):
    job = Job("run", tiny(steps=30, net="bogus"), tmp_path / "run")
    job_command(job)  # its weights could not be had, say: only its config is there
    better = job._replace(config=tiny(steps=30))
    assert job_state(better) == "new"
    job_command(better)
    assert json.loads((job.folder / "config.json").read_text())["net"] == better.config.net


def test_the_step_a_run_has_reached_is_that_of_its_last_whole_line(tmp_path):
    lines = [json.dumps({"step": step, "unix": 1000.5}) + "\n" for step in range(10, 200, 10)]
    (tmp_path / "times.jsonl").write_text("".join(lines) + '{"step": 99')  # a line half written
    assert reached_step(tmp_path) == 190
    assert reached_step(tmp_path / "nothing") == 0


def test_a_machine_is_divided_by_cores_and_gpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(engine, "local_devices", lambda: ("cpu", ["0"]))
    assert [worker.env["OMP_NUM_THREADS"] for worker in local_workers(100)] == ["1"] * 8
    assert [worker.env["OMP_NUM_THREADS"] for worker in local_workers(3)] == ["2"] * 3
    assert len(local_workers(100, per_device=2)) == 2
    monkeypatch.setattr(engine, "local_devices", lambda: ("cuda", ["3", "5"]))
    gpus = local_workers(100, per_device=2)
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in gpus] == ["3", "5"]
    assert [worker.together for worker in gpus] == [2, 2]


def test_a_worker_takes_further_rows_while_there_is_room(tiny, tmp_path, monkeypatch):
    settings = [tiny(seed=s, split_seed=s) for s in (0, 1)] + [tiny("freematch", seed=0)]
    settings += [tiny(fold=1), tiny(fold=2)]
    todo = [Job(f"run{k}", config, tmp_path / f"run{k}") for k, config in enumerate(settings)]
    began = stand_in_processes(todo, monkeypatch, "1", "0.1", "0.1", "0.1")
    items = perform(todo, [Worker({}, together=3)])
    assert [item.state for item in items.values()] == ["failed"] * 5
    assert began in ([2, 1, 1, 1], [2, 1, 2])  # the folds one by one, or when two are free


def stand_in_processes(todo, monkeypatch, *seconds):
    """Processes that sleep so long and fail start in place of runs; how many runs each takes."""
    for job in todo:
        job.folder.mkdir()
    began, naps = [], iter(seconds)

    def start(*bundle, env):
        began.append(len(bundle))
        return subprocess.Popen(["sh", "-c", f"sleep {next(naps)}; false"])

    monkeypatch.setattr(engine, "start_job", start)
    return began


def test_a_process_takes_five_runs_at_most(tiny, tmp_path, monkeypatch):
    todo = [Job(f"run{k}", tiny(seed=k), tmp_path / f"run{k}") for k in range(6)]
    began = stand_in_processes(todo, monkeypatch, "0", "0")
    perform(todo, [Worker({}, together=20)])
    assert began == [5, 1]


def test_what_does_not_fit_into_the_minutes_is_left(tiny, tmp_path):
    todo = [Job(f"run{k}", tiny(seed=k), tmp_path / f"run{k}") for k in range(3)]
    progress = SuiteProgress("test", todo, quiet=True)
    run_locally(todo, progress, WORKERS[:1], [], minutes=0.1 / 60)  # over before the first one ends
    assert progress.items[todo[0]].state in ("stopped", "finished")
    assert [progress.items[job].state for job in todo[1:]] == ["left", "left"]
    assert not (tmp_path / "run1").exists()


@pytest.fixture
def stand_in(tiny, monkeypatch):
    """A suite of two rows with one seed each, called tiny."""

    suite = {"columns": ["synthetic_16"], "rows": ["supervised", "fixmatch"]}
    monkeypatch.setattr(paper, "SEEDS", (0,))
    monkeypatch.setitem(paper.SUITES, "tiny", suite)
    monkeypatch.setitem(paper.RECIPES, "synthetic_16", tiny)
    monkeypatch.setitem(paper.SOURCES, "synthetic_16", "made up")


def test_a_dry_run_lists_runs_states_and_sources(stand_in, tmp_path, capsys):
    assert cli.main(["bench", "tiny", "--out", str(tmp_path), "--dry-run", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "supervised"], ["1", "fixmatch"]]
    assert [lines[0], *lines[3:]] == ["Protocol: made up.", "2 runs: 2 new."]
    assert not list(tmp_path.rglob("*.json"))  # nothing was begun


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["bench", "digit"], "Did you mean 'digits'"),
        (["bench", "tiny", "--only", "vat"], "No run of tiny has 'vat'"),
        (["bench", "tiny", "--index", "2"], "between 0 and 1"),
        (["bench", "tiny", "--jobs", "-1"], "--jobs"),
        (["bench", "tiny", "--steps", "0"], "--steps"),
        (["bench", "tiny", "--minutes", "0"], "--minutes"),
        (["bench", "tiny", "--engine", "ray", "--address", "ray://x:1"], "machine of the cluster"),
    ],
)
def test_mistakes_are_one_sentence(stand_in, tmp_path, capsys, words, sentence):
    if "ray" in words:
        pytest.importorskip("ray")
    assert cli.main([*words, "--out", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


def test_fewer_steps_shrink_every_interval(tiny):
    config = tiny(steps=1000, warmup=100, log_every=50, eval_every=0, checkpoint_every=500)
    small = shorten(config, 10)
    assert (small.steps, small.warmup, small.log_every) == (10, 1, 1)
    assert (small.eval_every, small.checkpoint_every) == (0, 5)


def test_a_suite_runs_with_the_weights_one_has(tmp_path):
    file = tmp_path / "mine.safetensors"
    file.touch()
    options = BenchOptions("main", tmp_path, only="eurosat", weights=file)
    wanted = f"vit_small_patch2_32(pretrained='{file}')"
    assert {cell.config.net for cell in choose_cells(options)} == {wanted}
    options = BenchOptions("longtail", tmp_path, weights=file)
    assert {cell.config.net for cell in choose_cells(options)} == {wanted, "wrn_28_2"}
    options = BenchOptions("main", tmp_path, net="vit_tiny_patch2_32", weights=file)
    (net,) = {cell.config.net for cell in choose_cells(options)}
    assert net == f"vit_tiny_patch2_32(pretrained='{file}')"
    with pytest.raises(ValueError, match="--only"):
        choose_cells(BenchOptions("main", tmp_path, weights=file))
    with pytest.raises(ValueError, match="no weights file"):
        choose_cells(BenchOptions("main", tmp_path, weights=tmp_path / "gone"))


def test_options_choose_cells_and_change_their_configs(stand_in, tmp_path):
    options = BenchOptions("tiny", tmp_path, seeds=(3, 4), only="FIX", protocol="paper", steps=6)
    cells = choose_cells(options)
    assert [(cell.row, cell.seed) for cell in cells] == [("fixmatch", 3), ("fixmatch", 4)]
    assert {cell.config.protocol for cell in cells} == {"paper"}
    assert {cell.config.steps for cell in cells} == {6}


def test_only_the_newest_attempt_may_write_and_the_result_comes_last(tmp_path, monkeypatch):
    coordinator = Coordinator([str(tmp_path / "run")])
    coordinator.expect(0, 1)
    assert coordinator.open(0, 1) == {}
    files = {"result.json": b"{}", "checkpoint/000000001.safetensors": b"1", "metrics.jsonl": b"x"}
    written = []
    original = write
    monkeypatch.setattr(
        "calmatch.bench.ray.write",
        lambda path, data: (written.append(path.name), original(path, data)),
    )
    assert coordinator.report(0, 1, 5, files, list(files)) is False
    assert written == ["000000001.safetensors", "metrics.jsonl", "result.json"]
    coordinator.expect(0, 2)
    assert coordinator.open(0, 1) is None
    assert coordinator.report(0, 1, 9, {"metrics.jsonl": b"late"}, []) is True
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b"x"
    assert coordinator.open(0, 2) == files
    newer = {"checkpoint/000000002.safetensors": b"2"}
    coordinator.report(0, 2, 9, newer, list(newer))
    assert saved_step(tmp_path / "run") == 2
    assert len(list((tmp_path / "run" / "checkpoint").iterdir())) == 1
    coordinator.stop()
    assert coordinator.report(0, 2, 9, {}, []) is True
    assert coordinator.open(0, 2) is None


def test_a_node_sends_only_what_changed_and_nothing_hidden(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    for name in ("metrics.jsonl", "checkpoint/1.safetensors", ".lock"):
        (tmp_path / name).write_text(name)
    files, marks = changed_files(tmp_path, {})
    assert list(files) == ["checkpoint/1.safetensors", "metrics.jsonl"]  # the log after it
    assert changed_files(tmp_path, marks)[0] == {}
    (tmp_path / "metrics.jsonl").write_text("more")
    assert changed_files(tmp_path, marks)[0] == {"metrics.jsonl": b"more"}


class Home:
    """A coordinator that answers at once."""

    def __init__(self, coordinator):
        self.coordinator = coordinator

    def __getattr__(self, name):
        def remote(*values):
            answer = getattr(self.coordinator, name)(*values)
            future = SimpleNamespace(result=lambda: answer)
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=remote)


def test_a_failed_run_on_a_node_speaks_of_its_folder_at_home(tiny, tmp_path, monkeypatch):
    home = tmp_path / "home" / "run"
    coordinator = Coordinator([str(home)])
    coordinator.expect(0, 1)

    def start(*bundle, env, orphaned):
        (bundle[0].folder / RUN_LOG).write_text(f"calmatch: {bundle[0].folder} is full.\n")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])

    monkeypatch.setattr(engine, "start_job", start)
    job = Job("run", tiny(), home)
    assert run_attempt(Home(coordinator), 0, 1, job, {}, 0.1) == 2
    assert f"calmatch: {home} is full." in (home / RUN_LOG).read_text()


# The command as a person uses it

SUITE = ["bench", "digits", "--only", "supervised", "--seeds", "0", "1"]


def begin(out, *words, **streams):
    command = [sys.executable, "-m", "calmatch", *SUITE, "--out", str(out), *words]
    return subprocess.Popen(command, env=ALONE, text=True, start_new_session=True, **streams)


def children(out):
    """Processes that train under this folder."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "train" in words and any(word.startswith(str(out)) for word in words):
            processes.append(int(path.parent.name))
    return processes


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def checkpoints(out):
    return list(out.glob("*/*/*/checkpoint/*.safetensors"))


@pytest.mark.slow
def test_an_interrupted_suite_goes_on_and_ends_with_the_same_bytes(tmp_path):
    words = ("--steps", "300")
    for name, number, code in (("int", signal.SIGINT, 130), ("term", signal.SIGTERM, 143)):
        out = tmp_path / name
        process = begin(out, *words, stderr=subprocess.PIPE)
        wait_for(lambda out=out: len({path.parent for path in checkpoints(out)}) == 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code
        assert "the same command continues" in errors
        assert not children(out)
        assert not list(out.rglob("result.json"))
    # a machine that dies: nobody is left behind, and the checkpoint is not lost
    process = begin(tmp_path / "kill", *words)
    wait_for(lambda: checkpoints(tmp_path / "kill"))
    process.kill()
    process.wait()
    wait_for(lambda: not children(tmp_path / "kill"), 30)
    # two at once share the work; one after another end in the same bytes
    both = [begin(tmp_path / "term", *words, stderr=subprocess.PIPE) for _ in range(2)]
    for one in both:
        one.communicate(timeout=200)
    assert [one.returncode for one in both] == [0, 0]
    for name in ("int", "kill", "whole"):
        ended = calmatch(*SUITE, "--out", tmp_path / name, *words, timeout=200)
        assert ended.returncode == 0, ended.stderr
        assert ("continues at step" in ended.stderr) == (name != "whole")
    for seed in ("seed0", "seed1"):
        logs = lines_of(tmp_path / "term" / "digits_40" / "supervised" / seed)
        assert sum(line.startswith("# exit code 0") for line in logs) == 1
        for file in FILES:
            whole, *others = (
                (tmp_path / name / "digits_40" / "supervised" / seed / file).read_bytes()
                for name in ("whole", "int", "term", "kill")
            )
            assert others == [whole] * 3, file


@pytest.mark.slow
def test_an_array_job_runs_one_cell_with_its_own_exit_code(tmp_path):
    words = [*SUITE, "--out", tmp_path, "--steps", "20", "--index"]
    assert calmatch(*words, "1").returncode == 0
    assert [path.parent.name for path in tmp_path.rglob("result.json")] == ["seed1"]
    assert calmatch(*words, "1").returncode == 0
    assert calmatch(*words, "2").returncode == 2


@pytest.mark.slow
def test_the_failed_runs_are_named_and_the_exit_code_is_1(tmp_path):
    folder = tmp_path / "digits_40" / "supervised" / "seed1"
    (folder / "predictions.npz").mkdir(parents=True)  # in the way
    ended = calmatch(*SUITE, "--out", tmp_path, "--steps", "20")
    assert ended.returncode == 1
    assert "calmatch: 1 of 2 runs failed" in ended.stderr
    assert str(folder) in ended.stderr
    assert "1 finished, 1 failed" in ended.stdout
    assert (tmp_path / "digits_40" / "supervised" / "seed0" / "result.json").exists()
