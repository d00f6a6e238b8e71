"""Datasets by name: the field's official files, class folders, archives; and what to check in one."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from calmatch import spec
from calmatch.data.batches import long_tail, split
from calmatch.data.images import (
    ImageFiles,
    Images,
    cache_folder,
    cached_tensor,
    list_class_folders,
    load_cached,
    take_images,
)
from calmatch.spec import Spec


class Dataset(NamedTuple):
    """Pictures to train on and to test on."""

    images: Images  # uint8 [N, 3, H, W], or what reads them when asked for
    labels: Tensor  # [N] class ids, -1 unknown
    test_images: Images
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    labelled_counts: tuple[int, ...] | None = None  # labels of each class, where that is the point
    unlabelled_counts: tuple[int, ...] | None = None
    whole_pool: bool = False  # unlabelled are all pictures, the labelled ones once more (STL-10)
    shuffle_first: bool = False  # USB shuffles EuroSAT's list before it splits


def last_share(labels: Tensor, share: float) -> Tensor:
    """True for the last share of each class in the given order."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for k in labels.unique():
        ids = (labels == k).nonzero()[:, 0]
        chosen[ids[len(ids) - round(share * len(ids)) :]] = True
    return chosen


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100 = (
    (129.3 / 255, 124.1 / 255, 112.4 / 255),
    (68.2 / 255, 65.4 / 255, 70.4 / 255),
)
STL10 = ((112.4 / 255, 109.1 / 255, 98.6 / 255), (68.4 / 255, 66.6 / 255, 68.5 / 255))
SVHN = ((0.4380, 0.4440, 0.4730), (0.1751, 0.1771, 0.1744))


