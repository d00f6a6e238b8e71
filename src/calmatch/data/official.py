"""The field's datasets in their official files: found, or downloaded and checked, then read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch

from calmatch.data import cache
from calmatch.data.dataset import Dataset, last_share
from calmatch.data.files import Files, listed, loaded
from calmatch.data.split import long_tail
from calmatch.spec import Spec

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100 = (
    (129.3 / 255, 124.1 / 255, 112.4 / 255),
    (68.2 / 255, 65.4 / 255, 70.4 / 255),
)
STL10 = ((112.4 / 255, 109.1 / 255, 98.6 / 255), (68.4 / 255, 66.6 / 255, 68.5 / 255))
SVHN = ((0.4380, 0.4440, 0.4730), (0.1751, 0.1771, 0.1744))


def root() -> Path:
    """Where datasets are: --data-root, or CALMATCH_DATA, or a folder in the user's cache."""
    chosen = os.environ.get("CALMATCH_DATA")
    return Path(chosen) if chosen else cache.folder() / "data"


def official(kind: str, expected: str, *splits: dict[str, Any]) -> list[Any]:
    """torchvision's readers of some splits, which check the files' checksums before reading."""
    import torchvision.datasets

    make: Callable[..., Any] = getattr(torchvision.datasets, kind)
    try:
        return [make(str(root()), **split) for split in splits]
    except RuntimeError:
        pass  # not there, or not whole: an archive that is there is checked and unpacked
    try:
        root().mkdir(parents=True, exist_ok=True)
        return [make(str(root()), download=True, **split) for split in splits]
    except (RuntimeError, URLError, OSError) as error:
        raise ValueError(
            f"{kind} is not there: put {expected} under {root()} (--data-root or CALMATCH_DATA "
            f"chooses another folder); downloading failed: {error}"
        ) from error


def cifar10() -> Dataset:
    """CIFAR-10: 50,000 and 10,000 pictures of 32 px, 10 classes."""
    return _cifar("CIFAR10", "cifar-10-batches-py/ or cifar-10-python.tar.gz", IMAGENET)


def cifar100() -> Dataset:
    """CIFAR-100: 50,000 and 10,000 pictures of 32 px, 100 classes."""
    return _cifar("CIFAR100", "cifar-100-python/ or cifar-100-python.tar.gz", CIFAR100)


def cifar100_lt(
    *, gamma_l: float = 10.0, gamma_u: float = 10.0, n1: int = 150, m: int = 300
) -> Dataset:
    """CIFAR-100 with long-tailed classes; a negative gamma_u reverses the unlabelled tail.

    n1 and m are the numbers of labelled and unlabelled pictures of the first class.
    """
    plain = cifar100()
    classes = len(plain.classes)
    return plain._replace(
        labelled_counts=tuple(long_tail(n1, gamma_l, classes)),
        unlabelled_counts=tuple(long_tail(m, gamma_u, classes)),
    )


def _cifar(kind: str, expected: str, statistics: Any) -> Dataset:
    train, test = official(kind, expected, {"train": True}, {"train": False})
    images, test_images = (torch.from_numpy(s.data).permute(0, 3, 1, 2) for s in (train, test))
    labels, test_labels = (torch.tensor(s.targets) for s in (train, test))
    return Dataset(
        images.contiguous(),
        labels,
        test_images.contiguous(),
        test_labels,
        tuple(train.classes),
        *statistics,
    )


def svhn() -> Dataset:
    """SVHN: 73,257 and 26,032 house-number digits of 32 px, 10 classes."""
    expected = "train_32x32.mat and test_32x32.mat"
    train, test = official("SVHN", expected, {"split": "train"}, {"split": "test"})
    sets = [(torch.from_numpy(s.data), torch.from_numpy(s.labels).long()) for s in (train, test)]
    return Dataset(*sets[0], *sets[1], tuple(str(k) for k in range(10)), *SVHN)


