"""A few small pictures beside a run's predictions, for people to look at: examples.npz."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from calmatch import checkpoint, ops, runfiles

FILE = "examples.npz"
SIDE = 64  # pixels of a thumbnail's longer side
BINS = 15  # as ECE has
EACH = 3  # right and as many wrong ones of every bin of confidence
WRONG = 24  # most confidently wrong ones
ASKED = 24  # unlabelled ones whose label would teach most
POOL = 5000  # unlabelled pictures looked at; predicting all could take long

Take = Callable[[Tensor], Tensor]  # rows -> uint8 [n, 3, H, W]


class Seen(NamedTuple):
    """Predicted pictures, of which some may be shown."""

    log_probs: Tensor  # [N, C]
    take: Take  # pictures by row of log_probs
    rows: Tensor | None = None  # [N] their rows in the set they are from; 0..N-1 by default
    files: Sequence[str] | None = None  # [N] where they have names
    whole: int = 0  # pictures of the set they are a sample of; N by default


class Examples(NamedTuple):
    """What examples.npz holds: judged pictures, and unlabelled ones worth a label."""

    rows: list[int]  # of the judged pictures, in predictions.npz
    pictures: Tensor  # uint8 [n, 3, h, w]
    asked_rows: list[int]
    asked_pictures: Tensor
    asked_log_probs: Tensor
    asked_files: list[str]  # empty where there are no names
    looked: int  # unlabelled pictures among which they were chosen ...
    whole: int  # ... of so many


def write(folder: Path, judged: Seen, labels: Tensor, unlabelled: Seen | None = None) -> None:
    """Choose pictures worth looking at and keep their thumbnails in the run folder.

    Args:
        folder: the run folder.
        judged: pictures whose truth is known, in the order of predictions.npz.
        labels: [N] class ids of the judged pictures.
        unlabelled: pictures without a label (or a sample of them; see `sample`).
    """
    shown = chosen(judged.log_probs, labels)
    arrays: dict[str, Any] = {
        "rows": shown.numpy(),
        "pictures": _thumbnails(judged.take, shown).numpy(),
    }
    if unlabelled is not None and len(unlabelled.log_probs):
        asked = worth_a_label(unlabelled.log_probs)
        rows = asked if unlabelled.rows is None else unlabelled.rows[asked]
        number = len(unlabelled.log_probs)
        arrays |= {
            "asked_rows": rows.numpy(),
            "asked_pictures": _thumbnails(unlabelled.take, asked).numpy(),
            "asked_log_probs": unlabelled.log_probs[asked].float().numpy(),
            "asked_of": np.array([number, unlabelled.whole or number]),
        }
        if unlabelled.files is not None:
            arrays["asked_files"] = np.array([unlabelled.files[k] for k in asked.tolist()])
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    checkpoint.write(folder / FILE, packed.getvalue())


def load(folder: Path) -> Examples | None:
    """The pictures of a run folder; None where there are none."""
    path = folder / FILE
    if not path.is_file():
        return None
    held = runfiles.read_arrays(path)
    if not _whole(held):
        raise ValueError(f"{path} does not hold pictures with their rows; remove it.")
    none = np.zeros((0, 3, 1, 1), dtype=np.uint8)
    looked, whole = held.get("asked_of", (0, 0))
    return Examples(
        held["rows"].tolist(),
        torch.from_numpy(held["pictures"]),
        held.get("asked_rows", np.zeros(0, dtype=np.int64)).tolist(),
        torch.from_numpy(held.get("asked_pictures", none)),
        torch.from_numpy(held.get("asked_log_probs", np.zeros((0, 2), dtype=np.float32))),
        [str(file) for file in held.get("asked_files", ())],
        int(looked),
        int(whole),
    )


def _whole(held: Mapping[str, Any]) -> bool:
    """Whether arrays from a file have the types and shapes that `write` gives them."""
    if not {"rows", "pictures"} <= held.keys():
        return False
    parts = [(held["rows"], held["pictures"])]
    if "asked_rows" in held:
        if not {"asked_pictures", "asked_log_probs", "asked_of"} <= held.keys():
            return False
        parts.append((held["asked_rows"], held["asked_pictures"]))
        number = len(held["asked_rows"]) if held["asked_rows"].ndim else -1
        probs, counts, files = held["asked_log_probs"], held["asked_of"], held.get("asked_files")
        if (probs.ndim, probs.dtype.kind, probs.shape[:1]) != (2, "f", (number,)):
            return False
        if counts.shape != (2,) or counts.dtype.kind != "i" or not (counts >= 0).all():
            return False
        if files is not None and (files.shape != (number,) or files.dtype.kind != "U"):
            return False
    elif any(name.startswith("asked") for name in held):
        return False
    return all(
        rows.ndim == 1
        and rows.dtype.kind == "i"
        and bool((rows >= 0).all())
        and pictures.dtype == np.uint8
        and pictures.ndim == 4
        and pictures.shape[:2] == (len(rows), 3)
        and (len(rows) == 0 or min(pictures.shape) > 0)
        and max(pictures.shape[2:]) <= SIDE
        for rows, pictures in parts
    )


def chosen(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Rows worth showing: the most confidently wrong, and some right and wrong ones of every bin.

    The order within a bin is a fixed shuffle, because test sets are often sorted by class.
    """
    confidence, guess = log_probs.double().log_softmax(-1).exp().max(-1)
    right = guess == labels
    found = set(worst(confidence, right).tolist())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    place = ops.bin_of(confidence, BINS)
    for k in place.unique().tolist():
        for kind in (right, ~right):
            found |= set(order[(kind & (place == k))[order]][:EACH].tolist())
    return torch.tensor(sorted(found), dtype=torch.long)


def worst(confidence: Tensor, right: Tensor, number: int = WRONG) -> Tensor:
    """Rows of the most confidently wrong pictures, most confident first."""
    wrong = (~right).nonzero()[:, 0]
    return wrong[confidence[wrong].argsort(descending=True, stable=True)[:number]]


def worth_a_label(log_probs: Tensor, number: int = ASKED) -> Tensor:
    """Rows of pictures whose label would teach most, best first: uncertain and unlike each other.

    Each next picture has the largest product of its entropy and its Hellinger distance to the
    nearest one chosen, so that one frequent confusion does not fill the list.
    """
    log_p = log_probs.double().log_softmax(-1)
    probs = log_p.exp()
    entropy = -(probs * log_p).nan_to_num(0.0).sum(-1)
    roots = probs.sqrt()
    far = torch.ones_like(entropy)
    picked: list[int] = []
    for _ in range(min(number, len(entropy))):
        score = entropy * far
        score[picked] = -1.0
        picked.append(int(score.argmax()))
        distance = (1 - roots @ roots[picked[-1]]).clamp_min(0).sqrt()
        far = torch.minimum(far, distance)
    return torch.tensor(picked, dtype=torch.long)


def sample(rows: Tensor, seed: int, number: int = POOL) -> Tensor:
    """At most so many of these rows, chosen by seed, in order."""
    if len(rows) <= number:
        return rows
    pick = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:number]
    return rows[pick.sort().values]


def _thumbnails(take: Take, rows: Tensor) -> Tensor:
    """uint8 [n, 3, h, w] with sides of at most 64 pixels."""
    if not len(rows):
        return torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
    pictures = take(rows).cpu()
    high, wide = pictures.shape[-2:]
    if max(high, wide) <= SIDE:
        return pictures
    scale = SIDE / max(high, wide)
    size = [max(1, round(high * scale)), max(1, round(wide * scale))]
    small = F.interpolate(pictures.float(), size, mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).to(torch.uint8)