def data_root() -> Path:
    """Where datasets are: --data-root, or CALMATCH_DATA, or a folder in the user's cache."""
    chosen = os.environ.get("CALMATCH_DATA")
    return Path(chosen) if chosen else cache_folder() / "data"


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
        raise ValueError(
            f"{kind} is not there: put {expected} under {data_root()} (--data-root or CALMATCH_DATA "
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
    train, test = official_readers(kind, expected, {"train": True}, {"train": False})
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
    train, test = official_readers("SVHN", expected, {"split": "train"}, {"split": "test"})
    sets = [(torch.from_numpy(s.data), torch.from_numpy(s.labels).long()) for s in (train, test)]
    return Dataset(*sets[0], *sets[1], tuple(str(k) for k in range(10)), *SVHN)


def stl10() -> Dataset:
    """STL-10: 5,000 labelled, 100,000 unlabelled and 8,000 test pictures of 96 px, 10 classes."""
    expected = "stl10_binary/ or stl10_binary.tar.gz"
    train, test = official_readers("STL10", expected, {"split": "train"}, {"split": "test"})
    (pool,) = official_readers("STL10", expected, {"split": "unlabeled"})
    n = len(train.data) + len(pool.data)

    def fill(pictures: Any) -> None:
        pictures[: len(train.data)] = train.data
        pictures[len(train.data) :] = pool.data

    key = "-".join(["stl10", *(md5[:12] for _, md5 in train.train_list)])
    images = cached_tensor(key, (n, *train.data.shape[1:]), fill)
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
        raise ValueError(f"{data_root()} has {len(found.classes)} of EuroSAT's 10 class folders.")
    return found._replace(shuffle_first=True)


def _eurosat() -> tuple[Path, str]:
    places = [
        (data_root() / "eurosat", "2750"),
        (data_root(), "2750"),
        (data_root() / "EuroSAT", "2750"),
    ]
    places = [(place, below) for place, below in places if (place / below).is_dir()]
    places += [(path, "2750/") for path in (data_root() / "EuroSAT.zip",) if path.is_file()]
    if not places:
        official_readers("EuroSAT", "eurosat/2750/ or EuroSAT.zip", {})
        return data_root() / "eurosat", "2750"
    return places[0]


def class_folders(*, path: str, size: int = 32, share: float = 0.2, cached: bool = True) -> Dataset:
    """A folder of class folders; the last share of each class in file order is the test set.

    `cached=False` keeps no decoded copy: worker processes decode what each step needs.
    """
    place = Path(path)
    if not place.is_dir():
        raise ValueError(f"There is no folder {place}.")
    if len(list_class_folders(place)) < 2:
        raise ValueError(f"{place} needs at least two class folders with pictures in them.")
    return _of_classes(place, "", size, "folder", share, cached)


def _of_classes(
    place: Path, below: str, size: int, title: str, share: float, cached: bool = True
) -> Dataset:
    """Class folders with the last share of each class, in file order, as the test set."""
    found = list_class_folders(place, below)
    sizes = [len(group) for group in found.values()]
    labels = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
    test = last_share(labels, share)
    names = tuple(name for group in found.values() for name in group)
    pictures = ImageFiles(place, names, size)
    if not cached:
        parts = [pictures.some(rows.nonzero()[:, 0].tolist()) for rows in (~test, test)]
        return Dataset(parts[0], labels[~test], parts[1], labels[test], tuple(found))
    images = load_cached(pictures, title)
    return Dataset(images[~test], labels[~test], images[test], labels[test], tuple(found))


def dataset_files(item: Spec) -> ImageFiles | None:
    """The picture files behind a dataset, where it is made of such."""
    size = int(item.kwargs.get("size", 32))
    if item.name == "eurosat":
        place, below = _eurosat()
    elif item.name == "folder" and Path(str(item.kwargs.get("path"))).is_dir():
        place, below = Path(str(item.kwargs["path"])), ""
    else:
        return None
    names = tuple(name for group in list_class_folders(place, below).values() for name in group)
    return ImageFiles(place, names, size)


SHEET_SIDE = 16  # a sheet holds 16 x 16 pictures; their sides are multiples of 8, so JPEG's blocks
# never cross from one picture into another
QUALITIES = range(50, 101)


def archive(*, name: str, size: int = 0, most: int = 0) -> Dataset:
    """A dataset that `tools/pack.py` has made one file of, under the data folder's `packed/`.

    Args:
        name: of the file, without its ending.
        size: pixels to resize to (bilinear); 0: as packed.
        most: training pictures that are used, the first ones; 0: all.
    """
    path = data_root() / "packed" / f"{name}.npz"
    if not path.is_file() or Path(name).name != name:
        raise ValueError(f"There is no packed dataset {path}; tools/pack.py makes one.")
    try:
        with np.load(path, allow_pickle=False) as found:
            held: dict[str, Any] = {key: found[key] for key in found.files}
        note = json.loads(str(held["note"]))
        ends, labels, tested = held["ends"], held["labels"], held["test_labels"]
        sheets, side = held["sheets"].tobytes(), size or note["size"]

        def fill(found: NDArray[np.uint8]) -> None:
            images = _unpack_sheets(sheets, ends, note["size"], len(found))
            found[:] = _resize_images(images, side).numpy()

        key = hashlib.blake2b(sheets, digest_size=12).hexdigest()
        images = cached_tensor(
            f"packed-{key}-{side}", (len(labels) + len(tested), 3, side, side), fill
        )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} is damaged or no packed dataset: {error}.") from error
    mean, std = (tuple(float(v) for v in row) for row in note["statistics"])
    used = min(most or len(labels), len(labels))
    return Dataset(
        images[:used],
        torch.from_numpy(labels[:used]).long(),
        images[len(labels) :],
        torch.from_numpy(tested).long(),
        tuple(str(name) for name in note["classes"]),
        (mean[0], mean[1], mean[2]),
        (std[0], std[1], std[2]),
        whole_pool=note["whole_pool"],
        shuffle_first=note["shuffle_first"],
    )


def pack_archive(dataset: Dataset, limit: int) -> tuple[bytes, dict[str, Any]]:
    """The file of a dataset, with the best JPEG quality that stays within `limit` bytes.

    Returns:
        Its content, and what is said in it beside pictures: quality, noise, classes.
    """
    both = (dataset.images, dataset.test_images)
    images = torch.cat([take_images(some, torch.arange(len(some))) for some in both])
    size = images.shape[-1]
    if images.shape[-2] != size or size % 8:
        raise ValueError("Only square pictures whose side is a multiple of 8 can be packed.")
    quality = _best_quality(
        images, limit - 9 * len(images) - 50_000
    )  # labels and names need room too
    sheets = [_encode_sheet(some, quality) for some in images.split(SHEET_SIDE * SHEET_SIDE)]
    blob = b"".join(sheets)
    ends = np.cumsum([len(sheet) for sheet in sheets])
    change = (
        (_unpack_sheets(blob, ends, size, len(images)).float() - images.float()).square().mean()
    )
    note = {
        "size": size,
        "quality": quality,
        "psnr": round(float(10 * torch.log10(255**2 / change.clamp_min(1e-9))), 2),
        "classes": list(dataset.classes),
        "statistics": [list(dataset.mean), list(dataset.std)],
        "whole_pool": dataset.whole_pool,
        "shuffle_first": dataset.shuffle_first,
    }
    filled = io.BytesIO()
    np.savez(
        filled,
        sheets=np.frombuffer(blob, np.uint8),
        ends=ends,
        labels=dataset.labels.numpy(),
        test_labels=dataset.test_labels.numpy(),
        note=json.dumps(note),
    )
    assert filled.tell() <= limit, "the estimate of a quality's size was too low"
    return filled.getvalue(), note


