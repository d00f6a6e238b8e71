"""RandAugment as FixMatch uses it, on a whole batch: every image its own operations and magnitudes.

Pillow's semantics (nearest neighbour, black fill, integer rounding). A round applies one operation
to each image without a branch on data. Rotations, shears and shifts are one gather with a matrix
per image; what maps values to values is one lookup in a table per image and channel; colour and
sharpness blend with a grey or a smoothed image.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from calmatch.augment import affine, grey, rotation, wide
from calmatch.ops import sent

RANGES = {  # USB's operations and the ranges their values are drawn from
    "autocontrast": (0.0, 1.0),
    "brightness": (0.05, 0.95),
    "color": (0.05, 0.95),
    "contrast": (0.05, 0.95),
    "equalize": (0.0, 1.0),
    "identity": (0.0, 1.0),
    "posterize": (4.0, 8.0),
    "rotate": (-30.0, 30.0),
    "sharpness": (0.05, 0.95),
    "shear_x": (-0.3, 0.3),
    "shear_y": (-0.3, 0.3),
    "solarize": (0.0, 256.0),
    "translate_x": (-0.3, 0.3),
    "translate_y": (-0.3, 0.3),
}
NAMES = list(RANGES)
BLOCK = 256  # images at once on a CPU: what fits its cache


def randaugment(images: Tensor, generator: Generator, n: int = 3) -> Tensor:
    """Apply n operations, drawn with replacement, to each image."""
    shape, device = (n, len(images)), images.device
    ops = torch.randint(len(NAMES), shape, generator=generator, device=device)
    draws = torch.rand(shape, generator=generator, device=device)
    size = BLOCK if images.device.type == "cpu" else max(1, len(images))
    blocks = []
    for block, *rounds in zip(
        images.split(size), ops.split(size, 1), draws.split(size, 1), strict=True
    ):
        for op, draw in zip(*rounds, strict=True):
            block = apply(block, op, value(op, draw))
        blocks.append(block)
    return torch.cat(blocks)


def value(op: Tensor, draw: Tensor) -> Tensor:
    """The magnitude of each operation for a uniform draw in [0, 1)."""
    ranges = sent(torch.tensor(list(RANGES.values())), draw.device)[op]
    return ranges[:, 0] + (ranges[:, 1] - ranges[:, 0]) * draw


def apply(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """One round: operation op[i] (a place in NAMES) with value[i] on image i."""
    kinds: tuple[tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str], ...] = (
        (_move, "rotate shear_x shear_y translate_x translate_y"),
        (_map, "autocontrast brightness contrast equalize posterize solarize"),
        (_blend, "color sharpness"),
    )
    for act, names in kinds:
        if images.device.type != "cpu" or torch.compiler.is_compiling():
            images = act(images, op, value)
        else:  # it leaves other images as they are, so a CPU need not compute them
            rows = _is(op, names).nonzero()[:, 0]
            images = images.index_copy(0, rows, act(images[rows], op[rows], value[rows]))
    return images


def _is(op: Tensor, names: str) -> Tensor:
    """Where the operation is one of these: bool [N]."""
    return functools.reduce(operator.or_, [op == NAMES.index(name) for name in names.split()])


def _move(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """Rotate, shear and translate: sample each image by a matrix, the identity for the others."""
    height, width = images.shape[-2:]
    v = wide(value)
    zero = torch.zeros_like(v)

    def of(name: str, amount: Tensor) -> Tensor:
        return torch.where(_is(op, name), amount, zero)

    right, down = of("translate_x", v * width), of("translate_y", v * height)
    moved = torch.stack([zero, of("shear_x", v), right, of("shear_y", v), zero, down], 1)
    return affine(images, rotation(images, of("rotate", v)) + moved)


def _map(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """Look the values up in a table of the 256 new ones per image and channel."""
    levels = torch.arange(256, device=images.device)
    n = len(images)
    v = value.view(n, 1, 1)
    bits = 8 - value.floor().clamp(0, 8).long().view(n, 1, 1)
    # brightness and contrast: blends with black or the mean grey, rounded down
    pixels = images.shape[-1] * images.shape[-2]
    mean = (wide(grey(images).sum((1, 2, 3), dtype=torch.int64)) / pixels + 0.5).floor()
    base = torch.where(_is(op, "contrast"), mean, 0.0).float().view(n, 1, 1)
    table = levels.expand(n, 1, 256)
    for names, new in (
        ("posterize", (levels >> bits) << bits),
        ("solarize", torch.where(levels < v, levels, 255 - levels)),
        ("brightness contrast", (base + (levels - base) * v).clamp(0, 255).long()),
        ("autocontrast", _stretched(images)),
        ("equalize", _equalised(images)),
    ):
        table = torch.where(_is(op, names).view(n, 1, 1), new, table)
    return table.to(torch.uint8).gather(2, images.flatten(2).long()).view_as(images)


def _stretched(images: Tensor) -> Tensor:
    """Autocontrast: the darkest value becomes 0, the brightest 255; in double, as Pillow."""
    levels = wide(torch.arange(256, device=images.device))
    flat = images.flatten(2).short()  # torch 2.15 compiles amin of bytes wrongly on the CPU
    low, high = wide(flat.amin(2, keepdim=True)), wide(flat.amax(2, keepdim=True))
    scale = levels[255] / (high - low).clamp_min(1)  # a tensor: 255.0 / x is not a division
    # clamping what is never negative keeps a compiler from fusing product and difference
    product, offset = (levels * scale).clamp_min(0), (low * scale).clamp_min(0)
    stretched = (product - offset).clamp(0, 255).long()
    return torch.where(high > low, stretched, levels.long())


def _equalised(images: Tensor) -> Tensor:
    """Equalize: the cumulative histogram in steps of its 255th part, in whole numbers."""
    n = len(images)
    flat = images.flatten(2).long()
    counts = torch.zeros(n, 3, 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (counts.sum(2, keepdim=True) - last) // 255
    before = counts.cumsum(2) - counts
    table = (step // 2 + before) // step.clamp_min(1)
    levels = torch.arange(256, device=images.device)
    return torch.where(step > 0, table.clamp(0, 255), levels)


def _blend(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """Colour and sharpness: between a degenerate image and the image, rounded down."""
    colour, sharp = (_is(op, name)[:, None, None, None] for name in ("color", "sharpness"))
    plain = images.float()
    base = torch.where(colour, grey(images).float(), torch.where(sharp, _smooth(plain), plain))
    mixed = base + (plain - base) * value[:, None, None, None]
    return torch.where(colour | sharp, mixed.clamp(0, 255).to(torch.uint8), images)


def _smooth(images: Tensor) -> Tensor:
    """Pillow's SMOOTH: weights 1 around 5, rounded to the nearest; the border is copied."""
    rows = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    square = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = ((square + 4 * images[:, :, 1:-1, 1:-1]) / 13 + 0.5).floor()
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = inner
    return smooth
