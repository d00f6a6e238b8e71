"""Features of every picture by a frozen network: its looks and views, computed once and kept."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from calmatch import augment, checkpoint, data, log, nets
from calmatch.augment import looks
from calmatch.augment.basic import normalise
from calmatch.config import Config
from calmatch.core import Output
from calmatch.data import cache, files
from calmatch.data.batches import stream_seed
from calmatch.heads import VIEWS, Frozen, Store, tensor
from calmatch.setup import Parts

BLOCK = 512  # pictures whose features are kept together: what an interruption may cost


def freeze(config: Config, parts: Parts, quiet: bool = False, kept: bool = True) -> Frozen:
    """Compute (or find in the cache) the features of a run's network as it is now.

    Args:
        config: `frozen` says how many weak and how many strong views each picture gets, `looks`
            how many looks are averaged for the picture as it is.
        parts: of a run with the whole network.
        quiet: no progress bar.
        kept: keep the features in the cache.
    """
    dataset = data.build(config.dataset)
    make = functools.partial(_features, parts, config, kept=kept)
    at = len(looks.chosen(config.looks, config.weak))
    total = len(dataset.labels) * (at + 2 * config.frozen) + at * len(dataset.test_labels)
    with log.Bar("features", total, 0, quiet, unit="views") as bar:
        store = make(dataset.images, config.frozen, bar)
        tested = make(dataset.test_images, 0, bar)
    total = len(dataset.labels)
    rows = torch.arange(0, total, max(1, total // 5000))
    one = torch.full_like(rows, min(1, at - 1))  # one look: the mean of several varies less
    some = store.take(rows, one)[:, :, 0, 0].cpu().double()
    mean, std = some.mean(0), some.std(0).clamp_min(1e-3)
    statistics = ((mean / 255).tolist(), (std / 255).tolist())
    return Frozen(config, parts, store, dataset.labels, tested, statistics)


def _features(
    parts: Parts, config: Config, images: files.Images, views: int, bar: log.Bar, kept: bool
) -> Store:
    """All in float16."""
    net = copy.deepcopy(parts.judged.body).eval().to(memory_format=torch.channels_last)
    width = nets.feature_size(net, parts.size)
    key = _key(net, images, config, views) if kept else ""
    at = len(looks.chosen(config.looks, config.weak))
    found: dict[int, Tensor | cache.Mapped] = {}
    numbers = range(-(-len(images) // BLOCK))
    for number in random.Random().sample(numbers, len(numbers)):  # others may build them too
        rows = torch.arange(number * BLOCK, min((number + 1) * BLOCK, len(images)))
        shape, before = (len(rows), 1 + 2 * views, width), bar.done
        fill = functools.partial(_fill, net, parts, config, images, rows, bar)
        if kept:
            found[number] = cache.mapped(f"features-{key}-{number}", shape, fill, np.float16)
        else:
            array = np.zeros(shape, np.float16)
            fill(array)
            found[number] = torch.from_numpy(array)
        bar.advance(before + len(rows) * (shape[1] - 1 + at) - bar.done)  # what was in the cache
    blocks = [found[number] for number in numbers]
    if parts.device.type == "cpu":
        return Store(blocks, views)
    shape = (len(images), *tensor(blocks[0]).shape[1:])
    whole = torch.empty(shape, dtype=torch.float16, device=parts.device)
    for into, block in zip(whole.split(BLOCK), blocks, strict=True):
        into.copy_(tensor(block))
    return Store([whole], views)


@torch.inference_mode()
def _fill(
    net: nn.Module,
    parts: Parts,
    config: Config,
    images: files.Images,
    rows: Tensor,
    bar: log.Bar,
    found: NDArray[np.float16],
) -> None:
    """Features of a block of pictures; every view has its own stream of chance."""
    at = looks.chosen(config.looks, config.weak)
    device, number = parts.device, int(rows[0]) // BLOCK
    pictures = files.taken(images, rows).to(device)
    mean, std = (torch.tensor(v, device=device) for v in parts.statistics)
    views = (found.shape[1] - 1) // 2
    pipelines = {"weak": augment.pipeline(config.weak), "strong": augment.pipeline(config.strong)}
    for place in range(found.shape[1]):
        made = pictures
        if place:
            chance = Generator(device).manual_seed(stream_seed(config.seed, 7, place, number))
            made = pipelines[VIEWS[(place - 1) // views]](pictures, chance)
        size = nets.at_once(device)
        for start in range(0, len(made), size):
            seen = []
            for look in at if place == 0 else [looks.PLAIN]:
                some = normalise(look(made[start : start + size]), mean, std)
                out: Output = net(some.contiguous(memory_format=torch.channels_last))
                seen.append(out.features)
                bar.advance(len(some))
            found[start : start + size, place] = torch.stack(seen).mean(0).cpu().numpy()


def _key(net: nn.Module, images: files.Images, config: Config, views: int) -> str:
    """Everything that features depend on."""
    facts: Mapping[str, object] = {
        "weights": checkpoint.digest({k: v.cpu() for k, v in net.state_dict().items()}),
        "net": config.net,
        "weak": config.weak,
        "strong": config.strong,
        "views": views,
        "seed": config.seed,
    }
    if len(at := looks.chosen(config.looks, config.weak)) > 1:
        facts = {**facts, "looks": at}
    total = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    if isinstance(images, files.Files):
        total.update(files.stamp(images).encode())
    elif isinstance(images, files.Kept):
        total.update(images.key.encode() + images.rows.numpy().tobytes())
    else:
        total.update(str(tuple(images.shape)).encode())
        for block in images.split(4096):
            total.update(block.contiguous().numpy().data)
    return total.hexdigest()


def timed(config: Config, parts: Parts, pictures: Tensor) -> float:
    """Seconds that one view of one picture takes, augmentation included."""
    net = copy.deepcopy(parts.judged.body).eval().to(memory_format=torch.channels_last)
    found = np.zeros((len(pictures), 3, nets.feature_size(net, parts.size)), np.float16)
    with log.Bar("", 0, 0, True) as bar:
        rows = torch.arange(len(pictures))
        _fill(net, parts, config, pictures, rows, bar, found)  # the first time is slower
        began = time.perf_counter()
        _fill(net, parts, config, pictures, rows, bar, found)
    at = len(looks.chosen(config.looks, config.weak))
    return (time.perf_counter() - began) / len(pictures) / (2 + at)
