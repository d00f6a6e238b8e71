"""Runs of a suite on a Ray cluster: one coordinator beside us writes what the workers send.

A node works in a folder of its own and sends what changed. Only the coordinator, on the machine
where the suite was started, writes into the run folders, and only for the newest attempt at a run.
So nodes share no path, no lock has to work across a network, and an attempt on a lost node cannot
come back: its process dies with its worker, and what it might still send is refused."""

import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from calmatch.bench import engine
from calmatch.bench.engine import Job, SuiteProgress
from calmatch.files import Busy, lock, read_bytes, write
from calmatch.predict import join_ray
from calmatch.training.checkpoint import list_checkpoints

POLL_SECONDS = 1.0  # between a node's messages
RETRIES = 20  # lost nodes that one run survives
STOPPED = 143
LAST_FILE = "result.json"  # written after everything else: it says that a run is finished

Files = dict[str, bytes]
Marks = dict[str, tuple[int, int]]  # time and size of each file


def run_on_ray(
    jobs: Sequence[Job],
    progress: SuiteProgress,
    signals: Sequence[int],
    address: str | None,
    per_device: int,
    env: Mapping[str, str],
    every: float = 60.0,
) -> None:
    """Run everything on a Ray cluster; what a lost node worked on goes on elsewhere.

    `signals` grows when one arrives; without an address Ray starts on this machine; `per_device`
    runs share a GPU. Checkpoints are sent `every` so many seconds: a lost node costs that at most.
    """
    if address and address.startswith("ray://"):
        inside = "Start the suite on a machine of the cluster, with --address auto or its IP:PORT"
        raise ValueError(f"{inside}; ray:// only reaches it from outside.")
    with join_ray(address) as ray:
        queue = _Queue(ray, jobs, progress, per_device, env, every)
        queue.fill()
        while queue.running or queue.held:
            queue.turn(len(signals))
            progress.tick()


