"""A dataset in one small file, to be sent where it is needed: JPEG sheets, so slightly changed."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from calmatch.data import cache
from calmatch.data.dataset import Dataset
from calmatch.data.files import taken
from calmatch.data.official import root

SIDE = 16  # a sheet holds 16 x 16 pictures; their sides are multiples of 8, so JPEG's blocks
# never cross from one picture into another
QUALITIES = range(50, 101)


def packed(*, name: str, size: int = 0, most: int = 0) -> Dataset:
    """A dataset that `tools/pack.py` has made one file of, under the data folder's `packed/`.

    Args:
        name: of the file, without its ending.
        size: pixels to resize to (bilinear); 0: as packed.
        most: training pictures that are used, the first ones; 0: all.
    """
    path = root() / "packed" / f"{name}.npz"
    if not path.is_file() or Path(name).name != name:
        raise ValueError(f"There is no packed dataset {path}; tools/pack.py makes one.")
    try:
        with np.load(path, allow_pickle=False) as found:
            held: dict[str, Any] = {key: found[key] for key in found.files}
        note = json.loads(str(held["note"]))
        ends, labels, tested = held["ends"], held["labels"], held["test_labels"]
        sheets, side = held["sheets"].tobytes(), size or note["size"]

        def fill(found: NDArray[np.uint8]) -> None:
            images = _unpacked(sheets, ends, note["size"], len(found))
            found[:] = _resized(images, side).numpy()

        key = hashlib.blake2b(sheets, digest_size=12).hexdigest()
        images = cache.array(
            f"packed-{key}-{side}", (len(labels) + len(tested), 3, side, side), fill
        )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} is damaged or no packed dataset: {error}.") from error
    mean, std = (tuple(float(v) for v in row) for row in note["statistics"])
    used = min(most or len(labels), len(labels))
    return Dataset(
        images[:used],
        torch.from_numpy(labels[:used]).long(),
        images[len(labels) :],
        torch.from_numpy(tested).long(),
        tuple(str(name) for name in note["classes"]),
        (mean[0], mean[1], mean[2]),
        (std[0], std[1], std[2]),
        whole_pool=note["whole_pool"],
        shuffle_first=note["shuffle_first"],
    )


def pack(dataset: Dataset, limit: int) -> tuple[bytes, dict[str, Any]]:
    """The file of a dataset, with the best JPEG quality that stays within `limit` bytes.

    Returns:
        Its content, and what is said in it beside pictures: quality, noise, classes.
    """
    both = (dataset.images, dataset.test_images)
    images = torch.cat([taken(some, torch.arange(len(some))) for some in both])
    size = images.shape[-1]
    if images.shape[-2] != size or size % 8:
        raise ValueError("Only square pictures whose side is a multiple of 8 can be packed.")
    quality = _quality(images, limit - 9 * len(images) - 50_000)  # labels and names need room too
    sheets = [_sheet(some, quality) for some in images.split(SIDE * SIDE)]
    blob = b"".join(sheets)
    ends = np.cumsum([len(sheet) for sheet in sheets])
    change = (_unpacked(blob, ends, size, len(images)).float() - images.float()).square().mean()
    note = {
        "size": size,
        "quality": quality,
        "psnr": round(float(10 * torch.log10(255**2 / change.clamp_min(1e-9))), 2),
        "classes": list(dataset.classes),
        "statistics": [list(dataset.mean), list(dataset.std)],
        "whole_pool": dataset.whole_pool,
        "shuffle_first": dataset.shuffle_first,
    }
    filled = io.BytesIO()
    np.savez(
        filled,
        sheets=np.frombuffer(blob, np.uint8),
        ends=ends,
        labels=dataset.labels.numpy(),
        test_labels=dataset.test_labels.numpy(),
        note=json.dumps(note),
    )
    assert filled.tell() <= limit, "the estimate of a quality's size was too low"
    return filled.getvalue(), note


def _quality(images: Tensor, room: int) -> int:
    """The best quality whose sheets need at most so many bytes, all of them measured."""
    low, high = 0, len(QUALITIES) - 1
    while low < high:
        middle = (low + high + 1) // 2
        sheets = images.split(SIDE * SIDE)
        if sum(len(_sheet(some, QUALITIES[middle])) for some in sheets) <= room:
            low = middle
        else:
            high = middle - 1
    return QUALITIES[low]


def _sheet(images: Tensor, quality: int) -> bytes:
    size = images.shape[-1]
    full = torch.zeros(SIDE * SIDE, 3, size, size, dtype=torch.uint8)
    full[: len(images)] = images
    tiles = full.view(SIDE, SIDE, 3, size, size).permute(0, 3, 1, 4, 2)
    picture = Image.fromarray(tiles.reshape(SIDE * size, SIDE * size, 3).numpy())
    packed = io.BytesIO()
    picture.save(packed, "JPEG", quality=quality, subsampling=0)  # colours as fine as brightness
    return packed.getvalue()


def _unpacked(blob: bytes, ends: Any, size: int, number: int) -> Tensor:
    def sheets() -> Iterator[Tensor]:
        start = 0
        for end in map(int, ends):
            with Image.open(io.BytesIO(blob[start:end])) as picture:
                pixels = torch.from_numpy(np.array(picture))
            tiles = pixels.view(SIDE, size, SIDE, size, 3).permute(0, 2, 4, 1, 3)
            yield tiles.reshape(-1, 3, size, size)
            start = end

    return torch.cat(list(sheets()))[:number]


def _resized(images: Tensor, size: int) -> Tensor:
    if size == images.shape[-1]:
        return images
    return torch.cat(
        [
            F.interpolate(some.float(), (size, size), mode="bilinear", antialias=True)
            .round()
            .clamp(0, 255)
            .to(torch.uint8)
            for some in images.split(1024)
        ]
    )
