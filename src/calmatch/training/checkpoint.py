"""What a run writes as it goes on: checkpoints that cannot carry code, and the lines of its log."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from calmatch import ops
from calmatch.files import regular, write

KEPT_CHECKPOINTS = 2  # on disk: the newest, and one to fall back on
_CODES = "F64 F32 BF16 F16 I64 I32 I16 I8 U8 BOOL".split()
_NAMES = "float64 float32 bfloat16 float16 int64 int32 int16 int8 uint8 bool".split()
SAFETENSORS_TYPES = {getattr(torch, k): code for k, code in zip(_NAMES, _CODES, strict=True)}


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
        copies = copy_to_host(tensors, self.copies)
        settings = (self.folder, step, copies, note, self.every)
        self.pending = self.pool.submit(save_checkpoint, *settings)

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
    """Copies on the host that later steps do not change, in memory that may be used again."""
    copies = {} if copies is None else copies  # page-locked: a device copies a hundred times faster
    for name, tensor in tensors.items():
        copy = copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return {name: copies[name] for name in tensors}


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], note: Mapping[str, Any], every: int = 0
) -> None:
    """Write a checkpoint under its final name, then drop all but the newest two.

    Signals write checkpoints at any step. The newest one of a multiple of `every` stays too: where
    a rollback goes must not depend on them.
    """
    write_checkpoint(folder / f"{step:09d}.safetensors", tensors, {**note, "step": step})
    spared = scheduled_checkpoints(folder, every)[-1:]
    for old in list_checkpoints(folder)[:-KEPT_CHECKPOINTS]:
        if old not in spared:
            old.unlink(missing_ok=True)


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write one checkpoint as a .safetensors file, without a copy.

    The library's own `save` copies every byte twice while it holds the interpreter's lock, so
    that training would wait for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = json.dumps(note)
    header: dict[str, Any] = {"__metadata__": {"note": text, "digest": digest_tensors(plain, text)}}
    end = 0
    for name, tensor in plain.items():
        start, end = end, end + tensor.nbytes
        kind, shape = SAFETENSORS_TYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    write(path, len(data).to_bytes(8, "little"), data, *map(_tensor_bytes, plain.values()))


def digest_tensors(tensors: Mapping[str, Tensor], note: str = "") -> str:
    """A checksum of the note and of names, types, shapes and bytes."""
    total = hashlib.blake2b(note.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(_tensor_bytes(tensor))
    return total.hexdigest()


def _tensor_bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.flatten().view(torch.uint8).numpy().data
    return data


def list_checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first; files of other names are somebody else's."""
    paths = folder.glob("[0-9]*.safetensors")
    return sorted(path for path in paths if re.fullmatch("[0-9]{9,18}", path.stem))


def scheduled_checkpoints(folder: Path, every: int) -> list[Path]:
    """Checkpoints of multiples of `every`, oldest first."""
    return [path for path in list_checkpoints(folder) if every and int(path.stem) % every == 0]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and note of a checkpoint; ValueError if a bit of it is wrong."""
    try:
        with safetensors.safe_open(regular(path), framework="pt") as file:
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
    for path in reversed(list_checkpoints(folder)):
        if limit is not None and int(path.stem) > limit:
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
        totals = [self.totals[name] for name in values]
        torch._foreach_add_(totals, [value.detach() for value in values.values()])

    def read(self) -> dict[str, Any]:
        """Means since the last reading, with counts turned into shares; starts anew."""

        def share(part: float, whole: float) -> float | None:
            return part / whole if whole > 0 else None

        means = {k: ops.average(v) / max(1, self.steps) for k, v in sorted(self.totals.items())}
        for total in self.totals.values():
            total.zero_()
        self.steps = 0
        bins = means.pop("bins", None)
        line: dict[str, Any] = {name: value.tolist() for name, value in means.items()}
        if "agreeing" in line:
            line["agree"] = share(line.pop("agreeing"), line["accepted"])
        if bins is not None:
            known = line.pop("known")
            line["pseudo_accuracy"] = share(line.pop("right"), known)
            line["pseudo_ece"] = share(float((bins[1] - bins[2]).abs().sum()), known)
        return line


class Lines:
    """metrics.jsonl, a pure function of the config, and times.jsonl beside it."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Continue after the first `keep` bytes; what a killed process wrote later is redone."""
        first = ops.rank() == 0  # other ranks write into nothing
        names = ("metrics.jsonl", "times.jsonl")
        paths = [folder / name if first else Path(os.devnull) for name in names]
        self.file, self.times = (path.open("ab", buffering=0) for path in paths)
        if first:
            self.file.truncate(keep)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line: the whole of it or, on a full disk, nothing."""
        times = {"step": line["step"], "unix": round(time.time(), 3)}
        for file, content in ((self.file, line), (self.times, times)):
            data = json.dumps(content).encode() + b"\n"
            before = os.fstat(file.fileno()).st_size
            try:
                while data:
                    data = data[file.write(data) or 0 :]
            except OSError:
                file.truncate(before)
                raise

    def size(self) -> int:
        """Bytes written, on disk for certain."""
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.times.close()
