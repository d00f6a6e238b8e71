"""Small folders of pictures for tests of `fit`, and short ways to fit them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from calmatch import augment
from calmatch.data.dataset import build
from calmatch.fit import fit
from calmatch.model import load_model
from calmatch.options import FitOptions
from calmatch.runs import Run


def blobs(folder: Path, each: int = 5, spare: int = 60, foreign: int = 0, classes: int = 3) -> Path:
    """Class folders of coloured blobs, and others that belong to no class."""
    data = build(f"synthetic(classes={classes}, per_class=120, size=16, noise=60)")
    strange = build("synthetic(classes=5, per_class=40, size=16, noise=60, seed=9)")
    for k in range(classes):
        rows = (data.labels == k).nonzero()[:, 0]
        for n, row in enumerate(rows[: each + spare // classes].tolist()):
            place = folder / (f"kind {k}" if n < each else "unlabelled") / f"{k}-{n}.png"
            save(data.images[row], place)
    for n in range(foreign):
        save(strange.images[n], folder / "unlabelled" / f"foreign-{n}.png")
    return folder


def save(image: torch.Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)


def options(root: Path, **changes: Any) -> FitOptions:
    """A fit of a second: the whole of a tiny network learns."""
    settings: dict[str, Any] = {"net": "tiny", "device": "cpu", "size": 16}
    if not changes.get("frozen"):
        settings["steps"] = 20
    return FitOptions(root, **settings | changes)


def fit_into(wanted: FitOptions, out: Path) -> Run:
    return fit(dataclasses.replace(wanted, out=out, quiet=True))


def accuracy(folder: Path, classes: int = 3) -> float:
    """On pictures the model has never met."""
    data = build(f"synthetic(classes={classes}, per_class=120, size=16, noise=60)")
    model = load_model(folder)
    shown = augment.Views([augment.View(model.size)], 16)(data.test_images)[0]
    guesses = model.probabilities(shown.round().byte()).argmax(1)
    return float((guesses == data.test_labels).double().mean())
