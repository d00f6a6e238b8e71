"""Inside Ray: the desk that alone writes into run folders, and one attempt at a run on a node."""

from __future__ import annotations

import platform
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from calmatch import checkpoint
from calmatch.bench import job as jobs
from calmatch.bench.job import Job
from calmatch.config import Config

BEAT = 1.0  # seconds between a node's messages
STOPPED = 143
LAST = "result.json"  # written after everything else: it says that a run is finished

Files = dict[str, bytes]
Marks = dict[str, tuple[int, int]]


class Desk:
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
        return changed(self.folders[run], {})[0]

    def report(self, run: int, attempt: int, step: int, files: Files, names: list[str]) -> bool:
        """Take what a node sends; the answer says whether it shall stop."""
        if attempt != self.attempts[run]:
            return True
        self.steps[run] = step
        if files:
            store(self.folders[run], files, names)
        return self.stopping

    def stop(self) -> None:
        self.stopping = True

    def look(self) -> tuple[dict[int, int], dict[int, str]]:
        """The step of each run, and the nodes of those that were started."""
        return self.steps, self.opened


def changed(folder: Path, before: Marks) -> tuple[Files, Marks]:
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


def store(folder: Path, files: Mapping[str, bytes], names: Sequence[str]) -> None:
    """Write what a node sent, each file whole or not at all, and drop old checkpoints."""
    for name in sorted(files, key=lambda name: (name == LAST, "/" not in name)):
        path = folder / PurePosixPath(name)
        assert path.resolve().is_relative_to(folder.resolve())
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write(path, files[name])
    for old in (folder / "checkpoint").glob("*.safetensors"):
        if f"checkpoint/{old.name}" not in names:
            old.unlink(missing_ok=True)


class Order(NamedTuple):
    """What a node is told to do."""

    run: int
    attempt: int
    name: str
    config: Config
    home: str  # the run's folder where the suite was started
    env: Mapping[str, str]
    every: float  # seconds between two sendings of checkpoints


def work(desk: Any, order: Order) -> int:
    """On a node: one attempt at a run in a folder of its own; the exit code."""
    files = _answer(desk.open.remote(order.run, order.attempt, platform.node()))
    if files is None:
        return STOPPED
    with tempfile.TemporaryDirectory(prefix="calmatch-") as name:
        folder = Path(name)
        store(folder, files, list(files))
        _, marks = changed(folder, {})
        # SIGKILL when the worker dies: nothing that a lost node does shall count or go on
        process = jobs.start(
            Job(order.name, order.config, folder), env=order.env, orphaned=signal.SIGKILL
        )
        try:
            return _attend(process, desk, order, folder, marks)
        finally:
            process.kill()
            process.wait()


def _answer(ref: Any) -> Any:
    """What the desk says. Not ray.get: while a task waits in it, Ray gives its core to another."""
    return ref.future().result()


def _attend(
    process: subprocess.Popen[bytes], desk: Any, order: Order, folder: Path, marks: Marks
) -> int:
    began = sent = time.monotonic()
    told = False
    while True:
        code = process.poll()
        files: Files = {}
        if code is not None:
            jobs.close(folder, code, time.monotonic() - began)
        if code is not None or time.monotonic() - sent >= order.every:
            sent = time.monotonic()
            files, marks = changed(folder, marks)
            if jobs.LOG in files:  # nobody finds the node's own folder later
                files[jobs.LOG] = files[jobs.LOG].replace(bytes(folder), order.home.encode())
        step = jobs.reached(folder)
        stop = _answer(desk.report.remote(order.run, order.attempt, step, files, list(marks)))
        if code is not None:
            return code
        if stop and not told:  # a second signal would not wait for the checkpoint
            told = True
            process.terminate()
        time.sleep(min(BEAT, order.every))
