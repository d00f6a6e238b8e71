"""Datasets by name: uint8 pictures, labels, class names, channel statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from calmatch import spec


class Dataset(NamedTuple):
    """Pictures to train on and to test on."""

    images: Tensor  # uint8 [N, 3, H, W]
    labels: Tensor  # [N] class ids, -1 unknown
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


def digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 doubled to 16 x 16.

    The last third of each class in file order is the test set (other writers than most of the
    rest, so it is harder than a random third).
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    grey = (loaded.images * (255 / 16)).round().astype(np.uint8)
    images = torch.from_numpy(grey).repeat_interleave(2, 1).repeat_interleave(2, 2)
    images = images[:, None].repeat(1, 3, 1, 1)
    labels = torch.from_numpy(loaded.target).long()
    test = last_share(labels, 1 / 3)
    return Dataset(
        images[~test],
        labels[~test],
        images[test],
        labels[test],
        tuple(str(name) for name in loaded.target_names),
        mean=(0.305, 0.305, 0.305),
        std=(0.376, 0.376, 0.376),
    )


def synthetic(
    *, classes: int = 4, per_class: int = 60, size: int = 8, noise: float = 40.0, seed: int = 0
) -> Dataset:
    """Coloured blobs with noise, one pattern a class: for tests."""
    generator = torch.Generator().manual_seed(seed)
    patterns = 255 * torch.rand(classes, 3, 4, 4, generator=generator)
    patterns = torch.nn.functional.interpolate(patterns, (size, size), mode="nearest")
    labels = torch.arange(classes).repeat(per_class)
    pixels = patterns[labels] + noise * torch.randn(len(labels), 3, size, size, generator=generator)
    images = pixels.clamp(0, 255).to(torch.uint8)
    test = last_share(labels, 0.25)
    names = tuple(f"class {k}" for k in range(classes))
    return Dataset(images[~test], labels[~test], images[test], labels[test], names)


def last_share(labels: Tensor, share: float) -> Tensor:
    """True for the last share of each class in the given order."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for k in labels.unique():
        ids = (labels == k).nonzero()[:, 0]
        chosen[ids[len(ids) - round(share * len(ids)) :]] = True
    return chosen


DATASETS: Mapping[str, Callable[..., Dataset]] = {"digits": digits, "synthetic": synthetic}


def build(text: str) -> Dataset:
    """The dataset a spec names."""
    bound = spec.bind(spec.parse(text), DATASETS, "dataset")
    try:
        built = bound()
    except TypeError as error:
        raise spec.SpecError(f"{text!r} does not make a dataset: {error}.") from error
    if not isinstance(built, Dataset):
        raise spec.SpecError(f"{text!r} is not a Dataset.")
    return built
