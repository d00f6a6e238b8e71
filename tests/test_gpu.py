"""What needs a CUDA device: `pytest -m gpu` there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calmatch import augment, train, trainer
from calmatch.augment import randaugment
from calmatch.setup import prepare
from conftest import ALL_METHODS
from test_augment import BATCH, EXACT, GEOMETRIC, PHOTOS, pillow

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
        if name in GEOMETRIC:
            assert (ours == theirs).double().mean() >= 0.995
        elif name in EXACT:
            assert torch.equal(ours, theirs)
        else:
            assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_steps_on_the_gpu_without_waiting(tiny, method):
    config = tiny(method, device="cuda", net="small(width=4)", ema=0.9)
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
