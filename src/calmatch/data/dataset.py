"""Datasets by name: the field's official files, class folders; and a check of one."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from calmatch import spec
from calmatch.data import images as stored
from calmatch.data.batches import Split, long_tail, split
from calmatch.data.images import ImageFiles, Images, take_images

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100 = ((129.3 / 255, 124.1 / 255, 112.4 / 255), (68.2 / 255, 65.4 / 255, 70.4 / 255))
STL10 = ((112.4 / 255, 109.1 / 255, 98.6 / 255), (68.4 / 255, 66.6 / 255, 68.5 / 255))
SVHN = ((0.4380, 0.4440, 0.4730), (0.1751, 0.1771, 0.1744))
NEAR = 3.0  # grey levels, root mean square over 8 x 8 cells: closer images are near duplicates,
NEAR_SHARE = 0.25  # if that is also under this share of their own contrast (open sea is all alike)
CHECK_ROWS = 4096
_NAMES = "digits cifar10 cifar100 cifar100_lt stl10 svhn eurosat folder synthetic".split()
DATASETS = spec.Lookup({name: f"data.dataset.{name}" for name in _NAMES})
DATASETS["pictures"] = "data.folder.own_images"


class Dataset(NamedTuple):
    """Images to train on and to test on."""

    images: Images  # uint8 [N, 3, H, W], or what reads them when asked for
    labels: Tensor  # [N] class ids, -1 unknown
    test_images: Images
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    labelled_counts: tuple[int, ...] | None = None  # labels of each class, where that is the point
    unlabelled_counts: tuple[int, ...] | None = None
    whole_pool: bool = False  # unlabelled are all images, the labelled ones once more (STL-10)
    shuffle_first: bool = False  # USB shuffles EuroSAT's list before it splits

    def split(self, labels: int, seed: int, **more: Any) -> Split:
        """Who is labelled; 0 labels: as the dataset says. `more` are options of `batches.split`."""
        wanted = labels or self.labelled_counts
        if wanted is None:
            raise ValueError("The dataset does not say how many labels; set --labels.")
        more |= {"whole_pool": self.whole_pool, "shuffle_first": self.shuffle_first}
        unlabelled = None if labels else self.unlabelled_counts
        return split(self.labels.numpy(), wanted, seed, unlabelled=unlabelled, **more)


def build(text: str) -> Dataset:
    """The dataset a spec names."""
    try:
        built = spec.bind(spec.parse(text), DATASETS, "dataset")()
    except TypeError as error:
        raise spec.SpecError(f"{text!r} does not make a dataset: {error}.") from error
    if not isinstance(built, Dataset):
        raise spec.SpecError(f"{text!r} is not a Dataset.")
    return built


def data_root() -> Path:
    """Where datasets are: --data-root, or CALMATCH_DATA, or a folder in the user's cache."""
    chosen = os.environ.get("CALMATCH_DATA")
    return Path(chosen) if chosen else stored.cache_root() / "data"


def official_readers(kind: str, expected: str, *splits: dict[str, Any]) -> list[Any]:
    """torchvision's readers of some splits, which check the files' checksums before reading."""
    import torchvision.datasets

    make: Callable[..., Any] = getattr(torchvision.datasets, kind)
    try:
        return [make(str(data_root()), **split) for split in splits]
    except RuntimeError:
        pass  # not there, or not whole: an archive that is there is checked and unpacked
    try:
        data_root().mkdir(parents=True, exist_ok=True)
        return [make(str(data_root()), download=True, **split) for split in splits]
    except (RuntimeError, URLError, OSError) as error:
        place = f"{data_root()} (--data-root or CALMATCH_DATA chooses another folder)"
        why = f"put {expected} under {place}; downloading failed: {error}"
        raise ValueError(f"{kind} is not there: {why}") from error


def cifar10() -> Dataset:
    """CIFAR-10: 50,000 and 10,000 images of 32 px, 10 classes."""
    return _cifar("CIFAR10", "cifar-10-batches-py/ or cifar-10-python.tar.gz", IMAGENET)


def cifar100() -> Dataset:
    """CIFAR-100: 50,000 and 10,000 images of 32 px, 100 classes."""
    return _cifar("CIFAR100", "cifar-100-python/ or cifar-100-python.tar.gz", CIFAR100)


def cifar100_lt(
    *, gamma_l: float = 10.0, gamma_u: float = 10.0, n1: int = 150, m: int = 300
) -> Dataset:
    """CIFAR-100 with long-tailed classes; a negative gamma_u reverses the unlabelled tail.

    n1 and m are the labelled and unlabelled images of the first class.
    """
    plain, heads = cifar100(), ((n1, gamma_l), (m, gamma_u))
    counts = [tuple(long_tail(*head, len(plain.classes))) for head in heads]
    return plain._replace(labelled_counts=counts[0], unlabelled_counts=counts[1])


