"""Pictures that do not fit the device: worker processes fetch them, copies overlap with compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as Rows

from calmatch.data.files import Images, taken

Plan = Callable[[int], Tensor]  # the rows of chunk k


class Stream:
    """The same chunks as `Resident`, fetched ahead by worker processes."""

    def __init__(self, images: Images, rows: Tensor, device: torch.device, workers: int) -> None:
        self.fetch = _Fetch(images, rows)
        self.device, self.workers = device, workers
        self.plan: Plan = lambda number: torch.tensor([number])
        self.next = -1
        self.chunks: Iterator[Tensor] = iter(())
        self.ready: Tensor | None = None
        # copies have a stream of their own, so that they overlap with compute
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.fetch.rows)

    def chunk(self, number: int) -> Tensor:
        """uint8 pictures of chunk `number`; the one after is on its way when this returns."""
        if number != self.next or self.ready is None:
            self.chunks = self._fetched(_From(self.plan, number))
            self.ready = self._copied()
        pictures = self.ready
        if self.side is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self.side)  # this chunk's copy; the next one starts below
            pictures.record_stream(now)
        self.next, self.ready = number + 1, self._copied()
        return pictures

    def batches(self, size: int) -> Iterator[Tensor]:
        """All pictures in order."""
        for pictures in self._fetched(list(torch.arange(len(self)).split(size))):
            yield pictures.to(self.device)

    unchanged = batches  # views take pictures as they are

    def some(self, rows: Tensor) -> Stream:
        """Only these rows."""
        return Stream(self.fetch.images, self.fetch.rows[rows], self.device, self.workers)

    def _copied(self) -> Tensor:
        pictures: Tensor = next(self.chunks)
        with torch.cuda.stream(self.side):  # without a device this does nothing
            return pictures.to(self.device, non_blocking=True)

    def _fetched(self, order: Sampler[Tensor] | list[Tensor]) -> Iterator[Tensor]:
        for found in self._loader(order):
            if isinstance(found, str):
                raise ValueError(found)
            yield found

    def _loader(self, order: Sampler[Tensor] | list[Tensor]) -> DataLoader[Tensor | str]:
        return DataLoader(
            self.fetch,
            batch_size=None,
            sampler=order,
            num_workers=self.workers,
            prefetch_factor=2 if self.workers else None,
            pin_memory=self.device.type == "cuda",
        )


class _Fetch(Rows[Tensor | str]):
    """What a worker does: pictures by row, or the sentence that says why not."""

    def __init__(self, images: Images, rows: Tensor) -> None:
        self.images, self.rows = images, rows

    def __getitem__(self, ids: Tensor) -> Tensor | str:
        try:
            return taken(self.images, self.rows[ids])
        except ValueError as error:  # raised here it would arrive as a worker's traceback
            return str(error)


class _From(Sampler[Tensor]):
    """Chunks from a given one on, without end."""

    def __init__(self, plan: Plan, start: int) -> None:
        self.plan, self.start = plan, start

    def __iter__(self) -> Iterator[Tensor]:
        number = self.start
        while True:
            yield self.plan(number)
            number += 1
