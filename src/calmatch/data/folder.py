"""A person's own images: class folders, or a folder and a CSV of a few labels."""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from calmatch.data.dataset import IMAGENET, Dataset
from calmatch.data.images import (
    SUFFIXES,
    CachedImages,
    ImageFiles,
    Pixels,
    cache_folder,
    cached_array,
    map_threads,
    open_image,
    release_pages,
    stamp_files,
    write_note,
)

UNLABELLED = ("unlabelled", "unlabeled")
SIZES = (16, 32, 64, 96, 128)
LARGEST = 8 * 2**30  # bytes of decoded pictures that are kept; beyond, they are decoded again
CountImages = Callable[[int], object]  # told how many pictures are read


class Skipped(NamedTuple):
    """A file that is left out, and why."""

    file: str
    why: str


class ImageFolder(NamedTuple):
    """What a folder holds: names below `root` in order, and a class id (-1: none) for each."""

    root: Path
    names: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def some(self, rows: Iterable[int]) -> ImageFolder:
        """Only these rows."""
        rows = list(rows)
        return self._replace(
            names=tuple(self.names[k] for k in rows), labels=tuple(self.labels[k] for k in rows)
        )

    @property
    def known(self) -> list[int]:
        """The class ids of labelled pictures."""
        return [label for label in self.labels if label >= 0]

    @property
    def counts(self) -> tuple[int, ...]:
        """Labels of each class."""
        found = Counter(self.labels)
        return tuple(found[k] for k in range(len(self.classes)))


def read_folder(root: Path, csv: Path | None = None, strict: bool = False) -> ImageFolder:
    """List a folder's pictures and their labels; nothing is decoded yet.

    Args:
        root: class folders (`unlabelled/` holds pictures without a label), or any tree with a CSV.
        csv: `file,label` for some of the pictures; the others are unlabelled.
        strict: a file that would be skipped is an error.
    """
    if not root.is_dir():
        hint = " Unpack it first." if root.suffix == ".zip" else ""
        raise ValueError(f"There is no folder {root}.{hint}")
    names, skipped = _list_images(root)
    if strict and skipped:
        raise ValueError(f"{skipped[0].file}: {skipped[0].why} (--strict).")
    if not names:
        kinds = ", ".join(suffix[1:] for suffix in SUFFIXES)
        raise ValueError(f"{root} holds no pictures; their names end in {kinds}.")
    known, notes = _by_folder(root, names) if csv is None else _by_csv(csv, names)
    classes = order_classes(known.values())
    _check_classes(classes, csv, root)
    place = {name: k for k, name in enumerate(classes)}
    ids = tuple(place[known[name]] if name in known else -1 for name in names)
    found = ImageFolder(root, tuple(names), ids, classes, tuple(skipped), tuple(notes))
    return found._replace(notes=(*notes, *_find_doubts(found)))


def _list_images(root: Path) -> tuple[list[str], list[Skipped]]:
    """Pictures anywhere below root, sorted; links that lead outside are left out."""
    inside = root.resolve()
    names, skipped = [], []
    for folder, below, files in os.walk(root, followlinks=False):
        here = Path(folder)
        below[:] = sorted(name for name in below if not name.startswith((".", "__MACOSX")))
        for name in below:
            if (here / name).is_symlink():
                link = (here / name).relative_to(root).as_posix()
                skipped.append(Skipped(link, "a link to a folder is not followed"))
        for name in files:
            if name.startswith(".") or not name.lower().endswith(SUFFIXES):
                continue
            path = here / name
            shown = path.relative_to(root).as_posix()
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                skipped.append(Skipped(shown, "the link leads outside the folder"))
            else:
                names.append(shown)
    return sorted(names), skipped