def stl10() -> Dataset:
    """STL-10: 5,000 labelled, 100,000 unlabelled and 8,000 test pictures of 96 px, 10 classes."""
    expected = "stl10_binary/ or stl10_binary.tar.gz"
    train, test = official("STL10", expected, {"split": "train"}, {"split": "test"})
    (pool,) = official("STL10", expected, {"split": "unlabeled"})
    n = len(train.data) + len(pool.data)

    def fill(pictures: Any) -> None:
        pictures[: len(train.data)] = train.data
        pictures[len(train.data) :] = pool.data

    key = "-".join(["stl10", *(md5[:12] for _, md5 in train.train_list)])
    images = cache.array(key, (n, *train.data.shape[1:]), fill)
    labels = torch.full((n,), -1)
    labels[: len(train.data)] = torch.from_numpy(train.labels).long()
    return Dataset(
        images,
        labels,
        torch.from_numpy(test.data),
        torch.from_numpy(test.labels).long(),
        tuple(train.classes),
        *STL10,
        whole_pool=True,
    )


def eurosat(*, size: int = 32) -> Dataset:
    """EuroSAT: 27,000 satellite pictures, 10 classes; the last 20 % of each class are the test set.

    Read from the folder 2750/ (as in the official zip, or torchvision's eurosat/2750/) or straight
    from EuroSAT.zip; 64 px pictures are resized.
    """
    found = _of_classes(*_eurosat(), size, "eurosat", 0.2)
    if len(found.classes) != 10:
        raise ValueError(f"{root()} has {len(found.classes)} of EuroSAT's 10 class folders.")
    return found._replace(shuffle_first=True)


def _eurosat() -> tuple[Path, str]:
    places = [(root() / "eurosat", "2750"), (root(), "2750"), (root() / "EuroSAT", "2750")]
    places = [(place, below) for place, below in places if (place / below).is_dir()]
    places += [(path, "2750/") for path in (root() / "EuroSAT.zip",) if path.is_file()]
    if not places:
        official("EuroSAT", "eurosat/2750/ or EuroSAT.zip", {})
        return root() / "eurosat", "2750"
    return places[0]


def folder(*, path: str, size: int = 32, share: float = 0.2, cached: bool = True) -> Dataset:
    """A folder of class folders; the last share of each class in file order is the test set.

    `cached=False` keeps no decoded copy: worker processes decode what each step needs.
    """
    place = Path(path)
    if not place.is_dir():
        raise ValueError(f"There is no folder {place}.")
    if len(listed(place)) < 2:
        raise ValueError(f"{place} needs at least two class folders with pictures in them.")
    return _of_classes(place, "", size, "folder", share, cached)


def _of_classes(
    place: Path, below: str, size: int, title: str, share: float, cached: bool = True
) -> Dataset:
    """Class folders with the last share of each class, in file order, as the test set."""
    found = listed(place, below)
    sizes = [len(group) for group in found.values()]
    labels = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
    test = last_share(labels, share)
    names = tuple(name for group in found.values() for name in group)
    pictures = Files(place, names, size)
    if not cached:
        parts = [pictures.some(rows.nonzero()[:, 0].tolist()) for rows in (~test, test)]
        return Dataset(parts[0], labels[~test], parts[1], labels[test], tuple(found))
    images = loaded(pictures, title)
    return Dataset(images[~test], labels[~test], images[test], labels[test], tuple(found))


def files(item: Spec) -> Files | None:
    """The picture files behind a dataset, where it is made of such."""
    size = int(item.kwargs.get("size", 32))
    if item.name == "eurosat":
        place, below = _eurosat()
    elif item.name == "folder" and Path(str(item.kwargs.get("path"))).is_dir():
        place, below = Path(str(item.kwargs["path"])), ""
    else:
        return None
    names = tuple(name for group in listed(place, below).values() for name in group)
    return Files(place, names, size)
