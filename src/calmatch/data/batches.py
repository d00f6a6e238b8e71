"""Batches as a pure function of (seed, step): nothing to save, nothing to restore."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Generator, Tensor

from calmatch import ops, parallel
from calmatch.augment.basic import normalise
from calmatch.core import Batch, Method, Transform
from calmatch.data.resident import Source


def stream_seed(seed: int, *stream: int) -> int:
    """A seed for one use of chance, unlike that of any other."""
    state = np.random.SeedSequence([seed, *stream]).generate_state(1, np.uint64)
    return int(state[0])


class Order:
    """Rows of step k: a new permutation each pass, cut to whole batches so rows are distinct."""

    def __init__(self, rows: int, batch: int, seed: int, stream: int) -> None:
        self.rows, self.batch, self.seed, self.stream = rows, batch, seed, stream
        self.steps = rows // batch if batch else 1
        self._pass = functools.lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, number: int) -> Tensor:
        generator = Generator().manual_seed(stream_seed(self.seed, self.stream, number))
        return torch.randperm(self.rows, generator=generator)

    def __getitem__(self, step: int) -> Tensor:
        number, place = divmod(step, self.steps)
        return self._pass(number)[place * self.batch : (place + 1) * self.batch]


class Batches:
    """The batch of every step, augmented many steps at a time on the device.

    Each rank makes the whole batch and keeps its share, so batches do not depend on their number.
    """

    def __init__(
        self,
        method: Method,
        labelled: Source,
        labels: Tensor,
        unlabelled: Source,
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
        self.mean, self.std = (
            torch.tensor(values, device=self.device, dtype=dtype) for values in statistics
        )
        self.orders = {
            "x": Order(len(labelled), batch, seed, 1),
            "u": Order(len(unlabelled), unlabelled_batch, seed, 2),
        }
        for side, source in self.sources.items():
            source.plan = functools.partial(self._flat, side)
        self._chunks = functools.lru_cache(maxsize=1)(self._make)

    def __getitem__(self, step: int) -> Batch:
        number, place = divmod(step, self.chunk)
        views, ids = self._chunks(number)
        x_id, u_id = (ops.sent(parallel.mine(ids[side][place]), self.device) for side in "xu")
        return Batch(
            x=tuple(parallel.mine(view[place]) for view in views["x"]),
            y=self.labels[x_id],
            u=tuple(parallel.mine(view[place]) for view in views["u"]),
            x_id=x_id,
            u_id=u_id,
            step=torch.full((), step, device=self.device),
            draws=self._draws(step),
        )

    def whole(self, number: int) -> Batch:
        """All steps of a chunk at once: every tensor with an axis of steps in front."""
        views, ids = self._chunks(number)
        x_id, u_id = (ops.sent(ids[side], self.device) for side in "xu")
        first = number * self.chunk
        draws = [self._draws(step) for step in range(first, first + self.chunk)]
        return Batch(
            x=tuple(views["x"]),
            y=self.labels[x_id],
            u=tuple(views["u"]),
            x_id=x_id,
            u_id=u_id,
            step=torch.arange(first, first + self.chunk, device=self.device),
            draws={name: torch.stack([draw[name] for draw in draws]) for name in draws[0]},
        )

    def rows(self, side: str, number: int) -> Tensor:
        """Rows of every step of a chunk: [chunk, rows]."""
        steps = range(number * self.chunk, (number + 1) * self.chunk)
        return torch.stack([self.orders[side][k] for k in steps])

    def _make(self, number: int) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """All views of one chunk of steps, each [chunk, rows, 3, H, W]."""
        ids = {side: self.rows(side, number) for side in self.orders}
        names = {"x": self.method.x_views, "u": self.method.u_views}
        made: dict[str, list[Tensor]] = {"x": [], "u": []}
        for side, stream in (("x", 3), ("u", 4)):
            if not names[side]:
                continue
            pictures = self.sources[side].chunk(number)
            for place, name in enumerate(names[side]):
                chance = Generator(self.device)
                chance.manual_seed(stream_seed(self.seed, stream, place, number))
                view = normalise(self.views[name](pictures, chance), self.mean, self.std)
                made[side].append(view.unflatten(0, ids[side].shape))
        return made, ids

    def _flat(self, side: str, number: int) -> Tensor:
        return self.rows(side, number).flatten()

    def _draws(self, step: int) -> dict[str, Tensor]:
        if type(self.method).draws is Method.draws:
            return {}
        chance = Generator(self.device).manual_seed(stream_seed(self.seed, 5, step))
        b, r = (self.orders[side].batch for side in "xu")
        draws = self.method.draws(chance, b, r)
        shared: Callable[[str], bool] = lambda name: not name.startswith(("x_", "u_"))  # noqa: E731
        return {k: v if shared(k) else parallel.mine(v) for k, v in draws.items()}
