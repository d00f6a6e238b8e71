"""Ranks: every function here is the identity on one device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


def world() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank."""
    return dist.get_rank() if world() > 1 else 0


@contextmanager
def started(device: torch.device) -> Iterator[None]:
    """Join the other ranks when started by torchrun, and leave them at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def average(tensor: Tensor) -> Tensor:
    """Mean over ranks, without gradient."""
    if world() == 1:
        return tensor
    result = tensor.detach().clone()
    dist.all_reduce(result)
    return result / world()


def gather(tensor: Tensor) -> Tensor:
    """Rows of all ranks in rank order, without gradient."""
    if world() == 1:
        return tensor
    rows = [torch.empty_like(tensor) for _ in range(world())]
    dist.all_gather(rows, tensor.detach().contiguous())
    return torch.cat(rows)


def total(tensor: Tensor) -> Tensor:
    """Sum over ranks with gradient.

    Backward sums over ranks too, so after DDP has averaged, a loss that every rank computes from
    a total has the gradient it would have on one device.
    """
    if world() == 1:
        return tensor
    result: Tensor = _Total.apply(tensor)
    return result


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        result = tensor.clone()
        dist.all_reduce(result)
        return result

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        result = grad.clone()
        dist.all_reduce(result)
        return result


def mine(rows: Tensor) -> Tensor:
    """This rank's share of the rows of a global batch."""
    return rows if world() == 1 else rows.chunk(world())[rank()]


class SyncNorm2d(nn.BatchNorm2d):
    """BatchNorm over the rows of all ranks, on any device (torch's own needs a GPU)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        moments = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        mean, square = total(moments / world())
        var = square - mean.square()
        if self.track_running_stats and self.running_mean is not None:
            self._follow(mean, var, world() * x.numel() / x.shape[1])
        scale = (var + self.eps).rsqrt() * self.weight
        shifted: Tensor = x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]
        return shifted

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, n: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * n / (n - 1), self.momentum)


def synchronised(net: nn.Module) -> nn.Module:
    """Replace BatchNorm by its synchronised form when there is more than one rank."""
    if world() == 1:
        return net
    for name, child in net.named_children():
        if type(child) is nn.BatchNorm2d:
            child.__class__ = SyncNorm2d
        else:
            synchronised(child)
            setattr(net, name, child)
    return net
