"""Several looks at a picture, whose mean is predicted: as it is, shifted, mirrored if views are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calmatch import spec
from calmatch.augment.basic import mirrored


class Look(NamedTuple):
    """How a picture is looked at."""

    right: int = 0  # pixels by which it is cut out further to the right, filled by reflection
    down: int = 0
    flipped: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        if self == PLAIN:
            return images
        height, width = images.shape[-2:]
        rows = mirrored(torch.arange(height, device=images.device) + self.down, height)
        columns = mirrored(torch.arange(width, device=images.device) + self.right, width)
        columns = columns.flip(0) if self.flipped else columns
        return images.index_select(-2, rows).index_select(-1, columns)


PLAIN = Look()


def chosen(number: int, weak: str) -> tuple[Look, ...]:
    """So many looks, fewer where the weak view has fewer to give: it says what is the same picture.

    >>> chosen(5, "flip|crop(4)")[2]
    Look(right=-4, down=0, flipped=True)
    >>> chosen(5, "flip")
    (Look(right=0, down=0, flipped=False), Look(right=0, down=0, flipped=True))
    """
    steps = {item.name: item for item in spec.chain(weak)}
    flip, shift = "flip" in steps, 0
    if crop := steps.get("crop"):
        shift = int([*crop.args, *crop.kwargs.values(), 4][0])
    if not shift:
        return (PLAIN, Look(flipped=True))[: number if flip else 1]
    others = Look(shift, 0), Look(-shift, 0, flip), Look(0, shift, flip), Look(0, -shift)
    return (PLAIN, *others)[:number]


def read(found: Sequence[Sequence[int]]) -> tuple[Look, ...]:
    """Looks from a model file."""
    return tuple(Look(right, down, bool(flipped)) for right, down, flipped in found)
