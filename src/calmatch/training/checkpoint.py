"""What a run writes while it goes on: checkpoints that cannot carry code, and the lines of its log."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from calmatch import ops
from calmatch.files import write

KEPT_CHECKPOINTS = 2  # checkpoints on disk: the newest, and one to fall back on


def digest_tensors(tensors: Mapping[str, Tensor], note: str = "") -> str:
    """A checksum of the note and of names, types, shapes and bytes."""
    total = hashlib.blake2b(note.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


SAFETENSORS_TYPES = {
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


def pack_safetensors(
    tensors: Mapping[str, Tensor], header: Mapping[str, str]
) -> list[bytes | memoryview]:
    """The pieces of a .safetensors file, without a copy.

    The library's own `save` copies every byte twice while it holds the interpreter's lock, so
    that training would wait for it.
    """
    named: dict[str, Any] = {"__metadata__": dict(header)}
    pieces, end = [], 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        named[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        pieces.append(tensor.flatten().view(torch.uint8).numpy().data)
    text = json.dumps(named).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *pieces]


class CheckpointWriter:
    """Writes checkpoints while training goes on: `save` copies the tensors and returns."""

    def __init__(self, folder: Path, every: int = 0) -> None:
        self.folder, self.every = folder, every
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.pending: Future[None] | None = None
        self.copies: dict[str, Tensor] = {}

    def save(self, step: int, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; an error of the one before is raised here."""
        self.wait()
        held = copy_to_host(tensors, self.copies)
        self.pending = self.pool.submit(save_checkpoint, self.folder, step, held, note, self.every)

    def wait(self) -> None:
        """Until what was begun is on disk."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self.pool.shutdown()


def copy_to_host(
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


def save_checkpoint(
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
    write_checkpoint(folder / f"{step:09d}.safetensors", tensors, {**note, "step": step})
    spared = scheduled_checkpoints(folder, every)[-1:]
    for old in sorted(folder.glob("*.safetensors"))[:-KEPT_CHECKPOINTS]:
        if old not in spared:
            old.unlink(missing_ok=True)


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write one checkpoint."""
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(note)
    header = {"note": text, "digest": digest_tensors(held, text)}
    write(path, *pack_safetensors(held, header))


def scheduled_checkpoints(folder: Path, every: int) -> list[Path]:
    """Checkpoints of multiples of `every`, oldest first."""
    paths = sorted(path for path in folder.glob("*.safetensors") if path.stem.isdecimal())
    return [path for path in paths if every and int(path.stem) % every == 0]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and note of a checkpoint; ValueError if a bit of it is wrong."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        note = json.loads(header["note"])
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if header.get("digest") != digest_tensors(tensors, header["note"]):
        raise ValueError(f"{path} is damaged: its checksum does not hold.")
    return tensors, note


def newest_checkpoint(
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
            return read_checkpoint(path), complaints
        except ValueError as error:
            complaints.append(f"{error} Going back to what was before it.")
            with suppress(OSError):  # out of the way, or good ones would be dropped for it
                path.replace(path.with_suffix(".damaged"))
    return None, complaints


class Sums:
    """Running sums on the device; the host reads them only when a line is due."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.steps = 0

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add in place, so that a captured step keeps adding to the same memory."""
        for name, value in values.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros_like(value, requires_grad=False)
        pairs = [(self.totals[name], value.detach()) for name, value in values.items()]
        torch._foreach_add_([total for total, _ in pairs], [value for _, value in pairs])

    def read(self) -> dict[str, Any]:
        """Means since the last reading, with counts turned into shares; starts anew."""
        means = {k: ops.average(v) / max(1, self.steps) for k, v in sorted(self.totals.items())}
        for total in self.totals.values():
            total.zero_()
        self.steps = 0
        bins = means.pop("bins", None)
        line: dict[str, Any] = {name: value.tolist() for name, value in means.items()}
        if "agreeing" in line:
            line["agree"] = _share(line.pop("agreeing"), line["accepted"])
        if bins is not None:
            known = line.pop("known")
            line["pseudo_accuracy"] = _share(line.pop("right"), known)
            line["pseudo_ece"] = _share(float((bins[1] - bins[2]).abs().sum()), known)
        return line


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


LINE_FILES = ("metrics.jsonl", "times.jsonl")


def _append(file: FileIO, line: Mapping[str, Any]) -> None:
    """A whole line or, on a full disk, none of it."""
    data = json.dumps(line).encode() + b"\n"
    before = os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[file.write(data) or 0 :]
    except OSError:
        file.truncate(before)
        raise


class Lines:
    """metrics.jsonl, a pure function of the config, and times.jsonl beside it."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Continue after the first `keep` bytes; what a killed process wrote later is redone."""
        first = ops.rank() == 0  # other ranks write into nothing
        paths = [folder / name if first else Path(os.devnull) for name in LINE_FILES]
        self.file, self.times = (path.open("ab", buffering=0) for path in paths)
        if first:
            self.file.truncate(keep)

    def write(self, line: Mapping[str, Any]) -> None:
        _append(self.file, line)
        _append(self.times, {"step": line["step"], "unix": round(time.time(), 3)})

    def size(self) -> int:
        """Bytes written, on disk for certain."""
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.times.close()
