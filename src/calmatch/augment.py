"""Augmentations of uint8 batches, and the views of test-time augmentation.

All take and return uint8 [N, 3, H, W]; every image gets its own draw. Semantics are Pillow's:
geometry is one gather with nearest neighbours and black outside, in 16-bit fixed point; what maps
values to values is one lookup in a table per image and channel; colours round down.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn

from calmatch import spec
from calmatch.core import Transform
from calmatch.ops import sent

GREY = (125, 123, 114)  # the colour cutout leaves
DRAWN = {  # the ranges from which values of USB's operations are drawn
    (0.0, 1.0): "autocontrast equalize identity",  # which have none
    (0.05, 0.95): "brightness color contrast sharpness",
    (-0.3, 0.3): "shear_x shear_y translate_x translate_y",
    (-30.0, 30.0): "rotate",
    (4.0, 8.0): "posterize",
    (0.0, 256.0): "solarize",
}
RANGES = dict(sorted((name, ends) for ends, names in DRAWN.items() for name in names.split()))
RANDAUGMENT = list(RANGES)
BLOCK = 512  # images at once on a CPU: what fits its cache


def pipeline(text: str) -> Transform:
    """The transforms a spec chains, `"flip|crop(4)|cutout(0.5)"` for example."""
    steps = [spec.bind(item, OPS, "augmentation", given=2) for item in spec.chain(text)]

    def transform(images: Tensor, generator: Generator) -> Tensor:
        for step in steps:
            images = step(images, generator)
        return images

    return transform


def identity(images: Tensor, generator: Generator) -> Tensor:
    """Nothing."""
    return images


def flip(images: Tensor, generator: Generator, p: float = 0.5) -> Tensor:
    """Mirror left and right with probability p."""
    return torch.where(_uniform(images, generator) < p, images.flip(-1), images)


def _uniform(images: Tensor, generator: Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    """A number per image: [N, 1, 1, 1]."""
    draw = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device)
    return low + (high - low) * draw


def vflip(images: Tensor, generator: Generator, p: float = 0.5) -> Tensor:
    """Mirror up and down with probability p."""
    return torch.where(_uniform(images, generator) < p, images.flip(-2), images)


def crop(images: Tensor, generator: Generator, pad: int = 4) -> Tensor:
    """Pad by reflection and crop back at a random place."""
    n, _, height, width = images.shape
    if not 0 <= pad < min(height, width):
        raise ValueError(f"crop({pad}) does not fit pictures of {height} x {width}.")
    shift = torch.randint(-pad, pad + 1, (2, n, 1), generator=generator, device=images.device)
    rows, columns = _mirrored(images, -2, shift[0]), _mirrored(images, -1, shift[1])
    return _gather(images, rows[:, :, None] * width + columns[:, None, :])


def _mirrored(images: Tensor, axis: int, shift: Tensor | int) -> Tensor:
    """Places along an axis after a shift; those outside are reflected into it."""
    size = images.shape[axis]
    index = torch.arange(size, device=images.device) + shift
    return (size - 1 - (size - 1 - index.abs()).abs()).abs()


def _gather(images: Tensor, index: Tensor) -> Tensor:
    """Pixels at flat positions [N, H, W], the same in every channel."""
    flat = index.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, flat).view_as(images)


def translate(images: Tensor, generator: Generator, share: float = 0.3) -> Tensor:
    """Shift by up to a share of the size in both directions, black outside."""
    across = _uniform(images, generator, -share, share) * images.shape[-1]
    down = _uniform(images, generator, -share, share) * images.shape[-2]
    one, zero = torch.ones_like(across), torch.zeros_like(across)
    return affine(images, torch.cat([one, zero, across, zero, one, down], 1)[..., 0, 0])


def rotate(images: Tensor, generator: Generator, degrees: float = 30.0) -> Tensor:
    """Turn about the centre by up to `degrees` either way, black outside."""
    angles = _uniform(images, generator, -degrees, degrees)[:, 0, 0, 0]
    return affine(images, rotation(images, angles))


def rotation(images: Tensor, degrees: Tensor) -> Tensor:
    """The matrices for `affine` that turn about the centre, in Pillow's sense: [N, 6]."""
    turn = degrees * (-math.pi / 180)
    cos, sin = turn.cos(), turn.sin()
    x, y = images.shape[-1] / 2, images.shape[-2] / 2
    return torch.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], 1)


