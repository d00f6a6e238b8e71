"""Strong augmentation of 32 px pictures: pictures a second, beside Pillow on the same cores.

Also writes a sheet that a person can look at: rows of one picture, ours above Pillow's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from results import row, show, write
from sklearn.datasets import load_sample_images

from calmatch import augment
from calmatch.augment import GREY, RANGES

STRONG = "crop(4)|flip|randaugment(3)|cutout(0.5)"
SIZE = 32


def patches(n: int) -> list[Image.Image]:
    """Pieces of two photographs."""
    chance = np.random.default_rng(0)
    images = []
    for k in range(n):
        photo = load_sample_images().images[k % 2]
        scale = int(chance.integers(2, 8))
        y, x = (chance.integers(0, side - SIZE * scale) for side in photo.shape[:2])
        piece = Image.fromarray(photo[y : y + SIZE * scale, x : x + SIZE * scale])
        images.append(piece.resize((SIZE, SIZE)))
    return images


def pillow_operation(name: str, picture: Image.Image, value: float) -> Image.Image:
    if name in ("brightness", "color", "contrast", "sharpness"):
        kind = getattr(ImageEnhance, name.capitalize())
        return kind(picture).enhance(value)
    if name in ("autocontrast", "equalize"):
        return getattr(ImageOps, name)(picture)
    if name == "posterize":
        return ImageOps.posterize(picture, int(value))
    if name == "solarize":
        return ImageOps.solarize(picture, value)
    if name == "rotate":
        return picture.rotate(value)
    if name == "identity":
        return picture
    matrix = {
        "shear_x": (1, value, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, value, 1, 0),
        "translate_x": (1, 0, value * SIZE, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, value * SIZE),
    }[name]
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix)


def pillow_strong(picture: Image.Image) -> Image.Image:
    """The same view as the field makes it, one picture at a time."""
    padded = np.pad(np.asarray(picture), ((4, 4), (4, 4), (0, 0)), mode="reflect")
    y, x = random.randint(0, 8), random.randint(0, 8)
    picture = Image.fromarray(padded[y : y + SIZE, x : x + SIZE])
    if random.random() < 0.5:
        picture = ImageOps.mirror(picture)
    for name in random.choices(list(RANGES), k=3):
        picture = pillow_operation(name, picture, random.uniform(*RANGES[name]))
    side = random.uniform(0, 0.5) * SIZE
    left, top = (int(max(0, random.uniform(0, SIZE) - side / 2)) for _ in range(2))
    box = (left, top, min(SIZE, left + side), min(SIZE, top + side))
    picture = picture.copy()
    ImageDraw.Draw(picture).rectangle(box, GREY)
    return picture


def _work(seconds: float) -> float:
    random.seed(0)
    pictures = patches(64)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for picture in pictures:
            pillow_strong(picture)
        done += len(pictures)
    return done / (time.perf_counter() - start)


def compare(batch: int, compiled: bool, rounds: int = 5) -> dict[str, object]:
    """The two take turns, so that a busy machine slows both."""
    threads = torch.get_num_threads()
    theirs, ours = [], []
    with multiprocessing.get_context("spawn").Pool(threads) as pool:
        pool.map(_work, [0.1] * threads)  # imports
        for _ in range(rounds):
            theirs.append(sum(pool.map(_work, [1.5] * threads)))
            ours.append(our_rate(torch.device("cpu"), batch, compiled))
    times = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    beside = {f"Pillow, {threads} processes": statistics.median(theirs)}
    how = {"aim": "2 times", "times": times, "all": [ours, theirs]}
    what = f"RandAugment at {SIZE} px, {threads} threads"
    return row(what, statistics.median(ours), "pictures/s", beside, **how)


def our_rate(device: torch.device, batch: int, compiled: bool) -> float:
    pieces = patches(256)
    images = torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) for p in pieces])
    images = images.repeat(-(-batch // 256), 1, 1, 1)[:batch].to(device)
    transform = augment.pipeline(STRONG)
    if compiled:
        transform = torch.compile(transform)
    generator = torch.Generator(device).manual_seed(0)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        transform(images, generator)
    wait()
    rates = []
    for _ in range(7):
        start = time.perf_counter()
        transform(images, generator)
        wait()
        rates.append(batch / (time.perf_counter() - start))
    return statistics.median(rates)


def sheet(path: Path, columns: int = 14) -> None:
    """One picture many times: the first row untouched, then ours, then Pillow's."""
    piece = patches(6)[5]
    tensor = torch.from_numpy(np.array(piece)).permute(2, 0, 1)
    ours = augment.pipeline(STRONG)(
        tensor.repeat(3 * columns, 1, 1, 1), torch.Generator().manual_seed(1)
    )
    random.seed(1)
    theirs = [pillow_strong(piece) for _ in range(3 * columns)]
    rows = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in ours] + theirs
    cell = 2 * SIZE + 4
    page = Image.new("RGB", (columns * cell, 6 * cell + 12), "white")
    for k, picture in enumerate(rows):
        row, column = divmod(k, columns)
        gap = 12 if row >= 3 else 0
        big = picture.resize((2 * SIZE, 2 * SIZE), Image.Resampling.NEAREST)
        page.paste(big, (column * cell, row * cell + gap))
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sheet", type=Path, help="write the picture sheet here")
    options.add_argument("--device", default="cpu")
    options.add_argument("--batch", type=int, default=0)
    options.add_argument("--compile", action="store_true")
    chosen = options.parse_args()
    if chosen.sheet:
        sheet(chosen.sheet)
        print(f"Sheet: {chosen.sheet} (three rows ours, three rows Pillow's)")
    device = torch.device(chosen.device)
    print(f"{STRONG} at {SIZE} px")
    if device.type == "cpu":
        rows = [compare(chosen.batch or 1024, chosen.compile)]
        show(rows)
        write("augment", rows, strong=STRONG)
        return
    for batch in (chosen.batch,) if chosen.batch else (1536, 8192, 32768):
        for compiled in (False, True):
            rate = our_rate(device, batch, compiled)
            kind = "compiled" if compiled else "eager"
            print(f"  {kind:<9}{batch:>7,} at once: {rate:12,.0f} pictures a second")


if __name__ == "__main__":
    main()
