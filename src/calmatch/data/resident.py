"""Pictures held whole on the device as uint8, where they fit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from calmatch import ops
from calmatch.data.files import Files
from calmatch.data.stream import Plan, Stream


class Resident:
    """Pictures on the device, taken by row."""

    def __init__(self, images: Tensor, device: torch.device) -> None:
        self.images = images.to(device)
        self.device = device
        self.plan: Plan = lambda number: torch.tensor([number])

    def __len__(self) -> int:
        return len(self.images)

    def chunk(self, number: int) -> Tensor:
        """uint8 pictures of chunk `number`."""
        return self.images[ops.sent(self.plan(number), self.device)]

    def batches(self, size: int) -> Iterator[Tensor]:
        """All pictures in order."""
        yield from self.images.split(size)

    def unchanged(self, size: int) -> Iterator[Tensor]:
        """All pictures in order, as views take them; features (`heads.Rows`) stay rows."""
        yield from self.images.split(size)

    def some(self, rows: Tensor) -> Resident:
        """Only these rows."""
        return Resident(self.images[rows.to(self.device)], self.device)


Source = Resident | Stream


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def source(
    images: Tensor | Files,
    rows: Tensor,
    device: torch.device,
    kind: str,
    memory: float,
    workers: int,
) -> Source:
    """Resident where the rows need at most this share of free memory, streamed otherwise."""
    need = len(rows) * math.prod(images.shape[1:])
    if kind == "resident" or (kind == "auto" and need <= memory * free_memory(device)):
        return Resident(taken(images, rows), device)
    return Stream(images, rows, device, workers)


def taken(images: Tensor | Files, rows: Tensor) -> Tensor:
    """Some pictures as one tensor."""
    return images.take(rows.tolist()) if isinstance(images, Files) else images[rows]
