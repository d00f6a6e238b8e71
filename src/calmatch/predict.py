"""A model over a folder, a zip or a file of images, streamed into a CSV or Parquet table."""

import csv
import io
import itertools
import json
import logging
import os
import re
import socket
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from calmatch import console, files, nets, spec
from calmatch.data import images as stored
from calmatch.data.images import Skipped, valid_text
from calmatch.model import Model

SHOWN = 10  # skipped files that are remembered and named on the console; all are written
TABLE_COLUMNS = ("file", "label", "confidence", "set", "sure")
ROW_GROUP = 16_384  # rows of one Parquet row group
FORMULA = re.compile(r"[=+@\t\r-](?![\d.]+$)")  # how a cell begins that a spreadsheet computes
RAY_BATCH = 256  # images that a worker of Ray's is sent at once
RAY_BLOCKS = 1000  # pieces of work that Ray keeps track of


class Answered(NamedTuple):
    """What the model says of one file."""

    file: str
    label: str
    confidence: float
    set: tuple[str, ...]
    sure: bool
    probs: tuple[float, ...] = ()  # of every class, where asked for


class Counts(NamedTuple):
    """What came of it."""

    images: int
    sure: int
    skipped: int
    out: Path


def predict(
    model: Model,
    images: Path | str,
    out: Path | str,
    *,
    batch: int = 0,
    workers: int = 0,
    strict: bool = False,
    engine: str = "local",
    address: str | None = None,
    format: str | None = None,
    probs: bool = False,
    quiet: bool = False,
) -> Counts:
    """Write a table of answers (file, label, confidence, set, sure), .csv or .parquet.

    `images` is a folder (and those in it), a .zip, or one file; the table appears when it is whole.
    The other settings are those of `calmatch predict`, see `options.PredictOptions`.
    """
    if batch < 0 or workers < 0:
        raise ValueError("--batch and --workers must be at least 0.")
    source, out = ImageSource(Path(images)), Path(out)
    total = sum(1 for _ in source.names())
    if format == "fiftyone":  # it leaves endings out
        names = Counter(str(name).rpartition(".")[0] for name in source.names())
        if twins := [name for name, number in names.items() if number > 1]:
            raise ValueError(f"Two pictures are called {twins[0]}; FiftyOne sees one.")
    if total == 0:
        raise ValueError(f"There are no pictures in {source.path} ({', '.join(stored.SUFFIXES)}).")
    if probs and (format is not None or engine == "ray"):
        raise ValueError("--probs is for a .csv or .parquet that this machine writes.")
    classes = model.classes if probs else ()
    if engine == "ray":
        rows = predict_on_ray(model, source, batch or RAY_BATCH, address, quiet)
    else:
        rows = predict_locally(model, source, batch, workers, probs)
    answered = sure = skipped = formulas = 0
    bar = console.ProgressBar("Pictures", total, 0, quiet, "pictures")
    with open_table(out, classes, format, (source.root, model.version)) as table, bar:
        for row in rows:
            bar.advance(1)
            formulas += any(map(FORMULA.match, row[:2]))
            if isinstance(row, Answered):
                table.write(row)
                answered, sure = answered + 1, sure + row.sure
                continue
            if strict:
                raise ValueError(f"{row.file}: {row.reason} Leave out --strict to skip such files.")
            table.skip(*row)
            skipped += 1
        if answered == 0:
            file, reason = table.skipped[0]
            raise ValueError(f"No picture in {source.path} can be decoded; {file}: {reason}")
    counts = Counts(answered, sure, skipped, out)
    if formulas and out.suffix == ".csv":  # names are left as they are: they are looked up again
        console.warn(f"{formulas} names begin like a formula: let a spreadsheet import it as text.")
    console.message(_summarise(model, counts, table.skipped), quiet)
    return counts


def _summarise(model: Model, counts: Counts, skipped: list[Skipped]) -> Iterator[str]:
    yield from (f"Skipped {valid_text(file)}: {reason}" for file, reason in skipped)
    if counts.skipped:
        yield f"{counts.skipped} files were skipped; all are in {skipped_path(counts.out)}."
    if model.note.get("calibration") is None:
        yield "This model was never calibrated: confidence is the network's own."
    yield f"{counts.images} pictures, {counts.sure} sure: {counts.out}"
    point = model.selective
    if point is None or point.threshold is None:
        more = f"; {point.missing} more labels are needed" if point and point.missing else ""
        yield f"Nothing is called sure: this model promises no accuracy{more}."


