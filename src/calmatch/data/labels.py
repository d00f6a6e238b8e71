"""labels.csv, read strictly: every mistake is a sentence that names the file and the row."""

from __future__ import annotations

import csv
import difflib
import io
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

SHOWN = 5  # mistakes of one kind in a message


class Row(NamedTuple):
    """A picture's name and label, and where they stand."""

    file: str
    label: str
    number: int


def read(path: Path) -> list[Row]:
    """The rows of a CSV with the header `file,label`; further columns are ignored."""
    try:
        text = _text(path.read_bytes(), path)
        # the csv module counts lines; a person counts rows, the header being row 1
        table = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except OSError as error:
        raise ValueError(f"Cannot read {path}: {error.strerror}.") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}.") from error
    places = _header(table[0] if table else [], path)
    rows: list[Row] = []
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
            rows.append(Row(file, label, number))
    if not rows:
        raise ValueError(f"{path} has no labels below its header.")
    return rows


def _text(raw: bytes, path: Path) -> str:
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


def _header(cells: list[str], path: Path) -> tuple[int, int]:
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


def matched(rows: Iterable[Row], names: Iterable[str], path: Path) -> dict[str, str]:
    """The label of each named picture; unknown, outside and contradictory ones are errors."""
    known = {unicodedata.normalize("NFC", name): name for name in names}
    found: dict[str, Row] = {}
    unknown: list[Row] = []
    labels: dict[str, str] = {}
    for row in rows:
        name = known.get(row.file) or known.get(_plain(row, path))
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
        raise ValueError(_unknown(unknown, known, path))
    return labels


def _plain(row: Row, path: Path) -> str:
    """A name below the folder with forward slashes; one that leaves it is refused."""
    windows = PureWindowsPath(row.file)
    parts = windows.parts if "\\" in row.file else PurePosixPath(row.file).parts
    if ".." in parts or row.file.startswith(("/", "\\")) or windows.drive:
        raise ValueError(
            f"{path}, row {row.number}: {row.file} lies outside the folder of pictures; names "
            f"are relative to it and never go up."
        )
    return "/".join(part for part in parts if part != ".")


def _unknown(rows: list[Row], known: Mapping[str, str], path: Path) -> str:
    lines = []
    for row in rows[:SHOWN]:
        close = difflib.get_close_matches(row.file, known, n=1, cutoff=0.6)
        hint = f" (is it {close[0]}?)" if close else ""
        lines.append(f"row {row.number}: {row.file}{hint}")
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return f"{path} names pictures that are not there: {'; '.join(lines)}{more}."


def ordered(labels: Iterable[str]) -> tuple[str, ...]:
    """Class names in order: by value if all are numbers, else by text.

    >>> ordered(["10", "9", "9"])
    ('9', '10')
    """
    names = set(labels)
    if all(re.fullmatch(r"[+-]?\d+(\.\d+)?", name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))
