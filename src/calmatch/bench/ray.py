"""Runs of a suite on a Ray cluster: one coordinator beside us writes what the workers send.

A node works in a folder of its own and sends what changed. Only the coordinator, on the machine
where the suite was started, writes into the run folders, and only for the newest attempt at a run.
So nodes share no path, no lock has to work across a network, and an attempt on a lost node cannot
come back: its process dies with its worker, and what it might still send is refused."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NamedTuple

from calmatch import files
from calmatch.bench.engine import (
    RUN_LOG,
    Job,
    SuiteProgress,
    close_log,
    reached_step,
    record_exit,
    start_job,
)
from calmatch.files import write
from calmatch.predict import start_ray
from calmatch.runs import find_finished
from calmatch.training.config import Config

POLL_SECONDS = 1.0  # seconds between a node's messages
STOPPED = 143
LAST_FILE = "result.json"  # written after everything else: it says that a run is finished

Files = dict[str, bytes]
Marks = dict[str, tuple[int, int]]


class Coordinator:
    """Reads and writes the run folders on the machine where the suite was started."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = [Path(folder) for folder in folders]
        self.attempts = dict.fromkeys(range(len(folders)), 0)
        self.steps: dict[int, int] = {}
        self.opened: dict[int, str] = {}
        self.stopping = False

    def expect(self, run: int, attempt: int) -> None:
        """From now on, only this attempt may send."""
        self.attempts[run] = attempt
        self.opened.pop(run, None)

    def open(self, run: int, attempt: int, node: str) -> Files | None:
        """What a node needs to go on with a run; None: do not start it."""
        if self.stopping or attempt != self.attempts[run]:
            return None
        self.opened[run] = node
        return changed_files(self.folders[run], {})[0]

    def report(self, run: int, attempt: int, step: int, files: Files, names: list[str]) -> bool:
        """Take what a node sends; the answer says whether it shall stop."""
        if attempt != self.attempts[run]:
            return True
        self.steps[run] = step
        if files:
            store_files(self.folders[run], files, names)
        return self.stopping

    def stop(self) -> None:
        self.stopping = True

    def look(self) -> tuple[dict[int, int], dict[int, str]]:
        """The step of each run, and the nodes of those that were started."""
        return self.steps, self.opened


def changed_files(folder: Path, before: Marks) -> tuple[Files, Marks]:
    """The files that are not as they were, and the marks of all.

    Checkpoints are read first: the log that is read after them holds at least their lines.
    """
    files: Files = {}
    marks: Marks = {}
    for path in sorted(folder.rglob("*"), key=lambda path: path.parent == folder):
        if path.name.startswith(".") or not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        try:
            found = path.stat()
            marks[name] = (found.st_mtime_ns, found.st_size)
            if marks[name] != before.get(name):
                files[name] = path.read_bytes()
        except FileNotFoundError:  # an old checkpoint, dropped just now
            marks.pop(name, None)
    return files, marks


def store_files(folder: Path, files: Mapping[str, bytes], names: Sequence[str]) -> None:
    """Write what a node sent, each file whole or not at all, and drop old checkpoints."""
    for name in sorted(files, key=lambda name: (name == LAST_FILE, "/" not in name)):
        path = folder / PurePosixPath(name)
        assert path.resolve().is_relative_to(folder.resolve())
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, files[name])
    for old in (folder / "checkpoint").glob("*.safetensors"):
        if f"checkpoint/{old.name}" not in names:
            old.unlink(missing_ok=True)


class Assignment(NamedTuple):
    """What a node is told to do."""

    run: int
    attempt: int
    name: str
    config: Config
    home: str  # the run's folder where the suite was started
    env: Mapping[str, str]
    every: float  # seconds between two sendings of checkpoints


def run_assignment(desk: Any, order: Assignment) -> int:
    """On a node: one attempt at a run in a folder of its own; the exit code."""
    files = _await_reply(desk.open.remote(order.run, order.attempt, platform.node()))
    if files is None:
        return STOPPED
    with tempfile.TemporaryDirectory(prefix="calmatch-") as name:
        folder = Path(name)
        store_files(folder, files, list(files))
        _, marks = changed_files(folder, {})
        # SIGKILL when the worker dies: nothing that a lost node does shall count or go on
        process = start_job(
            Job(order.name, order.config, folder), env=order.env, orphaned=signal.SIGKILL
        )
        try:
            return _watch_process(process, desk, order, folder, marks)
        finally:
            process.kill()
            process.wait()


def _await_reply(ref: Any) -> Any:
    """What the desk says. Not ray.get: while a task waits in it, Ray gives its core to another."""
    return ref.future().result()


def _watch_process(
    process: subprocess.Popen[bytes], desk: Any, order: Assignment, folder: Path, marks: Marks
) -> int:
    began = sent = time.monotonic()
    told = False
    while True:
        code = process.poll()
        files: Files = {}
        if code is not None:
            close_log(folder, code, time.monotonic() - began)
        if code is not None or time.monotonic() - sent >= order.every:
            sent = time.monotonic()
            files, marks = changed_files(folder, marks)
            if RUN_LOG in files:  # nobody finds the node's own folder later
                files[RUN_LOG] = files[RUN_LOG].replace(bytes(folder), order.home.encode())
        step = reached_step(folder)
        stop = _await_reply(desk.report.remote(order.run, order.attempt, step, files, list(marks)))
        if code is not None:
            return code
        if stop and not told:  # a second signal would not wait for the checkpoint
            told = True
            process.terminate()
        time.sleep(min(POLL_SECONDS, order.every))


RETRIES = 20  # lost nodes that one run survives


