"""Augmentations of uint8 batches, and the views of test-time augmentation.

All take and return uint8 [N, 3, H, W]; every image gets its own draw, no branch on data. Geometry
is one gather with nearest neighbours and black outside, in 16-bit fixed point as Pillow does it;
colours round down as Pillow does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from calmatch import spec
from calmatch.core import Transform
from calmatch.ops import sent

GREY = (125, 123, 114)  # the colour cutout leaves
BASIC = "identity flip vflip crop translate rotate brightness contrast cutout"
OPS = spec.Table(
    {name: f"augment.{name}" for name in BASIC.split()}
    | {"randaugment": "augment.randaugment.randaugment"}
)


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
    fixed = (fixed * 65536 + 0.5).floor().long()[:, :, None, None]
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[:, None]
    column = (fixed[:, 0] * x + fixed[:, 1] * y + fixed[:, 2]) >> 16  # [N, H, W]
    row = (fixed[:, 3] * x + fixed[:, 4] * y + fixed[:, 5]) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    return _gather(images, index) * inside[:, None]


def wide(numbers: Tensor) -> Tensor:
    """As many bits as the device has: Apple's has no float64."""
    return numbers.float() if numbers.device.type == "mps" else numbers.double()


def brightness(images: Tensor, generator: Generator, low: float = 0.5, high: float = 1.5) -> Tensor:
    """Multiply by a factor between low and high."""
    return _blend(torch.zeros_like(images[:, :1]), images, _uniform(images, generator, low, high))


def contrast(images: Tensor, generator: Generator, low: float = 0.5, high: float = 1.5) -> Tensor:
    """Spread about the mean grey by a factor between low and high."""
    mean = (grey(images).sum((-1, -2, -3), dtype=torch.int64) / images[0, 0].numel() + 0.5).floor()
    return _blend(mean[:, None, None, None], images, _uniform(images, generator, low, high))


def grey(images: Tensor) -> Tensor:
    """Luminance as Pillow rounds it: [N, 1, H, W] int32."""
    r, g, b = images.to(torch.int32).split(1, 1)
    luminance: Tensor = (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16
    return luminance


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    mixed = base + (images.to(torch.float32) - base) * factor
    return mixed.clamp(0, 255).to(torch.uint8)


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


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Float images with these channel means and deviations subtracted and divided out."""
    scale = 1 / (255 * std)
    return images.to(mean.dtype) * scale[:, None, None] - (mean / std)[:, None, None]


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
        return [self._show(k, view, images) for k, view in enumerate(self.views)]

    def _show(self, k: int, view: View, images: Tensor) -> Tensor:
        if view == View(self.source):
            return images
        across, down = self.get_buffer(f"across{k}"), self.get_buffer(f"down{k}")
        shown = down @ images.to(down.dtype) @ across.T
        return shown.clamp(0, 255)


def _resampling(source: int, view: View, start: float) -> Tensor:
    """Weights [view.size, source] of the antialiased bicubic filter that Pillow has."""
    step = view.side * source / view.size  # source pixels for each that is shown
    middle = start * source + (torch.arange(view.size) + 0.5) * step
    away = (torch.arange(source) + 0.5 - middle[:, None]).abs() / max(step, 1.0)
    near = (1.5 * away - 2.5) * away**2 + 1
    far = ((-0.5 * away + 2.5) * away - 4) * away + 2
    weights = torch.where(away < 1, near, torch.where(away < 2, far, 0.0))
    return weights / weights.sum(1, keepdim=True)


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


def read_tta(views: Sequence[Sequence[Any]]) -> tuple[View, ...]:
    """The tta views of a model file."""
    return tuple(View(*view) for view in views)
