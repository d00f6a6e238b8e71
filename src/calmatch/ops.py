"""Small tensor functions of methods, losses and metrics; ranks (one is no change); devices."""

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn

ALIGN_FLOOR = 1e-6
_EXACT = threading.RLock()  # of a setting that torch has for all threads together


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for what the device does now."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def count_cores() -> int:
    """Those that this process may use: a scheduler or container may leave it a few of many."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return own or 1


def check_ids(labels: Tensor, classes: int) -> Tensor:
    """Labels as class ids, 64 bits each; a ValueError where they are something else."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integer class ids, not {labels.dtype}.")
    labels = labels.long()  # torch has no smallest one of unsigned ones
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(f"labels must lie in 0..{classes - 1}; found {low}..{high}.")
    return labels


def ids(target: Tensor) -> Tensor:
    """Class ids [n] of a target that is class ids or probabilities [n, C]."""
    return target if target.ndim == 1 else target.argmax(-1)


def soft(target: Tensor, like: Tensor) -> Tensor:
    """Probabilities [n, C] of a target, with the shape and type of `like`."""
    if target.ndim > 1:
        return target.to(like.dtype)
    return torch.zeros_like(like).scatter(-1, target[:, None], 1.0)


def count(labels: Tensor, classes: int, weight: Tensor) -> Tensor:
    """Weighted number of each class: [classes]."""
    return weight.new_zeros(classes).index_add(0, labels, weight)


def normalise(values: Tensor) -> Tensor:
    """Divide by the sum over the last axis; all zeros stay zeros."""
    return values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)


def moving(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """Exponential moving average."""
    return momentum * old + (1 - momentum) * new


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Equal-width bin (lo, hi] of each confidence; 0 falls in the first, 1 in the last."""
    wide = torch.float32 if confidence.device.type == "mps" else torch.float64
    edges = torch.arange(1, bins, dtype=wide, device=confidence.device) / bins
    return torch.bucketize(confidence, edges.to(confidence.dtype))


def quantile(values: Tensor, level: Tensor) -> Tensor:
    """Linear-interpolated quantile at a level that is a tensor; torch's own looks at its value."""
    ordered = values.sort().values
    place = level * (len(values) - 1)
    below = place.floor().long().clamp(0, max(0, len(values) - 2))[None]
    above = (below + 1).clamp_max(len(values) - 1)
    return torch.lerp(ordered.gather(0, below), ordered.gather(0, above), place - below)[0]


def uniform(generator: Generator, *shape: int) -> Tensor:
    """Uniform numbers in [0, 1) on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device)


def normal(generator: Generator, *shape: int) -> Tensor:
    """Standard normal numbers on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device)


def beta(generator: Generator, alpha: float) -> Tensor:
    """One draw from Beta(alpha, alpha)."""
    shape = torch.full((2,), alpha, device=generator.device)
    both = torch._standard_gamma(shape, generator=generator)
    return both[0] / both.sum().clamp_min(1e-30)


def ramp(step: Tensor, length: float) -> Tensor:
    """Rises from 0 at step 0 to 1 at `length`, as a tensor of the default type."""
    return (step / max(length, 1e-9)).clamp(0, 1)


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """Probabilities to the power 1 / temperature, normalised."""
    return normalise(p ** (1 / temperature))


def rows(weight: Tensor, like: Tensor) -> Tensor:
    """A scalar weight for every row of logits [n, C]."""
    return weight.to(like.dtype).expand(len(like))


def hard_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row to its class: [n]."""
    return -logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def soft_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each row to its probabilities: [n]."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def quarter_turns(images: Tensor) -> Tensor:
    """Images turned counter-clockwise by 0, 90, 180 and 270 degrees: [4, n, 3, H, W]."""
    return torch.stack([torch.rot90(images, k, (-2, -1)) for k in range(4)])


def unit(features: Tensor) -> Tensor:
    """Rows of length one."""
    return torch.nn.functional.normalize(features, dim=-1)


@torch.no_grad()
def update_average(pairs: Sequence[tuple[Tensor, Tensor]], momentum: float) -> None:
    """Move each average towards its value; counters are copied."""
    floats = [pair for pair in pairs if pair[0].is_floating_point()]
    if floats:
        torch._foreach_lerp_([mean for mean, _ in floats], [v for _, v in floats], 1 - momentum)
    for mean, value in pairs:
        if not mean.is_floating_point():
            mean.copy_(value)


def running_mean(mean: Tensor, p: Tensor, momentum: float) -> Tensor:
    """The running mean prediction; it starts with the first batch's (zeros: not started)."""
    now = average(p.mean(0))
    return torch.where(mean.sum() > 0, moving(mean, now, momentum), now)