def _best_quality(images: Tensor, room: int) -> int:
    """The best quality whose sheets need at most so many bytes, all of them measured."""
    low, high = 0, len(QUALITIES) - 1
    while low < high:
        middle = (low + high + 1) // 2
        sheets = images.split(SHEET_SIDE * SHEET_SIDE)
        if sum(len(_encode_sheet(some, QUALITIES[middle])) for some in sheets) <= room:
            low = middle
        else:
            high = middle - 1
    return QUALITIES[low]


def _encode_sheet(images: Tensor, quality: int) -> bytes:
    size = images.shape[-1]
    full = torch.zeros(SHEET_SIDE * SHEET_SIDE, 3, size, size, dtype=torch.uint8)
    full[: len(images)] = images
    tiles = full.view(SHEET_SIDE, SHEET_SIDE, 3, size, size).permute(0, 3, 1, 4, 2)
    picture = Image.fromarray(tiles.reshape(SHEET_SIDE * size, SHEET_SIDE * size, 3).numpy())
    packed = io.BytesIO()
    picture.save(packed, "JPEG", quality=quality, subsampling=0)  # colours as fine as brightness
    return packed.getvalue()


def _unpack_sheets(blob: bytes, ends: Any, size: int, number: int) -> Tensor:
    def sheets() -> Iterator[Tensor]:
        start = 0
        for end in map(int, ends):
            with Image.open(io.BytesIO(blob[start:end])) as picture:
                pixels = torch.from_numpy(np.array(picture))
            tiles = pixels.view(SHEET_SIDE, size, SHEET_SIDE, size, 3).permute(0, 2, 4, 1, 3)
            yield tiles.reshape(-1, 3, size, size)
            start = end

    return torch.cat(list(sheets()))[:number]


def _resize_images(images: Tensor, size: int) -> Tensor:
    if size == images.shape[-1]:
        return images
    return torch.cat(
        [
            F.interpolate(some.float(), (size, size), mode="bilinear", antialias=True)
            .round()
            .clamp(0, 255)
            .to(torch.uint8)
            for some in images.split(1024)
        ]
    )


def digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 doubled to 16 x 16.

    The last third of each class in file order is the test set (other writers than most of the
    rest, so it is harder than a random third).
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    grey = (loaded.images * (255 / 16)).round().astype(np.uint8)
    images = torch.from_numpy(grey).repeat_interleave(2, 1).repeat_interleave(2, 2)
    images = images[:, None].repeat(1, 3, 1, 1)
    labels = torch.from_numpy(loaded.target).long()
    test = last_share(labels, 1 / 3)
    return Dataset(
        images[~test],
        labels[~test],
        images[test],
        labels[test],
        tuple(str(name) for name in loaded.target_names),
        mean=(0.305, 0.305, 0.305),
        std=(0.376, 0.376, 0.376),
    )


def synthetic(
    *, classes: int = 4, per_class: int = 60, size: int = 8, noise: float = 40.0, seed: int = 0
) -> Dataset:
    """Coloured blobs with noise, one pattern a class: for tests."""
    generator = torch.Generator().manual_seed(seed)
    patterns = 255 * torch.rand(classes, 3, 4, 4, generator=generator)
    patterns = torch.nn.functional.interpolate(patterns, (size, size), mode="nearest")
    labels = torch.arange(classes).repeat(per_class)
    pixels = patterns[labels] + noise * torch.randn(len(labels), 3, size, size, generator=generator)
    images = pixels.clamp(0, 255).to(torch.uint8)
    test = last_share(labels, 0.25)
    names = tuple(f"class {k}" for k in range(classes))
    return Dataset(images[~test], labels[~test], images[test], labels[test], names)


