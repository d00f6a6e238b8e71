"""A model over a folder, a zip or a file of pictures, streamed into a CSV or Parquet table."""

from __future__ import annotations

import itertools
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from calmatch import log, table
from calmatch.data.files import SUFFIXES, Files
from calmatch.model import Model
from calmatch.table import Row

BIGGEST = 1 << 28  # bytes of one file; larger ones are not pictures
SHOWN = 10  # skipped files that are named on the console


class Skipped(NamedTuple):
    """A file that is not predicted, and why."""

    file: str
    reason: str


class Count(NamedTuple):
    """What came of it."""

    pictures: int
    sure: int
    skipped: int
    out: Path


@dataclass(frozen=True)
class Pictures:
    """A folder, a zip or one file; names are listed anew each time, never kept."""

    path: Path

    @property
    def root(self) -> Path:
        return self.path if self.path.is_dir() or self.is_zip else self.path.parent

    @property
    def is_zip(self) -> bool:
        return self.path.suffix == ".zip" and self.path.is_file()

    def names(self) -> Iterator[str | Skipped]:
        """Names below the root in a fixed order, those of one folder at a time."""
        if not self.path.exists():
            raise ValueError(f"There is no {self.path}.")
        if self.path.is_dir():
            yield from _walk(self.path, self.path.resolve(), "")
        elif self.is_zip:
            yield from _inside(self.path)
        elif self.path.is_file():
            yield self.path.name
        else:
            raise ValueError(f"{self.path} is neither a folder, nor a .zip, nor a picture.")

    def chunks(self, size: int) -> Iterator[list[str | Skipped]]:
        names = self.names()
        while chunk := list(itertools.islice(names, size)):
            yield chunk