def _cifar(kind: str, expected: str, statistics: Any) -> Dataset:
    sets = official_readers(kind, expected, {"train": True}, {"train": False})
    images = [torch.from_numpy(s.data).permute(0, 3, 1, 2).contiguous() for s in sets]
    labels = [torch.tensor(s.targets) for s in sets]
    return Dataset(images[0], labels[0], images[1], labels[1], tuple(sets[0].classes), *statistics)


def svhn() -> Dataset:
    """SVHN: 73,257 and 26,032 house-number digits of 32 px, 10 classes."""
    expected = "train_32x32.mat and test_32x32.mat"
    train, test = official_readers("SVHN", expected, {"split": "train"}, {"split": "test"})
    sets = [(torch.from_numpy(s.data), torch.from_numpy(s.labels).long()) for s in (train, test)]
    return Dataset(*sets[0], *sets[1], tuple(str(k) for k in range(10)), *SVHN)


def stl10() -> Dataset:
    """STL-10: 5,000 labelled, 100,000 unlabelled and 8,000 test images of 96 px, 10 classes."""
    names = ({"split": name} for name in ("train", "test", "unlabeled"))
    train, test, pool = official_readers("STL10", "stl10_binary/ or stl10_binary.tar.gz", *names)
    n = len(train.data) + len(pool.data)

    def fill(images: Any) -> None:
        np.concatenate([train.data, pool.data], out=images)

    key = "-".join(["stl10", *(md5[:12] for _, md5 in train.train_list)])
    labels = torch.full((n,), -1)
    labels[: len(train.data)] = torch.from_numpy(train.labels).long()
    images = stored.cached_array(key, (n, *train.data.shape[1:]), fill).tensor
    tests = torch.from_numpy(test.data), torch.from_numpy(test.labels).long()
    return Dataset(images, labels, *tests, tuple(train.classes), *STL10, whole_pool=True)


def eurosat(*, size: int = 32) -> Dataset:
    """EuroSAT: 27,000 satellite images, 10 classes; the last 20 % of each class are the test set.

    Read from the folder 2750/ (as in the official zip, or torchvision's eurosat/2750/) or straight
    from EuroSAT.zip; 64 px images are resized.
    """
    dataset = _read_classes(*_find_eurosat(), size, "eurosat", 0.2)
    if len(dataset.classes) != 10:
        raise ValueError(f"{data_root()} has {len(dataset.classes)} of EuroSAT's 10 class folders.")
    return dataset._replace(shuffle_first=True)


def _find_eurosat() -> tuple[Path, str]:
    root = data_root()
    for place in (root / "eurosat", root, root / "EuroSAT"):
        if (place / "2750").is_dir():
            return place, "2750"
    if (root / "EuroSAT.zip").is_file():
        return root / "EuroSAT.zip", "2750/"
    official_readers("EuroSAT", "eurosat/2750/ or EuroSAT.zip", {})
    return root / "eurosat", "2750"


def folder(*, path: str, size: int = 32, share: float = 0.2, cached: bool = True) -> Dataset:
    """A folder of class folders; the last share of each class in file order is the test set.

    `cached=False` keeps no decoded copy: worker processes decode what each step needs.
    """
    place = Path(path)
    if not place.is_dir():
        raise ValueError(f"There is no folder {place}.")
    if len(stored.list_class_folders(place)) < 2:
        raise ValueError(f"{place} needs at least two class folders with pictures in them.")
    return _read_classes(place, "", size, "folder", share, cached)


def _read_classes(
    place: Path, below: str, size: int, title: str, share: float, cached: bool = True
) -> Dataset:
    groups, listed = _list_classes(place, below, size)
    labels = torch.from_numpy(np.repeat(np.arange(len(groups)), [*map(len, groups.values())]))
    images = stored.load_cached(listed, title) if cached else listed
    return _hold_out(images, labels, share, tuple(groups))


def _list_classes(place: Path, below: str, size: int) -> tuple[dict[str, list[str]], ImageFiles]:
    groups = stored.list_class_folders(place, below)
    names = tuple(name for names in groups.values() for name in names)
    return groups, ImageFiles(place, names, size)


def _hold_out(images: Tensor | ImageFiles, labels: Tensor, share: float, *rest: Any) -> Dataset:
    """The last share of each class, in the given order, is the test set."""
    test = torch.zeros(len(labels), dtype=torch.bool)
    for k in labels.unique():
        ids = (labels == k).nonzero()[:, 0]
        test[ids[len(ids) - round(share * len(ids)) :]] = True

    def some(mask: Tensor) -> Images:
        rows = mask.nonzero()[:, 0]
        return images.some(rows.tolist()) if isinstance(images, ImageFiles) else images[rows]

    return Dataset(some(~test), labels[~test], some(test), labels[test], *rest)


