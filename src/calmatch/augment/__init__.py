"""Augmentations of uint8 batches: every picture gets its own draw, no branch on data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Generator, Tensor

from calmatch import spec
from calmatch.augment import basic, randaugment
from calmatch.core import Transform

OPS: Mapping[str, Callable[..., Tensor]] = {
    "identity": basic.identity,
    "flip": basic.flip,
    "vflip": basic.vflip,
    "crop": basic.crop,
    "translate": basic.translate,
    "rotate": basic.rotate,
    "brightness": basic.brightness,
    "contrast": basic.contrast,
    "cutout": basic.cutout,
    "randaugment": randaugment.randaugment,
}


def pipeline(text: str) -> Transform:
    """The transforms a spec chains, `"flip|crop(4)|cutout(0.5)"` for example."""
    steps = [spec.bind(item, OPS, "augmentation", given=2) for item in spec.chain(text)]

    def transform(images: Tensor, generator: Generator) -> Tensor:
        for step in steps:
            images = step(images, generator)
        return images

    return transform
