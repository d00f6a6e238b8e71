"""Pictures held whole on the device as uint8, where they fit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from calmatch import ops
from calmatch.data.files import Images, Kept, taken
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
        """All pictures in order, as views take them."""
        yield from self.batches(size)

    def some(self, rows: Tensor) -> Resident:
        """Only these rows."""
        return Resident(self.images[rows.to(self.device)], self.device)


class Lent(Resident):
    """Pictures that stay in their file: beside a CPU, the system's own cache holds what is used."""

    def __init__(self, kept: Kept) -> None:
        super().__init__(kept.rows, torch.device("cpu"))
        self.kept = kept

    def chunk(self, number: int) -> Tensor:
        """uint8 pictures of chunk `number`."""
        return self.kept.take(self.plan(number))

    def batches(self, size: int) -> Iterator[Tensor]:
        """All pictures in order."""
        for rows in self.images.split(size):
            yield self.kept.file.take(rows)

    def some(self, rows: Tensor) -> Lent:
        """Only these rows."""
        return Lent(self.kept.some(rows))


Source = Resident | Stream
BLOCK = 4096  # pictures on their way to the device at once


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def source(
    images: Images,
    rows: Tensor,
    device: torch.device,
    kind: str,
    memory: float,
    workers: int,
) -> Source:
    """Resident where the rows need at most this share of free memory, streamed otherwise."""
    if isinstance(images, Kept) and device.type == "cpu" and kind != "stream":
        return Lent(images.some(rows))
    need = len(rows) * math.prod(images.shape[1:])
    if kind == "resident" or (kind == "auto" and need <= memory * free_memory(device)):
        return Resident(_placed(images, rows, device), device)
    return Stream(images, rows, device, workers)


def _placed(images: Images, rows: Tensor, device: torch.device) -> Tensor:
    """Pictures on the device, without a copy of all of them on the host."""
    if isinstance(images, Tensor) and device.type == "cpu":
        return images[rows]
    found = torch.empty(len(rows), *images.shape[1:], dtype=torch.uint8, device=device)
    for into, some in zip(found.split(BLOCK), rows.split(BLOCK), strict=True):
        into.copy_(taken(images, some))
    return found
