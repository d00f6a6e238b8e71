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


def first() -> bool:
    """Whether this process speaks for all, before, during and after a run."""
    return int(os.environ.get("RANK", "0")) == 0


def meet() -> None:
    """Wait until every rank is here."""
    if world() > 1:
        dist.barrier()


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
    def forward(tensor: Tensor) -> Tensor:
        result = tensor.clone()
        dist.all_reduce(result)
        return result

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
        """Apart from forward, so that torch.func can differentiate it."""

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return _Total.forward(grad)


def mine(rows: Tensor) -> Tensor:
    """This rank's share of the rows of a global batch."""
    return rows if world() == 1 else rows.chunk(world())[rank()]


class SyncNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over the rows of all ranks, on any device (torch's own needs a GPU)."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim >= 2

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = (1, -1, *[1] * (input.ndim - 2))
        wide = input.to(self.weight.dtype)  # bfloat16 is too narrow for statistics
        mean = total(wide.mean(axes) / world())
        centred = wide - mean.view(shape)
        var = total(centred.square().mean(axes) / world())
        if self.track_running_stats:
            self._follow(mean, var, world() * input.numel() / input.shape[1])
        scale = (var + self.eps).rsqrt() * self.weight
        shifted = centred * scale.view(shape) + self.bias.view(shape)
        return shifted.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, n: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * n / (n - 1), self.momentum)


def synchronised(net: nn.Module) -> nn.Module:
    """Turn BatchNorm into its synchronised form when there is more than one rank."""
    for module in net.modules() if world() > 1 else ():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d):
            module.__class__ = SyncNorm
    return net
