"""The table of answers: rows streamed into CSV or Parquet, whole or not there at all."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from calmatch import checkpoint

COLUMNS = ("file", "label", "confidence", "set", "sure")
GROUP = 16_384  # rows of one Parquet row group
KEPT = 100  # skipped files that are remembered; all are written


class Row(NamedTuple):
    """What the model says of one file."""

    file: str
    label: str
    confidence: float
    set: tuple[str, ...]
    sure: bool


class _Writer(Protocol):
    def write(self, row: Row) -> None: ...


class Sheet:
    """Rows go to the table, files that cannot be predicted to a list beside it."""

    def __init__(self, writer: _Writer, beside: Path) -> None:
        self.writer, self.beside = writer, beside
        self.skipped: list[tuple[str, str]] = []
        self.stack = ExitStack()
        self.list: Any = None

    def write(self, row: Row) -> None:
        self.writer.write(row)

    def skip(self, file: str, reason: str) -> None:
        if self.list is None:
            draft = self.stack.enter_context(checkpoint.draft(self.beside))
            opened = self.stack.enter_context(draft.open("w", newline="", encoding="utf-8"))
            self.list = Rows(opened)
            self.list.writerow(("file", "reason"))
        self.list.writerow((text(file), text(reason)))
        if len(self.skipped) < KEPT:
            self.skipped.append((file, reason))


@contextmanager
def writer(out: Path) -> Iterator[Sheet]:
    """A table that appears under its name when the block ends well."""
    kinds: dict[str, Callable[[Path], AbstractContextManager[_Writer]]]
    kinds = {".csv": _csv, ".parquet": _parquet}
    if out.suffix not in kinds:
        raise ValueError(f"{out} must end in {' or '.join(kinds)}.")
    if not out.parent.is_dir() or out.is_dir():
        raise ValueError(f"{out} cannot be written: its folder is not there, or it is a folder.")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"{out} cannot be written: its folder is read-only.")
    with checkpoint.draft(out) as draft, kinds[out.suffix](draft) as rows:
        sheet = Sheet(rows, beside(out))
        with sheet.stack:
            yield sheet
        if sheet.list is None:
            beside(out).unlink(missing_ok=True)  # of an earlier run


def beside(out: Path) -> Path:
    """Where the list of skipped files goes."""
    return out.with_name(f"{out.name}.skipped.csv")


def text(name: str) -> str:
    """A file name as valid Unicode; bytes that are none show as \\xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def joined(names: Sequence[str]) -> str:
    """A set in one cell: names joined by `|`; a `|` or backslash in a name gets a backslash.

    >>> print(joined(["cat", "a|b"]))
    cat|a\\|b
    """
    return "|".join(re.sub(r"([\\|])", r"\\\1", name) for name in names)


def parted(cell: str) -> tuple[str, ...]:
    """The names of a set from its cell: the inverse of `joined`."""
    names = re.findall(r"(?:[^\\|]|\\.)+", cell, re.DOTALL)
    return tuple(re.sub(r"\\(.)", r"\1", name, flags=re.DOTALL) for name in names)


class Rows:
    """CSV; Python before 3.13 leaves a lone carriage return unquoted, where readers end the row."""

    def __init__(self, file: Any) -> None:
        self.plain = csv.writer(file, lineterminator="\n")
        self.quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)

    def writerow(self, cells: Sequence[str]) -> None:
        (self.quoted if any("\r" in cell for cell in cells) else self.plain).writerow(cells)


class _Csv:
    def __init__(self, file: Any) -> None:
        self.rows = Rows(file)
        self.rows.writerow(COLUMNS)

    def write(self, row: Row) -> None:
        sure = "true" if row.sure else "false"
        cells = (text(row.file), row.label, f"{row.confidence:.6f}", joined(row.set), sure)
        self.rows.writerow(cells)


@contextmanager
def _csv(path: Path) -> Iterator[_Csv]:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        yield _Csv(file)


class _Parquet:
    def __init__(self, arrow: Any, file: Any) -> None:
        self.arrow, self.file = arrow, file
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Row) -> None:
        self.rows.append({**row._asdict(), "file": text(row.file), "set": list(row.set)})
        if len(self.rows) == GROUP:
            self.flush()

    def flush(self) -> None:
        if self.rows:
            self.file.write_table(self.arrow.Table.from_pylist(self.rows, self.file.schema))
            self.rows = []


@contextmanager
def _parquet(path: Path) -> Iterator[_Parquet]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            "Parquet files need an extra: pip install 'calmatch[parquet]', or write a .csv."
        ) from error
    kinds = (pyarrow.string(), pyarrow.string(), pyarrow.float64(), pyarrow.list_(pyarrow.string()))
    schema = pyarrow.schema(list(zip(COLUMNS, (*kinds, pyarrow.bool_()), strict=True)))
    with parquet.ParquetWriter(path, schema) as file:
        rows = _Parquet(pyarrow, file)
        yield rows
        rows.flush()
