"""A frozen network: the last layer learns from stored features, a few views of every picture.

Stored features pass for pictures of one pixel and many channels, so the batches, the loop and the
evaluation are the ones that whole networks use.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from calmatch import methods, nets
from calmatch.config import Config
from calmatch.core import Method, Output, Task, Transform
from calmatch.data import cache
from calmatch.data.batches import Batches
from calmatch.data.resident import Resident, Source
from calmatch.data.split import Split
from calmatch.setup import Parts, Statistics

VIEWS = ("weak", "strong")


class Store(NamedTuple):
    """Features [N, 1 + 2 V, D] of each picture: as it is (or looks), V weak views, V strong ones.

    Beside a CPU the blocks stay in their files, and only what a step needs is read.
    """

    blocks: Sequence[Tensor | cache.Mapped]  # equally many rows in each, fewer in the last
    views: int

    @property
    def width(self) -> int:
        return tensor(self.blocks[0]).shape[-1]

    @property
    def device(self) -> torch.device:
        return tensor(self.blocks[0]).device

    def __len__(self) -> int:
        return sum(len(block) for block in self.blocks)

    def plain(self, rows: Tensor) -> Tensor:
        return self.take(rows, torch.zeros_like(rows))

    def take(self, rows: Tensor, places: Tensor) -> Tensor:
        """One of its views of each row, as a picture of one pixel."""
        if len(self.blocks) == 1:
            return _pixel(_some(self.blocks[0], rows, places))
        number = rows // len(self.blocks[0])
        order, counts = number.argsort(), number.bincount(minlength=len(self.blocks))
        found = torch.empty(len(rows), self.width, dtype=tensor(self.blocks[0]).dtype)
        for block, some in zip(self.blocks, order.split(counts.tolist()), strict=True):
            if len(some):
                found[some] = _some(block, rows[some] % len(self.blocks[0]), places[some])
        return _pixel(found)

    def view(self, name: str) -> Transform:
        """What draws one stored view of each row."""
        start = 1 + VIEWS.index(name) * self.views

        def transform(rows: Tensor, generator: Generator) -> Tensor:
            which = torch.randint(
                self.views, (len(rows),), generator=generator, device=generator.device
            )
            return self.take(rows, start + which)

        return transform


def tensor(block: Tensor | cache.Mapped) -> Tensor:
    return block.tensor if isinstance(block, cache.Mapped) else block


def _some(block: Tensor | cache.Mapped, rows: Tensor, places: Tensor) -> Tensor:
    return block.take(rows, places) if isinstance(block, cache.Mapped) else block[rows, places]


def _pixel(features: Tensor) -> Tensor:
    return features.float()[:, :, None, None]


class Rows(Resident):
    """Some rows of a store, as a source of pictures."""

    def __init__(self, store: Store, rows: Tensor, pictures: Source | None = None) -> None:
        super().__init__(rows, store.device)
        self.store = store
        self.pictures = pictures  # what a person sees

    def some(self, rows: Tensor) -> Rows:
        """Only these rows."""
        pictures = None if self.pictures is None else self.pictures.some(rows)
        return Rows(self.store, self.images[rows.to(self.device)], pictures)

    def batches(self, size: int) -> Iterator[Tensor]:
        """Features of the pictures as they are, in order."""
        for rows in self.images.split(size):
            yield self.store.plain(rows)

    def unchanged(self, size: int) -> Iterator[Tensor]:
        """Row numbers in order: the views of features are stored too."""
        yield from self.images.split(size)


class Head(nn.Module):
    """One linear layer that starts at zero: every class equally likely."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, pixels: Tensor) -> Output:
        features = pixels[:, :, 0, 0]
        return Output(self.linear(features), features)


@dataclass
class Frozen:
    """A run whose network is frozen: its features, and parts of a run for any rows of them."""

    config: Config
    base: Parts  # with the whole network
    store: Store
    labels: Tensor  # [N] class ids, -1 unknown
    tested: Store  # the test pictures, as they are
    statistics: tuple[Sequence[float], Sequence[float]]

    def parts(self, split: Split, config: Config | None = None) -> Parts:
        """The parts of a run on these rows; a ValueError if the method cannot do without pixels."""
        config, base = config or self.config, self.base
        device, classes = base.device, len(base.classes)
        features = self.store.width
        rows = {name: torch.tensor(ids) for name, ids in split._asdict().items()}
        own = self.labels[rows["labelled"]]
        task = Task(
            classes=classes,
            labelled=len(own),
            unlabelled=len(split.unlabelled),
            features=features,
            steps=config.steps,
            counts=tuple(int((own == k).sum()) for k in range(classes)),
        )
        method = methods.build(config.method, task)
        if method.turns:
            raise ValueError(
                f"{config.method} turns pictures, which stored features cannot show; "
                f"use freematch, or train the whole network (--frozen 0)."
            )
        method.picture = (features, 1, 1)
        method.threshold = base.method.threshold  # which may know of a margin
        net = nets.Net(Head(features, classes), method.heads()).to(device)
        momentum = method.ema if config.ema is None else config.ema
        own_pool = split.unlabelled == base.split.unlabelled
        pool = base.batches.sources["u"] if own_pool else None
        batch = min(config.batch, len(own))
        batches = Batches(
            method.to(device),
            Rows(self.store, rows["labelled"]),
            own.to(device),
            Rows(self.store, rows["unlabelled"], pool),
            {name: self.store.view(name) for name in VIEWS},
            self.statistics,
            batch=batch,
            unlabelled_batch=min(config.batch * config.ratio, len(split.unlabelled)),
            seed=config.seed,
            chunk=config.chunk,
        )
        pictures, truth = base.sets["test"]
        tested: Source = Rows(self.tested, torch.arange(len(truth)), pictures)
        sets = {"test": (tested, truth)}
        if len(held := rows["validation"]):
            sets["validation"] = (Rows(self.store, held), self.labels[held])
        made = replace(
            base,
            statistics=self.statistics,
            split=split,
            sets=sets,
            truth=self.labels[rows["unlabelled"]].to(device),
            net=net,
            ema=copy.deepcopy(net).requires_grad_(False) if momentum else net,
            momentum=momentum,
            method=method,
            batches=batches,
        )
        made.whole = functools.partial(self.joined, made)
        return made

    def joined(self, parts: Parts) -> tuple[nets.Net, Statistics] | None:
        """The whole network with a trained head, and the statistics of its pictures.

        Layers of the method's own learned from scaled features and stay behind; None where it
        predicts with them.
        """
        if type(parts.method).predict is not Method.predict:
            return None
        net = nets.Net(copy.deepcopy(self.base.net.body), {})
        last = nets.classifier(net.body, self.store.width, len(self.base.classes))
        head = parts.judged.body
        assert isinstance(head, Head)
        mean, std = (255 * torch.tensor(v, dtype=torch.float64) for v in self.statistics)
        weight = head.linear.weight.detach().cpu().double() / std
        bias = head.linear.bias.detach().cpu().double() - weight @ mean
        with torch.no_grad():
            last.weight.copy_(weight)
            last.bias.copy_(bias)
        return net, self.base.statistics
