"""Parameter groups with layer decay, optimizers, and the field's learning-rate schedule."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

EXEMPT = ("pos_embed", "cls_token")  # as one-dimensional parameters, never decayed


def factor(step: int, steps: int, warmup: int, schedule: str = "cosine") -> float:
    """Learning rate at a step, relative to the highest: linear warm-up, then cos(7 pi t / 16)."""
    if step < warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, steps - warmup)
    return max(0.0, math.cos(math.pi * 7 / 16 * progress))


def layers(names: list[str]) -> dict[str, int]:
    """Depth of each parameter, 0 nearest the picture.

    What comes before the numbered blocks is 0, block i is i + 1, what comes after is one more; a
    transformer's final `norm` joins its last block.

    >>> layers(["stem.w", "blocks.0.w", "blocks.1.w", "norm.w", "head.w"])
    {'stem.w': 0, 'blocks.0.w': 1, 'blocks.1.w': 2, 'norm.w': 2, 'head.w': 3}
    """
    depth: dict[str, int] = {}
    blocks: list[str] = []
    if len({name.split(".")[0] for name in names}) == 1 and all("." in name for name in names):
        inner = layers([name.partition(".")[2] for name in names])  # a wrapper around the network
        return {name: inner[name.partition(".")[2]] for name in names}
    for name in names:
        if found := re.match(r"(.*?\.\d+)\.", name):
            if found[1] not in blocks:
                blocks.append(found[1])
            depth[name] = blocks.index(found[1]) + 1
        elif name.startswith("norm."):
            depth[name] = len(blocks)
        else:
            depth[name] = len(blocks) + 1 if blocks else 0
    return depth


def rates(
    shapes: Mapping[str, int],
    weight_decay: float,
    layer_decay: float,
    exempt: Collection[str] = (),
) -> dict[str, tuple[float, float]]:
    """Relative learning rate and weight decay of each body parameter, given its dimensions."""
    depth = layers(list(shapes))
    top = max(depth.values())
    return {
        name: (
            layer_decay ** (top - depth[name]),
            0.0 if dims <= 1 or name.split(".")[-1] in EXEMPT or name in exempt else weight_decay,
        )
        for name, dims in shapes.items()
    }


def groups(
    net: nn.Module,
    lr: float,
    weight_decay: float,
    layer_decay: float,
    special: Mapping[str, Mapping[str, float]],
) -> list[dict[str, Any]]:
    """Optimizer groups of `net.body` and `net.heads`; each remembers its highest rate as `peak`."""
    body = {k: p for k, p in net.named_parameters() if k.startswith("body.") and p.requires_grad}
    exempt: Collection[str] = getattr(net.get_submodule("body"), "no_weight_decay", tuple)()
    dims = {k[5:]: p.ndim for k, p in body.items()}
    plain = rates(dims, weight_decay, layer_decay, exempt)
    found: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in body:
            scale, decay = plain[name[5:]]
            found[lr * scale, decay].append(parameter)
        else:
            own = special.get(name.split(".")[1], {})
            decay = own.get("weight_decay", 0.0 if parameter.ndim <= 1 else weight_decay)
            found[own.get("lr", lr), decay].append(parameter)
    return [
        {"params": params, "peak": peak, "lr": torch.tensor(peak), "weight_decay": decay}
        for (peak, decay), params in found.items()
    ]


def build(
    name: str, parameters: list[dict[str, Any]], momentum: float, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW or SGD with Nesterov momentum, with learning rates held in tensors."""
    for group in parameters:
        group["lr"] = group["lr"].to(device)
    if name == "sgd":
        nesterov = momentum > 0
        return torch.optim.SGD(parameters, momentum=momentum, nesterov=nesterov, fused=True)
    capturable = device.type == "cuda"  # the step may be captured as a graph
    return torch.optim.AdamW(
        parameters, betas=(0.9, 0.999), eps=1e-8, fused=True, capturable=capturable
    )


def set_rate(optimizer: torch.optim.Optimizer, relative: float) -> None:
    """Give every group this share of its highest rate."""
    for group in optimizer.param_groups:
        group["lr"].fill_(group["peak"] * relative)