DATASETS = spec.Table(
    {
        name: f"data.dataset.{name}"
        for name in "digits cifar10 cifar100 cifar100_lt stl10 svhn eurosat".split()
    }
    | {"folder": "data.dataset.class_folders", "archive": "data.dataset.archive"}
    | {"pictures": "data.folder.own_images", "synthetic": "data.dataset.synthetic"}
)


def build(text: str) -> Dataset:
    """The dataset a spec names."""
    bound = spec.bind(spec.parse(text), DATASETS, "dataset")
    try:
        built = bound()
    except TypeError as error:
        raise spec.SpecError(f"{text!r} does not make a dataset: {error}.") from error
    if not isinstance(built, Dataset):
        raise spec.SpecError(f"{text!r} is not a Dataset.")
    return built


NEAR = 3.0  # grey levels, root mean square over 8 x 8 cells: closer pictures are near duplicates,
NEAR_SHARE = 0.25  # if that is also under this share of their own contrast (open sea is all alike)
CHECK_ROWS = 4096


class Finding(NamedTuple):
    """A line of the report."""

    what: str
    value: str


def check_dataset(text: str, labels: int = 0, split_seed: int = 0) -> Iterator[Finding]:
    """Counts, undecodable files, duplicates across the test border, and the split."""
    bad = undecodable(dataset_files(spec.parse(text)))
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
    images = take_images(dataset.images, torch.arange(len(dataset.labels)))
    test_images = take_images(dataset.test_images, torch.arange(len(dataset.test_labels)))
    exact = exact_duplicates(images, test_images)
    yield Finding("test pictures also in training", f"{len(exact):,}{_first_pairs(exact)}")
    near = near_duplicates(images, test_images)
    yield Finding("test pictures nearly in training", f"{len(near):,}{_first_pairs(near)}")
    yield _split_finding(dataset, labels, split_seed)


def undecodable(files: ImageFiles | None) -> list[str]:
    """A sentence for each file that is not a picture."""
    found = []
    for place in range(len(files or ())):
        assert files is not None
        try:
            files.picture(place)
        except ValueError as error:
            found.append(str(error))
    return found


def exact_duplicates(train: Tensor, test: Tensor) -> list[tuple[int, int]]:
    """Pairs (test, training) of pictures that are equal to the last bit."""
    known = {_hash_image(picture): row for row, picture in enumerate(train)}
    pairs = ((row, known.get(_hash_image(picture))) for row, picture in enumerate(test))
    return [(row, other) for row, other in pairs if other is not None]


def near_duplicates(train: Tensor, test: Tensor) -> list[tuple[int, int]]:
    """Pairs (test, training) of pictures that nearly agree: each one's nearest, if near."""
    small = _mean_cells(train)
    lengths = small.square().sum(1)
    pairs = []
    for start in range(0, len(test), CHECK_ROWS):
        some = _mean_cells(test[start : start + CHECK_ROWS])
        best = torch.full((len(some),), torch.inf)
        nearest = torch.zeros(len(some), dtype=torch.long)
        for place in range(0, len(small), 4 * CHECK_ROWS):
            block = small[place : place + 4 * CHECK_ROWS]
            far = lengths[place : place + 4 * CHECK_ROWS] - 2 * some @ block.T
            value, index = (far + some.square().sum(1, keepdim=True)).min(1)
            closer = value < best
            best = torch.where(closer, value, best)
            nearest = torch.where(closer, index + place, nearest)
        near = (best / small.shape[1]).clamp_min(0).sqrt() < (NEAR_SHARE * some.std(1)).clamp_max(
            NEAR
        )
        rows = near.nonzero()[:, 0]
        pairs += [(start + int(row), int(nearest[row])) for row in rows]
    return pairs


def _mean_cells(images: Tensor) -> Tensor:
    """Mean colours of 8 x 8 cells, [N, 192]."""
    parts = [
        torch.nn.functional.adaptive_avg_pool2d(some.float(), 8).flatten(1)
        for some in images.split(CHECK_ROWS)
    ]
    return torch.cat(parts)


def _hash_image(picture: Tensor) -> bytes:
    return hashlib.blake2b(picture.contiguous().numpy().tobytes(), digest_size=16).digest()


def _first_pairs(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"test {a} = training {b}" for a, b in pairs[:3])
    return f" ({shown}{', ...' if len(pairs) > 3 else ''})" if pairs else ""


def _split_finding(dataset: Dataset, labels: int, seed: int) -> Finding:
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