def digits(*, noise: float = 0.0) -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 doubled to 16 x 16.

    The last third of each class in file order is the test set (other writers than most of the
    rest, so it is harder than a random third). `noise` is the deviation of grey values added to
    every image, of 255, always the same: it makes the task hard enough to be wrong and sure.
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    drawn = noise * np.random.default_rng(0).standard_normal(loaded.images.shape)
    pixels = (loaded.images * (255 / 16) + drawn).round().clip(0, 255)
    grey = torch.from_numpy(pixels.astype(np.uint8))
    images = grey.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None].repeat(1, 3, 1, 1)
    names = tuple(str(name) for name in loaded.target_names)
    statistics = ((0.305, 0.305, 0.305), (0.376, 0.376, 0.376))
    return _hold_out(images, torch.from_numpy(loaded.target).long(), 1 / 3, names, *statistics)


def synthetic(
    *, classes: int = 4, per_class: int = 60, size: int = 8, noise: float = 40.0, seed: int = 0
) -> Dataset:
    """Coloured blobs with noise, one pattern a class: for tests."""
    generator = torch.Generator().manual_seed(seed)
    patterns = 255 * torch.rand(classes, 3, 4, 4, generator=generator)
    patterns = F.interpolate(patterns, (size, size), mode="nearest")
    labels = torch.arange(classes).repeat(per_class)
    pixels = patterns[labels] + noise * torch.randn(len(labels), 3, size, size, generator=generator)
    names = tuple(f"class {k}" for k in range(classes))
    return _hold_out(pixels.clamp(0, 255).to(torch.uint8), labels, 0.25, names)


def check_dataset(text: str, labels: int = 0, split_seed: int = 0) -> Iterator[tuple[str, str]]:
    """Lines, what and how: counts, undecodable files, test images in training, the split."""
    broken = list(_undecodable(spec.parse(text)))
    yield "undecodable files", "\n".join([str(len(broken)), *broken[:10]])
    if broken:
        return
    dataset = build(text)
    yield "training pictures", f"{len(dataset.labels):,} {tuple(dataset.images.shape[1:])}"
    yield "test pictures", f"{len(dataset.test_labels):,}"
    for k, name in enumerate(dataset.classes):
        train, test = (int((y == k).sum()) for y in (dataset.labels, dataset.test_labels))
        yield f"class {k} {name}", f"{train:,} training, {test:,} test"
    if unknown := int((dataset.labels < 0).sum()):
        yield "without label", f"{unknown:,}"
    both = (dataset.images, dataset.test_images)
    images, test_images = (take_images(some, torch.arange(len(some))) for some in both)
    for word, search in (("also", _exact_duplicates), ("nearly", _near_duplicates)):
        pairs = search(images, test_images)
        first = ", ".join(f"test {a} = training {b}" for a, b in pairs[:3])
        more = f" ({first}{', ...' if len(pairs) > 3 else ''})" if pairs else ""
        yield f"test pictures {word} in training", f"{len(pairs):,}{more}"
    number = 0 if dataset.labelled_counts else 4 * len(dataset.classes)
    parts = dataset.split(labels or number, split_seed)
    first = ", ".join(map(str, parts.labelled[:5]))
    words = f"{len(parts.labelled):,} labelled ({first}, ...), {len(parts.unlabelled):,} unlabelled"
    yield f"split with seed {split_seed}", words


def _undecodable(item: spec.Spec) -> Iterator[str]:
    """A sentence for each file of a dataset that is not an image."""
    if item.name == "eurosat":
        place, below = _find_eurosat()
    elif item.name == "folder" and Path(str(item.kwargs.get("path"))).is_dir():
        place, below = Path(str(item.kwargs["path"])), ""
    else:
        return
    listed = _list_classes(place, below, int(item.kwargs.get("size", 32)))[1]
    for row in range(len(listed)):
        try:
            listed.image(row)
        except ValueError as error:
            yield str(error)


def _exact_duplicates(train: Tensor, test: Tensor) -> list[tuple[int, int]]:
    """Pairs (test, training) of images that are equal to the last bit."""

    def digest(image: Tensor) -> bytes:
        return hashlib.blake2b(image.contiguous().numpy().tobytes(), digest_size=16).digest()

    known = {digest(image): row for row, image in enumerate(train)}
    pairs = ((row, known.get(digest(image))) for row, image in enumerate(test))
    return [(row, other) for row, other in pairs if other is not None]


def _near_duplicates(train: Tensor, test: Tensor) -> list[tuple[int, int]]:
    """Pairs (test, training) of images that nearly agree: each one's nearest, if near."""
    from sklearn.metrics import pairwise_distances_argmin_min

    known, asked = _mean_cells(train).numpy(), _mean_cells(test).numpy()
    nearest, away = pairwise_distances_argmin_min(asked, known)
    near = away / known.shape[1] ** 0.5 < np.minimum(NEAR_SHARE * asked.std(1, ddof=1), NEAR)
    return [(row, int(nearest[row])) for row in np.flatnonzero(near).tolist()]


def _mean_cells(images: Tensor) -> Tensor:
    """Mean colours of 8 x 8 cells, [N, 192]."""
    parts = images.split(CHECK_ROWS)
    return torch.cat([F.adaptive_avg_pool2d(some.float(), 8).flatten(1) for some in parts])
