"""Trains every method for a few steps on one of two ranks, or alone: what the ranks test runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from calmatch import methods, ops
from calmatch.runs import Run
from calmatch.training.config import Config
from calmatch.training.loop import train
from calmatch.training.setup import build_parts
from calmatch.training.step import make_training

EXEMPT = ("mixmatch", "remixmatch", "comatch")  # they mix within a rank: only run
CONFIG = Config(
    dataset="synthetic",
    labels=16,
    method="freematch",
    net="small(width=4)",  # with BatchNorm, which ranks must share
    weak="crop(1)",
    strong="crop(2)|cutout(0.5)",
    batch=8,
    ratio=2,
    steps=4,
    ema=0.9,
    penalty="margin(m=0.5)",
    precision="fp64",
    device="cpu",
    log_every=2,
    eval_every=2,
)


def state(method: str) -> dict[str, Tensor]:
    """Everything a run knows after four steps, and what it logged, averaged over ranks."""
    config = CONFIG.replace(method=method)
    if method == "supervised":
        config = config.replace(penalty="")
    run = make_training(config, build_parts(config))
    while run.step < config.steps:
        run.advance()
    logged = {f"sums/{k}": ops.average(v) for k, v in run.sums.totals.items()}
    named = run.tensors() | logged
    return {k: v for k, v in named.items() if not k.endswith("num_batches_tracked")}


def compare(one: Run, two: Run) -> None:
    """Fails unless the run of two ranks is that of one process, but for rounding."""
    folders = one.folder, two.folder
    facts = [json.loads((each / "environment.json").read_text()) for each in folders]
    assert [each["ranks"] for each in facts] == [1, 2]
    for kind in ("train", "test"):
        for first, second in zip(one.lines(kind), two.lines(kind), strict=True):
            assert first.keys() == second.keys()
            assert first.pop("kind") == second.pop("kind") == kind
            for key, value in first.items():
                expected = value if value is None else pytest.approx(value, rel=1e-7, abs=1e-9)
                assert second[key] == expected, key
    torch.testing.assert_close(two.predictions(), one.predictions(), rtol=1e-5, atol=1e-5)


def main(out: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out / 'meet'}", rank=rank, world_size=2)
    for method in methods.METHODS:
        named = state(method)
        if rank == 0:
            save_file({k: v.contiguous() for k, v in named.items()}, out / f"{method}.safetensors")
        dist.barrier()
    train(CONFIG, out / "run", quiet=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), 1)
