"""What a dataset is: uint8 pictures, labels, class names, channel statistics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from calmatch.data.files import Images


class Dataset(NamedTuple):
    """Pictures to train on and to test on."""

    images: Images  # uint8 [N, 3, H, W], or what reads them when asked for
    labels: Tensor  # [N] class ids, -1 unknown
    test_images: Images
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    labelled_counts: tuple[int, ...] | None = None  # labels of each class, where that is the point
    unlabelled_counts: tuple[int, ...] | None = None
    whole_pool: bool = False  # unlabelled are all pictures, the labelled ones once more (STL-10)
    shuffle_first: bool = False  # USB shuffles EuroSAT's list before it splits


def last_share(labels: Tensor, share: float) -> Tensor:
    """True for the last share of each class in the given order."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for k in labels.unique():
        ids = (labels == k).nonzero()[:, 0]
        chosen[ids[len(ids) - round(share * len(ids)) :]] = True
    return chosen
