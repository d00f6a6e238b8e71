"""What a person should know of a dataset before training on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from calmatch import spec
from calmatch.data import build, official
from calmatch.data.dataset import Dataset
from calmatch.data.files import Files, taken
from calmatch.data.split import split

NEAR = 3.0  # grey levels, root mean square over 8 x 8 cells: closer pictures are near duplicates,
OWN = 0.25  # if that is also under this share of their own contrast (open sea is all alike)
ROWS = 4096


class Finding(NamedTuple):
    """A line of the report."""

    what: str
    value: str


def check(text: str, labels: int = 0, split_seed: int = 0) -> Iterator[Finding]:
    """Counts, undecodable files, duplicates across the test border, and the split."""
    bad = undecodable(official.files(spec.parse(text)))
    yield Finding("undecodable files", f"{len(bad)}" + "".join(f"\n{line}" for line in bad[:10]))
    if bad:
        return
    dataset = build(text)
    yield Finding("training pictures", f"{len(dataset.labels):,} {tuple(dataset.images.shape[1:])}")
    yield Finding("test pictures", f"{len(dataset.test_labels):,}")
    for k, name in enumerate(dataset.classes):
        train, test = (int((y == k).sum()) for y in (dataset.labels, dataset.test_labels))
        yield Finding(f"class {k} {name}", f"{train:,} training, {test:,} test")
    if unknown := int((dataset.labels < 0).sum()):
        yield Finding("without label", f"{unknown:,}")
    images = taken(dataset.images, torch.arange(len(dataset.labels)))
    test_images = taken(dataset.test_images, torch.arange(len(dataset.test_labels)))
    exact = shared(images, test_images)
    yield Finding("test pictures also in training", f"{len(exact):,}{_some(exact)}")
    near = alike(images, test_images)
    yield Finding("test pictures nearly in training", f"{len(near):,}{_some(near)}")
    yield _split(dataset, labels, split_seed)


def undecodable(files: Files | None) -> list[str]:
    """A sentence for each file that is not a picture."""
    found = []
    for place in range(len(files or ())):
        assert files is not None
        try:
            files.picture(place)
        except ValueError as error:
            found.append(str(error))
    return found


def shared(train: Tensor, test: Tensor) -> list[tuple[int, int]]:
    """Pairs (test, training) of pictures that are equal to the last bit."""
    known = {_hash(picture): row for row, picture in enumerate(train)}
    pairs = ((row, known.get(_hash(picture))) for row, picture in enumerate(test))
    return [(row, other) for row, other in pairs if other is not None]


def alike(train: Tensor, test: Tensor) -> list[tuple[int, int]]:
    """Pairs (test, training) of pictures that nearly agree: each one's nearest, if near."""
    small = _cells(train)
    lengths = small.square().sum(1)
    pairs = []
    for start in range(0, len(test), ROWS):
        some = _cells(test[start : start + ROWS])
        best = torch.full((len(some),), torch.inf)
        nearest = torch.zeros(len(some), dtype=torch.long)
        for place in range(0, len(small), 4 * ROWS):
            block = small[place : place + 4 * ROWS]
            far = lengths[place : place + 4 * ROWS] - 2 * some @ block.T
            value, index = (far + some.square().sum(1, keepdim=True)).min(1)
            closer = value < best
            best = torch.where(closer, value, best)
            nearest = torch.where(closer, index + place, nearest)
        near = (best / small.shape[1]).clamp_min(0).sqrt() < (OWN * some.std(1)).clamp_max(NEAR)
        rows = near.nonzero()[:, 0]
        pairs += [(start + int(row), int(nearest[row])) for row in rows]
    return pairs


def _cells(images: Tensor) -> Tensor:
    """Mean colours of 8 x 8 cells, [N, 192]."""
    parts = [
        torch.nn.functional.adaptive_avg_pool2d(some.float(), 8).flatten(1)
        for some in images.split(ROWS)
    ]
    return torch.cat(parts)


def _hash(picture: Tensor) -> bytes:
    return hashlib.blake2b(picture.contiguous().numpy().tobytes(), digest_size=16).digest()


def _some(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"test {a} = training {b}" for a, b in pairs[:3])
    return f" ({shown}{', ...' if len(pairs) > 3 else ''})" if pairs else ""


def _split(dataset: Dataset, labels: int, seed: int) -> Finding:
    wanted = labels or dataset.labelled_counts or 4 * len(dataset.classes)
    found = split(
        dataset.labels.numpy(),
        wanted,
        seed,
        unlabelled=None if labels else dataset.unlabelled_counts,
        whole_pool=dataset.whole_pool,
        shuffle_first=dataset.shuffle_first,
    )
    first = ", ".join(map(str, found.labelled[:5]))
    return Finding(
        f"split with seed {seed}",
        f"{len(found.labelled):,} labelled ({first}, ...), {len(found.unlabelled):,} unlabelled",
    )
