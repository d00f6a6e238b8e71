"""A model over a folder, a zip or a file of images, streamed into a CSV or Parquet table."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
import re
import socket
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from calmatch import console, files
from calmatch.data.images import SUFFIXES, ImageFiles
from calmatch.model import Model

LARGEST_FILE = 1 << 28  # bytes of one file; larger ones are not pictures
SHOWN = 10  # skipped files that are named on the console


class Skipped(NamedTuple):
    """A file that is not predicted, and why."""

    file: str
    reason: str


class Counts(NamedTuple):
    """What came of it."""

    pictures: int
    sure: int
    skipped: int
    out: Path


@dataclass(frozen=True)
class ImageSource:
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
            yield from _walk_images(self.path, self.path.resolve(), "")
        elif self.is_zip:
            yield from _names_in_zip(self.path)
        elif self.path.is_file():
            yield self.path.name
        else:
            raise ValueError(f"{self.path} is neither a folder, nor a .zip, nor a picture.")

    def chunks(self, size: int) -> Iterator[list[str | Skipped]]:
        names = self.names()
        while chunk := list(itertools.islice(names, size)):
            yield chunk


def _walk_images(folder: Path, root: Path, below: str) -> Iterator[str | Skipped]:
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
            yield from _walk_images(Path(entry.path), root, f"{name}/")
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
    return f"it is larger than {LARGEST_FILE >> 20} MiB" if facts.st_size > LARGEST_FILE else ""


def _names_in_zip(path: Path) -> Iterator[str | Skipped]:
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
            large = found[name] > LARGEST_FILE
            yield Skipped(name, f"it is larger than {LARGEST_FILE >> 20} MiB") if large else name


def decode_one(root: Path, name: str, size: int) -> Any:
    """uint8 [3, size, size], or why not."""
    try:
        return ImageFiles(root, (name,), size).picture(0)
    except Exception as error:  # whatever a decoder makes of a broken or hostile file
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return Skipped(name, told.removeprefix(f"{name} ").strip() or "it cannot be decoded")


def answer_chunk(
    model: Model, names: Sequence[str], found: Iterable[Any]
) -> list[Answered | Skipped]:
    """Rows of one chunk, in its order."""
    results = dict(zip(names, found, strict=True))
    good = {name: pixels for name, pixels in results.items() if not isinstance(pixels, Skipped)}
    rows: dict[str, Answered | Skipped] = {
        name: result for name, result in results.items() if isinstance(result, Skipped)
    }
    if good:
        probs = model.probabilities(torch.from_numpy(np.stack(list(good.values()))))
        for name, answer in zip(good, model.answer(probs), strict=True):
            rows[name] = Answered(name, *answer)
    return [rows[name] for name in names]


def predict_locally(
    model: Model, pictures: ImageSource, batch: int, workers: int
) -> Iterator[Answered | Skipped]:
    """Rows of all pictures: one chunk is decoded by threads while the one before is computed."""

    def finished(chunk: list[str | Skipped], work: list[Future[Any]]) -> list[Answered | Skipped]:
        names = [name for name in chunk if isinstance(name, str)]
        unfit: list[Answered | Skipped] = [name for name in chunk if isinstance(name, Skipped)]
        return unfit + answer_chunk(model, names, [each.result() for each in work])

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        waiting: tuple[list[str | Skipped], list[Future[Any]]] | None = None
        for chunk in pictures.chunks(batch):
            work = [
                pool.submit(decode_one, pictures.root, name, model.size)
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
) -> Counts:
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
    source, out = ImageSource(Path(pictures)), Path(out)
    total = sum(1 for _ in source.names())
    if total == 0:
        raise ValueError(f"There are no pictures in {source.path} ({', '.join(SUFFIXES)}).")
    if engine == "ray":
        pass  # IMPORT GONE

        rows = predict_on_ray(model, source, batch, address, quiet)
    else:
        rows = predict_locally(model, source, batch, workers)
    with open_table(out) as sheet, _progress(total, quiet) as progress:
        count = _write_rows(rows, sheet, progress, strict)
        if count.pictures == 0:
            file, reason = sheet.skipped[0]
            raise ValueError(f"No picture in {source.path} can be decoded; {file}: {reason}")
    _summarise(model, count, sheet.skipped, out, quiet)
    return count._replace(out=out)


def _write_rows(
    rows: Iterable[Answered | Skipped], sheet: Table, progress: Progress, strict: bool
) -> Counts:
    task = progress.task_ids[0]
    pictures = sure = skipped = 0
    for row in rows:
        progress.advance(task)
        if isinstance(row, Answered):
            sheet.write(row)
            pictures, sure = pictures + 1, sure + row.sure
            continue
        if strict:
            raise ValueError(f"{row.file}: {row.reason} Leave out --strict to skip such files.")
        sheet.skip(row.file, row.reason)
        skipped += 1
    return Counts(pictures, sure, skipped, Path())


def _progress(total: int, quiet: bool) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    show = not quiet and console.console.is_terminal
    progress = Progress(TextColumn("Pictures"), *columns, console=console.console, disable=not show)
    progress.add_task("", total=total)
    return progress


def _summarise(
    model: Model, count: Counts, skipped: list[tuple[str, str]], out: Path, quiet: bool
) -> None:
    for file, reason in skipped[:SHOWN]:
        console.message(f"Skipped {valid_text(file)}: {reason}", quiet)
    if count.skipped:
        console.message(
            f"{count.skipped} files were skipped; all are in {skipped_path(out)}.", quiet
        )
    if model.note.get("calibration") is None:
        console.message("This model was never calibrated: confidence is the network's own.", quiet)
    point = model.selective
    console.message(f"{count.pictures} pictures, {count.sure} sure: {out}", quiet)
    if point is None or point.threshold is None:
        more = f"; {point.missing} more labels are needed" if point and point.missing else ""
        console.message(f"Nothing is called sure: this model promises no accuracy{more}.", quiet)


TABLE_COLUMNS = ("file", "label", "confidence", "set", "sure")
ROW_GROUP = 16_384  # rows of one Parquet row group
REMEMBERED = 100  # skipped files that are remembered; all are written


class Answered(NamedTuple):
    """What the model says of one file."""

    file: str
    label: str
    confidence: float
    set: tuple[str, ...]
    sure: bool


class _Writer(Protocol):
    def write(self, row: Answered) -> None: ...


class Table:
    """Rows go to the table, files that cannot be predicted to a list beside it."""

    def __init__(self, writer: _Writer, beside: Path) -> None:
        self.writer, self.beside = writer, beside
        self.skipped: list[tuple[str, str]] = []
        self.stack = ExitStack()
        self.list: Any = None

    def write(self, row: Answered) -> None:
        self.writer.write(row)

    def skip(self, file: str, reason: str) -> None:
        if self.list is None:
            draft = self.stack.enter_context(files.draft(self.beside))
            opened = self.stack.enter_context(draft.open("w", newline="", encoding="utf-8"))
            self.list = CsvRows(opened)
            self.list.writerow(("file", "reason"))
        self.list.writerow((valid_text(file), valid_text(reason)))
        if len(self.skipped) < REMEMBERED:
            self.skipped.append((file, reason))


@contextmanager
def open_table(out: Path) -> Iterator[Table]:
    """A table that appears under its name when the block ends well."""
    kinds: dict[str, Callable[[Path], AbstractContextManager[_Writer]]]
    kinds = {".csv": _csv, ".parquet": _parquet}
    if out.suffix not in kinds:
        raise ValueError(f"{out} must end in {' or '.join(kinds)}.")
    if not out.parent.is_dir() or out.is_dir():
        raise ValueError(f"{out} cannot be written: its folder is not there, or it is a folder.")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"{out} cannot be written: its folder is read-only.")
    with files.draft(out) as draft, kinds[out.suffix](draft) as rows:
        sheet = Table(rows, skipped_path(out))
        with sheet.stack:
            yield sheet
        if sheet.list is None:
            skipped_path(out).unlink(missing_ok=True)  # of an earlier run


def skipped_path(out: Path) -> Path:
    """Where the list of skipped files goes."""
    return out.with_name(f"{out.name}.skipped.csv")


def valid_text(name: str) -> str:
    """A file name as valid Unicode; bytes that are none show as \\xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def join_names(names: Sequence[str]) -> str:
    """A set in one cell: names joined by `|`; a `|` or backslash in a name gets a backslash.

    >>> print(join_names(["cat", "a|b"]))
    cat|a\\|b
    """
    return "|".join(re.sub(r"([\\|])", r"\\\1", name) for name in names)


