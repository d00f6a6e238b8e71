"""Runs of a suite as processes on this machine: jobs, workers and progress."""

import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from calmatch import files, ops
from calmatch.console import ProgressBar, message, run_guarded
from calmatch.runs import find_finished, load_run
from calmatch.training.checkpoint import list_checkpoints
from calmatch.training.config import Config, without_seeds

RUN_LOG = "run.log"
TRAIN_FOLDERS = "import sys; from calmatch.bench import engine; sys.exit(engine.train_folders())"


class Job(NamedTuple):
    """One run of a suite."""

    name: str
    config: Config
    folder: Path


def job_state(job: Job) -> str:
    """finished, running (in another process), half done or new; ValueError for another config."""
    if _is_finished(job):
        return "finished"
    return "running" if is_held(job.folder) else "half done" if saved_step(job.folder) else "new"


def _is_finished(job: Job) -> bool:
    """ValueError if another run began here; a config whose run never began is none."""
    begun = ("environment.json", "checkpoint", "result.json")
    there = any((job.folder / name).exists() for name in begun)
    return there and find_finished(job.folder, job.config) is not None


def is_held(folder: Path) -> bool:
    try:
        with files.open_file(folder / ".lock") as file:
            return not files.try_lock(file, share=True)
    except OSError:
        return False


def saved_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0: none."""
    paths = list_checkpoints(folder / "checkpoint")
    return int(paths[-1].stem) if paths else 0


def reached_step(folder: Path) -> int:
    """The step of the newest line; 0: none yet."""
    try:
        with files.open_file(folder / "times.jsonl") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))  # two lines at least
            whole = [line for line in file.readlines() if line[:1] == b"{" and line[-1:] == b"\n"]
    except OSError:
        return 0
    return int(json.loads(whole[-1])["step"]) if whole else 0


def job_command(*jobs: Job) -> list[str]:
    """What runs them. Their configs were made by our code, not read from a file: trusted."""
    for job in jobs:
        _is_finished(job)  # another run's config is not overwritten
        job.folder.mkdir(parents=True, exist_ok=True)
        files.write_json(job.folder / "config.json", job.config.dump())
    if len(jobs) > 1:
        return [sys.executable, "-P", "-c", TRAIN_FOLDERS, *(str(job.folder) for job in jobs)]
    folder = jobs[0].folder
    words = ["train", str(folder / "config.json"), "--out", str(folder), "--trust", "--quiet"]
    return [sys.executable, "-P", "-m", "calmatch", *words]  # not a calmatch.py in this folder


def train_folders() -> int:
    """Train the runs in the folders that the command line names; they differ in seeds only."""
    from calmatch.report import build
    from calmatch.training.loop import train_together

    folders = [Path(word) for word in sys.argv[1:]]
    configs = [Config().replace(**files.read_json(each / "config.json")) for each in folders]

    def train() -> int:
        for run in train_together(configs, folders, quiet=True):
            build([run], run.folder / "report.html")
        return 0

    return run_guarded(train, "train")


def start_job(
    *jobs: Job, env: Mapping[str, str], orphaned: int = signal.SIGTERM
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that a terminal's Ctrl-C reaches it once, by us.

    Runs that differ in their seeds only share one; the first one's folder has the log. `orphaned`
    is the signal it gets when this process dies, however that ends (Linux only).
    """
    words, parent = job_command(*jobs), os.getpid()
    linux = sys.platform.startswith("linux")
    prctl = ctypes.CDLL(None).prctl if linux else None  # looked up before the fork

    def die_with_parent() -> None:
        assert prctl
        prctl(1, orphaned)  # PR_SET_PDEATHSIG: the kernel sends it when the parent dies
        if os.getppid() != parent:  # it died before we asked
            os._exit(128 + orphaned)

    with (jobs[0].folder / RUN_LOG).open("ab") as log:
        log.write(f"# {datetime.now():%Y-%m-%d %H:%M:%S} {' '.join(words)}\n".encode())
        log.flush()
        how: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        how["preexec_fn"] = die_with_parent if linux else None
        return subprocess.Popen(words, env={**os.environ, **env}, start_new_session=True, **how)


