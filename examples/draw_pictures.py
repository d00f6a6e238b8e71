"""Draws a folder of pictures to try `calmatch label` on: python examples/draw_pictures.py FOLDER"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

KINDS = ("boat", "fish", "house", "tree")
SIZE = 160


def draw_folder(folder: Path, number: int = 240, seed: int = 0) -> dict[str, str]:
    """Draw so many pictures; what each of them shows, by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    truth = {f"drawing-{k:04d}.jpg": draw.choice(KINDS) for k in range(number)}
    for name, kind in truth.items():
        draw_one(kind, draw).save(folder / name, quality=88)
    return truth


def draw_one(kind: str, draw: random.Random) -> Image.Image:
    """A boat, a fish, a house or a tree, of any colour, somewhere in the picture."""

    def colour(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randint(low, high) for _ in range(3))

    image = Image.new("RGB", (2 * SIZE, 2 * SIZE), colour(150, 255))
    pen = ImageDraw.Draw(image)
    ground = draw.randint(210, 270)
    pen.rectangle((0, ground, 2 * SIZE, 2 * SIZE), colour(90, 200))
    for _ in range(draw.randint(0, 12)):  # clouds, stones, whatever
        x, y, r = draw.randint(0, 320), draw.randint(0, 320), draw.randint(3, 12)
        pen.ellipse((x - r, y - r / 2, x + r, y + r / 2), colour(120, 240))
    x, y, s = draw.randint(110, 210), ground + draw.randint(-20, 20), draw.uniform(0.7, 1.25)
    first, second = colour(10, 150), colour(60, 220)

    def at(*points: tuple[float, float]) -> list[tuple[float, float]]:
        return [(x + s * px, y + s * py) for px, py in points]

    if kind == "boat":
        pen.polygon(at((-70, -30), (70, -30), (45, 5), (-45, 5)), first)
        pen.line(at((0, -30), (0, -130)), first, 5)
        pen.polygon(at((6, -125), (6, -40), (60, -40)), second)
    elif kind == "fish":
        turn = draw.choice((-1, 1))
        pen.ellipse([*at((-60, -95))[0], *at((60, -35))[0]], first)
        pen.polygon(at((turn * 50, -65), (turn * 95, -100), (turn * 95, -30)), second)
        pen.ellipse([*at((-turn * 38 - 6, -78))[0], *at((-turn * 38 + 6, -66))[0]], (250, 250, 250))
    elif kind == "house":
        pen.rectangle([*at((-55, -75))[0], *at((55, 0))[0]], first)
        pen.polygon(at((-68, -75), (68, -75), (0, -130)), second)
        pen.rectangle([*at((-12, -40))[0], *at((14, 0))[0]], second)
        pen.rectangle([*at((26, -60))[0], *at((44, -40))[0]], (250, 240, 170))
    else:
        pen.rectangle([*at((-9, -60))[0], *at((9, 0))[0]], first)
        for k in range(7):
            angle = 2 * math.pi * k / 7
            px, py = 30 * math.cos(angle), -95 + 26 * math.sin(angle)
            pen.ellipse([*at((px - 30, py - 30))[0], *at((px + 30, py + 30))[0]], second)
    turned = image.rotate(draw.uniform(-8, 8), Image.Resampling.BICUBIC)
    return turned.crop((25, 25, 295, 295)).resize((SIZE, SIZE))


if __name__ == "__main__":
    drawn = draw_folder(Path(sys.argv[1]))
    print(f"{len(drawn)} pictures in {sys.argv[1]}")
