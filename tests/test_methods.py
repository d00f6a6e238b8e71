"""Properties that every method has, by being a Method; a new one gets these tests free."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ranks
from calmatch import checkpoint, losses, trainer
from calmatch.core import Batch, Method, Objective, Plan
from calmatch.methods.fixmatch import FixMatch
from calmatch.setup import prepare
from conftest import ALL_METHODS, ALONE

PENALTY = "margin(m=1)"  # a margin that acts from the first step


def penalty(method: str) -> str:
    return "" if method == "supervised" else PENALTY


def start(config):
    return trainer._start(config, prepare(config))


@pytest.mark.parametrize("method", ALL_METHODS)
def test_the_step_is_one_graph_and_compiled_equals_eager(tiny, method):
    _compare_compiled(tiny(method, precision="fp64", penalty=penalty(method)), "aot_eager", 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", ALL_METHODS)
def test_inductor_equals_eager(tiny, method):
    _compare_compiled(tiny(method, precision="fp64", penalty=penalty(method)), "inductor", 1e-9)


def _compare_compiled(config, backend, tolerance):
    torch._dynamo.reset()
    eager, compiled = start(config), start(config)
    compiled.objective.compile(fullgraph=True, backend=backend)
    for step in range(20):
        losses_and_gradients = []
        for run in (eager, compiled):
            values, state = run.objective(run.parts.batches[step])
            values["loss"].backward()
            run.parts.method.commit(state)
            gradients = [p.grad.clone() for p in run.parts.net.parameters() if p.grad is not None]
            losses_and_gradients.append((dict(values), gradients))
            run.optimizer.step()
            run.optimizer.zero_grad()
        torch.testing.assert_close(*losses_and_gradients, atol=tolerance, rtol=tolerance)


def on_meta(config, method_class=None):
    """The objective and a batch on a device without values: reading one is an error."""
    parts = prepare(config)
    method = method_class(parts.method.task) if method_class else parts.method
    objective = Objective(
        parts.net,
        method,
        parts.labelled_loss,
        parts.unlabelled_loss,
        copy.deepcopy(parts.net).requires_grad_(False),
        parts.truth,
    ).to("meta")
    batch = parts.batches[0]
    meta = Batch(
        *(
            tuple(t.to("meta") for t in part)
            if isinstance(part, tuple)
            else {k: t.to("meta") for k, t in part.items()}
            if isinstance(part, dict)
            else part.to("meta")
            for part in batch
        )
    )
    return objective, meta


@pytest.mark.parametrize("method", ALL_METHODS)
def test_nothing_in_the_step_waits_for_a_value(tiny, method):
    objective, batch = on_meta(tiny(method, penalty=penalty(method)))
    values, state = objective(batch)
    values["loss"].backward()
    objective.method.commit(state)
    assert values["loss"].device.type == "meta"


def test_a_method_that_waits_for_a_value_is_noticed(tiny):
    class Waiting(FixMatch):
        def select(self, p, batch):
            assert p.amax().item() >= 0
            return super().select(p, batch)

    objective, batch = on_meta(tiny(), Waiting)
    with pytest.raises(RuntimeError, match=r"[Mm]eta"):
        objective(batch)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_stopped_run_continues_bit_for_bit(tiny, tmp_path, method):
    config = tiny(method, steps=10, ema=0.9, penalty=penalty(method))
    whole, before, after = start(config), start(config), start(config)
    for _ in range(10):
        whole.advance(whole.parts.batches[whole.step])
    for _ in range(6):  # in the middle of a chunk and of a log interval
        before.advance(before.parts.batches[before.step])
    note = {"sums": before.sums.steps, "best": None}
    checkpoint.save(tmp_path, before.step, before.tensors(), note)
    tensors, note, complaints = checkpoint.newest(tmp_path)
    after.restore(tensors, note)
    assert not complaints
    for _ in range(4):
        after.advance(after.parts.batches[after.step])
    first, second = whole.tensors(), after.tensors()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Every method trained by two real processes on half batches each, its state by name.

    pytest-xdist's workers share the folder: the first to make it does the work.
    """
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    out = tmp_path_factory.getbasetemp().parent / f"ranks-{session}"
    try:
        out.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 300
        while not (out / "done").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return out
    script = Path(__file__).parent / "ranks.py"
    commands = [[sys.executable, str(script), str(out), str(rank)] for rank in range(2)]
    processes = [subprocess.Popen(c, stderr=subprocess.PIPE, env=ALONE) for c in commands]
    errors = [process.communicate(timeout=250)[1].decode() for process in processes]
    (out / "done").touch()
    assert [process.returncode for process in processes] == [0, 0], errors
    return out


@pytest.mark.ddp
@pytest.mark.parametrize("method", ALL_METHODS)
def test_two_ranks_on_half_batches_equal_one_process(two_ranks, method):
    alone = ranks.state(method)
    together = load_file(two_ranks / f"{method}.safetensors")
    assert alone.keys() == together.keys()
    for name in alone:
        torch.testing.assert_close(alone[name], together[name], atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_methods_own_no_parameters_and_forward_writes_no_memory(tiny, method):
    run = start(tiny(method))
    assert not list(run.parts.method.parameters())
    memory = {k: v.clone() for k, v in run.parts.method.state_dict().items()}
    _, state = run.objective(run.parts.batches[0])
    assert all(torch.equal(memory[k], v) for k, v in run.parts.method.state_dict().items())
    assert set(state) <= set(memory)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_loss_works_on_the_terms_of_every_method(method, tiny):
    run = start(tiny(method))
    plan = run.parts.method(run.parts.net, run.parts.ema, run.parts.batches[0])
    assert isinstance(plan, Plan)
    assert isinstance(run.parts.method, Method)
    assert plan.labelled.logits.requires_grad
    for loss in losses.LOSSES.values():
        for term in (plan.labelled, plan.unlabelled):
            assert term is None or torch.isfinite(loss(term))