def affine(images: Tensor, matrix: Tensor) -> Tensor:
    """Sample at (a x + b y + c, d x + e y + f), nearest neighbour, black outside: matrix [N, 6]."""
    height, width = images.shape[-2:]
    a, b, c, d, e, f = wide(matrix).unbind(1)
    fixed = torch.stack([a, b, c + (a + b) / 2, d, e, f + (d + e) / 2], 1)
    whole = torch.int32 if max(height, width) <= 2048 else torch.int64
    fixed = (fixed * 65536 + 0.5).floor().to(whole)[:, :, None, None]
    x = torch.arange(width, device=images.device, dtype=whole)
    y = torch.arange(height, device=images.device, dtype=whole)[:, None]
    column = (fixed[:, 0] * x + fixed[:, 1] * y + fixed[:, 2]) >> 16  # [N, H, W]
    row = (fixed[:, 3] * x + fixed[:, 4] * y + fixed[:, 5]) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    return _gather(images, index.long()) * inside[:, None]


def wide(numbers: Tensor) -> Tensor:
    """As many bits as the device has: Apple's has no float64."""
    return numbers.float() if numbers.device.type == "mps" else numbers.double()


def brightness(images: Tensor, generator: Generator, low: float = 0.5, high: float = 1.5) -> Tensor:
    """Multiply by a factor between low and high."""
    return _blend(torch.zeros_like(images[:, :1]), images, _uniform(images, generator, low, high))


def contrast(images: Tensor, generator: Generator, low: float = 0.5, high: float = 1.5) -> Tensor:
    """Spread about the mean grey by a factor between low and high."""
    mean = _mean_grey(images)[:, None, None, None]
    return _blend(mean, images, _uniform(images, generator, low, high))


def _mean_grey(images: Tensor) -> Tensor:
    """The mean luminance of each image, rounded: [N]."""
    total = wide(grey(images).sum((1, 2, 3), dtype=torch.int64))
    return (total / (images.shape[-1] * images.shape[-2]) + 0.5).floor().float()


