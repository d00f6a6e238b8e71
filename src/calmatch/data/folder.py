"""A person's own images: class folders, or a folder and a file of a few labels."""

import csv
import difflib
import io
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch

from calmatch import files
from calmatch.console import ProgressBar
from calmatch.data import images as stored
from calmatch.data.dataset import Dataset
from calmatch.data.images import SUFFIXES, CachedImages, ImageFiles, Pixels, Skipped
from calmatch.data.labelfiles import LabelRow, read_label_json

UNLABELLED = ("unlabelled", "unlabeled")
SIZES = (16, 32, 64, 96, 128)
LARGEST = 8 * 2**30  # bytes of decoded images that are kept; beyond, they are decoded again
SHOWN = 5  # mistakes of one kind in a message
NEAR = 500  # names of pictures among which a mistaken one is looked for
LONGEST_NAME, MOST_CLASSES = 1000, 100_000  # of a class, and how many: what a model file holds


class ImageFolder(NamedTuple):
    """What a folder holds: names below `root` in order, and a class id (-1: none) for each."""

    root: Path
    names: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def some(self, rows: Sequence[int]) -> "ImageFolder":
        names, labels = tuple(self.names[k] for k in rows), tuple(self.labels[k] for k in rows)
        return self._replace(names=names, labels=labels)

    @property
    def known(self) -> list[int]:
        """The class ids of labelled images."""
        return [label for label in self.labels if label >= 0]

    @property
    def counts(self) -> tuple[int, ...]:
        """Labels of each class."""
        counts = Counter(self.labels)
        return tuple(counts[k] for k in range(len(self.classes)))


def read_folder(
    root: Path, csv: Path | None = None, strict: bool = False, fewest: int = 2
) -> ImageFolder:
    """List a folder's images and their labels, of so many classes; nothing is decoded yet.

    `root` has class folders (`unlabelled/` holds images without a label), or is any tree with a
    file that `read_labels` knows; `strict` makes a file that would be skipped an error.
    """
    names, skipped = list_images(root, strict)
    if csv is None:
        known, notes = _by_folder(root, names)
    else:
        rows = read_labels(csv, names)
        known = match_labels(rows, names, csv)
        twice = len(rows) - len(known)
        notes = [f"{csv.name} names {twice} pictures more than once, alike."] if twice else []
    classes = _order_classes(known.values())
    for name in classes:
        if not 0 < len(name) <= LONGEST_NAME or name.encode(errors="ignore").decode() != name:
            rule = f"a label, which has 1 to {LONGEST_NAME:,} characters of valid Unicode"
            raise ValueError(f"{csv or root}: {name[:40]!r} cannot be {rule}.")
    if len(classes) > MOST_CLASSES:
        raise ValueError(f"{csv or root} names {len(classes):,} classes; {MOST_CLASSES:,} at most.")
    if len(classes) < fewest:
        one = f"{csv or root} knows one class only, {classes[0]!r}"
        raise ValueError(f"{one}; a classifier needs two or more.")
    place = {name: k for k, name in enumerate(classes)}
    ids = tuple(place[known[name]] if name in known else -1 for name in names)
    folder = ImageFolder(root, tuple(names), ids, classes, tuple(skipped))
    return folder._replace(notes=(*notes, *_find_doubts(folder)))


def list_images(root: Path, strict: bool = False) -> tuple[list[str], list[Skipped]]:
    """Images anywhere below root, sorted; links that lead outside are left out."""
    if not root.is_dir():
        hint = " Unpack it first." if root.suffix == ".zip" else ""
        raise ValueError(f"There is no folder {root}.{hint}")
    listed = list(stored.walk_images(root))
    names = sorted(name for name in listed if isinstance(name, str))
    skipped = [name for name in listed if isinstance(name, Skipped)]
    if strict and skipped:
        raise ValueError(f"{skipped[0].file}: {skipped[0].reason} (--strict).")
    if skipped and not names:
        why = f"{skipped[0].file}: {skipped[0].reason}"
        how = "choose pictures that can be opened and copy them into it"
        raise ValueError(f"{root} holds no pictures that may be read ({why}); {how}.")
    if not names:
        kinds = ", ".join(suffix[1:] for suffix in SUFFIXES)
        raise ValueError(f"{root} holds no pictures; their names end in {kinds}.")
    return names, skipped


