"""The same unlabelled pictures predicted plain, weakly and strongly changed: views.npz."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from calmatch import checkpoint
from calmatch.core import Transform
from calmatch.data.resident import Source

FILE = "views.npz"
PAIR = ("plain", "strong")  # whose agreement stands for accuracy


class Changed:
    """Pictures of a source, changed anew by a transform whenever they are read."""

    def __init__(self, pictures: Source, transform: Transform, seed: int) -> None:
        self.pictures, self.transform, self.seed = pictures, transform, seed

    def batches(self, size: int) -> Iterator[Tensor]:
        for number, some in enumerate(self.pictures.unchanged(size)):
            chance = Generator(some.device).manual_seed(self.seed + number)
            yield self.transform(some, chance)


class Views(NamedTuple):
    """What a network says of pictures in each view."""

    log_probs: Mapping[str, Tensor]  # [n, C] under plain, weak and strong
    truth: Tensor  # [n] class ids, -1 unknown: only to judge estimates by


def write(folder: Path, views: Views) -> None:
    """Keep the views in a run folder."""
    packed = io.BytesIO()
    arrays: dict[str, Any] = {
        name: found.float().numpy() for name, found in views.log_probs.items()
    }
    np.savez_compressed(packed, truth=views.truth.numpy(), **arrays)
    checkpoint.write(folder / FILE, packed.getvalue())


def load(folder: Path) -> Views | None:
    """The views of a run folder; None where there are none."""
    path = folder / FILE
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as found:
        held = {name: torch.from_numpy(found[name]) for name in found.files}
    return Views({k: v for k, v in held.items() if k != "truth"}, held["truth"])