@dataclass(frozen=True)
class ImageSource:
    """A folder, a zip or one file; names are listed anew each time, never kept."""

    path: Path
    only: frozenset[str] | None = None  # names that matter; None: all

    @property
    def root(self) -> Path:
        return self.path if self.path.is_dir() or stored.is_zip(self.path) else self.path.parent

    def names(self) -> Iterator[str | Skipped]:
        """Names below the root in a fixed order, those of one folder at a time."""
        if not self.path.exists():
            raise ValueError(f"There is no {self.path}.")
        if self.path.is_dir():
            yield from stored.walk_images(self.path)
        elif stored.is_zip(self.path):
            yield from _names_in_zip(self.path)
        elif self.path.is_file():
            reason = stored.unfit_reason(self.path, self.path.resolve().parent)
            yield Skipped(self.path.name, reason) if reason else self.path.name
        else:
            raise ValueError(f"{self.path} is neither a folder, nor a .zip, nor a picture.")

    def chunks(self, size: int) -> Iterator[tuple[list[str], list[Skipped]]]:
        """So many names at a time: those to decode, and those to skip."""
        names = (name for name in self.names() if self.only is None or str(name) in self.only)
        while chunk := list(itertools.islice(names, size)):
            good = [name for name in chunk if isinstance(name, str)]
            yield good, [name for name in chunk if isinstance(name, Skipped)]


def _names_in_zip(path: Path) -> Iterator[str | Skipped]:
    try:
        with zipfile.ZipFile(files.regular(path)) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"{path} is not a zip file: {files.reason(error)}.") from error
    for name in sorted(sizes):
        parts = name.split("/")
        hidden = any(part.startswith(".") and part != ".." for part in parts)
        if parts[0] != "__MACOSX" and not hidden and name.lower().endswith(stored.SUFFIXES):
            reason = stored.too_large(sizes[name])
            yield Skipped(name, reason) if reason else name


def predict_locally(
    model: Model, source: ImageSource, batch: int, workers: int, probs: bool = False
) -> Iterator[Answered | Skipped]:
    """Rows of all images, a batch at a time."""

    def read(chunk: tuple[list[str], list[Skipped]]) -> Any:
        return *chunk, [decode_one(source.root, name, model) for name in chunk[0]]

    def answer(chunk: Any) -> list[Answered | Skipped]:
        names, skipped, decoded = chunk
        return [*skipped, *answer_chunk(model, names, decoded, probs)]

    model.quick.eval()  # made before threads ask for it
    chunks = source.chunks(batch or nets.batch_size(model.device))
    for rows in stored.compute_ordered(chunks, read, answer, model.device, workers):
        yield from rows


def decode_one(root: Path, name: str, model: Model) -> Any:
    """uint8 [3, size, size], or why not."""
    try:
        return stored.ImageFiles(root, (name,), model.size, model.squash).image(0)
    except Exception as error:  # whatever a decoder makes of a broken or hostile file
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return Skipped(name, why.removeprefix(f"{name} ").strip() or "it cannot be decoded")


def answer_chunk(
    model: Model, names: Sequence[str], decoded: Iterable[Any], whole: bool = False
) -> list[Answered | Skipped]:
    """Rows of one chunk, in its order."""
    rows: dict[str, Any] = dict(zip(names, decoded, strict=True))
    good = {name: pixels for name, pixels in rows.items() if not isinstance(pixels, Skipped)}
    if good:
        probs = model.probabilities(torch.from_numpy(np.stack(list(good.values()))))
        every = probs.tolist() if whole else [()] * len(good)
        for name, answer, each in zip(good, model.answer(probs), every, strict=True):
            rows[name] = Answered(name, *answer, tuple(each))
    return [rows[name] for name in names]