def _by_folder(root: Path, names: list[str]) -> tuple[dict[str, str], list[str]]:
    """The first folder of a name is its class."""
    known = {}
    loose = 0
    for name in names:
        first, _, rest = name.partition("/")
        if not rest:
            loose += 1
        elif first.lower() not in UNLABELLED:
            known[name] = first
    filled = set(known.values())
    for folder in sorted(root.iterdir()):
        name = folder.name
        other = name.startswith((".", "__MACOSX")) or name.lower() in UNLABELLED
        if folder.is_dir() and not folder.is_symlink() and not other and name not in filled:
            raise ValueError(f"The class folder {folder} holds no pictures; fill it or delete it.")
    if not known:
        raise ValueError(
            f"{root} has no class folders with pictures in them. Sort a few pictures into one "
            f"folder for each class, or name their classes with --labels labels.csv."
        )
    note = f"{loose} pictures lie in {root} itself: they count as unlabelled."
    return known, [note] if loose else []


def _by_csv(csv: Path, names: list[str]) -> tuple[dict[str, str], list[str]]:
    rows = read_labels(csv)
    known = match_labels(rows, names, csv)
    twice = len(rows) - len(known)
    return known, [f"{csv} names {twice} pictures more than once, alike."] if twice else []


def _check_classes(classes: tuple[str, ...], csv: Path | None, root: Path) -> None:
    if len(classes) < 2:
        where = csv or root
        raise ValueError(
            f"{where} knows one class only, {classes[0]!r}; a classifier needs two or more."
        )


def _find_doubts(found: ImageFolder) -> list[str]:
    """What a person may have overlooked."""
    notes = []
    for name, count in zip(found.classes, found.counts, strict=True):
        if count == 1:
            notes.append(
                f"Class {name!r} has one label: it is learned from, but how well it is recognised "
                f"cannot be checked. Label at least one more."
            )
    same = Counter(name.casefold() for name in found.classes)
    for folded, times in same.items():
        if times > 1:
            alike = [name for name in found.classes if name.casefold() == folded]
            notes.append(f"Classes {', '.join(map(repr, alike))} differ in capitals only.")
    return notes


