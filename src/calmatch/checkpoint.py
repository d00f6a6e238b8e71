"""Atomic files, checkpoints that cannot carry code, and the lock on a run folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

KEEP = 2  # checkpoints on disk: the newest, and one to fall back on


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """Another name to write to; it becomes `path` when the block ends well, and vanishes else."""
    other = path.with_name(f".{path.name}.{os.getpid()}.part")
    other.unlink(missing_ok=True)  # a link somebody left there would be followed
    try:
        yield other
        with other.open("rb") as file:
            os.fsync(file.fileno())
        other.replace(path)
    finally:
        other.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write(path: Path, *pieces: bytes | str | memoryview) -> None:
    """Write a file so that its name never shows half of it, even across a power cut."""
    with draft(path) as other, other.open("wb") as file:
        for piece in pieces:
            file.write(piece.encode() if isinstance(piece, str) else piece)


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def digest(tensors: Mapping[str, Tensor], note: str = "") -> str:
    """A checksum of the note and of names, types, shapes and bytes."""
    total = hashlib.blake2b(note.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def packed(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> list[bytes | memoryview]:
    """The pieces of a .safetensors file, without a copy.

    The library's own `save` copies every byte twice while it holds the interpreter's lock, so
    that training would wait for it.
    """
    named: dict[str, Any] = {"__metadata__": dict(header)}
    pieces, end = [], 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        named[name] = {
            "dtype": KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        pieces.append(tensor.flatten().view(torch.uint8).numpy().data)
    text = json.dumps(named).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *pieces]


class Writer:
    """Writes checkpoints while training goes on: `save` copies the tensors and returns."""

    def __init__(self, folder: Path, every: int = 0) -> None:
        self.folder, self.every = folder, every
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.pending: Future[None] | None = None
        self.copies: dict[str, Tensor] = {}

    def save(self, step: int, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; an error of the one before is raised here."""
        self.wait()
        held = copied(tensors, self.copies)
        self.pending = self.pool.submit(save, self.folder, step, held, note, self.every)

    def wait(self) -> None:
        """Until what was begun is on disk."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self.pool.shutdown()


def copied(
    tensors: Mapping[str, Tensor], copies: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Copies on the host that later steps do not change, in memory that may be used again.

    It is page-locked, so that a device copies in hundredths of the time.
    """
    copies = {} if copies is None else copies
    for name, tensor in tensors.items():
        held = copies.get(name)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return {name: copies[name] for name in tensors}


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    note: Mapping[str, Any],
    every: int = 0,
) -> None:
    """Write a checkpoint under its final name, then drop all but the newest two.

    Signals write checkpoints at any step. The newest one of a multiple of `every` stays too: where
    a rollback goes must not depend on them.
    """
    store(folder / f"{step:09d}.safetensors", tensors, {**note, "step": step})
    spared = scheduled(folder, every)[-1:]
    for old in sorted(folder.glob("*.safetensors"))[:-KEEP]:
        if old not in spared:
            old.unlink(missing_ok=True)


def store(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write one checkpoint."""
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(note)
    header = {"note": text, "digest": digest(held, text)}
    write(path, *packed(held, header))


def scheduled(folder: Path, every: int) -> list[Path]:
    """Checkpoints of multiples of `every`, oldest first."""
    paths = sorted(path for path in folder.glob("*.safetensors") if path.stem.isdecimal())
    return [path for path in paths if every and int(path.stem) % every == 0]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and note of a checkpoint; ValueError if a bit of it is wrong."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        note = json.loads(header["note"])
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if header.get("digest") != digest(tensors, header["note"]):
        raise ValueError(f"{path} is damaged: its checksum does not hold.")
    return tensors, note


def newest(
    folder: Path, limit: int | None = None
) -> tuple[tuple[dict[str, Tensor], dict[str, Any]] | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence about each newer one that is not.

    `limit` leaves out checkpoints of later steps.
    """
    complaints: list[str] = []
    for path in sorted(folder.glob("*.safetensors"), reverse=True):
        if limit is not None and path.stem.isdecimal() and int(path.stem) > limit:
            continue
        try:
            return read(path), complaints
        except ValueError as error:
            complaints.append(f"{error} Going back to what was before it.")
            with suppress(OSError):  # out of the way, or good ones would be dropped for it
                path.replace(path.with_suffix(".damaged"))
    return None, complaints


class Busy(ValueError):
    """Another process works in this run folder."""


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a run folder; the lock dies with the process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        no_links(folder)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}.") from error
    with file:
        _take(file, folder)
        _held.add(file)
        try:
            for litter in (*folder.glob(".*.part"), *folder.glob("*/.*.part")):
                number = litter.suffixes[-2][1:] if len(litter.suffixes) > 1 else ""
                if number.isdecimal() and not _writing(int(number)):
                    litter.unlink(missing_ok=True)  # a killed process had not finished it
            yield
        finally:
            _held.discard(file)


def _writing(process: int) -> bool:
    """Whether it may still write: a run's page is made when its lock is free again."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return process != os.getpid()


_held: set[IO[str]] = set()


def _let_go() -> None:
    """In a forked process: a worker that outlives its killed parent must not keep the lock."""
    for file in _held:
        os.close(file.fileno())


os.register_at_fork(after_in_child=_let_go)


def _within(link: str, home: Path) -> bool:
    try:
        return Path(link).resolve(strict=True).is_relative_to(home)
    except (OSError, RuntimeError):  # it leads nowhere, or to itself
        return False


def no_links(folder: Path) -> None:
    """Refuse a run folder in which a name leads out of it: writing there would follow it."""
    if not folder.is_dir():
        return
    home = folder.resolve()
    for place in (folder, folder / "checkpoint"):
        with os.scandir(place) if place.is_dir() else nullcontext(()) as entries:
            for entry in entries:
                if entry.is_symlink() and not _within(entry.path, home):
                    raise ValueError(f"{entry.path} is a link out of the run folder; remove it.")


def _take(file: IO[str], folder: Path, patience: int = 5) -> None:
    """Lock at once, or after the moment that somebody needs to look whether it is locked."""
    for left in reversed(range(patience)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if not left:
                raise Busy(
                    f"Another process is working in {folder}; wait or choose --out."
                ) from error
            time.sleep(0.02)
