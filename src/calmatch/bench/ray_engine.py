"""The Ray engine: runs on a cluster's nodes; one desk beside us writes what they send home.

A node works in a folder of its own and sends what changed. Only the desk, on the machine where the
suite was started, writes into the run folders, and only for the newest attempt at a run. So nodes
share no path, no lock has to work across a network, and an attempt on a lost node cannot come
back: its process dies with its worker, and what it might still send is refused.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from calmatch import checkpoint, cluster, results
from calmatch.bench.board import Board
from calmatch.bench.engines import settle
from calmatch.bench.job import Job
from calmatch.bench.ray_node import BEAT, Desk, Order, work

RETRIES = 20  # lost nodes that one run survives


def run(
    todo: Sequence[Job],
    board: Board,
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
    ray = load()
    ours = not ray.is_initialized()
    if ours:
        _join(ray, address)
    try:
        queue = _Queue(ray, todo, board, per_device, env, every)
        queue.fill()
        while queue.going or queue.others:
            queue.turn(len(asked))
            board.tick()
    finally:
        if ours:
            ray.shutdown()


def load() -> Any:
    """Ray, or a sentence that says how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ValueError("--engine ray needs Ray: pip install 'calmatch[ray]'.") from error
    return ray


def _join(ray: ModuleType, address: str | None) -> None:
    if address and address.startswith("ray://"):
        raise ValueError(
            "Start the suite on a machine of the cluster, with --address auto or its IP:PORT; "
            "ray:// only reaches it from outside."
        )
    try:
        cluster.start(ray, address, "error")
    except ConnectionError as error:
        raise ValueError(f"There is no Ray cluster at {address}: {error}") from error


class _Queue:
    """The runs on the cluster, and those that another process on this machine works on."""

    def __init__(
        self,
        ray: ModuleType,
        todo: Sequence[Job],
        board: Board,
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
        self.desk = ray.remote(num_cpus=0, scheduling_strategy=here)(Desk).remote(folders)
        cards = ray.cluster_resources().get("GPU", 0)
        share = {"num_gpus": 1 / (per_device or 1)} if cards else {}
        self.work = ray.remote(num_cpus=1, max_retries=0, **share)(work)

    def fill(self) -> None:
        """Hand out every run that nobody here holds; its lock is ours until it ends."""
        for run in list(self.others):
            job = self.jobs[run]
            lock = ExitStack()
            try:
                lock.enter_context(checkpoint.lock(job.folder))
            except checkpoint.Busy:
                self.board.move(job, "held", note="by another process; waiting for it")
                continue
            self.others.remove(run)
            if results.finished(job.folder, job.config):
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
        order = Order(run, self.attempts[run], job.name, job.config, home, self.env, self.every)
        self.going[self.work.remote(self.desk, order)] = run

    def turn(self, asked: int) -> None:
        """Look at what has ended, what has begun, and whether all shall end."""
        if asked > self.told:
            self.halt(force=asked > 1)
            self.told = asked
        ended, _ = self.ray.wait(list(self.going), timeout=BEAT) if self.going else ([], [])
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
            time.sleep(0 if self.going else BEAT)

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
            settle(job, self.ray.get(ref), self.board, stopping=self.told > 0)
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
