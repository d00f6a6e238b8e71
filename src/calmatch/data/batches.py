"""Which images are labelled, and every step's batch: pure functions of the seed and the step."""

import copy
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as Rows
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from calmatch import ops
from calmatch.augment import normalise
from calmatch.core import Batch, Method, RandomStream, Transform
from calmatch.data.images import CachedImages, Images, take_images

_MultiProcessingDataLoaderIter._shutdown = True  # of one that no shared memory let be made
FOLDS = 5  # at most
COPY_BLOCK = 4096  # images on their way to the device at once
Ids = NDArray[np.int64]
ChunkRows = Callable[[int], Tensor]  # the rows of chunk k
Read = Callable[[Tensor], Tensor]
Views = dict[str, list[Tensor]]  # of both sides, x and u


class Split(NamedTuple):
    """Rows of the training images; an image may be both labelled and unlabelled."""

    labelled: list[int]
    unlabelled: list[int]
    validation: list[int]


def split(
    labels: Sequence[int] | Ids,
    labelled: int | Sequence[int],
    seed: int,
    *,
    unlabelled: Sequence[int] | None = None,
    validation: float = 0.0,
    include_labelled: bool = True,
    whole_pool: bool = False,
    shuffle_first: bool = False,
) -> Split:
    """Shuffle each class in turn; the first are labelled, the last validation, the rest unlabelled.

    `labels` are class ids, -1 (unknown) always unlabelled; `labelled` is how many in all, the same
    number a class, or how many of each; of `unlabelled` ones all that are left by default. A share
    `validation` of each class is held out, with its labels. `whole_pool`: the unlabelled images are
    all of them, labelled ones included (STL-10); `shuffle_first`: as USB does with EuroSAT.
    """
    y = np.asarray(labels)
    order = np.arange(len(y))
    classes = int(y.max()) + 1
    if isinstance(labelled, int):
        if labelled < classes or labelled % classes:
            shared = f"{labelled} labels cannot be shared equally among {classes} classes"
            raise ValueError(f"{shared}; ask for a multiple of {classes}.")
        labelled = [labelled // classes] * classes
    random = np.random.RandomState(seed)  # the legacy generator, which makes the field's splits
    if shuffle_first:
        random.shuffle(order)
    chosen, rest, held = list[Ids](), list[Ids](), list[Ids]()
    for k in range(classes):
        ids = np.flatnonzero(y[order] == k)
        random.shuffle(ids)
        ids = order[ids]
        hold = math.floor(validation * len(ids))
        if labelled[k] + hold > len(ids):
            few = f"too few for {labelled[k]} labels and {hold} for validation; ask for fewer"
            raise ValueError(f"Class {k} has {len(ids)} training pictures, {few}.")
        stop = len(ids) - hold
        if unlabelled is not None:
            stop = min(stop, labelled[k] + unlabelled[k])
        chosen.append(ids[: labelled[k]])
        rest.append(ids[0 if whole_pool else labelled[k] : stop])
        held.append(ids[len(ids) - hold :])
    rest.append(np.flatnonzero(y < 0))
    pool = ([*chosen] if include_labelled else []) + rest
    return Split(*(np.concatenate(part).tolist() for part in (chosen, pool, held)))


def long_tail(head: int, gamma: float, classes: int) -> list[int]:
    """Images of each class from `head` down to head / |gamma|; a negative gamma reverses them.

    >>> long_tail(15, 10, 10)
    [15, 11, 8, 6, 5, 4, 3, 2, 1, 1]
    """
    ratio = float(np.power(1 / abs(gamma), 1 / (classes - 1)))
    numbers = [int(head * np.power(ratio, k)) for k in range(classes - 1)]
    numbers.append(int(head / abs(gamma)))
    return numbers[::-1] if gamma < 0 else numbers


def folds(labels: Sequence[int], seed: int) -> list[list[int]]:
    """Places of labels in two to five folds; a class's only label is in none.

    There are as many folds as labels of a typical class, and every class starts with the first, so
    that what is left to learn from stays as balanced as it was: a class that lost more labels than
    the others would be guessed less often, and just its labels are held out.

    >>> [len(fold) for fold in folds([0, 0, 0, 1, 1, 1, 2], 0)]
    [2, 2, 2]
    """
    random = np.random.default_rng([seed, 12])
    y = np.asarray(labels)
    classes, counts = np.unique(y, return_counts=True)
    number = int(np.clip(np.median(counts), 2, FOLDS))
    places: list[list[int]] = [[] for _ in range(number)]
    for k in classes:
        own = random.permutation(np.flatnonzero(y == k))
        for place, row in enumerate(own if len(own) > 1 else []):
            places[place % number].append(int(row))
    return [fold for fold in places if fold]


def leave_fold_out(chosen: Split, labels: Sequence[int], number: int, seed: int) -> Split:
    """The split without fold `number` (1, 2, ...) of its labels, which is the validation set then.

    The fold's images serve neither as labelled nor as unlabelled ones; `labels` are the class ids
    of the labelled rows, `seed` is that of the folds.
    """
    parts = folds(labels, seed)
    if number > len(parts):
        raise ValueError(f"These labels make {len(parts)} folds; --fold cannot be {number}.")
    held = {chosen.labelled[place] for place in parts[number - 1]}
    labelled, unlabelled = ([row for row in rows if row not in held] for rows in chosen[:2])
    return Split(labelled, unlabelled, sorted(held))


def stream_seed(seed: int, *stream: int) -> int:
    """A seed for one use of chance, unlike that of any other."""
    return int(np.random.SeedSequence([seed, *stream]).generate_state(1, np.uint64)[0])


class Batches:
    """The batch of every step, augmented many steps at a time on the device.

    Each rank makes the whole batch and keeps its share, so batches do not depend on their number.
    """

    def __init__(
        self,
        method: Method,
        labelled: "Source",
        labels: Tensor,
        unlabelled: "Source",
        views: Mapping[str, Transform],
        statistics: tuple[Sequence[float], Sequence[float]],
        *,
        batch: int,
        unlabelled_batch: int,
        seed: int,
        chunk: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.method, self.labels = method, labels
        self.sources = {"x": labelled, "u": unlabelled}
        self.views, self.seed, self.chunk = views, seed, chunk
        self.device = labelled.device
        self.mean, self.std = (torch.tensor(v, device=self.device, dtype=dtype) for v in statistics)
        self.orders = {
            "x": Order(len(labelled), batch, seed, RandomStream.LABELLED_ORDER),
            "u": Order(len(unlabelled), unlabelled_batch, seed, RandomStream.UNLABELLED_ORDER),
        }
        for side, source in self.sources.items():
            source.plan = functools.partial(self.rows, side, flat=True)
        self._chunks = functools.lru_cache(maxsize=1)(self._make)

    def __getitem__(self, step: int) -> Batch:
        number, place = divmod(step, self.chunk)
        views, ids = self._chunks(number)
        own = {side: [ops.rank_share(view[place]) for view in views[side]] for side in "xu"}
        rows = {side: ops.rank_share(ids[side][place]) for side in "xu"}
        time = torch.full((), step, device=self.device)
        return self._batch(own, rows, step=time, draws=self._draws(step))

    def whole(self, number: int) -> Batch:
        """All steps of a chunk at once: every tensor with an axis of steps in front."""
        first, end = number * self.chunk, (number + 1) * self.chunk
        draws = [self._draws(step) for step in range(first, end)]
        stacked = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
        steps = torch.arange(first, end, device=self.device)
        return self._batch(*self._chunks(number), step=steps, draws=stacked)

    def rows(self, side: str, number: int, flat: bool = False) -> Tensor:
        """Rows of every step of a chunk: [chunk, rows], or all of them in a row."""
        steps = range(number * self.chunk, (number + 1) * self.chunk)
        return (torch.cat if flat else torch.stack)([self.orders[side][k] for k in steps])

    def _make(self, number: int) -> tuple[Views, dict[str, Tensor]]:
        """All views of one chunk of steps, each [chunk, rows, 3, H, W]."""
        ids = {side: self.rows(side, number) for side in self.orders}
        views: Views = {"x": [], "u": []}
        for side, names, stream in (
            ("x", self.method.x_views, RandomStream.LABELLED_VIEWS),
            ("u", self.method.u_views, RandomStream.UNLABELLED_VIEWS),
        ):
            images = self.sources[side].chunk(number) if names else torch.empty(0)
            for place, name in enumerate(names):
                chance = Generator(self.device)
                chance.manual_seed(stream_seed(self.seed, stream, place, number))
                view = normalise(self.views[name](images, chance), self.mean, self.std)
                views[side].append(view.unflatten(0, ids[side].shape))
        return views, ids

    def _batch(self, views: Views, ids: Mapping[str, Tensor], **chance: Any) -> Batch:
        x, u = (tuple(views[side]) for side in "xu")
        x_id, u_id = (ops.sent(ids[side], self.device) for side in "xu")
        return Batch(x, self.labels[x_id], u, x_id, u_id, **chance)

    def _draws(self, step: int) -> dict[str, Tensor]:
        """The method's random numbers; those with a row for every image are shared out."""
        if type(self.method).draws is Method.draws:
            return {}
        seed = stream_seed(self.seed, RandomStream.METHOD, step)
        sizes = (self.orders[side].batch for side in "xu")
        draws = self.method.draws(Generator(self.device).manual_seed(seed), *sizes)
        shared = [name for name in draws if name.startswith(("x_", "u_"))]
        return draws | {name: ops.rank_share(draws[name]) for name in shared}


class Order:
    """Rows of step k: a new permutation each pass, cut to whole batches so rows are distinct."""

    def __init__(self, rows: int, batch: int, seed: int, stream: int) -> None:
        self.rows, self.batch, self.seed, self.stream = rows, batch, seed, stream
        self.steps = rows // batch if batch else 1
        self._pass = functools.lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, step: int) -> Tensor:
        number, place = divmod(step, self.steps)
        return self._pass(number)[place * self.batch : (place + 1) * self.batch]

    def _permutation(self, number: int) -> Tensor:
        generator = Generator().manual_seed(stream_seed(self.seed, self.stream, number))
        return torch.randperm(self.rows, generator=generator)


def place_images(
    images: Images, rows: Tensor, device: torch.device, kind: str, memory: float, workers: int
) -> "Source":
    """Resident where the rows need at most this share of free memory, streamed otherwise."""
    if isinstance(images, CachedImages) and device.type == "cpu" and kind != "stream":
        # they stay in their file, of which the system's own cache holds what is used
        return Resident(images.rows[rows], device, images.file.take)
    need = len(rows) * math.prod(images.shape[1:])
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ()):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        free = 4 << 30  # macOS and Windows do not say
    if kind != "resident" and (kind == "stream" or need > memory * free):
        return Stream(images, rows, device, workers)
    if isinstance(images, Tensor) and device.type == "cpu":
        return Resident(images[rows], device)
    placed = torch.empty(len(rows), *images.shape[1:], dtype=torch.uint8, device=device)
    for into, some in zip(placed.split(COPY_BLOCK), rows.split(COPY_BLOCK), strict=True):
        into.copy_(take_images(images, some))  # never all of them on the host
    return Resident(placed, device)


