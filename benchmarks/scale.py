"""`calmatch fit` over many small files: time, memory, disk, and what a million would take.

    python benchmarks/scale.py [--pictures 200000]

Two fits, one of a quarter of the pictures, with features by Ray's workers on this machine; what
lies between them is what a further picture costs. Memory is that of the process that fits; each
worker takes its own, whatever the number of pictures. The line for 1,000,000 is an extrapolation,
not a measurement. `--engine local` looks at a sample.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image


class Cost(NamedTuple):
    """What a fit took."""

    seconds: float
    memory: float  # bytes at the peak
    disk: float  # bytes of the cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", type=int, default=200_000)
    parser.add_argument("--engine", default="ray")
    parser.add_argument("--size", default="64", help="pixels that the network sees")
    options = parser.parse_args()
    numbers, costs = (options.pictures // 4, options.pictures), []
    with tempfile.TemporaryDirectory() as place:
        for number in numbers:
            home = Path(place) / str(number)
            write_pictures(home / "pictures", number)
            costs.append(measure(home, options.size, options.engine))
            show(f"{number:,} pictures", costs[-1])
    few, many = costs
    each = [(b - a) / (numbers[1] - numbers[0]) for a, b in zip(few, many, strict=True)]
    whole = [b + c * (1_000_000 - numbers[1]) for b, c in zip(many, each, strict=True)]
    show("1,000,000 (extrapolated)", Cost(*whole))


def show(title: str, cost: Cost) -> None:
    sizes = f"{cost.memory / 1e9:6.2f} GB of memory, {cost.disk / 1e9:7.2f} GB of cache"
    print(f"{title:<26} {cost.seconds:9.0f} s, {sizes}", flush=True)


def measure(home: Path, size: str, engine: str) -> Cost:
    """One fit in a process of its own; children of this one are seen by their largest."""
    words = ["fit", "pictures", "--labels", "labels.csv", "--out", "run", "--minutes", "600"]
    words += ["--size", size, "--tta", "1", "--engine", engine, "--quiet"]
    place = {**os.environ, "CALMATCH_CACHE": str(home / "cache")}
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "calmatch", *words], cwd=home, env=place, check=True)
    seconds = time.monotonic() - began
    memory = 1024.0 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    disk = sum(path.stat().st_size for path in (home / "cache").rglob("*") if path.is_file())
    return Cost(seconds, memory, disk)


def write_pictures(folder: Path, number: int) -> None:
    rows = []
    for k in range(number):
        pixels = np.random.default_rng(k).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        pixels[k % 5 % 4, k % 5 // 4] = (250, 40, 20)  # what tells five classes apart
        path = folder / f"{k // 1000:04d}" / f"{k:07d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC).save(path, quality=85)
        if k < 50:
            rows.append((path.relative_to(folder).as_posix(), f"kind {k % 5}"))
    with (folder.parent / "labels.csv").open("w", newline="") as table:
        csv.writer(table).writerows([("file", "label"), *rows])


if __name__ == "__main__":
    main()
