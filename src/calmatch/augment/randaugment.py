"""RandAugment as FixMatch uses it, on a whole batch: every picture its own operations, order and
magnitudes, with Pillow's semantics (nearest neighbour, black fill, integer rounding).

A round applies one operation to each picture without a branch on data. Rotations, shears and shifts
are one gather with a matrix per picture; what maps values to values is one lookup in a table per
picture and channel; colour and sharpness blend with a grey or a smoothed picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from calmatch.augment import affine, grey, wide
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
BLOCK = 256  # pictures at once on a CPU: what fits its cache
ACTS = {
    "_moved": ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
    "_mapped": ("autocontrast", "brightness", "contrast", "equalize", "posterize", "solarize"),
    "_blended": ("color", "sharpness"),
}
Kind = Callable[[Tensor, Tensor, Tensor], Tensor]


def randaugment(images: Tensor, generator: Generator, n: int = 3) -> Tensor:
    """Apply n operations, drawn with replacement, to each picture."""
    shape, device = (n, len(images)), images.device
    ops = torch.randint(len(NAMES), shape, generator=generator, device=device)
    draws = torch.rand(shape, generator=generator, device=device)
    size = BLOCK if images.device.type == "cpu" else max(1, len(images))
    blocks = zip(images.split(size), ops.split(size, 1), draws.split(size, 1), strict=True)
    return torch.cat([_rounds(*block) for block in blocks])


def _rounds(images: Tensor, ops: Tensor, draws: Tensor) -> Tensor:
    for op, draw in zip(ops, draws, strict=True):
        images = apply(images, op, value(op, draw))
    return images


def value(op: Tensor, draw: Tensor) -> Tensor:
    """The magnitude of each operation for a uniform draw in [0, 1)."""
    ranges = sent(torch.tensor(list(RANGES.values())), draw.device)[op]
    return ranges[:, 0] + (ranges[:, 1] - ranges[:, 0]) * draw


def apply(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """One round: operation op[i] (a place in NAMES) with value[i] on picture i."""
    for kind in (_moved, _mapped, _blended):
        images = _where_it_acts(kind, images, op, value)
    return images


def _where_it_acts(kind: Kind, images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """A kind of operation leaves other pictures as they are, so a CPU need not look at them."""
    if images.device.type != "cpu" or torch.compiler.is_compiling():
        return kind(images, op, value)
    rows = _is(op, *ACTS[kind.__name__]).nonzero()[:, 0]
    return images.index_copy(0, rows, kind(images[rows], op[rows], value[rows]))


def _is(op: Tensor, *names: str) -> Tensor:
    found = op == NAMES.index(names[0])
    for name in names[1:]:
        found = found | (op == NAMES.index(name))
    return found


def _moved(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    return affine(images, _matrix(images, op, value))


def _mapped(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    return _table(images, op, value).gather(2, images.flatten(2).long()).view_as(images)


def _matrix(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """Where each picture is sampled: [N, 6], the identity for operations that move nothing."""
    height, width = images.shape[-2:]
    v = wide(value)
    zero = torch.zeros_like(v)
    turn = torch.where(_is(op, "rotate"), v, zero) * (-math.pi / 180)
    cos, sin = turn.cos(), turn.sin()
    x, y = width / 2, height / 2
    shear_x = torch.where(_is(op, "shear_x"), v, zero)
    shear_y = torch.where(_is(op, "shear_y"), v, zero)
    right = torch.where(_is(op, "translate_x"), v * width, zero)
    down = torch.where(_is(op, "translate_y"), v * height, zero)
    return torch.stack(
        [
            cos,
            sin + shear_x,
            x - cos * x - sin * y + right,
            shear_y - sin,
            cos,
            y + sin * x - cos * y + down,
        ],
        1,
    )


def _table(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """New values of the 256 old ones, per picture and channel: uint8 [N, 3, 256]."""
    levels = torch.arange(256, device=images.device)
    n = len(images)
    v = value.view(n, 1, 1)
    # posterize and solarize
    bits = 8 - value.floor().clamp(0, 8).long().view(n, 1, 1)
    posterized = (levels >> bits) << bits
    solarized = torch.where(levels < v, levels, 255 - levels)
    # brightness and contrast: blends with black or the mean grey, rounded down
    pixels = images.shape[-1] * images.shape[-2]
    mean = (wide(grey(images).sum((1, 2, 3), dtype=torch.int64)) / pixels + 0.5).floor()
    base = torch.where(_is(op, "contrast"), mean, 0.0).float().view(n, 1, 1)
    blended = (base + (levels - base) * v).clamp(0, 255).long()
    table = levels.expand(n, 1, 256)
    for names, new in (
        (("posterize",), posterized),
        (("solarize",), solarized),
        (("brightness", "contrast"), blended),
    ):
        table = torch.where(_is(op, *names).view(n, 1, 1), new, table)
    table = table.expand(n, 3, 256)
    table = torch.where(_is(op, "autocontrast").view(n, 1, 1), _stretched(images), table)
    table = torch.where(_is(op, "equalize").view(n, 1, 1), _equalised(images), table)
    return table.to(torch.uint8)


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


def _blended(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """Colour and sharpness: between a degenerate picture and the picture, rounded down."""
    n = len(images)
    colour, sharp = _is(op, "color").view(n, 1, 1, 1), _is(op, "sharpness").view(n, 1, 1, 1)
    plain = images.float()
    base = torch.where(colour, grey(images).float(), torch.where(sharp, _smooth(plain), plain))
    mixed = base + (plain - base) * value.view(n, 1, 1, 1)
    return torch.where(colour | sharp, mixed.clamp(0, 255).to(torch.uint8), images)


def _smooth(images: Tensor) -> Tensor:
    """Pillow's SMOOTH: weights 1 around 5, rounded to the nearest; the border is copied."""
    rows = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    square = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = ((square + 4 * images[:, :, 1:-1, 1:-1]) / 13 + 0.5).floor()
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = inner
    return smooth