def _by_folder(root: Path, names: list[str]) -> tuple[dict[str, str], list[str]]:
    """Labels by class folders, and what may not have been meant by them."""
    known = class_folders(names)
    inside: dict[str, set[str]] = {}
    for name in known:
        first, *deeper, _ = name.split("/")
        inside.setdefault(first, set()).update(deeper[:1])
    for folder in sorted(root.iterdir()):
        name = folder.name
        other = name.startswith((".", "__MACOSX")) or name.lower() in UNLABELLED
        if folder.is_dir() and not folder.is_symlink() and not other and name not in inside:
            raise ValueError(f"The class folder {folder} holds no pictures; fill it or delete it.")
    if not known:
        raise ValueError(
            f"{root} has no class folders with pictures in them. Sort a few pictures into one "
            f"folder for each class, or name their classes with --labels labels.csv."
        )
    loose = sum("/" not in name for name in names)
    notes = [f"Pictures in {root.name} itself count as unlabelled: {loose}."] if loose else []
    if len(inside) > 1 and len(shared := sorted(set.intersection(*inside.values()))) > 1:
        notes.append(
            f"The folders {' and '.join(sorted(inside)[:2])} are taken for classes, but both hold "
            f"{', '.join(shared[:3])}: if those are the classes, give {root / min(inside)} instead."
        )
    return known, notes


def class_folders(names: Iterable[str]) -> dict[str, str]:
    """The class of each image in a class folder: the first folder of its name."""
    first = {name: name.partition("/")[0] for name in names if "/" in name}
    kinds = {text for text in first.values() if text.lower() not in UNLABELLED}
    plain = {k: unicodedata.normalize("NFC", stored.valid_text(k)).strip() for k in kinds}
    return {name: plain[text] for name, text in first.items() if text in plain}