@dataclass
class _Queue:
    """The runs on the cluster, and those that another process on this machine holds."""

    ray: Any
    jobs: Sequence[Job]
    progress: SuiteProgress
    per_device: int
    env: Mapping[str, str]
    every: float

    def __post_init__(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.held = list(range(len(self.jobs)))
        self.running: dict[Any, int] = {}
        self.locks: dict[int, ExitStack] = {}
        self.attempts: Counter[int] = Counter()
        self.stops = 0  # signals that were answered
        node = self.ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        folders = [str(job.folder.resolve()) for job in self.jobs]
        remote = self.ray.remote(num_cpus=0, scheduling_strategy=here)(Coordinator)
        self.coordinator = remote.remote(folders)
        gpus = self.ray.cluster_resources().get("GPU", 0)
        share = {"num_gpus": 1 / (self.per_device or 1)} if gpus else {}
        self.work = self.ray.remote(num_cpus=1, max_retries=0, **share)(run_attempt)

    def fill(self) -> None:
        """Hand out every run that nobody here holds; its lock is ours until it ends."""
        for run in list(self.held):
            job, stack = self.jobs[run], ExitStack()
            try:
                stack.enter_context(lock(job.folder))
            except Busy:
                self.progress.move(job, "held", note="by another process; waiting for it")
                continue
            self.held.remove(run)
            if engine.job_state(job) == "finished":
                stack.close()
                self.progress.move(job, "kept")
            else:
                self.locks[run] = stack
                self.submit(run)

    def submit(self, run: int) -> None:
        """Start the next attempt at a run, wherever there is room."""
        self.attempts[run] += 1
        attempt, job = self.attempts[run], self.jobs[run]
        self.ray.get(self.coordinator.expect.remote(run, attempt))
        task = self.work.remote(self.coordinator, run, attempt, job, self.env, self.every)
        self.running[task] = run

    def turn(self, signals: int) -> None:
        """Look at what has ended, what has begun, and whether all shall end."""
        if signals > self.stops:
            self.halt(force=signals > 1)
            self.stops = signals
        running = list(self.running)
        ended, _ = self.ray.wait(running, timeout=POLL_SECONDS) if running else ([], [])
        steps, started = self.ray.get(self.coordinator.status.remote())
        for ref, run in self.running.items():
            item = self.progress.items[self.jobs[run]]
            item.step = max(item.step, steps.get(run, 0))
            if run in started and item.state != "running" and ref not in ended:
                self.progress.move(item.job, "running")
        for ref in ended:
            run = self.running.pop(ref)
            self.settle(ref, run)
            if run not in self.running.values():
                self.locks.pop(run).close()
        if self.held:
            self.fill()
            time.sleep(0 if self.running else POLL_SECONDS)

    def halt(self, force: bool) -> None:
        """Running ones write a checkpoint and send it; waiting ones are taken back."""
        self.progress.halt()
        self.ray.get(self.coordinator.stop.remote())
        _, started = self.ray.get(self.coordinator.status.remote())
        for ref, run in self.running.items():
            if force or run not in started:
                self.ray.cancel(ref, force=force)
        self.progress.move_all([self.jobs[run] for run in self.held], "stopped")
        self.held.clear()

    def settle(self, ref: Any, run: int) -> None:
        """What the end of an attempt means for its run."""
        job, move = self.jobs[run], self.progress.move
        try:
            engine.record_exit(job, self.ray.get(ref), self.progress, stopping=self.stops > 0)
        except self.ray.exceptions.RayTaskError as error:  # our own fault, on a node
            move(job, "failed", note=f"on its node: {error.cause!r}")
        except self.ray.exceptions.RayError as error:  # cancelled, or its node or worker is gone
            lost = type(error).__name__
            if self.stops:
                move(job, "stopped")
            elif self.attempts[run] > RETRIES:
                move(job, "failed", note=f"lost {RETRIES} times: {lost}")
            else:
                move(job, "waiting", note=f"again, its node was lost ({lost})")
                self.submit(run)


class Coordinator:
    """Reads and writes the run folders on the machine where the suite was started."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = [Path(folder) for folder in folders]
        self.attempts = dict.fromkeys(range(len(folders)), 0)
        self.steps: dict[int, int] = {}
        self.started: set[int] = set()  # by the newest attempt
        self.stopping = False

    def expect(self, run: int, attempt: int) -> None:
        """From now on, only this attempt may send."""
        self.attempts[run] = attempt
        self.started.discard(run)

    def open(self, run: int, attempt: int) -> Files | None:
        """What a node needs to go on with a run; None: do not start it."""
        if self.stopping or attempt != self.attempts[run]:
            return None
        self.started.add(run)
        return changed_files(self.folders[run], {})[0]

    def report(self, run: int, attempt: int, step: int, files: Files, names: list[str]) -> bool:
        """Store what a node sends; the answer says whether it shall stop."""
        if attempt != self.attempts[run]:
            return True
        self.steps[run] = step
        if files:
            store_files(self.folders[run], files, names)
        return self.stopping

    def stop(self) -> None:
        self.stopping = True

    def status(self) -> tuple[dict[int, int], set[int]]:
        """The step of each run, and those that were started."""
        return self.steps, self.started


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
            status = path.stat()
            marks[name] = (status.st_mtime_ns, status.st_size)
            if marks[name] != before.get(name):
                files[name] = read_bytes(path, 1 << 40)
        except FileNotFoundError:  # an old checkpoint, dropped just now
            marks.pop(name, None)
    return files, marks


def store_files(folder: Path, files: Mapping[str, bytes], names: Sequence[str]) -> None:
    """Write what a node sent, each file whole or not at all, and drop old checkpoints."""
    for name in sorted(files, key=lambda name: (name == LAST_FILE, "/" not in name)):
        path = folder / PurePosixPath(name)
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"A node sent {name!r}, which lies outside of {folder}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, files[name])
    for old in list_checkpoints(folder / "checkpoint"):
        if f"checkpoint/{old.name}" not in names:
            old.unlink(missing_ok=True)


def run_attempt(
    coordinator: Any, run: int, attempt: int, job: Job, env: Mapping[str, str], every: float
) -> int:
    """On a node: one attempt at a run in a folder of its own, not the job's; the exit code."""

    def ask(method: str, *values: Any) -> Any:
        # not ray.get: while a task waits in it, Ray gives its core to another
        return getattr(coordinator, method).remote(run, attempt, *values).future().result()

    files = ask("open")
    if files is None:
        return STOPPED
    with tempfile.TemporaryDirectory(prefix="calmatch-") as name:
        folder = Path(name)
        store_files(folder, files, list(files))
        _, marks = changed_files(folder, {})
        began = sent = time.monotonic()
        stop = False
        # SIGKILL when the worker dies: nothing that a lost node does shall count or go on
        process = engine.start_job(job._replace(folder=folder), env=env, orphaned=signal.SIGKILL)
        try:
            while True:
                code, files, now = process.poll(), {}, time.monotonic()
                if code is not None:
                    engine.close_log(folder, code, now - began)
                if code is not None or now - sent >= every:
                    sent = now
                    files, marks = changed_files(folder, marks)
                    if log := files.get(engine.RUN_LOG):  # nobody finds the node's folder later
                        files[engine.RUN_LOG] = log.replace(bytes(folder), bytes(job.folder))
                before, stop = stop, ask("report", engine.reached_step(folder), files, list(marks))
                if code is not None:
                    return code
                if stop and not before:  # a second signal would not wait for the checkpoint
                    process.terminate()
                time.sleep(min(POLL_SECONDS, every))
        finally:
            process.kill()
            process.wait()
