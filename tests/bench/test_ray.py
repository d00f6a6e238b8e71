"""The Ray engine for real: two nodes on this machine, one killed with runs on it."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from calmatch.bench.engine import Job, SuiteProgress, Worker, is_held, run_locally, saved_step
from calmatch.bench.ray import run_on_ray

pytestmark = pytest.mark.ray
HERE = Path(__file__).parents[1]
ENV = {"OMP_NUM_THREADS": "1"}
FILES = ("result.json", "metrics.jsonl", "predictions.npz", "model.safetensors", "config.json")
SOON = {  # a lost node is noticed in two seconds, not in thirty
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture
def cluster(monkeypatch):
    """A head without room for runs, where the coordinator is, and two nodes for a run each."""
    ray = pytest.importorskip("ray")
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    # a dotted method is looked up where nodes were started
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    from ray.cluster_utils import Cluster

    room = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    head = {"num_cpus": 0, "_system_config": SOON, **room}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=1, **room) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def todo(tiny, out):
    """Four runs, long enough to be killed; each counts how often it came to the end."""
    changes = {"steps": 1500, "checkpoint_every": 50, "eval_every": 0, "log_every": 50}
    return [
        Job(
            f"seed{seed}",
            tiny(f"ledger.Counted(book='{out / f'book{seed}'}')", seed=seed, **changes),
            out / f"seed{seed}",
        )
        for seed in range(4)
    ]


def test_a_lost_node_costs_no_run_and_no_run_ends_twice(cluster, tiny, tmp_path):
    cluster, nodes = cluster
    there = tmp_path / "ray"
    there.mkdir()
    work = todo(tiny, there)
    progress = SuiteProgress("test", work, quiet=True)
    killed = []
    moves = []
    original = progress.move

    def move(job, state, note=""):
        moves.append((job.name, state, note, saved_step(job.folder)))
        original(job, state, note)
        assert progress.counts()["running"] <= 2  # a core a run

    progress.move = move

    def kill_one():
        """When both nodes have runs whose checkpoints have come home."""
        while sum(saved_step(job.folder) > 0 for job in work) < 2:
            time.sleep(0.05)
        killed.append(progress.counts()["running"])
        cluster.remove_node(nodes[0], allow_graceful=False)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    run_on_ray(work, progress, [], None, 0, ENV, every=0.3)
    killer.join(timeout=120)  # a busy machine takes its time
    assert killed, "no node was killed while runs were going"
    assert progress.counts() == {"finished": 4}, moves
    lost = [(name, saved) for name, state, note, saved in moves if "lost" in note]
    assert len(lost) == 1, moves
    # it went on from the checkpoint that had come home, not from the start
    name, saved = lost[0]
    assert saved > 0
    resumed = [at for other, state, _, at in moves if (other, state) == (name, "running")]
    assert resumed[-1] >= saved
    assert (
        Counter(name for name, state, *_ in moves if state == "finished").most_common(1)[0][1] == 1
    )

    here = tmp_path / "local"
    here.mkdir()
    again = todo(tiny, here)
    workers = [Worker({**ENV, "PYTHONPATH": os.environ["PYTHONPATH"]})] * 2
    run_locally(again, progress_of(again), workers, [])
    for one, two in zip(work, again, strict=True):
        ends = [(folder / f"book{one.config.seed}").read_text() for folder in (there, here)]
        assert len(set(ends[0].split())) == 1  # one process, and as many lines as in one run
        assert len(ends[0].split()) == len(ends[1].split()) > 0
        for file in FILES:
            content, expected = ((job.folder / file).read_bytes() for job in (one, two))
            paths = bytes(there), bytes(here)
            assert content.replace(*paths) == expected, file
        assert not (one.folder / ".part").exists()


def progress_of(work):
    return SuiteProgress("test", work, quiet=True)


def test_a_stopped_suite_brings_its_checkpoints_home_and_goes_on(cluster, tiny, tmp_path):
    work = todo(tiny, tmp_path)[:3]  # two nodes: one of them has to wait
    signals: list[int] = []
    progress = progress_of(work)

    def stop():
        while not any(progress.items[job].step for job in work):
            time.sleep(0.05)
        signals.append(2)

    threading.Thread(target=stop, daemon=True).start()
    run_on_ray(work, progress, signals, None, 0, ENV, every=600)
    assert progress.counts() == {"stopped": 3}
    assert any(saved_step(job.folder) for job in work)
    assert not any(is_held(job.folder) for job in work)
    failing = Job("bad", tiny(lr=1e30), tmp_path / "bad")
    progress = progress_of([*work, failing])
    run_on_ray([*work, failing], progress, [], None, 0, ENV, every=600)
    counts = progress.counts()  # a run may have ended while it was being stopped
    assert (counts["finished"] + counts["kept"], counts["failed"]) == (3, 1)
    assert "A weight or a moment became infinite or NaN in step 1" in progress.items[failing].note
