"""Trains every method for a few steps on one of two ranks, or alone: what the ranks test runs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from calmatch import methods, ops
from calmatch.training.config import Config
from calmatch.training.setup import build_parts
from calmatch.training.step import make_training

EXEMPT = ("mixmatch", "remixmatch", "comatch")  # they mix within a rank: only run


def state(method: str) -> dict[str, Tensor]:
    """Everything a run knows after six steps, and what it logged, averaged over ranks."""
    config = Config(
        dataset="synthetic",
        labels=16,
        method=method,
        net="small(width=4)",  # with BatchNorm, which ranks must share
        weak="crop(1)",
        strong="crop(2)|cutout(0.5)",
        batch=8,
        ratio=2,
        steps=6,
        ema=0.9,
        penalty="" if method == "supervised" else "margin(m=0.5)",
        precision="fp64",
        device="cpu",
    )
    run = make_training(config, build_parts(config))
    while run.step < config.steps:
        run.advance()
    logged = {f"sums/{k}": ops.average(v) for k, v in run.sums.totals.items()}
    found = run.tensors() | logged
    return {k: v for k, v in found.items() if not k.endswith("num_batches_tracked")}


def main(out: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out / 'meet'}", rank=rank, world_size=2)
    for method in methods.METHODS:
        found = state(method)
        if rank == 0:
            save_file({k: v.contiguous() for k, v in found.items()}, out / f"{method}.safetensors")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