def _order_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Class names in order: by value if all are numbers, else by text.

    >>> _order_classes(["10", "9", "9"])
    ('9', '10')
    """
    names = set(labels)
    if all(re.fullmatch(r"[+-]?\d+(\.\d+)?", name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


def _find_doubts(folder: ImageFolder) -> Iterator[str]:
    """What a person may have overlooked."""
    for name, count in zip(folder.classes, folder.counts, strict=True):
        if count == 1:
            yield (
                f"Class {name!r} has one label: it is learned from, but how well it is recognised "
                f"cannot be checked. Label at least one more."
            )
    alike: dict[str, list[str]] = {}
    for name in folder.classes:
        folded = unicodedata.normalize("NFKC", name.casefold())
        alike.setdefault(" ".join(folded.split()), []).append(ascii(name))
    for names in alike.values():
        if len(names) > 1:
            yield f"Classes {', '.join(names)} differ in capitals, blanks or accents' codes only."


def fitting_size(folder: ImageFolder, sample: int = 400) -> tuple[int, int]:
    """The training size that suits the images, and the median of their shorter sides."""
    sides = []
    for name in folder.names[:: max(1, len(folder.names) // sample)]:
        try:
            data = files.read_bytes(folder.root / name, stored.LARGEST_FILE)
            with stored.open_image(data) as image:
                sides.append(min(image.size))
        except stored.BROKEN:
            continue
    middle = int(np.median(sides)) if sides else SIZES[0]
    return max(size for size in SIZES if size <= max(middle, SIZES[0])), middle


def decode_folder(
    folder: ImageFolder,
    size: int,
    strict: bool = False,
    bar: ProgressBar | None = None,
    *,
    squash: bool = False,
) -> tuple[CachedImages | ImageFiles, ImageFolder]:
    """All images of a folder at one size, decoded once and kept; broken files are left out."""
    listed = ImageFiles(folder.root, folder.names, size, squash)
    key = f"pictures-{stored.stamp_files(listed)}"
    record = stored.cache_folder() / f"{key}.json"
    broken: dict[str, str] = {}

    def decode(place: int) -> Pixels | None:
        try:
            return listed.image(place)
        except ValueError as error:
            if strict:
                raise
            broken[folder.names[place]] = str(error).partition("cannot be decoded: ")[2]
            return None

    def fill(pixels: Pixels | None) -> None:
        for place, image in enumerate(stored.map_threads(decode, len(listed))):
            if image is not None and pixels is not None:
                pixels[place] = image
                if place % 1024 == 0 and isinstance(pixels, np.memmap):
                    stored.release_pages(pixels._mmap)  # type: ignore[attr-defined]
            if bar is not None:
                bar.update(place + 1)
        files.write(record, json.dumps(broken))  # all ASCII: names need not be valid Unicode

    try:
        known: dict[str, Any] | None = None if strict else files.read_json(record)
    except ValueError:  # missing, or damaged
        known = None
    if known is None:
        (stored.cache_folder() / f"{key}.npy").unlink(missing_ok=True)
    images: CachedImages | ImageFiles = listed
    if math.prod(listed.shape) <= LARGEST:
        cached = stored.cached_array(key, listed.shape, fill)
        images = CachedImages(cached, torch.arange(len(listed)), key)
    elif known is None:
        fill(None)
    bad = {name: str(why) for name, why in files.read_json(record).items()}
    if not bad:
        return images, folder
    rows = [k for k, name in enumerate(folder.names) if name not in bad]
    if not rows:
        raise ValueError(f"No file in {folder.root} can be decoded: {next(iter(bad.values()))}")
    skipped = [Skipped(name, why) for name, why in sorted(bad.items())]
    return images.some(rows), folder.some(rows)._replace(skipped=(*folder.skipped, *skipped))


def leave_out_broken(
    images: ImageFiles, folder: ImageFolder, rows: list[int], strict: bool = False
) -> tuple[ImageFiles, ImageFolder]:
    """Only these rows, those that could be decoded; the others are looked at again, to say why."""
    skipped = list(folder.skipped)
    for row in sorted(set(range(len(images))) - set(rows)):
        try:
            images.image(row)
        except ValueError as error:
            if strict or not rows:
                raise
            reason = str(error).partition("cannot be decoded: ")[2]
            skipped.append(Skipped(folder.names[row], reason))
    return images.some(rows), folder.some(rows)._replace(skipped=tuple(skipped))


def arrange_rows(
    folder: ImageFolder, hold: float, most: int, seed: int
) -> tuple[list[int], list[int]]:
    """Rows to learn from, with at most so many unlabelled ones; and a held-out share of labels."""
    random = np.random.default_rng([seed, 11])
    y = np.array(folder.labels)
    held: list[int] = []
    for k in range(len(folder.classes)):
        ids = random.permutation(np.flatnonzero(y == k))
        held += ids[: int(hold * len(ids))].tolist()
    if hold and not held:
        raise ValueError(f"--hold {hold:g} of so few labels holds none out; leave it out.")
    spare = np.flatnonzero(y < 0)
    if most and len(spare) > most:
        spare = random.choice(spare, most, replace=False)
    train = sorted(set(np.flatnonzero(y >= 0).tolist()) - set(held)) + sorted(spare.tolist())
    return train, sorted(held)


def refuse_unseen_classes(folder: ImageFolder) -> tuple[int, ...]:
    """How many labels each class has; one without any cannot be learned."""
    if 0 in folder.counts:
        name = folder.classes[folder.counts.index(0)]
        raise ValueError(f"Class {name!r} has no label left whose picture can be decoded.")
    return folder.counts


def own_images(
    *,
    root: str,
    labels: str = "",
    size: int = 64,
    hold: float = 0.0,
    most: int = 0,
    seed: int = 0,
    mean: Any = None,
    std: Any = None,
    strict: bool = False,
) -> Dataset:
    """Own pictures: class folders (+ unlabelled/), or a folder and a CSV of a few labels.

    A share `hold` of each class's labels is for testing (0: the labelled images stand in), and of
    unlabelled images there are `most` (0: all). `mean` and `std` are each channel's, as the network
    wants them (None: the images' own); with `strict` an undecodable file is an error.
    """
    folder = read_folder(Path(root), Path(labels) if labels else None, strict)
    images, folder = decode_folder(folder, size, strict)
    rows, held = arrange_rows(folder, hold, most, seed)
    y = torch.tensor(folder.labels)
    counts = refuse_unseen_classes(folder.some(rows))
    test = held or [k for k in rows if folder.labels[k] >= 0]
    if not (mean and std):  # by up to 1,000 images
        flat = images.take(rows[:: max(1, len(rows) // 1000)]).div(255).transpose(0, 1).flatten(1)
        mean, std = tuple(flat.mean(1).tolist()), tuple(flat.std(1).clamp_min(0.02).tolist())
    train = (images.some(rows), y[rows])
    return Dataset(*train, images.some(test), y[test], folder.classes, mean, std, counts)


def read_labels(path: Path, names: Iterable[str] = ()) -> list[LabelRow]:
    """The rows of a CSV with the columns `file` (or `file_name`) and `label`, or of a JSON file.

    `names` are the images of the folder, by which addresses in JSON files are understood.
    """
    try:
        text = _decode_text(files.read_bytes(path), path)
        if text.lstrip().startswith(("[", "{")):
            return read_label_json(text, path, names)
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
        if label:  # without one, the image is not labelled yet
            rows.append(LabelRow(file, label, number))
    if not rows:
        raise ValueError(f"{path} has no labels below its header.")
    return rows


def _decode_text(raw: bytes, path: Path) -> str:
    """UTF-8 or UTF-16 where they say so, else UTF-8, else what Windows writes, else Latin-1."""
    marked = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    for kind in ("utf-16",) if marked else ("utf-8-sig", "cp1252", "latin-1"):
        try:
            text = raw.decode(kind)
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            return text
    raise ValueError(f"{path} is not a text file; save it as CSV in UTF-8.")


def _find_columns(cells: list[str], path: Path) -> tuple[int, int]:
    names = [re.sub("^file_?name$", "file", cell.strip().lower()) for cell in cells]
    if "file" in names and "label" in names:
        for name in ("file", "label"):
            if names.count(name) > 1:
                raise ValueError(f"{path}, row 1: the header names the column {name!r} twice.")
        return names.index("file"), names.index("label")
    for mark, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and mark in names[0]:
            odd = f"{path}, row 1: its columns are separated by {word}"
            raise ValueError(f"{odd}; save it with commas, so that the first line is file,label.")
    first = ",".join(cells)[:60]
    raise ValueError(f"{path}, row 1: the first line must be file,label, not {first!r}.")


def match_labels(rows: Iterable[LabelRow], names: Iterable[str], path: Path) -> dict[str, str]:
    """The label of each named image; unknown, outside and contradictory ones are errors."""
    known: dict[str, str] = {}
    twins: set[str] = set()  # of files whose names look the same
    for own in names:
        plain = unicodedata.normalize("NFC", own)
        twins |= {plain} & known.keys()
        known[plain] = own
    first: dict[str, LabelRow] = {}
    unknown: list[LabelRow] = []
    for row in rows:
        name = known.get(row.file) or known.get(_plain_name(row, path))
        if name is None:
            unknown.append(row)
            continue
        if unicodedata.normalize("NFC", name) in twins:
            both = f"two pictures are called {row.file}, one with an accent of its own (NFD)"
            raise ValueError(f"{path}, row {row.number}: {both}; rename one.")
        before = first.setdefault(name, row)
        if before.label != row.label:
            both = f"rows {before.number} and {row.number}"
            where = both if before.number != row.number else f"row {row.number}"  # two annotators
            labels = f"{before.label!r} and {row.label!r}"
            raise ValueError(f"{path}, {where}: {row.file} is called {labels}; keep one.")
    if unknown:
        raise ValueError(_unknown_sentence(unknown, known, path))
    return {name: row.label for name, row in first.items()}


def _plain_name(row: LabelRow, path: Path) -> str:
    """A name below the folder with forward slashes; one that leaves it is refused."""
    windows = PureWindowsPath(row.file)
    parts = windows.parts if "\\" in row.file else PurePosixPath(row.file).parts
    if ".." in parts or row.file.startswith(("/", "\\")) or windows.drive:
        outside = f"{path}, row {row.number}: {row.file} lies outside the folder of pictures"
        raise ValueError(f"{outside}; names are relative to it and never go up.")
    return "/".join(part for part in parts if part != ".")


def _unknown_sentence(rows: list[LabelRow], known: Mapping[str, str], path: Path) -> str:
    lines = []
    for row in rows[:SHOWN]:
        last = row.file.rpartition("/")[2].rpartition(".")[0].casefold()
        some = [name for name in known if last in name.casefold()][:NEAR] or list(known)[:NEAR]
        close = difflib.get_close_matches(row.file[:LONGEST_NAME], some, n=1, cutoff=0.6)
        hint = f" (is it {close[0]}?)" if close else ""
        lines.append(f"row {row.number}: {row.file}{hint}")
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f"{path} names pictures that are not there: {'; '.join(lines)}{more}."
