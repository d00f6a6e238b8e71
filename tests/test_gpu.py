"""What needs a CUDA device: `pytest -m gpu` there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calmatch import augment, train, trainer
from calmatch.augment import randaugment
from calmatch.capture import Captured
from calmatch.setup import prepare
from conftest import ALL_METHODS
from test_augment import BATCH, PHOTOS, assert_pillows, pillow

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", randaugment.NAMES)
def test_operations_on_the_gpu_are_pillows(name, compiled):
    low, high = randaugment.RANGES[name]
    op = torch.full((len(BATCH),), randaugment.NAMES.index(name), device="cuda")
    apply = torch.compile(randaugment.apply, fullgraph=True) if compiled else randaugment.apply
    for share in (0.0, 0.37, 0.71, 0.999):
        values = torch.full((len(BATCH),), low + (high - low) * share, device="cuda")
        ours = apply(BATCH.cuda(), op, values).cpu()
        pictures = [np.array(pillow(name, p, float(values[0]))) for p in PHOTOS]
        theirs = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
        assert_pillows(name, ours, theirs)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_steps_on_the_gpu_without_waiting(tiny, method):
    config = tiny(method, device="cuda", net="small(width=4)", ema=0.9, compile=False)
    run = trainer._start(config, prepare(config))
    batches = [run.parts.batches[k] for k in range(4)]
    run.advance(batches[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            run.advance(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(value).all() for value in run.tensors().values())


@pytest.mark.parametrize("method", ALL_METHODS)
def test_the_captured_step_equals_the_eager_one(tiny, method):
    """Twenty steps in float64 from the same seed, over chunk borders, compiled and captured."""
    config = tiny(method, device="cuda", precision="fp64", steps=20, ema=0.9, chunk=8)
    torch._dynamo.reset()
    eager = trainer._start(config.replace(compile=False), prepare(config))
    replayed = trainer._start(config, prepare(config))
    engine = Captured(replayed)
    while eager.step < 20:
        eager.advance(eager.parts.batches[eager.step])
        engine.advance()
    assert not engine.failed
    first, second = eager.tensors(), replayed.tensors()
    assert first.keys() == second.keys()
    close = 1e-4 if method == "vat" else 1e-8
    for name in first:
        torch.testing.assert_close(second[name], first[name], atol=close, rtol=close, msg=name)


def test_dropout_under_replay_is_new_each_step_and_resumable(tiny):
    config = tiny("fixmatch", device="cuda", net="vit_tiny_patch2_32", steps=12, compile=False)
    # SGD: Adam would blow up the rounding noise of gradients that are zero, such as the keys' bias
    config = config.replace(dataset="synthetic(size=16)", optimizer="sgd")
    runs = []
    for start in (0, 5):
        run = trainer._start(config, prepare(config))
        if start:
            run.restore(runs[0][1], {"step": 5, "sums": 0, "best": None, "best_step": None})
        engine = Captured(run)
        kept = None
        while run.step < 12:
            if run.step == 5:
                kept = {k: v.clone() for k, v in run.tensors().items() if not k.startswith("sums")}
            engine.advance()
        runs.append((run.tensors(), kept))
    for name, value in runs[0][0].items():
        if not name.startswith("sums"):
            torch.testing.assert_close(runs[1][0][name], value, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_the_gpu_learns_and_continues(tiny, tmp_path, precision):
    config = tiny("freematch", device="cuda", net="small(width=8)", steps=60, precision=precision)
    run = train(config, tmp_path / "run", quiet=True)
    assert run.result["metrics"]["error"]["value"] < 0.2


def test_streamed_pictures_on_the_gpu_are_the_resident_ones(tiny):
    config = tiny(device="cuda", chunk=3)
    resident = prepare(config.replace(source="resident")).batches
    streamed = prepare(config.replace(source="stream")).batches
    for step in (0, 1, 5, 2):
        assert torch.equal(resident[step].u[1], streamed[step].u[1])


def test_the_pipeline_runs_on_the_gpu():
    images = BATCH.cuda()
    transform = augment.pipeline("crop(4)|flip|randaugment(3)|cutout(0.5)")
    out = transform(images, torch.Generator("cuda").manual_seed(0))
    assert out.shape == images.shape
    assert out.device.type == "cuda"
