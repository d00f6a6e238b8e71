"""What a run writes as it goes on, and the way back where its numbers stop being finite.

Checkpoints cannot carry code; of the lines of the log, times stand apart. A step whose numbers are
not finite is looked for and kept in `fault/`; then the run stops, or goes back to a checkpoint.
"""

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from calmatch import console, files, ops
from calmatch.training.config import Config
from calmatch.training.step import Training, new_training

MOST_ROLLBACKS = 3  # in a run before it gives up
FRESH_NOTE = {"step": 0, "lines": 0, "sums": 0, "best": None, "best_step": None}
KEPT_CHECKPOINTS = 2  # on disk: the newest, and one to fall back on
_CODES = "F64 F32 BF16 F16 I64 I32 I16 I8 U8 BOOL".split()
_NAMES = "float64 float32 bfloat16 float16 int64 int32 int16 int8 uint8 bool".split()
SAFETENSORS_TYPES = {getattr(torch, k): code for k, code in zip(_NAMES, _CODES, strict=True)}


class CheckpointWriter(ExitStack):
    """Writes checkpoints while training goes on: `save` copies the tensors and returns."""

    def __init__(self, folder: Path, every: int = 0) -> None:
        super().__init__()
        self.folder, self.every = folder, every
        self.pool = self.enter_context(ThreadPoolExecutor(max_workers=1))
        self.callback(self.wait)  # at the end, before the pool goes
        self.pending: Future[None] | None = None
        self.copies: dict[str, Tensor] = {}

    def save(self, step: int, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; an error of the one before is raised here."""
        self.wait()
        settings = (self.folder, step, copy_to_host(tensors, self.copies), note, self.every)
        self.pending = self.pool.submit(save_checkpoint, *settings)

    def wait(self) -> None:
        """Until what was begun is on disk."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()


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
    spared = list_checkpoints(folder, every)[-1:]
    for old in list_checkpoints(folder)[:-KEPT_CHECKPOINTS]:
        if old not in spared:
            old.unlink(missing_ok=True)


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write one checkpoint as a .safetensors file, without the copies that `save` would make."""
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
    files.write(path, len(data).to_bytes(8, "little"), data, *map(_tensor_bytes, plain.values()))


def digest_tensors(tensors: Mapping[str, Tensor], note: str = "") -> str:
    """A checksum of the note and of names, types, shapes and bytes."""
    total = hashlib.blake2b(note.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(_tensor_bytes(tensor))
    return total.hexdigest()


def _tensor_bytes(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data


def list_checkpoints(folder: Path, every: int = 1) -> list[Path]:
    """Checkpoints of multiples of `every` (0: none), oldest first; other names are not ours."""
    paths = [p for p in folder.glob("[0-9]*.safetensors") if re.fullmatch("[0-9]{9,18}", p.stem)]
    return sorted(path for path in paths if every and int(path.stem) % every == 0)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and note of a checkpoint; ValueError if a bit of it is wrong."""
    try:
        with safetensors.safe_open(files.regular(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        note = json.loads(header["note"])
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if header.get("digest") != digest_tensors(tensors, header["note"]):
        raise ValueError(f"{path} is damaged: its checksum does not hold.")
    return tensors, note


def newest_checkpoint(
    folder: Path, limit: int | None = None, every: int = 1
) -> tuple[tuple[dict[str, Tensor], dict[str, Any]] | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence about each newer one that is not.

    `limit` leaves out checkpoints of later steps, `every` those that were not due.
    """
    complaints: list[str] = []
    for path in reversed(list_checkpoints(folder, every)):
        if limit is not None and int(path.stem) > limit:
            continue
        try:
            return read_checkpoint(path), complaints
        except ValueError as error:
            complaints.append(f"{error} Going back to what was before it.")
            with suppress(OSError):  # out of the way, or good ones would be dropped for it
                path.replace(path.with_suffix(".damaged"))
    return None, complaints


class Lines(ExitStack):
    """metrics.jsonl, a pure function of the config, and times.jsonl beside it."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Continue after the first `keep` bytes; what a killed process wrote later is redone."""
        super().__init__()
        first = ops.rank() == 0  # other ranks write into nothing
        names = ("metrics.jsonl", "times.jsonl")
        paths = [folder / name if first else Path(os.devnull) for name in names]
        self.file, self.times = (self.enter_context(path.open("ab", buffering=0)) for path in paths)
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


def is_finite(run: Training) -> bool:
    """Whether losses since the last log line, weights, averages and moments are all finite.

    The method's memory may hold infinities of its own choice, but no NaN.
    """
    named = {k: v for k, v in run.tensors().items() if v.is_floating_point() and v.numel()}
    memory = [v for k, v in named.items() if k.startswith("method/")]
    others = [v for k, v in named.items() if not k.startswith(("method/", "best/"))]
    # the largest magnitude of each, in which NaN wins
    largest, remembered = (
        torch.nn.utils.get_total_norm(tensors, math.inf) if tensors else torch.zeros(())
        for tensors in (others, memory)
    )
    bad = ~largest.isfinite() | remembered.isnan()
    return float(ops.average(bad.float().to(run.parts.device))) == 0


def handle_nonfinite(
    noticed: int, config: Config, folder: Path, signals: Sequence[int], quiet: bool
) -> None:
    """Find the step, keep it in `fault/`, then go back, or stop with a sentence.

    A signal that comes meanwhile ends the search, and nothing is changed.
    """
    console.free_device_memory()  # the failed attempt may hold much of the device
    ops.wait_for_ranks()  # the first rank has written what it had begun
    console.message(f"Numbers are not finite at step {noticed:,}; looking for the step.", quiet)
    run = new_training(config.replace(compile=False))
    # nothing is saved before it was looked at, so that all checkpoints are good
    state, _ = newest_checkpoint(folder / "checkpoint", every=config.saves)
    tensors, note = state or ({}, dict(FRESH_NOTE))
    if tensors:
        run.restore(tensors, note)
    else:
        tensors = copy_to_host(run.tensors())
    before = trace_nonfinite(run, noticed, signals)
    if signals:
        return
    facts = {"noticed": noticed, "checkpoint": note["step"], "rollbacks": run.rollbacks}
    facts |= describe_step(run, before, note) if before else {"step": None, "what": "a number"}
    if ops.rank() == 0:
        here = {} if before is None else {"step": facts["step"]}
        path = folder / "fault" / "state.safetensors"
        write_checkpoint(path, before or tensors, {**note, **here})
        files.write_json(folder / "fault" / "fault.json", facts)
    if config.on_nan == "stop" or run.rollbacks >= MOST_ROLLBACKS:
        raise ValueError(_fault_sentence(config, folder, facts))
    _roll_back(folder, config.saves, tensors, note, facts)
    line = f"Back to step {note['step']:,}, from there on with half the learning rate; "
    console.message(f"{line}{folder / 'fault'} holds what went wrong.", quiet)


def trace_nonfinite(
    run: Training, until: int, signals: Sequence[int] = ()
) -> dict[str, Tensor] | None:
    """Step until numbers are not finite; the state before that step. None: they stay finite."""
    while run.step < until and not signals:
        before = copy_to_host(run.tensors())
        run.advance()
        if not is_finite(run):
            return before
    return None


def describe_step(run: Training, before: Mapping[str, Tensor], note: Any) -> dict[str, Any]:
    """What is known of the step that the run has just made, from the state before it."""
    step = run.step - 1
    after = [name for name, value in run.tensors().items() if not value.isfinite().all()]
    run.restore(before, {**note, "step": step})
    losses, split, orders = _probe_losses(run), run.parts.split, run.parts.batches.orders
    what = "a weight or a moment"
    if any(isinstance(probe["value"], str) for probe in losses.values()):
        what = "the loss"
    elif any(probe["broken"] for probe in losses.values()):
        what = "a gradient"
    return {
        "step": step,
        "what": what,
        "losses": losses,
        "after": after,
        "labelled": [split.labelled[k] for k in orders["x"][step].tolist()],
        "unlabelled": [split.unlabelled[k] for k in orders["u"][step].tolist()],
    }


def _probe_losses(run: Training) -> dict[str, dict[str, Any]]:
    """Each loss of the step that is due, the norm of its gradient, and weights that break it."""
    named = {k: p for k, p in run.parts.net.named_parameters() if p.requires_grad}
    batch, weights = run.parts.batches[run.step], list(named.values())
    run.seed_dropout()
    losses, _ = run.parts.objective(run.parts.net).parts(batch)
    probes = {}
    for name, loss in losses.items():
        grads: Sequence[Tensor | None] = [None] * len(named)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        exact = {k: g.double() for k, g in zip(named, grads, strict=True) if g is not None}
        norm = torch.nn.utils.get_total_norm(list(exact.values()))
        numbers = {"value": float(loss.detach()), "gradient": float(norm)}
        plain = {k: x if math.isfinite(x) else str(x) for k, x in numbers.items()}  # for JSON
        probes[name] = {**plain, "broken": [k for k, g in exact.items() if not g.isfinite().all()]}
    return probes


def _fault_sentence(config: Config, folder: Path, facts: Mapping[str, Any]) -> str:
    when = f"between steps {facts['checkpoint']:,} and {facts['noticed']:,}, not so when repeated"
    if facts["step"] is not None:
        when = f"in step {facts['step']:,}"
    more = " or add --on-nan rollback" if config.on_nan == "stop" else ""
    after = f", after {facts['rollbacks']} rollbacks" if facts["rollbacks"] else ""
    what = f"{str(facts['what']).capitalize()} became infinite or NaN {when}{after}"
    how = f"calmatch replay {folder / 'fault'} shows how"
    return f"{what}; {how}. Lower --lr, set --clip 1{more}."


def _roll_back(
    folder: Path, every: int, tensors: Mapping[str, Tensor], note: Mapping[str, Any], facts: Any
) -> None:
    """Make the checkpoint the newest, with one rollback more in its note and in the log."""
    if ops.rank() == 0:
        step, count = int(note["step"]), int(note.get("rollbacks", 0)) + 1
        for later in list_checkpoints(folder / "checkpoint"):
            if int(later.stem) > step:  # a signal's: its steps will be made again, otherwise
                later.unlink()
        line = {"step": step, "kind": "rollback", "fault": facts["step"], "rate": 0.5**count}
        with Lines(folder, int(note["lines"])) as lines:
            lines.write(line)
            fresh = {**note, "lines": lines.size(), "rollbacks": count}
        save_checkpoint(folder / "checkpoint", step, tensors, fresh, every)
    ops.wait_for_ranks()


def read_fault(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """State, its note, and the facts of a fault, from its folder."""
    try:
        facts = files.read_json(folder / "fault.json")
    except ValueError as error:
        raise ValueError(f"{folder} holds no fault that can be read.") from error
    return *read_checkpoint(folder / "state.safetensors"), facts
