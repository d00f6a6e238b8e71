"""Features of a frozen network, of any number of images: blocks on disk, made here or by Ray."""

import copy
import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calmatch import console, nets
from calmatch.data import images as stored
from calmatch.data.images import ImageFiles, Images
from calmatch.fit.portfolio import Extractor, Features
from calmatch.nets import fuse
from calmatch.predict import spread_items
from calmatch.training.checkpoint import digest_tensors

BLOCK = 512  # images whose features are kept together: what an interruption may cost


class FeatureBlocks(NamedTuple):
    """Features in files of the cache; what is asked for comes into memory, and nothing else."""

    key: str
    views: int
    width: int  # numbers of a view
    last: int  # how many of them are the last layer's
    number: int  # images in the files
    rows: NDArray[np.int64]  # those that could be decoded

    def place(self, block: int) -> tuple[str, tuple[int, int, int]]:
        """The name and shape of a file."""
        images = min(BLOCK, self.number - block * BLOCK)
        return f"features-{self.key}-{block}", (images, self.views, self.width)

    def some(self, rows: Any = slice(None)) -> Features:
        """Of these images."""
        places = self.rows[rows]
        joined = np.empty((len(places), self.views, self.width), np.float32)
        for block in np.unique(places // BLOCK):
            own = np.flatnonzero(places // BLOCK == block)
            name, shape = self.place(int(block))
            file = stored.open_array(stored.cache_folder() / f"{name}.npy", shape, np.float16)
            joined[own] = file.tensor.numpy()[places[own] % BLOCK]
        last, stages = np.split(joined.swapaxes(0, 1), [self.last], 2)
        return Features([*last], [*stages] if self.width > self.last else None)


def compute_blocks(
    extractor: Extractor, images: Images, quiet: bool, ray: Any = None
) -> FeatureBlocks:
    """Features of all images: cached, from here, or from Ray; NaN of files that do not decode."""
    blank = torch.zeros(1, *images.shape[1:], dtype=torch.uint8)
    views, width = extractor(blank).shape[1:]
    last, every = nets.feature_size(extractor.body, extractor.size), torch.arange(len(images))
    blocks = FeatureBlocks(_key(extractor, images), views, width, last, len(images), every.numpy())
    sent = _send_blocks(ray, extractor, images, blocks)
    good = []

    def fill(rows: Tensor, features: NDArray[Any]) -> None:
        place = int(rows[0])
        if ray is not None:
            data = next(item["features"] for item in sent if item["start"] == place)
            features[:] = np.frombuffer(data, np.float16).reshape(features.shape)
            return
        read, batches = partial(_read, images), rows.split(nets.batch_size(extractor.device))
        compute = partial(_compute, extractor)
        for some in stored.compute_ordered(batches, read, compute, extractor.device):
            features[place - int(rows[0]) :][: len(some)] = some
            place += len(some)
            bar.update(place)

    with console.ProgressBar("features", len(images), 0, quiet, unit="pictures") as bar:
        for number, rows in enumerate(every.split(BLOCK)):
            name, shape = blocks.place(number)
            block = stored.cached_array(name, shape, partial(fill, rows), np.float16)
            good.append(rows[~block.tensor[:, 0, 0].isnan()].numpy())
            bar.update(int(rows[-1]) + 1)
    return blocks._replace(rows=np.concatenate(good)) if isinstance(images, ImageFiles) else blocks


def _read(images: Images, rows: Tensor) -> tuple[Tensor, list[int]]:
    """Images, and which of them are blank because they cannot be decoded."""
    if not isinstance(images, ImageFiles):
        return stored.take_images(images, rows), []
    pixels, broken = torch.zeros(len(rows), *images.shape[1:], dtype=torch.uint8), []
    for place, row in enumerate(rows.tolist()):
        try:
            pixels[place] = torch.from_numpy(images.image(row))
        except ValueError:
            broken.append(place)
    return pixels, broken


def _compute(extractor: Extractor, some: tuple[Tensor, list[int]]) -> NDArray[Any]:
    features = extractor(some[0]).cpu().numpy()
    features[some[1]] = np.nan
    return features


def _send_blocks(
    ray: Any, extractor: Extractor, images: Any, blocks: FeatureBlocks
) -> Iterator[dict[str, Any]]:
    """What is not in the cache, in order; names go to the workers, and features come back."""
    items = []
    for start in range(0, len(images), BLOCK):
        names = images.names[start : start + BLOCK]
        if stored.find_array(*blocks.place(start // BLOCK), np.float16) is None:
            items.append({"start": start, "names": json.dumps(names)})
    body = copy.deepcopy(extractor.body).to("cpu")
    bare = extractor._replace(body=body, quick=body, device=torch.device("cpu"))
    bare = bare.showing(extractor.views.views)
    place = (images.root.resolve(), images.size, images.squash)
    yield from spread_items(ray, items, _RayWorker, ray.put(bare), *place)


class _RayWorker:
    """One process on one node: it holds the network and turns names into features."""

    def __init__(self, extractor: Any, root: Path, size: int, squash: bool) -> None:
        import ray

        torch.set_num_threads(1)  # Ray starts one worker for each core
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        bare: Extractor = ray.get(extractor)
        body = bare.body.to(device)
        self.extractor = bare._replace(body=body, quick=fuse(body, bare.size), device=device)
        self.extractor = self.extractor.showing(bare.views.views)
        self.images = partial(ImageFiles, root, size=size, squash=squash)

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        images = self.images(tuple(json.loads(item["names"])))
        batches = torch.arange(len(images)).split(nets.batch_size(self.extractor.device))
        parts = [_compute(self.extractor, _read(images, rows)) for rows in batches]
        return {**item, "features": np.concatenate(parts).astype(np.float16).tobytes()}


def _key(extractor: Extractor, images: Images) -> str:
    """Everything that features depend on."""
    state = {k: v.cpu() for k, v in extractor.body.state_dict().items()}
    facts = (digest_tensors(state), extractor.mean, extractor.std, extractor.views.views)
    total = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    if isinstance(images, ImageFiles):
        total.update(stored.stamp_files(images).encode())
    elif isinstance(images, stored.CachedImages):
        total.update(images.key.encode() + images.rows.numpy().tobytes())
    else:
        total.update(images.contiguous().numpy().tobytes())
    return total.hexdigest()