class Resident:
    """Images on the device, taken by row; or rows of images that `read` takes from a file."""

    def __init__(self, images: Tensor, device: torch.device, read: Read = lambda x: x) -> None:
        self.images, self.device, self.read = images.to(device), device, read
        self.plan: ChunkRows = lambda number: torch.tensor([number])

    def __len__(self) -> int:
        return len(self.images)

    def chunk(self, number: int) -> Tensor:
        """uint8 images of chunk `number`."""
        return self.read(self.images[ops.sent(self.plan(number), self.device)])

    def batches(self, size: int) -> Iterator[Tensor]:
        """All images in order."""
        yield from map(self.read, self.images.split(size))

    def some(self, rows: Tensor) -> Self:
        other = copy.copy(self)
        other.images = self.images[rows.to(self.device)]
        return other


class Stream:
    """The same chunks as `Resident`, fetched ahead by worker processes."""

    def __init__(self, images: Images, rows: Tensor, device: torch.device, workers: int) -> None:
        self.fetch = _Fetch(images, rows)
        self.device, self.workers = device, workers
        self.plan: ChunkRows = lambda number: torch.tensor([number])
        self.next = -1
        self.chunks: Iterator[Tensor] = iter(())
        self.ready: Tensor | None = None
        # copies have a stream of their own, so that they overlap with compute
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.fetch.rows)

    def chunk(self, number: int) -> Tensor:
        """uint8 images of chunk `number`; the one after is on its way when this returns."""
        if number != self.next or self.ready is None:
            self.chunks = self._load(map(self.plan, itertools.count(number)))
            self.ready = self._copy_next()
        images = self.ready
        if self.side is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self.side)  # this chunk's copy; the next one starts below
            images.record_stream(now)
        self.next, self.ready = number + 1, self._copy_next()
        return images

    def batches(self, size: int) -> Iterator[Tensor]:
        for images in self._load(torch.arange(len(self)).split(size)):
            yield images.to(self.device)

    def some(self, rows: Tensor) -> "Stream":
        return Stream(self.fetch.images, self.fetch.rows[rows], self.device, self.workers)

    def _copy_next(self) -> Tensor:
        with torch.cuda.stream(self.side):  # without a device this does nothing
            return next(self.chunks).to(self.device, non_blocking=True)

    def _load(self, order: Iterable[Tensor]) -> Iterator[Tensor]:
        how: Any = {"batch_size": None, "sampler": order, "num_workers": self.workers}
        how |= {"prefetch_factor": 2} if self.workers else {}
        for images in DataLoader(self.fetch, pin_memory=self.device.type == "cuda", **how):
            if isinstance(images, str):
                raise ValueError(images)
            yield images


class _Fetch(Rows[Tensor | str]):
    """What a worker does: images by row, or the sentence that says why not."""

    def __init__(self, images: Images, rows: Tensor) -> None:
        self.images, self.rows = images, rows

    def __getitem__(self, ids: Tensor) -> Tensor | str:
        try:
            return take_images(self.images, self.rows[ids])
        except ValueError as error:  # raised here it would arrive as a worker's traceback
            return str(error)


Source = Resident | Stream
