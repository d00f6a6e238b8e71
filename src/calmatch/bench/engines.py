"""The local engine: a queue of runs over this machine's devices, seeds of a cell in a process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from calmatch.bench import job as jobs
from calmatch.bench.board import Board
from calmatch.bench.job import Job
from calmatch.config import seedless

TOGETHER = 3  # seeds side by side on one card: 1.3 times as fast as one by one on an H200
MOST = 5  # of them in one process, however many run at once: more end no sooner


class Slot(NamedTuple):
    """A place for runs: its name and what it adds to their environment."""

    name: str
    env: Mapping[str, str]
    together: int = 1  # runs at once; those that differ in their seeds only share a process


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
    if kind != "cuda":
        n = per_device or 1
        return [Slot(kind, {"OMP_NUM_THREADS": str(max(1, cores // n))}) for _ in range(n)]
    processes = len(cards) * max(1, per_device // TOGETHER)
    env = {"OMP_NUM_THREADS": str(max(1, cores // processes))}
    return [
        Slot(f"cuda {card}", {**env, "CUDA_VISIBLE_DEVICES": card}, per_device or TOGETHER)
        for card in cards
    ]


def devices() -> tuple[str, list[str]]:
    """What kind of device there is, and the cards' ids as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if count := torch.cuda.device_count():
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return "cuda", named.split(",")[:count] if named else [str(k) for k in range(count)]
    return ("mps", ["0"]) if torch.backends.mps.is_available() else ("cpu", ["0"])


def local(
    todo: Sequence[Job],
    board: Board,
    places: Sequence[Slot],
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
                while room[place] and (ready := _bundle(waiting, board, min(MOST, room[place]))):
                    running[ready] = (jobs.start(*ready, env=slot.env), place)
                    room[place] -= len(ready)
                    for job in ready:
                        board.move(job, "running", slot.name)
            for bundle, (process, place) in list(running.items()):
                code = process.poll()
                for job in bundle:
                    board.items[job].step = jobs.reached(job.folder)
                if code is not None:
                    del running[bundle]
                    room[place] += len(bundle)
                    took = time.monotonic() - board.items[bundle[0]].began
                    jobs.close(bundle[0].folder, code, took)
                    for job in bundle:
                        if code and not calls and jobs.held(job.folder):  # somebody was faster
                            waiting.append(job)
                        else:
                            settle(job, code, board, stopping=calls > 0, log=bundle[0])
            board.tick()
            time.sleep(0.2)
    finally:  # also when we ourselves fail: nobody goes on unseen
        for process, _ in running.values():
            process.kill()


def _bundle(waiting: list[Job], board: Board, most: int) -> tuple[Job, ...]:
    """The next run with others that differ from it in their seeds only; empty: none is ready."""
    first = _next(waiting, board)
    if first is None:
        return ()
    alike = [job for job in waiting if seedless(job.config) == seedless(first.config)]
    found = [first]
    while len(found) < most and (other := _next(alike, board)):
        waiting.remove(other)
        found.append(other)
    return tuple(found)


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


def settle(job: Job, code: int, board: Board, stopping: bool, log: Job | None = None) -> None:
    """What a process that ended means for one of its runs; `log` is the run that has its log."""
    if code == 0:
        state, note = "finished", ""
    elif stopping and code in (130, 143, -signal.SIGTERM):
        state, note = "stopped", ""
    else:
        lines = [jobs.ended(code), *jobs.last_lines((log or job).folder)[-1:]]
        state, note = "failed", ": ".join(lines)
    board.move(job, state, note=note)