def split_names(cell: str) -> tuple[str, ...]:
    """The names of a set from its cell: the inverse of `joined`."""
    names = re.findall(r"(?:[^\\|]|\\.)+", cell, re.DOTALL)
    return tuple(re.sub(r"\\(.)", r"\1", name, flags=re.DOTALL) for name in names)


class CsvRows:
    """CSV; Python before 3.13 leaves a lone carriage return unquoted, where readers end the row."""

    def __init__(self, file: Any) -> None:
        self.plain = csv.writer(file, lineterminator="\n")
        self.quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)

    def writerow(self, cells: Sequence[str]) -> None:
        (self.quoted if any("\r" in cell for cell in cells) else self.plain).writerow(cells)


class _Csv:
    def __init__(self, file: Any) -> None:
        self.rows = CsvRows(file)
        self.rows.writerow(TABLE_COLUMNS)

    def write(self, row: Answered) -> None:
        sure = "true" if row.sure else "false"
        cells = (
            valid_text(row.file),
            row.label,
            f"{row.confidence:.6f}",
            join_names(row.set),
            sure,
        )
        self.rows.writerow(cells)


@contextmanager
def _csv(path: Path) -> Iterator[_Csv]:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        yield _Csv(file)


class _Parquet:
    def __init__(self, arrow: Any, file: Any) -> None:
        self.arrow, self.file = arrow, file
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Answered) -> None:
        self.rows.append({**row._asdict(), "file": valid_text(row.file), "set": list(row.set)})
        if len(self.rows) == ROW_GROUP:
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
    schema = pyarrow.schema(list(zip(TABLE_COLUMNS, (*kinds, pyarrow.bool_()), strict=True)))
    with parquet.ParquetWriter(path, schema) as file:
        rows = _Parquet(pyarrow, file)
        yield rows
        rows.flush()


