"""A frozen network: features of every image, computed once and kept, and a last layer that learns.

Stored features pass for images of one pixel and many channels, so the batches, the loop and the
evaluation are the ones that whole networks use."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from calmatch import augment, console, methods, nets
from calmatch.augment import normalise
from calmatch.core import Method, Output, Task, Transform
from calmatch.data.batches import Batches, Resident, Source, Split, stream_seed
from calmatch.data.dataset import build
from calmatch.data.images import (
    CachedImages,
    ImageFiles,
    Images,
    MappedArray,
    cached_array,
    stamp_files,
    take_images,
)
from calmatch.training import checkpoint
from calmatch.training.config import Config
from calmatch.training.setup import Parts, Statistics, build_losses, reachable_threshold

VIEW_NAMES = ("weak", "strong")


class FeatureStore(NamedTuple):
    """Features [N, 1 + 2 V, D] of each picture: as it is (or looks), V weak views, V strong ones.

    Beside a CPU the blocks stay in their files, and only what a step needs is read.
    """

    blocks: Sequence[Tensor | MappedArray]  # equally many rows in each, fewer in the last
    views: int

    @property
    def width(self) -> int:
        return block_tensor(self.blocks[0]).shape[-1]

    @property
    def device(self) -> torch.device:
        return block_tensor(self.blocks[0]).device

    def __len__(self) -> int:
        return sum(len(block) for block in self.blocks)

    def plain(self, rows: Tensor) -> Tensor:
        return self.take(rows, torch.zeros_like(rows))

    def take(self, rows: Tensor, places: Tensor) -> Tensor:
        """One of its views of each row, as a picture of one pixel."""
        if len(self.blocks) == 1:
            return _as_pixel(_take_block(self.blocks[0], rows, places))
        number = rows // len(self.blocks[0])
        order, counts = number.argsort(), number.bincount(minlength=len(self.blocks))
        found = torch.empty(len(rows), self.width, dtype=block_tensor(self.blocks[0]).dtype)
        for block, some in zip(self.blocks, order.split(counts.tolist()), strict=True):
            if len(some):
                found[some] = _take_block(block, rows[some] % len(self.blocks[0]), places[some])
        return _as_pixel(found)

    def view(self, name: str) -> Transform:
        """What draws one stored view of each row."""
        start = 1 + VIEW_NAMES.index(name) * self.views

        def transform(rows: Tensor, generator: Generator) -> Tensor:
            which = torch.randint(
                self.views, (len(rows),), generator=generator, device=generator.device
            )
            return self.take(rows, start + which)

        return transform


def block_tensor(block: Tensor | MappedArray) -> Tensor:
    return block.tensor if isinstance(block, MappedArray) else block


def _take_block(block: Tensor | MappedArray, rows: Tensor, places: Tensor) -> Tensor:
    return block.take(rows, places) if isinstance(block, MappedArray) else block[rows, places]


def _as_pixel(features: Tensor) -> Tensor:
    return features.float()[:, :, None, None]


class FeatureRows(Resident):
    """Some rows of a store, as a source of pictures."""

    def __init__(self, store: FeatureStore, rows: Tensor, pictures: Source | None = None) -> None:
        super().__init__(rows, store.device)
        self.store = store
        self.pictures = pictures  # what a person sees

    def some(self, rows: Tensor) -> FeatureRows:
        """Only these rows."""
        pictures = None if self.pictures is None else self.pictures.some(rows)
        return FeatureRows(self.store, self.images[rows.to(self.device)], pictures)

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
class FrozenRun:
    """A run whose network is frozen: its features, and parts of a run for any rows of them."""

    config: Config
    base: Parts  # with the whole network
    store: FeatureStore
    labels: Tensor  # [N] class ids, -1 unknown
    tested: FeatureStore  # the test pictures, as they are
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
            FeatureRows(self.store, rows["labelled"]),
            own.to(device),
            FeatureRows(self.store, rows["unlabelled"], pool),
            {name: self.store.view(name) for name in VIEW_NAMES},
            self.statistics,
            batch=batch,
            unlabelled_batch=min(config.batch * config.ratio, len(split.unlabelled)),
            seed=config.seed,
            chunk=config.chunk,
        )
        pictures, truth = base.sets["test"]
        tested: Source = FeatureRows(self.tested, torch.arange(len(truth)), pictures)
        sets = {"test": (tested, truth)}
        if len(held := rows["validation"]):
            sets["validation"] = (FeatureRows(self.store, held), self.labels[held])
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


FEATURE_BLOCK = 512  # pictures whose features are kept together: what an interruption may cost


def freeze_network(
    config: Config, parts: Parts, quiet: bool = False, kept: bool = True
) -> FrozenRun:
    """Compute (or find in the cache) the features of a run's network as it is now.

    Args:
        config: `frozen` says how many weak and how many strong views each picture gets, `looks`
            how many looks are averaged for the picture as it is.
        parts: of a run with the whole network.
        quiet: no progress bar.
        kept: keep the features in the cache.
    """
    dataset = build(config.dataset)
    make = functools.partial(_compute_features, parts, config, kept=kept)
    at = len(augment.tta_views(config.looks, config.weak))
    total = len(dataset.labels) * (at + 2 * config.frozen) + at * len(dataset.test_labels)
    with console.ProgressBar("features", total, 0, quiet, unit="views") as bar:
        store = make(dataset.images, config.frozen, bar)
        tested = make(dataset.test_images, 0, bar)
    total = len(dataset.labels)
    rows = torch.arange(0, total, max(1, total // 5000))
    one = torch.full_like(rows, min(1, at - 1))  # one look: the mean of several varies less
    some = store.take(rows, one)[:, :, 0, 0].cpu().double()
    mean, std = some.mean(0), some.std(0).clamp_min(1e-3)
    statistics = ((mean / 255).tolist(), (std / 255).tolist())
    return FrozenRun(config, parts, store, dataset.labels, tested, statistics)


def _compute_features(
    parts: Parts, config: Config, images: Images, views: int, bar: console.ProgressBar, kept: bool
) -> FeatureStore:
    """All in float16."""
    net = copy.deepcopy(parts.judged.body).eval().to(memory_format=torch.channels_last)
    width = nets.feature_size(net, parts.size)
    key = _features_key(net, images, config, views) if kept else ""
    at = len(augment.tta_views(config.looks, config.weak))
    found: dict[int, Tensor | MappedArray] = {}
    numbers = range(-(-len(images) // FEATURE_BLOCK))
    for number in random.Random().sample(numbers, len(numbers)):  # others may build them too
        rows = torch.arange(number * FEATURE_BLOCK, min((number + 1) * FEATURE_BLOCK, len(images)))
        shape, before = (len(rows), 1 + 2 * views, width), bar.done
        fill = functools.partial(_fill_features, net, parts, config, images, rows, bar)
        if kept:
            found[number] = cached_array(f"features-{key}-{number}", shape, fill, np.float16)
        else:
            array = np.zeros(shape, np.float16)
            fill(array)
            found[number] = torch.from_numpy(array)
        bar.advance(before + len(rows) * (shape[1] - 1 + at) - bar.done)  # what was in the cache
    blocks = [found[number] for number in numbers]
    if parts.device.type == "cpu":
        return FeatureStore(blocks, views)
    shape = (len(images), *block_tensor(blocks[0]).shape[1:])
    whole = torch.empty(shape, dtype=torch.float16, device=parts.device)
    for into, block in zip(whole.split(FEATURE_BLOCK), blocks, strict=True):
        into.copy_(block_tensor(block))
    return FeatureStore([whole], views)


@torch.inference_mode()
def _fill_features(
    net: nn.Module,
    parts: Parts,
    config: Config,
    images: Images,
    rows: Tensor,
    bar: console.ProgressBar,
    found: NDArray[np.float16],
) -> None:
    """Features of a block of pictures; every view has its own stream of chance."""
    at = augment.tta_views(config.looks, config.weak)
    device, number = parts.device, int(rows[0]) // FEATURE_BLOCK
    pictures = take_images(images, rows).to(device)
    mean, std = (torch.tensor(v, device=device) for v in parts.statistics)
    views = (found.shape[1] - 1) // 2
    pipelines = {"weak": augment.pipeline(config.weak), "strong": augment.pipeline(config.strong)}
    for place in range(found.shape[1]):
        made = pictures
        if place:
            chance = Generator(device).manual_seed(stream_seed(config.seed, 7, place, number))
            made = pipelines[VIEW_NAMES[(place - 1) // views]](pictures, chance)
        size = nets.batch_size(device)
        for start in range(0, len(made), size):
            seen = []
            for look in at if place == 0 else [augment.PLAIN]:
                some = normalise(look(made[start : start + size]), mean, std)
                out: Output = net(some.contiguous(memory_format=torch.channels_last))
                seen.append(out.features)
                bar.advance(len(some))
            found[start : start + size, place] = torch.stack(seen).mean(0).cpu().numpy()


def _features_key(net: nn.Module, images: Images, config: Config, views: int) -> str:
    """Everything that features depend on."""
    facts: Mapping[str, object] = {
        "weights": checkpoint.digest_tensors({k: v.cpu() for k, v in net.state_dict().items()}),
        "net": config.net,
        "weak": config.weak,
        "strong": config.strong,
        "views": views,
        "seed": config.seed,
    }
    if len(at := augment.tta_views(config.looks, config.weak)) > 1:
        facts = {**facts, "looks": at}
    total = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    if isinstance(images, ImageFiles):
        total.update(stamp_files(images).encode())
    elif isinstance(images, CachedImages):
        total.update(images.key.encode() + images.rows.numpy().tobytes())
    else:
        total.update(str(tuple(images.shape)).encode())
        for block in images.split(4096):
            total.update(block.contiguous().numpy().data)
    return total.hexdigest()


def time_view(config: Config, parts: Parts, pictures: Tensor) -> float:
    """Seconds that one view of one picture takes, augmentation included."""
    net = copy.deepcopy(parts.judged.body).eval().to(memory_format=torch.channels_last)
    found = np.zeros((len(pictures), 3, nets.feature_size(net, parts.size)), np.float16)
    with console.ProgressBar("", 0, 0, True) as bar:
        rows = torch.arange(len(pictures))
        _fill_features(net, parts, config, pictures, rows, bar, found)  # the first time is slower
        began = time.perf_counter()
        _fill_features(net, parts, config, pictures, rows, bar, found)
    at = len(augment.tta_views(config.looks, config.weak))
    return (time.perf_counter() - began) / len(pictures) / (2 + at)


def freeze_vectors(
    config: Config, features: Tensor, labels: Tensor, classes: int, views: int = 4
) -> FrozenRun:
    """A frozen run on vectors: a view adds noise, a strong one also mixes in other rows.

    Args:
        config: of the head's training.
        features: [N, D], of a variance about 1.
        labels: [N] class ids, -1 unknown.
        classes: how many there are.
        views: weak and as many strong ones of each vector.
    """
    chance = Generator().manual_seed(stream_seed(config.seed, 8))
    x = features
    made = [x]
    for name in VIEW_NAMES:
        for _ in range(views):
            view = x + 0.1 * torch.randn(x.shape, generator=chance)
            if name == "strong":
                others = view[torch.randperm(len(x), generator=chance)]
                view = torch.where(torch.rand(x.shape, generator=chance) < 0.2, others, view)
            made.append(view)
    store = FeatureStore([torch.stack(made, 1)], views)
    rows = Split((labels >= 0).nonzero()[:, 0].tolist(), list(range(len(x))), [])
    width = x.shape[1]
    task = Task(classes, len(rows.labelled), len(x), width, config.steps, (1,) * classes)
    method = methods.build(config.method, task)
    labelled_loss, unlabelled_loss = build_losses(config, method)
    method.threshold = reachable_threshold(config, method, unlabelled_loss)
    nothing = FeatureRows(store, torch.arange(0))
    net = nets.Net(Head(width, classes), {})
    base = Parts(
        device=torch.device("cpu"),
        classes=tuple(str(k) for k in range(classes)),
        statistics=([0.0] * width, [1 / 255] * width),
        split=rows,
        sets={"test": (nothing, labels[:0])},
        truth=labels,
        net=net,
        ema=net,
        momentum=0.0,
        method=method,
        labelled_loss=labelled_loss,
        unlabelled_loss=unlabelled_loss,
        batches=Batches(
            method,
            nothing,
            labels[:0],
            nothing,
            {},
            ((0.0,), (1.0,)),
            batch=1,
            unlabelled_batch=1,
            seed=0,
            chunk=1,
        ),
        size=1,
        title=config.method,
        notes=[],
    )
    return FrozenRun(config, base, store, labels, store, base.statistics)
