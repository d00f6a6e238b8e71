"""What a run says: running sums on the device, lines in metrics.jsonl, a bar on the console."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from calmatch import parallel

console = Console(stderr=True, highlight=False)


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
        means = {
            k: parallel.average(v) / max(1, self.steps) for k, v in sorted(self.totals.items())
        }
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


LINES = ("metrics.jsonl", "times.jsonl")


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
        first = parallel.rank() == 0  # other ranks write into nothing
        paths = [folder / name if first else Path(os.devnull) for name in LINES]
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


class Bar:
    """A progress bar with rate and time left; silent when quiet, piped, or not the first rank."""

    def __init__(
        self, title: str, steps: int, start: int, quiet: bool, unit: str = "steps"
    ) -> None:
        show = not quiet and console.is_terminal and parallel.rank() == 0
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not show,
        )
        self.show, self.start, self.began = show, start, time.monotonic()
        self.done, self.unit = start, unit
        self.words: dict[str, str] = {}
        self.task = self.progress.add_task(title, total=steps, completed=start, rate="", note="")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, step: int) -> None:
        self.done = step
        if self.show and (step % 5 == 0 or step == self.progress.tasks[0].total):
            rate = (step - self.start) / max(1e-9, time.monotonic() - self.began)
            self.progress.update(self.task, completed=step, rate=f"{rate:.0f} {self.unit}/s")

    def advance(self, number: int) -> None:
        """So many more are done."""
        self.update(self.done + number)

    def note(self, line: Mapping[str, Any]) -> None:
        """The words a person wants beside the bar: of a training line, or of an evaluation."""
        if line.get("accepted") is not None:
            self.words["use"] = f"pseudo-labels in use {line['accepted']:.0%}"
        if line.get("error") is not None:
            self.words["error"] = f"error about {line['error']:.0%}"
            self.words["ece"] = f"confidence off by {line['ece']:.0%}"
        if self.show:
            self.progress.update(self.task, note=", ".join(self.words.values()))


_hushed = False


@contextmanager
def hush() -> Iterator[None]:
    """Within it `tell` is silent, bars are not: for a run that is a part of something larger."""
    global _hushed
    before, _hushed = _hushed, True
    try:
        yield
    finally:
        _hushed = before


def tell(text: str, quiet: bool = False) -> None:
    """A line for the person at the console."""
    if not quiet and not _hushed:
        warn(text)


def warn(text: str) -> None:
    """A line that is never left out: something was lost."""
    if parallel.rank() == 0:
        console.print(text, markup=False, soft_wrap=True)