RAY_BLOCKS = 1000  # pieces of work that Ray keeps track of


class _RayWorker:
    """One process on one node: it holds the model and turns chunks of names into rows."""

    def __init__(self, model: Any, source: ImageSource) -> None:
        import ray

        torch.set_num_threads(1)  # Ray starts one worker for each core
        self.model: Model = ray.get(model)
        self.model.to("cuda" if ray.get_gpu_ids() else "cpu")
        self.source = source
        self.node = ray.get_runtime_context().get_node_id()

    def __call__(self, item: dict[str, Any]) -> dict[str, str]:
        names = json.loads(item["names"])
        root, size = self.source.root, self.model.size
        found = answer_chunk(self.model, names, [decode_one(root, name, size) for name in names])
        rows = [[isinstance(row, Answered), *row] for row in found]
        return {"node": self.node, "rows": json.dumps(rows)}


def predict_on_ray(
    model: Model, source: ImageSource, batch: int, address: str | None, quiet: bool
) -> Iterator[Answered | Skipped]:
    """The rows that `predict.local` gives, in the same order, computed by Ray Data.

    Every node must have calmatch installed and see the pictures under the same path. File names,
    not pictures, pass through the machine that asks.
    """
    ray = _import_ray()
    mine = not ray.is_initialized()
    if mine:
        _check_address(address)
        try:
            start_ray(ray, address, logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f"There is no Ray cluster at {address}: {error}.") from error
    try:
        yield from _spread_chunks(ray, model, source, batch, quiet)
    finally:
        if mine:
            ray.shutdown()


def start_ray(ray: Any, address: str | None, level: Any) -> None:
    """Join a cluster, or start one that only this machine can reach, without a dashboard."""
    own = {} if address else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(address=address, log_to_driver=False, logging_level=level, **own)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it warns of its own design
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError("--engine ray needs an extra: pip install 'calmatch[ray]'.") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


def _check_address(address: str | None) -> None:
    """Ray itself takes minutes to find that nobody answers."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # "auto" and "ray://..." are Ray's own business
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"There is no Ray cluster at {address}: {error}.") from error


def _spread_chunks(
    ray: Any, model: Model, source: ImageSource, batch: int, quiet: bool
) -> Iterator[Answered | Skipped]:
    chunks = []
    for chunk in source.chunks(batch):
        yield from (name for name in chunk if isinstance(name, Skipped))
        if names := [name for name in chunk if isinstance(name, str)]:
            chunks.append({"names": json.dumps(names)})
    if not chunks:
        return
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    there = ray.cluster_resources()
    gpus = int(there.get("GPU", 0))
    most = max(1, min(len(chunks), gpus or int(there.get("CPU", 1))))
    held = ray.put(model.to("cpu"))
    work = ray.data.from_items(chunks, override_num_blocks=min(len(chunks), RAY_BLOCKS)).map(
        _RayWorker,
        fn_constructor_args=(held, ImageSource(source.path.absolute())),
        compute=ray.data.ActorPoolStrategy(min_size=most, max_size=most),
        num_cpus=1,
        num_gpus=1 if gpus else 0,
    )
    nodes = set()
    for item in work.iter_rows():
        nodes.add(item["node"])
        for good, *cells in json.loads(item["rows"]):
            yield _row_from_json(*cells) if good else Skipped(*cells)
    console.message(f"Nodes that took part: {len(nodes)}.", quiet)


def _row_from_json(
    file: str, label: str, confidence: float, names: list[str], sure: bool
) -> Answered:
    return Answered(file, label, confidence, tuple(names), sure)
