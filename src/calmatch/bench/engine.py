"""Runs of a suite as processes on this machine: jobs, workers, progress and throughput."""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from calmatch import files
from calmatch.console import console, message, run_guarded
from calmatch.runs import find_finished, load_run
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
    if find_finished(job.folder, job.config):
        return "finished"
    if is_held(job.folder):
        return "running"
    return "half done" if saved_step(job.folder) else "new"


def saved_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0: none."""
    names = sorted((folder / "checkpoint").glob("*.safetensors"))
    return int(names[-1].stem) if names else 0


def reached_step(folder: Path) -> int:
    """The step of the newest line; 0: none yet."""
    try:
        with (folder / "times.jsonl").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 200))  # two lines at least
            whole = [line for line in file.readlines() if line[:1] == b"{" and line[-1:] == b"\n"]
    except OSError:
        return 0
    return int(json.loads(whole[-1])["step"]) if whole else 0


def read_times(folder: Path) -> list[dict[str, float]]:
    """When each line was written; a half-written last one is left out."""
    try:
        text = (folder / "times.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def is_held(folder: Path) -> bool:
    """Whether another process works in this folder."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def job_command(*jobs: Job) -> list[str]:
    """What runs them. Their configs were made by our code, not found in a file: trusted."""
    for job in jobs:
        find_finished(job.folder, job.config)  # another run's config is not overwritten
        job.folder.mkdir(parents=True, exist_ok=True)
        path = job.folder / "config.json"
        wanted = job.config.dump()
        if not path.exists() or json.loads(path.read_text("utf-8")) != wanted:
            files.write_json(path, wanted)
    if len(jobs) > 1:
        folders = [str(job.folder) for job in jobs]
        return [sys.executable, "-c", TRAIN_FOLDERS, *folders]
    folder = jobs[0].folder
    words = ["train", str(folder / "config.json"), "--out", str(folder), "--trust", "--quiet"]
    return [sys.executable, "-m", "calmatch", *words]


