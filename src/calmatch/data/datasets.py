"""Datasets by name, and the two that need no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from calmatch import spec
from calmatch.data import official
from calmatch.data.dataset import Dataset, last_share
from calmatch.data.packed import packed
from calmatch.data.pictures import pictures


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


DATASETS: Mapping[str, Callable[..., Dataset]] = {
    "digits": digits,
    "cifar10": official.cifar10,
    "cifar100": official.cifar100,
    "cifar100_lt": official.cifar100_lt,
    "stl10": official.stl10,
    "svhn": official.svhn,
    "eurosat": official.eurosat,
    "folder": official.folder,
    "packed": packed,
    "pictures": pictures,
    "synthetic": synthetic,
}


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