def grey(images: Tensor) -> Tensor:
    """Luminance as Pillow rounds it: [N, 1, H, W] int32."""
    r, g, b = images.to(torch.int32).split(1, 1)
    luminance: Tensor = (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16
    return luminance


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return (base + (images.float() - base) * factor).clamp(0, 255).to(torch.uint8)


def cutout(images: Tensor, generator: Generator, share: float = 0.5) -> Tensor:
    """Cover a square, centred anywhere, with a side of up to `share` of the width."""
    height, width = images.shape[-2:]
    side = _uniform(images, generator, 0, share) * width
    left = (_uniform(images, generator) * width - side / 2).floor().clamp_min(0)
    top = (_uniform(images, generator) * height - side / 2).floor().clamp_min(0)
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[:, None]
    inside = (x >= left) & (x <= left + side) & (y >= top) & (y <= top + side) & (side > 0)
    colour = sent(torch.tensor(GREY, dtype=images.dtype), images.device)[:, None, None]
    return torch.where(inside, colour, images)


def randaugment(images: Tensor, generator: Generator, n: int = 3) -> Tensor:
    """Apply n operations, drawn with replacement, to each image."""
    shape, device = (n, len(images)), images.device
    ops = torch.randint(len(RANGES), shape, generator=generator, device=device)
    draws = torch.rand(shape, generator=generator, device=device)
    size = BLOCK if images.device.type == "cpu" else max(1, len(images))
    blocks = []
    parts = images.split(size), ops.split(size, 1), draws.split(size, 1)
    for block, *rounds in zip(*parts, strict=True):
        for op, draw in zip(*rounds, strict=True):
            block = apply_operations(block, op, magnitude(op, draw))
        blocks.append(block)
    return torch.cat(blocks)


def magnitude(op: Tensor, draw: Tensor) -> Tensor:
    """The magnitude of each operation for a uniform draw in [0, 1)."""
    ranges = sent(torch.tensor(list(RANGES.values())), draw.device)[op]
    return ranges[:, 0] + (ranges[:, 1] - ranges[:, 0]) * draw


def apply_operations(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """One round: operation op[i] (a place in RANDAUGMENT) with value[i] on image i."""
    acts: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "rotate shear_x shear_y translate_x translate_y": _move,
        **dict.fromkeys(("brightness", "contrast", "posterize", "solarize", *BY_IMAGE), _map),
        **dict.fromkeys(("color", "sharpness"), _blend_grey),
    }
    if images.device.type != "cpu" or torch.compiler.is_compiling():
        for act in dict.fromkeys(acts.values()):
            images = act(images, op, value)
        return images
    group = torch.zeros_like(op)  # each act leaves others as they are, so it need not see them
    for place, names in enumerate(acts, 1):
        group[_is(op, names)] = place
    order, sizes = group.argsort(), torch.bincount(group, minlength=len(acts) + 1).tolist()
    first, *parts = zip(*(each[order].split(sizes) for each in (images, op, value)), strict=True)
    done = [act(*part) for act, part in zip(acts.values(), parts, strict=True)]
    return torch.cat([first[0], *done])[order.argsort()]


def _is(op: Tensor, names: str) -> Tensor:
    """Where the operation is one of these: bool [N]."""
    return functools.reduce(operator.or_, [op == RANDAUGMENT.index(name) for name in names.split()])


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
    n, v = len(images), value.view(-1, 1, 1)
    tables: dict[str, Callable[[Tensor], Tensor]] = {
        "posterize": lambda _: (levels >> (bits := 8 - v.floor().clamp(0, 8).long())) << bits,
        "solarize": lambda _: torch.where(levels < v, levels, 255 - levels),
        "brightness": lambda _: (levels * v).clamp(0, 255).long(),  # blends with black
        "contrast": lambda x: _blend(_mean_grey(x).view(n, 1, 1), levels, v).long(),
        **BY_IMAGE,
    }
    table = levels.expand(n, 1, 256)
    for name, make in tables.items():
        if _drawn(op, name):
            table = torch.where(_is(op, name).view(n, 1, 1), make(images), table)
    channels = table.to(torch.uint8).expand(n, 3, 256)
    return channels.gather(2, images.flatten(2).long()).view_as(images)


def _drawn(op: Tensor, name: str) -> bool:
    """Whether an operation may have been drawn; only a CPU can look without waiting."""
    return op.device.type != "cpu" or torch.compiler.is_compiling() or bool(_is(op, name).any())


def _stretched(images: Tensor) -> Tensor:
    """Autocontrast: the darkest value becomes 0, the brightest 255; in double, as Pillow."""
    levels = wide(torch.arange(256, device=images.device))
    flat = images.flatten(2).short()  # torch 2.15 compiles amin of bytes wrongly on the CPU
    low, high = wide(flat.amin(2, keepdim=True)), wide(flat.amax(2, keepdim=True))
    scale = levels[255] / (high - low).clamp_min(1)  # a tensor: 255.0 / x is not a division
    # clamping what is never negative keeps a compiler from fusing product and difference
    product, offset = (levels * scale).clamp_min(0), (low * scale).clamp_min(0)
    return torch.where(high > low, (product - offset).clamp(0, 255).long(), levels.long())


def _equalised(images: Tensor) -> Tensor:
    """Equalize: the cumulative histogram in steps of its 255th part, in whole numbers."""
    flat = images.flatten(2).long()
    counts = flat.new_zeros(len(images), 3, 256).scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (counts.sum(2, keepdim=True) - last) // 255
    before = counts.cumsum(2) - counts
    table = (step // 2 + before) // step.clamp_min(1)
    return torch.where(step > 0, table.clamp(0, 255), torch.arange(256, device=images.device))


BY_IMAGE = {"autocontrast": _stretched, "equalize": _equalised}  # tables that pixels decide


def _blend_grey(images: Tensor, op: Tensor, value: Tensor) -> Tensor:
    """Colour and sharpness: between a degenerate image and the image, rounded down."""
    base = plain = images.float()
    for name, make in (("sharpness", _smooth), ("color", lambda x: grey(images).float())):
        if _drawn(op, name):
            base = torch.where(_is(op, name)[:, None, None, None], make(plain), base)
    drawn = _is(op, "color sharpness")[:, None, None, None]
    return torch.where(drawn, _blend(base, images, value[:, None, None, None]), images)


def _smooth(images: Tensor) -> Tensor:
    """Pillow's SMOOTH: weights 1 around 5, rounded to the nearest; the border is copied."""
    rows = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    square = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = ((square + 4 * images[:, :, 1:-1, 1:-1]) / 13 + 0.5).floor()
    return smooth


BASIC = (identity, flip, vflip, crop, translate, rotate, brightness, contrast, cutout)
OPS = {transform.__name__: transform for transform in (*BASIC, randaugment)}


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Float images with these channel means and deviations subtracted and divided out."""
    scaled = images.to(mean.dtype) * (1 / (255 * std))[:, None, None]
    return scaled.sub_((mean / std)[:, None, None])  # in place: it is new, whatever came


class View(NamedTuple):
    """A square part of an image, shown at some size: a view of test-time augmentation (tta)."""

    size: int  # pixels of its side when it is shown
    left: float = 0.0  # where the part begins, as shares of the image
    top: float = 0.0
    side: float = 1.0  # its side, as a share
    flipped: bool = False


class Views(nn.Module):
    """Views of uint8 images [N, 3, source, source], each resampled by one matrix a direction."""

    def __init__(self, views: Sequence[View], source: int) -> None:
        super().__init__()
        self.views, self.source = tuple(views), source
        for k, view in enumerate(self.views):
            across, down = _resampling(source, view, view.left), _resampling(source, view, view.top)
            across = across.flip(0) if view.flipped else across
            self.register_buffer(f"across{k}", across, persistent=False)
            self.register_buffer(f"down{k}", down, persistent=False)

    def forward(self, images: Tensor) -> list[Tensor]:
        """A list entry for each view: bytes where it is the image as it is, else floats."""
        shown = []
        for k, view in enumerate(self.views):
            across, down = self.get_buffer(f"across{k}"), self.get_buffer(f"down{k}")
            same = view == View(self.source)
            resampled = images if same else down @ images.to(down.dtype) @ across.T
            shown.append(resampled if same else resampled.clamp(0, 255))
        return shown


def _resampling(source: int, view: View, start: float) -> Tensor:
    """Weights [view.size, source] of the antialiased bicubic filter that Pillow has."""
    step = view.side * source / view.size  # source pixels for each that is shown
    middle = start * source + (np.arange(view.size, dtype=np.float32) + 0.5) * step
    away = np.abs(np.arange(source, dtype=np.float32) + 0.5 - middle[:, None]) / max(step, 1.0)
    near = (1.5 * away - 2.5) * away**2 + 1
    far = ((-0.5 * away + 2.5) * away - 4) * away + 2
    weights = np.where(away < 1, near, np.where(away < 2, far, 0.0)).astype(np.float32)
    # not by torch: a model is first built on the device "meta", where arange imports a compiler
    return torch.tensor(weights / weights.sum(1, keepdims=True))


def tta_views(number: int, size: int, *, flip: bool = True, larger: bool = True) -> list[View]:
    """The first so many views: plain, mirrored, larger, then parts and their mirror images.

    >>> [view.flipped for view in tta_views(3, 224)]
    [False, True, False]
    """
    part, high = 0.85, round(size * 9 / 7) if larger else size
    rest = 1 - part
    views = [
        View(size),
        View(size, flipped=True),
        View(high) if larger else View(size, rest / 2, rest / 2, part),
        View(size, 0.0, 0.0, part),
        View(size, rest, rest, part, flipped=True),
        View(high, rest / 2, rest / 2, part, flipped=True),
        View(size, rest, 0.0, part),
        View(size, 0.0, rest, part, flipped=True),
        View(high, flipped=True),
        View(size, 0.0, rest, part),
        View(size, rest, 0.0, part, flipped=True),
        View(high, rest / 2, rest / 2, part),
    ]
    if not flip:
        views = [view._replace(flipped=False) for view in views]
    return list(dict.fromkeys(views))[:number]