def start_job(
    *jobs: Job, env: Mapping[str, str], orphaned: int = signal.SIGTERM
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that a terminal's Ctrl-C reaches it once, by us.

    Args:
        jobs: the run, or runs that differ in their seeds only; the first one's folder has the log.
        env: what its environment adds to ours.
        orphaned: the signal it gets when this process dies, however that ends (Linux only).
    """
    words = job_command(*jobs)
    with (jobs[0].folder / RUN_LOG).open("ab") as log:
        log.write(f"# {datetime.now():%Y-%m-%d %H:%M:%S} {' '.join(words)}\n".encode())
        log.flush()
        return subprocess.Popen(
            words,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid(), orphaned),
        )


def _die_with_parent(parent: int, number: int) -> Callable[[], None] | None:
    """Called in the child: the kernel shall send it a signal when its parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before we asked
            os._exit(128 + number)

    return ask


def close_log(folder: Path, code: int, seconds: float) -> None:
    """The last line of an attempt in its log."""
    with (folder / RUN_LOG).open("a") as log:
        log.write(f"# {describe_exit(code)} after {seconds:.1f} s\n")


def last_log_lines(folder: Path, n: int = 5) -> list[str]:
    """The end of the log of the newest attempt."""
    try:
        lines = (folder / RUN_LOG).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    starts = [k for k, line in enumerate(lines) if re.match(r"# \d{4}-", line)]
    newest = lines[starts[-1] + 1 if starts else 0 :]
    return [line for line in newest if line.strip() and not line.startswith("# ")][-n:]


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        hint = ", out of memory perhaps" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    return f"exit code {code}"


RUNS_PER_GPU = 3  # seeds side by side on one card: 1.3 times as fast as one by one on an H200
RUNS_PER_PROCESS = 5  # of them in one process, however many run at once: more end no sooner


class Worker(NamedTuple):
    """A place for runs: its name and what it adds to their environment."""

    name: str
    env: Mapping[str, str]
    together: int = 1  # runs at once; those that differ in their seeds only share a process


def local_workers(runs: int, per_device: int = 0) -> list[Worker]:
    """The places of this machine.

    On a CPU every core is a place: two runs with a thread each are faster than one after the
    other with two (docs/engines.md has the numbers). More cores than runs are shared among them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    kind, cards = local_devices()
    if kind == "cpu":
        n = per_device or max(1, min(cores, runs))
        env = {"OMP_NUM_THREADS": str(max(1, cores // n))}
        return [Worker(f"cpu {k}", env) for k in range(n)]
    if kind != "cuda":
        n = per_device or 1
        return [Worker(kind, {"OMP_NUM_THREADS": str(max(1, cores // n))}) for _ in range(n)]
    processes = len(cards) * max(1, per_device // RUNS_PER_GPU)
    env = {"OMP_NUM_THREADS": str(max(1, cores // processes))}
    return [
        Worker(f"cuda {card}", {**env, "CUDA_VISIBLE_DEVICES": card}, per_device or RUNS_PER_GPU)
        for card in cards
    ]


def local_devices() -> tuple[str, list[str]]:
    """What kind of device there is, and the cards' ids as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if count := torch.cuda.device_count():
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return "cuda", named.split(",")[:count] if named else [str(k) for k in range(count)]
    return ("mps", ["0"]) if torch.backends.mps.is_available() else ("cpu", ["0"])


def run_locally(
    todo: Sequence[Job],
    board: SuiteProgress,
    places: Sequence[Worker],
    asked: Sequence[int],
    minutes: float = math.inf,
) -> None:
    """Run everything; a failed run touches no other. `asked` grows when a signal arrives.

    After so many minutes running ones write a checkpoint and end; none is begun that would not
    be done by then, judged by the last one that ended.
    """
    waiting, room, told = list(todo), [slot.together for slot in places], 0
    running: dict[tuple[Job, ...], tuple[subprocess.Popen[bytes], int]] = {}
    end, took = time.monotonic() + 60 * minutes, 0.0
    try:
        while waiting or running:
            if time.monotonic() + took > end:
                for job in waiting:
                    board.move(job, "left")
                waiting.clear()
            calls = len(asked) + (time.monotonic() > end)
            if calls > told:  # once: checkpoint and end; twice: end
                told = calls
                board.halt()
                for process, _ in running.values():
                    process.terminate()
                for job in waiting:
                    board.move(job, "stopped")
                waiting.clear()
            for place, slot in enumerate(places):
                while room[place] and (
                    ready := _next_bundle(waiting, board, min(RUNS_PER_PROCESS, room[place]))
                ):
                    running[ready] = (start_job(*ready, env=slot.env), place)
                    room[place] -= len(ready)
                    for job in ready:
                        board.move(job, "running", slot.name)
            for bundle, (process, place) in list(running.items()):
                code = process.poll()
                for job in bundle:
                    board.items[job].step = reached_step(job.folder)
                if code is not None:
                    del running[bundle]
                    room[place] += len(bundle)
                    took = time.monotonic() - board.items[bundle[0]].began
                    close_log(bundle[0].folder, code, took)
                    for job in bundle:
                        if code and not calls and is_held(job.folder):  # somebody was faster
                            waiting.append(job)
                        else:
                            record_exit(job, code, board, stopping=calls > 0, log=bundle[0])
            board.tick()
            time.sleep(0.2)
    finally:  # also when we ourselves fail: nobody goes on unseen
        for process, _ in running.values():
            process.kill()


def _next_bundle(waiting: list[Job], board: SuiteProgress, most: int) -> tuple[Job, ...]:
    """The next run with others that differ from it in their seeds only; empty: none is ready."""
    first = _next_job(waiting, board)
    if first is None:
        return ()
    alike = [job for job in waiting if without_seeds(job.config) == without_seeds(first.config)]
    found = [first]
    while len(found) < most and (other := _next_job(alike, board)):
        waiting.remove(other)
        found.append(other)
    return tuple(found)


def _next_job(waiting: list[Job], board: SuiteProgress) -> Job | None:
    """The first run that nobody else works on; those that others have finished are kept."""
    for job in list(waiting):
        if is_held(job.folder):
            board.move(job, "held", note="by another process; waiting for it")
            continue
        waiting.remove(job)
        if job_state(job) != "finished":
            return job
        board.move(job, "kept")
    return None


def record_exit(
    job: Job, code: int, board: SuiteProgress, stopping: bool, log: Job | None = None
) -> None:
    """What a process that ended means for one of its runs; `log` is the run that has its log."""
    if code == 0:
        state, note = "finished", ""
    elif stopping and code in (130, 143, -signal.SIGTERM):
        state, note = "stopped", ""
    else:
        lines = [describe_exit(code), *last_log_lines((log or job).folder)[-1:]]
        state, note = "failed", ": ".join(lines)
    board.move(job, state, note=note)


SHOWN_DONE = 5  # runs that were finished last, shown on a terminal
OPEN_STATES = ("waiting", "held", "running")


@dataclass
class JobStatus:
    """A run and how it stands: waiting, held by others, running, finished, kept, failed, ..."""

    job: Job
    state: str = "waiting"
    where: str = ""
    began: float = 0.0
    first: int = 0  # the step it stood at when this command began
    step: int = 0
    note: str = ""


class SuiteProgress:
    """How every run of a suite stands; engines move the items, this shows them."""

    def __init__(self, title: str, todo: Sequence[Job], quiet: bool = False) -> None:
        self.title, self.quiet = title, quiet
        self.items = {job: JobStatus(job, first=saved_step(job.folder)) for job in todo}
        for item in self.items.values():
            item.step = item.first
        self.began = time.monotonic()
        self.drawn = 0.0
        self.done: list[JobStatus] = []
        self.stopping = False
        live = console.is_terminal and not quiet
        self.live = Live(console=console, auto_refresh=False) if live else None

    def __enter__(self) -> SuiteProgress:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update(self.table(), refresh=True)
            self.live.stop()

    def move(self, job: Job, state: str, where: str = "", note: str = "") -> None:
        """A run changes its state; in a pipe that is a line."""
        item = self.items[job]
        before, item.state, item.where, item.note = item.state, state, where, note
        if state == "running":
            item.began = time.monotonic()
            item.step = saved_step(job.folder)
            self._say(item, f"continues at step {item.step:,}" if item.step else "")
        elif state == "finished":
            item.step = job.config.steps
            item.note = f"{format_duration(time.monotonic() - item.began)}, {_result_text(job)}"
            self.done.append(item)
            self._say(item, f"finished in {item.note}{self._left()}")
        elif state == "kept":
            item.step = job.config.steps
            self._say(item, "kept: another process finished it" if before == "held" else "")
        elif state not in (before, "left"):  # what is left is counted at the end
            self._say(item, f"{state} {note}".strip())

    def tick(self) -> None:
        """Draw anew, twice a second at most."""
        if self.live and time.monotonic() - self.drawn > 0.5:
            self.drawn = time.monotonic()
            self.live.update(self.table(), refresh=True)

    def counts(self) -> Counter[str]:
        return Counter(item.state for item in self.items.values())

    def left(self) -> float | None:
        """Seconds to go, at the speed at which this command has advanced so far."""
        going = [item for item in self.items.values() if item.state in OPEN_STATES]
        done = sum(item.step - item.first for item in self.items.values() if item.state != "kept")
        ahead = sum(item.job.config.steps - item.step for item in going)
        return (time.monotonic() - self.began) * ahead / done if done > 0 else None

    def halt(self) -> None:
        """Say that everything is about to end."""
        if not (self.quiet or self.live or self.stopping):
            message(f"{self.title}: stopping; running ones write their checkpoints.")
        self.stopping = True

    def _left(self) -> str:
        if self.stopping:
            return "; stopping, checkpoints are written (again: at once)"
        left = self.left()
        return f"; about {format_duration(left)} left" if left else ""

    def _say(self, item: JobStatus, words: str) -> None:
        if words and not self.quiet and not self.live:
            closed = sum(item.state not in OPEN_STATES for item in self.items.values())
            line = f"[{closed}/{len(self.items)}] {item.job.name}: {words}"
            console.print(line, markup=False, soft_wrap=True)

    def table(self) -> Group:
        """Running runs, the last that ended and all that failed, under a line that counts all."""
        counts = self.counts()
        words = [f"{counts[state]} {state}" for state in _ordered_states(counts)]
        head = f"{self.title}: {len(self.items)} runs, {', '.join(words)}{self._left()}"
        table = Table.grid(padding=(0, 2))
        for item in self.items.values():
            if item.state == "running":
                step = f"{item.step:,} / {item.job.config.steps:,}"
                spent = format_duration(time.monotonic() - item.began)
                table.add_row(item.job.name, item.where, step, spent)
        ended = [(item, "dim", "done") for item in self.done[-SHOWN_DONE:]]
        ended += [(i, "red", "failed") for i in self.items.values() if i.state == "failed"]
        lines = [
            Text(f"{i.job.name}  {word}  {i.note}", style, no_wrap=True) for i, style, word in ended
        ]
        return Group(Text(head, style="bold"), table, *lines)


def _ordered_states(counts: Counter[str]) -> list[str]:
    every = ("finished", "kept", "running", "held", "failed", "stopped", "waiting")
    return [state for state in every if counts[state]]


def _result_text(job: Job) -> str:
    metrics = load_run(job.folder).result["metrics"]
    error, ece = (100 * metrics[key]["value"] for key in ("error", "ece"))
    return f"error {error:.1f} %, ECE {ece:.1f} %"


def format_duration(seconds: float) -> str:
    """A length of time a person can read.

    >>> [format_duration(seconds) for seconds in (5, 200, 7300, 300_000)]
    ['5 s', '3 min 20 s', '2 h 1 min', '3 d 11 h']
    """
    whole = round(seconds)
    for unit, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {small}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


LONGEST_MEASUREMENT = 120.0  # seconds that one measurement may take


class Throughput(NamedTuple):
    """Seconds a step, and seconds around the steps (start, last measurement)."""

    step: float
    around: float


SpeedKey = tuple[object, ...]


def speed_keys(config: Config) -> list[SpeedKey]:
    """What decides the speed of a run: exactly, then roughly."""
    rough = (config.net, config.batch, config.ratio, config.precision)
    return [(config.dataset, config.method, *rough), rough]


def throughput_of(folder: Path, steps: int) -> Throughput | None:
    """The pace of a run from its times; None where there are too few.

    A gap of more than twenty usual intervals is a night in which the run was stopped.
    """
    moments = {int(line["step"]): line["unix"] for line in read_times(folder)}
    spans = [(b - a, moments[b] - moments[a]) for a, b in pairwise(sorted(moments))]
    rates = [seconds / n for n, seconds in spans if seconds > 0]
    if not rates:
        return None
    usual = statistics.median(rates)
    kept = [(n, s) for n, s in spans if 0 < s / n <= 20 * usual]
    step = sum(s for _, s in kept) / sum(n for n, _ in kept)
    whole = wall_time(folder)
    return Throughput(step, max(0.0, whole - step * steps) if whole else 0.0)


def wall_time(folder: Path) -> float | None:
    """Wall time of a run that was finished in one go by an engine."""
    try:
        text = (folder / RUN_LOG).read_text("utf-8", errors="replace")
    except OSError:
        return None
    starts = re.findall(r"^# \d{4}-", text, re.MULTILINE)
    ends = re.findall(r"^# exit code 0 after ([\d.]+) s$", text, re.MULTILINE)
    return float(ends[0]) if len(starts) == len(ends) == 1 else None


def known_throughputs(todo: Sequence[Job]) -> dict[SpeedKey, Throughput]:
    """What the folders of these runs tell, the exact keys and the rough ones."""
    found: dict[SpeedKey, list[Throughput]] = {}
    for job in todo:
        if pace := throughput_of(job.folder, job.config.steps):
            for key in speed_keys(job.config):
                found.setdefault(key, []).append(pace)
    return {key: _median_throughput(paces) for key, paces in found.items()}


def _median_throughput(paces: Sequence[Throughput]) -> Throughput:
    around = [pace.around for pace in paces if pace.around] or [0.0]
    return Throughput(statistics.median(pace.step for pace in paces), statistics.median(around))


def find_throughput(config: Config, paces: Mapping[SpeedKey, Throughput]) -> Throughput | None:
    return next((paces[key] for key in speed_keys(config) if key in paces), None)


def measure_throughput(config: Config, slot: Worker) -> Throughput | None:
    """The pace of a few real steps in a process of its own; None where they cannot be made."""
    chunk = config.chunk if "CUDA_VISIBLE_DEVICES" in slot.env else 4
    short = config.replace(steps=4 * chunk, chunk=chunk, log_every=chunk, eval_every=0, warmup=0)
    with tempfile.TemporaryDirectory(prefix="calmatch-pace-") as name:
        job = Job("pace", short, Path(name))
        began = time.monotonic()
        process = start_job(job, env=slot.env)
        try:
            process.wait(LONGEST_MEASUREMENT)
        except subprocess.TimeoutExpired:
            pass  # its first lines may do
        finally:
            process.kill()
            process.wait()
        whole = time.monotonic() - began
        pace = throughput_of(job.folder, short.steps)
        return Throughput(pace.step, max(0.0, whole - short.steps * pace.step)) if pace else None


def estimate_seconds(
    todo: Sequence[Job], paces: Mapping[SpeedKey, Throughput]
) -> tuple[float, int]:
    """Seconds that these runs take one after the other, and how many are unknown."""
    total, unknown = 0.0, 0
    for job in todo:
        pace = find_throughput(job.config, paces)
        unknown += pace is None
        if pace:
            total += pace.around + pace.step * (job.config.steps - saved_step(job.folder))
    return total, unknown


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