@contextmanager
def open_table(
    out: Path,
    classes: Sequence[str] = (),
    format: str | None = None,
    origin: tuple[Path, str] = (Path(), ""),
) -> Iterator["AnswerTable"]:
    """A table that appears under its name when the block ends well; of `origin`, some formats."""
    kinds: dict[str, Callable[[Path], AbstractContextManager[WriteRow]]]
    more = tuple(f"p({valid_text(name)})" for name in classes)
    kinds = {".csv": partial(_open_csv, more), ".parquet": partial(_open_parquet, more)}
    if format is not None:
        from calmatch.data.labelfiles import FORMATS

        ending, opened = FORMATS[format]
        kinds = {ending: lambda path: opened(path, *origin)}
    elif out.suffix == ".json":
        raise ValueError(f"{out}: for which program? Add --format label-studio or fiftyone.")
    if out.suffix not in kinds:
        raise ValueError(f"{out} must end in {' or '.join(kinds)}.")
    if not out.parent.is_dir() or out.is_dir():
        raise ValueError(f"{out} cannot be written: its folder is not there, or it is a folder.")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"{out} cannot be written: its folder is read-only.")
    with files.draft(out) as draft, kinds[out.suffix](draft) as write, ExitStack() as stack:
        yield (table := AnswerTable(write, skipped_path(out), stack))
    if table.list is None:
        skipped_path(out).unlink(missing_ok=True)  # of an earlier run


def skipped_path(out: Path) -> Path:
    """Where the list of skipped files goes."""
    return out.with_name(f"{out.name}.skipped.csv")


WriteRow = Callable[[Answered], None]


class AnswerTable:
    """Rows go to the table, files that cannot be predicted to a list beside it."""

    def __init__(self, write: WriteRow, beside: Path, stack: ExitStack) -> None:
        self.write, self.beside, self.stack = write, beside, stack
        self.skipped: list[Skipped] = []  # the first ones
        self.list: Callable[[Sequence[str]], Any] | None = None

    def skip(self, file: str, reason: str) -> None:
        if self.list is None:
            draft = self.stack.enter_context(files.draft(self.beside))
            opened = self.stack.enter_context(draft.open("w", newline="", encoding="utf-8"))
            self.list = csv_writer(opened)
            self.list(("file", "reason"))
        self.list((valid_text(file), valid_text(reason)))
        if len(self.skipped) < SHOWN:
            self.skipped.append(Skipped(file, reason))


def csv_writer(file: Any) -> Callable[[Sequence[str]], Any]:
    """CSV; Python before 3.13 leaves a lone carriage return unquoted, where readers end the row."""
    plain = csv.writer(file, lineterminator="\n")
    quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    return lambda cells: (quoted if "\r" in "".join(cells) else plain).writerow(cells)


@contextmanager
def _open_csv(more: tuple[str, ...], path: Path) -> Iterator[WriteRow]:
    def write(row: Answered) -> None:
        file, label, confidence, names, sure, probs = row
        truth = "true" if sure else "false"
        cells = (valid_text(file), label, f"{confidence:.6f}", join_names(names), truth)
        write_row((*cells, *(f"{value:.6g}" for value in probs)))

    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as opened:
        write_row = csv_writer(opened)
        write_row((*TABLE_COLUMNS, *more))
        yield write


@contextmanager
def _open_parquet(more: tuple[str, ...], path: Path) -> Iterator[WriteRow]:
    why = "Parquet files need an extra: pip install 'calmatch[parquet]', or write a .csv."
    pyarrow, parquet = spec.import_extra(why, "pyarrow", "pyarrow.parquet")
    text = pyarrow.string()
    kinds = (text, text, pyarrow.float64(), pyarrow.list_(text), pyarrow.bool_())
    columns = [*zip(TABLE_COLUMNS, kinds, strict=True), *((k, pyarrow.float64()) for k in more)]
    schema = pyarrow.schema(columns)
    rows: list[dict[str, Any]] = []

    def flush() -> None:
        if rows:
            file.write_table(pyarrow.Table.from_pylist(rows, schema))
            rows.clear()

    def write(row: Answered) -> None:
        every = dict(zip(more, row.probs, strict=True))
        cells = {**row._asdict(), "file": valid_text(row.file), "set": list(row.set)}
        rows.append(cells | every)
        if len(rows) == ROW_GROUP:
            flush()

    with parquet.ParquetWriter(path, schema) as file:
        yield write
        flush()


class Checked(NamedTuple):
    """Predictions beside the truth."""

    probs: NDArray[Any]  # [N, C]
    labels: NDArray[Any]  # [N] class ids
    files: tuple[str, ...]
    classes: tuple[str, ...]
    whole: bool = True  # False: only the top class's probability is known