def close_log(folder: Path, code: int, seconds: float) -> None:
    """The last line of an attempt in its log."""
    with (folder / RUN_LOG).open("a", encoding="utf-8") as log:
        log.write(f"# {_describe_exit(code)} after {seconds:.1f} s\n")


def last_log_lines(folder: Path, n: int = 5) -> list[str]:
    """The end of the log of the newest attempt."""
    try:
        text = files.read_bytes(folder / RUN_LOG).decode("utf-8", errors="replace")
    except OSError:
        return []
    newest = re.split(r"(?m)^# \d{4}-.*", text)[-1].splitlines()
    return [line for line in newest if line.strip() and not line.startswith("# ")][-n:]


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = ", out of memory perhaps" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


RUNS_PER_GPU = 3  # seeds side by side on one GPU: 1.3 times as fast as one by one on an H200
RUNS_PER_PROCESS = 5  # of them in one process, however many run at once: more end no sooner


class Worker(NamedTuple):
    """A place for runs: what it adds to their environment."""

    env: Mapping[str, str]
    together: int = 1  # runs at once; those that differ in their seeds only share a process


def local_workers(runs: int, per_device: int = 0) -> list[Worker]:
    """The workers of this machine.

    On a CPU every core is a worker: two runs with a thread each are faster than one after the
    other with two (docs/engines.md has the numbers). More cores than runs are shared among them.
    """
    cores = ops.count_cores()
    kind, gpus = local_devices()
    processes = per_device or (max(1, min(cores, runs)) if kind == "cpu" else 1)
    if kind == "cuda":
        processes = len(gpus) * max(1, per_device // RUNS_PER_GPU)
    env = {"OMP_NUM_THREADS": str(max(1, cores // processes))}
    if kind != "cuda":
        return [Worker(env)] * processes
    together = per_device or RUNS_PER_GPU
    return [Worker({**env, "CUDA_VISIBLE_DEVICES": gpu}, together) for gpu in gpus]


def local_devices() -> tuple[str, list[str]]:
    """What kind of device there is, and the GPUs' ids as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if count := torch.cuda.device_count():
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return "cuda", named.split(",")[:count] if named else [str(k) for k in range(count)]
    return ("mps", ["0"]) if torch.backends.mps.is_available() else ("cpu", ["0"])


def run_locally(
    jobs: Sequence[Job],
    progress: "SuiteProgress",
    workers: Sequence[Worker],
    signals: Sequence[int],
    minutes: float = math.inf,
) -> None:
    """Run everything; a failed run touches no other. `signals` grows when one arrives.

    After so many minutes running ones write a checkpoint and end; none is begun that would not
    be done by then, if it takes as long as the last one that ended.
    """
    waiting, room, answered = list(jobs), [worker.together for worker in workers], 0
    running: dict[tuple[Job, ...], tuple[subprocess.Popen[bytes], int]] = {}
    end, took = time.monotonic() + 60 * minutes, 0.0
    try:
        while waiting or running:
            if time.monotonic() + took > end:
                progress.move_all(waiting, "left")
            stops = len(signals) + (time.monotonic() > end)
            if stops > answered:  # once: checkpoint and end; twice: end
                answered = stops
                progress.halt()
                for process, _ in running.values():
                    process.terminate()
                progress.move_all(waiting, "stopped")
            for place, worker in enumerate(workers):
                while room[place] and (
                    bundle := _next_bundle(waiting, progress, min(RUNS_PER_PROCESS, room[place]))
                ):
                    running[bundle] = (start_job(*bundle, env=worker.env), place)
                    room[place] -= len(bundle)
                    for job in bundle:
                        progress.move(job, "running")
            for bundle, (process, place) in list(running.items()):
                code = process.poll()
                for job in bundle:
                    progress.items[job].step = reached_step(job.folder)
                if code is not None:
                    del running[bundle]
                    room[place] += len(bundle)
                    took = time.monotonic() - progress.items[bundle[0]].began
                    close_log(bundle[0].folder, code, took)
                    for job in bundle:
                        if code and not stops and is_held(job.folder):  # somebody was faster
                            waiting.append(job)
                        else:
                            record_exit(job, code, progress, stopping=stops > 0, log=bundle[0])
            progress.tick()
            time.sleep(0.2)
    finally:  # also when we ourselves fail: nobody goes on unseen
        for process, _ in running.values():
            process.kill()


def _next_bundle(waiting: list[Job], progress: "SuiteProgress", most: int) -> tuple[Job, ...]:
    """The next run that nobody else works on, with others that differ in their seeds only."""
    bundle: list[Job] = []
    for job in list(waiting):
        if bundle and without_seeds(job.config) != without_seeds(bundle[0].config):
            continue
        if is_held(job.folder):
            progress.move(job, "held", note="by another process; waiting for it")
            continue
        waiting.remove(job)
        if job_state(job) == "finished":  # by somebody else
            progress.move(job, "kept")
        else:
            bundle.append(job)
        if len(bundle) == most:
            break
    return tuple(bundle)


def record_exit(
    job: Job, code: int, progress: "SuiteProgress", stopping: bool, log: Job | None = None
) -> None:
    """What a process that ended means for one of its runs; `log` is the run that has its log."""
    if code == 0:
        progress.move(job, "finished")
    elif stopping and code in (130, 143, -signal.SIGTERM):
        progress.move(job, "stopped")
    else:
        lines = [_describe_exit(code), *last_log_lines((log or job).folder, 1)]
        progress.move(job, "failed", note=": ".join(lines))


OPEN_STATES = ("waiting", "held", "running")


@dataclass
class JobStatus:
    """A run and how it stands: waiting, held by others, running, finished, kept, failed, ..."""

    job: Job
    state: str = "waiting"
    began: float = 0.0
    step: int = 0
    note: str = ""


class SuiteProgress(ProgressBar):
    """How every run of a suite stands: engines move the items, here are lines about them and a bar.

    The bar counts the steps of all runs; on it stands how many runs are in which state.
    """

    def __init__(self, title: str, jobs: Sequence[Job], quiet: bool = False) -> None:
        self.title, self.quiet, self.stopping = title, quiet, False
        self.items = {job: JobStatus(job, step=saved_step(job.folder)) for job in jobs}
        super().__init__(title, sum(job.config.steps for job in jobs), self._steps(), quiet)

    def move(self, job: Job, state: str, note: str = "") -> None:
        """A run changes its state, which may be worth a line."""
        item = self.items[job]
        before, item.state, item.note = item.state, state, note
        text = ""
        if state == "running":
            item.began = time.monotonic()
            item.step = saved_step(job.folder)
            text = f"continues at step {item.step:,}" if item.step else ""
        elif state == "finished":
            item.step = job.config.steps
            metrics = load_run(job.folder).result.metrics
            error, ece = (100 * metrics[key].value for key in ("error", "ece"))
            spent = format_duration(time.monotonic() - item.began)
            item.note = f"{spent}, error {error:.1f} %, ECE {ece:.1f} %"
            text = f"finished in {item.note}"
        elif state == "kept":
            item.step = job.config.steps
            text = "kept: another process finished it" if before == "held" else ""
        elif state not in (before, "left"):  # what is left is counted at the end
            text = f"{state} {note}".strip()
        if text:
            closed = sum(item.state not in OPEN_STATES for item in self.items.values())
            message(f"[{closed}/{len(self.items)}] {job.name}: {text}", self.quiet)

    def move_all(self, waiting: list[Job], state: str) -> None:
        for job in waiting:
            self.move(job, state)
        waiting.clear()

    def halt(self) -> None:
        """Say that everything is about to end."""
        if not self.stopping:
            message(f"{self.title}: stopping; running ones write their checkpoints.", self.quiet)
        self.stopping = True

    def tick(self) -> None:
        self.words = {state: f"{number} {state}" for state, number in self.counts().items()}
        self.update(self._steps())

    def counts(self) -> Counter[str]:
        return Counter(item.state for item in self.items.values())

    def _steps(self) -> int:
        return sum(item.step for item in self.items.values())


def format_duration(seconds: float) -> str:
    """A length of time a person can read.

    >>> [format_duration(seconds) for seconds in (5, 200, 7300, 300_000)]
    ['5 s', '3 min 20 s', '2 h 1 min', '3 d 11 h']
    """
    whole = round(seconds)
    units = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    for unit, size, small, part in units:
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {small}"
    return f"{whole} s"