def _walk(folder: Path, root: Path, below: str) -> Iterator[str | Skipped]:
    """Pictures in a folder and under it; hidden ones and links out of the folder are left out."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        if not below:
            raise ValueError(f"{folder} cannot be opened: {error.strerror}.") from error
        yield Skipped(below, f"it cannot be opened ({error.strerror})")
        return
    for entry in entries:
        name = below + entry.name
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), root, f"{name}/")
        elif entry.name.lower().endswith(SUFFIXES):
            reason = _unfit(Path(entry.path), root)
            yield Skipped(name, reason) if reason else name


def _unfit(path: Path, root: Path) -> str:
    """Why a file must not be opened; empty if it may."""
    try:
        if path.is_symlink() and not path.resolve(strict=True).is_relative_to(root):
            return "it is a link that leaves the folder"
        facts = path.stat()
    except OSError as error:
        return f"it cannot be opened ({error.strerror})"
    if not stat.S_ISREG(facts.st_mode):
        return "it is not a regular file"
    return f"it is larger than {BIGGEST >> 20} MiB" if facts.st_size > BIGGEST else ""


def _inside(path: Path) -> Iterator[str | Skipped]:
    try:
        with zipfile.ZipFile(path) as archive:
            found = {info.filename: info.file_size for info in archive.infolist()}
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{path} is not a zip file: {error}.") from error
    for name in sorted(found):
        parts = name.split("/")
        if parts[0] == "__MACOSX" or any(part.startswith(".") and part != ".." for part in parts):
            continue
        if name.lower().endswith(SUFFIXES):
            large = found[name] > BIGGEST
            yield Skipped(name, f"it is larger than {BIGGEST >> 20} MiB") if large else name


def decoded(root: Path, name: str, size: int) -> Any:
    """uint8 [3, size, size], or why not."""
    try:
        return Files(root, (name,), size).picture(0)
    except Exception as error:  # whatever a decoder makes of a broken or hostile file
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return Skipped(name, told.removeprefix(f"{name} ").strip() or "it cannot be decoded")


def answered(model: Model, names: Sequence[str], found: Iterable[Any]) -> list[Row | Skipped]:
    """Rows of one chunk, in its order."""
    results = dict(zip(names, found, strict=True))
    good = {name: pixels for name, pixels in results.items() if not isinstance(pixels, Skipped)}
    rows: dict[str, Row | Skipped] = {
        name: result for name, result in results.items() if isinstance(result, Skipped)
    }
    if good:
        probs = model.probabilities(torch.from_numpy(np.stack(list(good.values()))))
        for name, answer in zip(good, model.answer(probs), strict=True):
            rows[name] = Row(name, *answer)
    return [rows[name] for name in names]


def local(model: Model, pictures: Pictures, batch: int, workers: int) -> Iterator[Row | Skipped]:
    """Rows of all pictures: one chunk is decoded by threads while the one before is computed."""

    def finished(chunk: list[str | Skipped], work: list[Future[Any]]) -> list[Row | Skipped]:
        names = [name for name in chunk if isinstance(name, str)]
        unfit: list[Row | Skipped] = [name for name in chunk if isinstance(name, Skipped)]
        return unfit + answered(model, names, [each.result() for each in work])

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        waiting: tuple[list[str | Skipped], list[Future[Any]]] | None = None
        for chunk in pictures.chunks(batch):
            work = [
                pool.submit(decoded, pictures.root, name, model.size)
                for name in chunk
                if isinstance(name, str)
            ]
            if waiting:
                yield from finished(*waiting)
            waiting = (chunk, work)
        if waiting:
            yield from finished(*waiting)


def predict(
    model: Model,
    pictures: Path | str,
    out: Path | str,
    *,
    batch: int = 256,
    workers: int = 0,
    strict: bool = False,
    engine: str = "local",
    address: str | None = None,
    quiet: bool = False,
) -> Count:
    """Write a table of answers: file, label, confidence, set, sure.

    Args:
        model: from `calmatch.load_model`.
        pictures: a folder (and those in it), a .zip, or one file.
        out: a .csv or .parquet file; it appears when it is whole.
        batch: pictures held in memory at once, twice.
        workers: threads that decode; 0: one for each core.
        strict: stop at a file that cannot be decoded, instead of skipping it.
        engine: `local`, or `ray` for a cluster whose nodes all see `pictures`.
        address: of the Ray cluster; by default one is started here.
        quiet: no progress bar and no lines.
    """
    if batch < 1 or workers < 0:
        raise ValueError("--batch must be at least 1 and --workers at least 0.")
    source, out = Pictures(Path(pictures)), Path(out)
    total = sum(1 for _ in source.names())
    if total == 0:
        raise ValueError(f"There are no pictures in {source.path} ({', '.join(SUFFIXES)}).")
    if engine == "ray":
        from calmatch import cluster

        rows = cluster.rows(model, source, batch, address, quiet)
    else:
        rows = local(model, source, batch, workers)
    with table.writer(out) as sheet, _bar(total, quiet) as progress:
        count = _write(rows, sheet, progress, strict)
        if count.pictures == 0:
            file, reason = sheet.skipped[0]
            raise ValueError(f"No picture in {source.path} can be decoded; {file}: {reason}")
    _tell(model, count, sheet.skipped, out, quiet)
    return count._replace(out=out)


def _write(
    rows: Iterable[Row | Skipped], sheet: table.Sheet, progress: Progress, strict: bool
) -> Count:
    task = progress.task_ids[0]
    pictures = sure = skipped = 0
    for row in rows:
        progress.advance(task)
        if isinstance(row, Row):
            sheet.write(row)
            pictures, sure = pictures + 1, sure + row.sure
            continue
        if strict:
            raise ValueError(f"{row.file}: {row.reason} Leave out --strict to skip such files.")
        sheet.skip(row.file, row.reason)
        skipped += 1
    return Count(pictures, sure, skipped, Path())


def _bar(total: int, quiet: bool) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    show = not quiet and log.console.is_terminal
    progress = Progress(TextColumn("Pictures"), *columns, console=log.console, disable=not show)
    progress.add_task("", total=total)
    return progress


def _tell(
    model: Model, count: Count, skipped: list[tuple[str, str]], out: Path, quiet: bool
) -> None:
    for file, reason in skipped[:SHOWN]:
        log.tell(f"Skipped {table.text(file)}: {reason}", quiet)
    if count.skipped:
        log.tell(f"{count.skipped} files were skipped; all are in {table.beside(out)}.", quiet)
    if model.note.get("calibration") is None:
        log.tell("This model was never calibrated: confidence is the network's own.", quiet)
    point = model.selective
    log.tell(f"{count.pictures} pictures, {count.sure} sure: {out}", quiet)
    if point is None or point.threshold is None:
        more = f"; {point.missing} more labels are needed" if point and point.missing else ""
        log.tell(f"Nothing is called sure: this model promises no accuracy{more}.", quiet)
