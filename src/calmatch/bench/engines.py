"""The local engine: a queue of runs over this machine's devices, each run a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from calmatch.bench import job as jobs
from calmatch.bench.board import Board
from calmatch.bench.job import Job


class Slot(NamedTuple):
    """A place for one run at a time: its name and what it adds to the environment."""

    name: str
    env: Mapping[str, str]


def slots(runs: int, per_device: int = 0) -> list[Slot]:
    """The places of this machine.

    On a CPU every core is a place: two runs with a thread each are faster than one after the
    other with two (docs/engines.md has the numbers). More cores than runs are shared among them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    kind, cards = devices()
    if kind == "cpu":
        n = per_device or max(1, min(cores, runs))
        env = {"OMP_NUM_THREADS": str(max(1, cores // n))}
        return [Slot(f"cpu {k}", env) for k in range(n)]
    n = len(cards) * (per_device or 1)
    env = {"OMP_NUM_THREADS": str(max(1, cores // n))}
    if kind != "cuda":
        return [Slot(kind, env) for _ in range(n)]
    # one run on each card before a second on any
    return [
        Slot(f"cuda {card}", {**env, "CUDA_VISIBLE_DEVICES": card})
        for _ in range(per_device or 1)
        for card in cards
    ]


def devices() -> tuple[str, list[str]]:
    """What kind of device there is, and the cards' ids as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if count := torch.cuda.device_count():
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return "cuda", named.split(",")[:count] if named else [str(k) for k in range(count)]
    return ("mps", ["0"]) if torch.backends.mps.is_available() else ("cpu", ["0"])


def local(todo: Sequence[Job], board: Board, places: Sequence[Slot], asked: Sequence[int]) -> None:
    """Run everything; a failed run touches no other. `asked` grows when a signal arrives."""
    waiting, free, told = list(todo), list(places), 0
    running: dict[Job, tuple[subprocess.Popen[bytes], Slot]] = {}
    try:
        while waiting or running:
            if len(asked) > told:  # once: checkpoint and end; twice: end
                told = len(asked)
                board.halt()
                for process, _ in running.values():
                    process.terminate()
                for job in waiting:
                    board.move(job, "stopped")
                waiting.clear()
            while free and (ready := _next(waiting, board)):
                running[ready] = (jobs.start(ready, free[0].env), free[0])
                board.move(ready, "running", free.pop(0).name)
            for job, (process, slot) in list(running.items()):
                board.items[job].step = jobs.reached(job.folder)
                if (code := process.poll()) is not None:
                    del running[job]
                    free.append(slot)
                    jobs.close(job.folder, code, time.monotonic() - board.items[job].began)
                    if code and not asked and jobs.held(job.folder):  # somebody was faster
                        waiting.append(job)
                    else:
                        settle(job, code, board, stopping=bool(asked))
            board.tick()
            time.sleep(0.2)
    finally:  # also when we ourselves fail: nobody goes on unseen
        for process, _ in running.values():
            process.kill()


def _next(waiting: list[Job], board: Board) -> Job | None:
    """The first run that nobody else works on; those that others have finished are kept."""
    for job in list(waiting):
        if jobs.held(job.folder):
            board.move(job, "held", note="by another process; waiting for it")
            continue
        waiting.remove(job)
        if jobs.state(job) != "finished":
            return job
        board.move(job, "kept")
    return None


def settle(job: Job, code: int, board: Board, stopping: bool) -> None:
    """What a process that ended means for its run."""
    if code == 0:
        state, note = "finished", ""
    elif stopping and code in (130, 143, -signal.SIGTERM):
        state, note = "stopped", ""
    else:
        lines = [jobs.ended(code), *jobs.last_lines(job.folder)[-1:]]
        state, note = "failed", ": ".join(lines)
    board.move(job, state, note=note)


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