def align(p: Tensor, mean: Tensor, target: Tensor | float) -> Tensor:
    """Predictions [n, C] times target / mean, normalised."""
    return normalise(p * (target + ALIGN_FLOOR) / (mean + ALIGN_FLOOR))


def align_by_queue(p: Tensor, queue: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Align to uniform by a queue of batch means; also the new queue and its next place."""
    queue = queue.index_copy(0, place[None], average(p.mean(0))[None])
    return align(p, queue.mean(0), 1 / p.shape[-1]), queue, (place + 1) % len(queue)


def world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def join_ranks(device: torch.device) -> Iterator[None]:
    """Join the other ranks when started by torchrun, and leave them at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def wait_for_ranks() -> None:
    if world_size() > 1:
        dist.barrier()


def average(tensor: Tensor) -> Tensor:
    """Mean over ranks, without gradient."""
    return tensor if world_size() == 1 else total(tensor.detach()) / world_size()


def gather(tensor: Tensor) -> Tensor:
    """Rows of all ranks in rank order, without gradient."""
    if world_size() == 1:
        return tensor
    rows = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(rows, tensor.detach().contiguous())
    return torch.cat(rows)


def total(tensor: Tensor) -> Tensor:
    """Sum over ranks with gradient.

    Backward sums over ranks too, so after DDP has averaged, a loss that every rank computes from
    a total has the gradient it would have on one device.
    """
    return tensor if world_size() == 1 else _Total.apply(tensor)


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


def rank_share(rows: Tensor) -> Tensor:
    """This rank's share of the rows of a global batch."""
    return rows if world_size() == 1 else rows.chunk(world_size())[rank()]


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
        mean = total(wide.mean(axes) / world_size())
        centred = wide - mean.view(shape)
        var = total(centred.square().mean(axes) / world_size())
        if self.track_running_stats:  # VAT turns it off for a while
            n = world_size() * input.numel() / input.shape[1]
            assert self.running_mean is not None and self.running_var is not None  # noqa: PT018
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum or 0)
                self.running_var.lerp_(var * n / (n - 1), self.momentum or 0)
        scale = (var + self.eps).rsqrt() * self.weight
        return (centred * scale.view(shape) + self.bias.view(shape)).to(input.dtype)


def pick_device(name: str) -> torch.device:
    """The device a config names; `auto` is the first of cuda, mps and cpu that is there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    there["cpu"] = True
    if name == "auto":
        name = next(kind for kind, present in there.items() if present)
    if name == "cuda" and there["cuda"] and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"  # each rank its own GPU
        torch.cuda.set_device(name)
    if not there.get(name.partition(":")[0], False):
        raise ValueError(f"There is no device {name!r} here; use --device auto or cpu.")
    return torch.device(name)


@contextmanager
def exact_convolutions(device: torch.device) -> Iterator[None]:
    """Of float32 on a GPU: by TF32, torch's default, they differ from a CPU's by 1e-3."""
    if device.type != "cuda":
        yield
        return
    with _EXACT:
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = before


def keep_freed_memory() -> None:
    """Let a process keep large blocks that it frees: it will want them again at once.

    glibc gives them back to the system, and a convolutional network on a CPU then spends half of
    its time getting them anew (17.5 instead of 8.2 ms an image, EfficientNet-Lite0 on two cores).
    """
    with suppress(OSError, AttributeError):  # another system's memory
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
        mallopt(-8, 1)  # M_ARENA_MAX: those of other threads give back whatever is large