def run_on_ray(
    todo: Sequence[Job],
    board: SuiteProgress,
    asked: Sequence[int],
    address: str | None,
    per_device: int,
    env: Mapping[str, str],
    every: float = 60.0,
) -> None:
    """Run everything on a Ray cluster; what a lost node worked on goes on elsewhere.

    Args:
        todo: the runs.
        board: where their states are shown.
        asked: grows when a signal arrives.
        address: of the cluster; none: Ray starts on this machine.
        per_device: runs that share a card; 0: one.
        env: what runs find in their environment, beside what their node has.
        every: seconds between two sendings of checkpoints; a lost node costs this at most.
    """
    ray = import_ray()
    ours = not ray.is_initialized()
    if ours:
        _join_cluster(ray, address)
    try:
        queue = _Queue(ray, todo, board, per_device, env, every)
        queue.fill()
        while queue.going or queue.others:
            queue.turn(len(asked))
            board.tick()
    finally:
        if ours:
            ray.shutdown()


def import_ray() -> Any:
    """Ray, or a sentence that says how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ValueError("--engine ray needs Ray: pip install 'calmatch[ray]'.") from error
    return ray


def _join_cluster(ray: ModuleType, address: str | None) -> None:
    if address and address.startswith("ray://"):
        raise ValueError(
            "Start the suite on a machine of the cluster, with --address auto or its IP:PORT; "
            "ray:// only reaches it from outside."
        )
    try:
        start_ray(ray, address, "error")
    except ConnectionError as error:
        raise ValueError(f"There is no Ray cluster at {address}: {error}") from error


class _Queue:
    """The runs on the cluster, and those that another process on this machine works on."""

    def __init__(
        self,
        ray: ModuleType,
        todo: Sequence[Job],
        board: SuiteProgress,
        per_device: int,
        env: Mapping[str, str],
        every: float,
    ) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray, self.board, self.env, self.every = ray, board, env, every
        self.jobs = list(todo)
        self.others = list(range(len(todo)))
        self.going: dict[Any, int] = {}
        self.locks: dict[int, ExitStack] = {}
        self.attempts: Counter[int] = Counter()
        self.told = 0
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        folders = [str(job.folder.resolve()) for job in todo]
        self.desk = ray.remote(num_cpus=0, scheduling_strategy=here)(Coordinator).remote(folders)
        cards = ray.cluster_resources().get("GPU", 0)
        share = {"num_gpus": 1 / (per_device or 1)} if cards else {}
        self.work = ray.remote(num_cpus=1, max_retries=0, **share)(run_assignment)

    def fill(self) -> None:
        """Hand out every run that nobody here holds; its lock is ours until it ends."""
        for run in list(self.others):
            job = self.jobs[run]
            lock = ExitStack()
            try:
                lock.enter_context(files.lock(job.folder))
            except files.Busy:
                self.board.move(job, "held", note="by another process; waiting for it")
                continue
            self.others.remove(run)
            if find_finished(job.folder, job.config):
                lock.close()
                self.board.move(job, "kept")
            else:
                self.locks[run] = lock
                self.submit(run)

    def submit(self, run: int) -> None:
        """Start the next attempt at a run, wherever there is room."""
        self.attempts[run] += 1
        self.ray.get(self.desk.expect.remote(run, self.attempts[run]))
        job = self.jobs[run]
        home = str(job.folder)
        order = Assignment(
            run, self.attempts[run], job.name, job.config, home, self.env, self.every
        )
        self.going[self.work.remote(self.desk, order)] = run

    def turn(self, asked: int) -> None:
        """Look at what has ended, what has begun, and whether all shall end."""
        if asked > self.told:
            self.halt(force=asked > 1)
            self.told = asked
        ended, _ = self.ray.wait(list(self.going), timeout=POLL_SECONDS) if self.going else ([], [])
        steps, opened = self.ray.get(self.desk.look.remote())
        for ref, run in self.going.items():
            item = self.board.items[self.jobs[run]]
            item.step = max(item.step, steps.get(run, 0))
            if run in opened and item.state != "running" and ref not in ended:
                self.board.move(item.job, "running", opened[run])
        for ref in ended:
            run = self.going.pop(ref)
            self.settle(ref, run)
            if run not in self.going.values():
                self.locks.pop(run).close()
        if self.others:
            self.fill()
            time.sleep(0 if self.going else POLL_SECONDS)

    def halt(self, force: bool) -> None:
        """Running ones write a checkpoint and send it; waiting ones are taken back."""
        self.board.halt()
        self.ray.get(self.desk.stop.remote())
        _, opened = self.ray.get(self.desk.look.remote())
        for ref, run in self.going.items():
            if force or run not in opened:
                self.ray.cancel(ref, force=force)
        for run in self.others:
            self.board.move(self.jobs[run], "stopped")
        self.others.clear()

    def settle(self, ref: Any, run: int) -> None:
        """What the end of an attempt means for its run."""
        job, lost = self.jobs[run], None
        try:
            record_exit(job, self.ray.get(ref), self.board, stopping=self.told > 0)
        except self.ray.exceptions.RayTaskError as error:  # our own fault, on a node
            self.board.move(job, "failed", note=f"on its node: {error.cause!r}")
        except self.ray.exceptions.RayError as error:  # cancelled, or its node or worker is gone
            lost = type(error).__name__
        if lost and self.told:
            self.board.move(job, "stopped")
        elif lost and self.attempts[run] > RETRIES:
            self.board.move(job, "failed", note=f"lost {RETRIES} times: {lost}")
        elif lost:
            self.board.move(job, "waiting", note=f"again, its node was lost ({lost})")
            self.submit(run)