def fitting_size(found: ImageFolder, sample: int = 400) -> tuple[int, int]:
    """The training size that suits the pictures, and the median of their shorter sides."""
    step = max(1, len(found.names) // sample)
    sides = []
    for name in found.names[::step]:
        try:
            with open_image((found.root / name).read_bytes()) as picture:
                sides.append(min(picture.size))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue
    middle = int(np.median(sides)) if sides else SIZES[0]
    return max(size for size in SIZES if size <= max(middle, SIZES[0])), middle


def decode_folder(
    found: ImageFolder, size: int, strict: bool = False, seen: CountImages | None = None
) -> tuple[CachedImages | ImageFiles, ImageFolder]:
    """All pictures of a folder at one size, decoded once and kept; broken files are left out."""
    files = ImageFiles(found.root, found.names, size)
    key = f"pictures-{stamp_files(files)}"
    record = cache_folder() / f"{key}.json"
    large = len(files) * 3 * size * size > LARGEST
    broken: dict[str, str] = {}

    def one(place: int) -> Pixels | None:
        try:
            return files.picture(place)
        except ValueError as error:
            if strict:
                raise
            broken[found.names[place]] = str(error).partition("cannot be decoded: ")[2]
            return None

    def fill(pictures: Pixels | None) -> None:
        for place, picture in enumerate(map_threads(one, len(files))):
            if picture is not None and pictures is not None:
                pictures[place] = picture
                if place % 1024 == 0:
                    release_pages(pictures)
            if seen is not None:
                seen(place + 1)
        write_note(record, broken)

    if strict or not record.exists():
        (cache_folder() / f"{key}.npy").unlink(missing_ok=True)
    images: CachedImages | ImageFiles = files
    if not large:
        images = CachedImages(cached_array(key, files.shape, fill), torch.arange(len(files)), key)
    elif strict or not record.exists():
        fill(None)
    bad = json.loads(record.read_text("utf-8"))
    if not bad:
        return images, found
    rows = [k for k, name in enumerate(found.names) if name not in bad]
    if not rows:
        raise ValueError(f"No file in {found.root} can be decoded: {next(iter(bad.values()))}")
    skipped = [Skipped(name, why) for name, why in sorted(bad.items())]
    return images.some(rows), found.some(rows)._replace(skipped=(*found.skipped, *skipped))


class Arranged(NamedTuple):
    """Rows to learn from, and rows with labels that are held out."""

    train: list[int]
    held: list[int]


def arrange_rows(found: ImageFolder, hold: float, most: int, seed: int) -> Arranged:
    """Hold out a share of each class's labels; keep at most so many unlabelled pictures."""
    random = np.random.default_rng([seed, 11])
    y = np.array(found.labels)
    held: list[int] = []
    for k in range(len(found.classes)):
        ids = random.permutation(np.flatnonzero(y == k))
        held += ids[: int(hold * len(ids))].tolist()
    spare = np.flatnonzero(y < 0)
    if most and len(spare) > most:
        spare = random.choice(spare, most, replace=False)
    train = sorted(set(np.flatnonzero(y >= 0).tolist()) - set(held)) + sorted(spare.tolist())
    return Arranged(train, sorted(held))


def own_images(
    *,
    root: str,
    labels: str = "",
    size: int = 64,
    hold: float = 0.0,
    most: int = 0,
    seed: int = 0,
    imagenet: bool = True,
    strict: bool = False,
) -> Dataset:
    """Own pictures: class folders (+ unlabelled/), or a folder and a CSV of a few labels.

    Args:
        root: the folder.
        labels: a CSV `file,label`; empty: the class folders say it.
        size: pixels of a side.
        hold: share of each class's labels that are the test set; 0: all labels train, and
            the labelled pictures stand in for a test set.
        most: unlabelled pictures at most; 0: all.
        seed: of what is held out and left out.
        imagenet: normalise as ImageNet networks want it, else by the pictures' own statistics.
        strict: a file that cannot be decoded is an error.
    """
    found = read_folder(Path(root), Path(labels) if labels else None, strict)
    images, found = decode_folder(found, size, strict)
    return as_dataset(images, found, arrange_rows(found, hold, most, seed), imagenet)


def as_dataset(
    images: CachedImages | ImageFiles, found: ImageFolder, rows: Arranged, imagenet: bool = True
) -> Dataset:
    """Decoded pictures as a dataset whose labels are all used."""
    y = torch.tensor(found.labels)
    own = y[rows.train]
    counts = tuple(int((own == k).sum()) for k in range(len(found.classes)))
    if 0 in counts:
        name = found.classes[counts.index(0)]
        raise ValueError(f"Class {name!r} has no label left whose picture can be decoded.")
    test = rows.held or [k for k in rows.train if found.labels[k] >= 0]
    mean, std = IMAGENET if imagenet else _statistics(images, rows.train)
    return Dataset(
        images.some(rows.train),
        own,
        images.some(test),
        y[test],
        found.classes,
        mean=mean,
        std=std,
        labelled_counts=counts,
    )


def _statistics(
    images: CachedImages | ImageFiles, rows: list[int]
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Channel means and deviations of up to 1,000 pictures."""
    some = rows[:: max(1, len(rows) // 1000)]
    flat = images.take(some).float().transpose(0, 1).flatten(1) / 255
    mean, std = flat.mean(1).tolist(), flat.std(1).clamp_min(0.02).tolist()
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


SHOWN = 5  # mistakes of one kind in a message


class LabelRow(NamedTuple):
    """A picture's name and label, and where they stand."""

    file: str
    label: str
    number: int


def read_labels(path: Path) -> list[LabelRow]:
    """The rows of a CSV with the header `file,label`; further columns are ignored."""
    try:
        text = _decode_text(path.read_bytes(), path)
        # the csv module counts lines; a person counts rows, the header being row 1
        table = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except OSError as error:
        raise ValueError(f"Cannot read {path}: {error.strerror}.") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}.") from error
    places = _find_columns(table[0] if table else [], path)
    rows: list[LabelRow] = []
    for number, cells in enumerate(table[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(table[0]):
            raise ValueError(
                f"{path}, row {number}: {len(cells)} cells, but the header has {len(table[0])}; "
                f"put a file name with a comma in double quotes."
            )
        file, label = (unicodedata.normalize("NFC", cells[place]).strip() for place in places)
        if not file:
            raise ValueError(f"{path}, row {number}: the file name is empty.")
        if label:  # without one, the picture is not labelled yet
            rows.append(LabelRow(file, label, number))
    if not rows:
        raise ValueError(f"{path} has no labels below its header.")
    return rows


def _decode_text(raw: bytes, path: Path) -> str:
    """UTF-8 or UTF-16 where they say so, else UTF-8, else Latin-1."""
    marked = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    kinds = ["utf-16"] if marked else ["utf-8-sig", "latin-1"]
    for kind in kinds:
        try:
            text = raw.decode(kind)
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            return text
    raise ValueError(f"{path} is not a text file; save it as CSV in UTF-8.")


def _find_columns(cells: list[str], path: Path) -> tuple[int, int]:
    names = [cell.strip().lower() for cell in cells]
    if "file" in names and "label" in names:
        for name in ("file", "label"):
            if names.count(name) > 1:
                raise ValueError(f"{path}, row 1: the header names the column {name!r} twice.")
        return names.index("file"), names.index("label")
    for mark, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and mark in names[0]:
            raise ValueError(
                f"{path}, row 1: its columns are separated by {word}; save it with commas, "
                f"so that the first line is file,label."
            )
    raise ValueError(
        f"{path}, row 1: the first line must be file,label, not {','.join(cells)[:60]!r}."
    )


def match_labels(rows: Iterable[LabelRow], names: Iterable[str], path: Path) -> dict[str, str]:
    """The label of each named picture; unknown, outside and contradictory ones are errors."""
    known = {unicodedata.normalize("NFC", name): name for name in names}
    found: dict[str, LabelRow] = {}
    unknown: list[LabelRow] = []
    labels: dict[str, str] = {}
    for row in rows:
        name = known.get(row.file) or known.get(_plain_name(row, path))
        if name is None:
            unknown.append(row)
            continue
        before = found.setdefault(name, row)
        if before.label != row.label:
            raise ValueError(
                f"{path}, rows {before.number} and {row.number}: {row.file} is called "
                f"{before.label!r} and {row.label!r}; keep one."
            )
        labels[name] = row.label
    if unknown:
        raise ValueError(_unknown_sentence(unknown, known, path))
    return labels


def _plain_name(row: LabelRow, path: Path) -> str:
    """A name below the folder with forward slashes; one that leaves it is refused."""
    windows = PureWindowsPath(row.file)
    parts = windows.parts if "\\" in row.file else PurePosixPath(row.file).parts
    if ".." in parts or row.file.startswith(("/", "\\")) or windows.drive:
        raise ValueError(
            f"{path}, row {row.number}: {row.file} lies outside the folder of pictures; names "
            f"are relative to it and never go up."
        )
    return "/".join(part for part in parts if part != ".")


def _unknown_sentence(rows: list[LabelRow], known: Mapping[str, str], path: Path) -> str:
    lines = []
    for row in rows[:SHOWN]:
        close = difflib.get_close_matches(row.file, known, n=1, cutoff=0.6)
        hint = f" (is it {close[0]}?)" if close else ""
        lines.append(f"row {row.number}: {row.file}{hint}")
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f"{path} names pictures that are not there: {'; '.join(lines)}{more}."


def order_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Class names in order: by value if all are numbers, else by text.

    >>> order_classes(["10", "9", "9"])
    ('9', '10')
    """
    names = set(labels)
    if all(re.fullmatch(r"[+-]?\d+(\.\d+)?", name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))