def check_images(
    model: Model, images: Path, labels: Path | None, run: Path, *, quiet: bool
) -> Checked:
    """A model's predictions of labelled images: class folders, or any folder and a label file.

    Those that the fit in the folder `run` learned from are left out: they would flatter it.
    """
    if labels is None:
        from calmatch.data.folder import read_folder

        own = read_folder(images, fewest=1)
        truth = {n: own.classes[k] for n, k in zip(own.names, own.labels, strict=True) if k >= 0}
    else:
        names = [name for name in ImageSource(images).names() if isinstance(name, str)]
        truth = _read_truth(labels, names)
    if strange := sorted(set(truth.values()) - set(model.classes)):
        known = ", ".join(model.classes[:20])
        raise ValueError(f"The model does not know {strange[0]!r}, only: {known}.")
    place, learned = ImageSource(images).root.resolve(), _find_learned(run)
    if flattering := [name for name in truth if place / name in learned]:
        console.warn(f"Left out are {len(flattering)} pictures that the model learned from.")
        truth = {name: truth[name] for name in truth.keys() - set(flattering)}
    elif twins := {path.name for path in learned} & {Path(name).name for name in truth}:
        console.warn(
            f"{len(twins)} have the name of a picture that the model learned from: if they are "
            "copies, leave them out, or the result looks too good."
        )
    if not truth:
        raise ValueError("The model learned from all of these; evaluate it by other pictures.")
    source = ImageSource(images, frozenset(truth))
    rows = []
    with console.ProgressBar("Pictures", len(truth), 0, quiet, "pictures") as bar:
        for row in predict_locally(model, source, 0, 0, probs=True):
            bar.advance(1)
            if isinstance(row, Answered):
                rows.append(row)
            else:
                console.message(f"Skipped {valid_text(row.file)}: {row.reason}", quiet)
    if not rows:
        raise ValueError(f"No labelled picture in {images} can be decoded.")
    return _check([(r.file, r.label, r.confidence, r.probs) for r in rows], truth, model.classes)


def _find_learned(folder: Path) -> set[Path]:
    """Images whose labels a fit learned from; those it held out altogether are not among them."""
    from calmatch.runs import load_run

    if not (folder / "fit.json").is_file():
        return set()
    root = str(spec.parse(load_run(folder).config.dataset).kwargs.get("root", ""))
    names = files.read_arrays(folder / "predictions.npz").get("learned", ())
    return {Path(root, str(name)) for name in names}


def check_table(path: Path, labels: Path) -> Checked:
    """A table that `predict` wrote, beside a label file."""
    try:
        text = files.read_bytes(path).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text, newline=""), restval=""))
        columns = [name for name in rows[0] if re.fullmatch(r"p\(.*\)", name, re.DOTALL)]
        answers = [
            (row["file"], row["label"], float(row["confidence"]), [float(row[k]) for k in columns])
            for row in rows
        ]
        if not all(own > 0 and all(0 <= p <= 1 for p in (own, *each)) for *_, own, each in answers):
            raise ValueError("no probabilities")
    except (UnicodeDecodeError, csv.Error, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a table that `calmatch predict` wrote.") from error
    truth = _read_truth(labels, [file for file, *_ in answers])
    names = {*truth.values(), *(label for _, label, *_ in answers)}
    classes = [name[2:-1] for name in columns] or sorted(names)
    if not columns:  # nameless ones, until no share of the rest exceeds the least confidence
        least = min(own for _, _, own, _ in answers)
        classes += [""] * min(1000, int(1 / least) + 2 - len(classes))
    if strange := sorted(names - set(classes)):
        raise ValueError(f"{path} has no probability of {strange[0]!r}.")
    return _check([row for row in answers if row[0] in truth], truth, classes)


def _read_truth(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Labels of these files; those of others do not matter, unless there is nothing else."""
    from calmatch.data.folder import match_labels, read_labels

    here = {unicodedata.normalize("NFC", name) for name in names}
    rows = read_labels(path, names)
    own = [r for r in rows if {r.file, r.file.replace("\\", "/").removeprefix("./")} & here]
    truth = match_labels(own or rows, names, path)
    if not truth:
        raise ValueError(f"{path} has no label of these pictures.")
    return truth


def _check(answers: Sequence[Any], truth: Mapping[str, str], classes: Sequence[str]) -> Checked:
    """Beside the truth; a rest that is not known is spread evenly: error and ECE do not see it."""
    ids = {name: k for k, name in enumerate(classes)}
    probs, whole = np.zeros((len(answers), len(classes))), bool(answers[0][3])
    for k, (_, label, confidence, every) in enumerate(answers):
        probs[k] = every if whole else (1 - confidence) / max(1, len(classes) - 1)
        probs[k, ids[label]] = confidence
    names = tuple(file for file, *_ in answers)
    labels = np.array([ids[truth[name]] for name in names])
    return Checked(probs / probs.sum(1, keepdims=True), labels, names, tuple(classes), whole)


def join_names(names: Sequence[str]) -> str:
    """A set in one cell: names joined by `|`; a `|` or backslash in a name gets a backslash.

    >>> print(join_names(["cat", "a|b"]))
    cat|a\\|b
    """
    return "|".join(re.sub(r"([\\|])", r"\\\1", name) for name in names)


def split_names(cell: str) -> tuple[str, ...]:
    """The names of a set from its cell: the inverse of `join_names`."""
    names = re.findall(r"(?:[^\\|]|\\.)+", cell, re.DOTALL)
    return tuple(re.sub(r"\\(.)", r"\1", name, flags=re.DOTALL) for name in names)


def predict_on_ray(
    model: Model, source: ImageSource, batch: int, address: str | None, quiet: bool
) -> Iterator[Answered | Skipped]:
    """The rows that `predict_locally` gives, by Ray Data; every node sees the same path."""
    with join_ray(address) as ray:
        chunks = []
        for names, skipped in source.chunks(batch):
            yield from skipped
            if names:
                chunks.append({"names": json.dumps(names)})
        nodes, own = set(), ImageSource(source.path.absolute())
        for item in spread_items(ray, chunks, _RayWorker, ray.put(model.to("cpu")), own):
            nodes.add(item["node"])
            for good, *cells in json.loads(item["rows"]):
                yield Answered(*cells)._replace(set=tuple(cells[3])) if good else Skipped(*cells)
        if nodes:
            console.message(f"Nodes that took part: {len(nodes)}.", quiet)


@contextmanager
def join_ray(address: str | None) -> Iterator[Any]:
    """The package, while its cluster is there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it warns of its own design
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    why = "--engine ray needs an extra: pip install 'calmatch[ray]'."
    ray, _ = spec.import_extra(why, "ray", "ray.data")
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    mine = not ray.is_initialized()
    if mine:
        try:
            host, _, port = (address or "").rpartition(":")
            if host and port.isdecimal() and "/" not in host:  # not "auto" nor "ray://..."
                # Ray itself takes minutes to find that nobody answers
                socket.create_connection((host, int(port)), timeout=10).close()
            start_ray(ray, address)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise ValueError(f"There is no Ray cluster at {address}: {error}.") from error
    try:
        yield ray
    except ray.exceptions.RayTaskError:  # our own fault, on a node
        raise
    except ray.exceptions.RayError as error:  # lost nodes, full disks and memories
        raise ValueError(f"Ray gave up, {type(error).__name__}: {str(error).strip()}") from error
    finally:
        if mine:
            ray.shutdown()


def start_ray(ray: Any, address: str | None) -> None:
    """Join a cluster, or start one that only this machine can reach, without a dashboard.

    Asked for nothing, Ray would look for one here, and wait minutes for one that was killed.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    own = {} if address else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(address=address or "local", log_to_driver=False, logging_level="error", **own)


def spread_items(
    ray: Any, items: list[dict[str, Any]], worker: Any, *arguments: Any
) -> Iterator[dict[str, Any]]:
    """What objects worker(*arguments), one for each core or GPU, make of the items, in order."""
    if not items:
        return
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    gpus, cores = count_workers(ray)
    most = max(1, min(len(items), gpus or cores))
    pool = ray.data.ActorPoolStrategy(min_size=most, max_size=most)
    needs = {"compute": pool, "num_cpus": 1, "num_gpus": 1 if gpus else 0}
    data = ray.data.from_items(items, override_num_blocks=min(len(items), RAY_BLOCKS))
    yield from data.map(worker, fn_constructor_args=arguments, **needs).iter_rows()


def count_workers(ray: Any) -> tuple[int, int]:
    """GPUs and cores of a cluster."""
    resources = ray.cluster_resources()
    return int(resources.get("GPU", 0)), int(resources.get("CPU", 1))


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
        decoded = [decode_one(self.source.root, name, self.model) for name in names]
        rows = answer_chunk(self.model, names, decoded)
        cells = json.dumps([[isinstance(row, Answered), *row] for row in rows])
        return {"node": self.node, "rows": cells}
