"""Decoded pictures kept on disk as one memory-mapped array, keyed by their content."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEPT = 30 * 24 * 3600  # seconds that an array stays after its last use


def folder() -> Path:
    """CALMATCH_CACHE, or calmatch's folder in the user's cache."""
    chosen = os.environ.get("CALMATCH_CACHE")
    path = Path(chosen) if chosen else Path.home() / ".cache" / "calmatch"
    path.mkdir(parents=True, exist_ok=True)
    return path


def note(path: Path, content: Any) -> None:
    """Write JSON beside an array, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    draft.write_text(json.dumps(content), "utf-8")
    draft.replace(path)


@dataclass(frozen=True)
class Mapped:
    """An array in a file. What was looked at is let go at once: the system's own cache keeps it."""

    tensor: Tensor
    pages: mmap.mmap

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, *rows: Tensor) -> Tensor:
        """Some of it, as `tensor[rows]`."""
        found = self.tensor[rows]
        self.pages.madvise(mmap.MADV_DONTNEED)
        return found


def rest(array: NDArray[Any]) -> None:
    """Let go of the pages of an array that is being filled; what they hold is in the file."""
    if isinstance(array, np.memmap):
        array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def array(
    key: str, shape: tuple[int, ...], fill: Callable[[NDArray[Any]], None], dtype: Any = np.uint8
) -> Tensor:
    """The array of this key, filled on first use."""
    return mapped(key, shape, fill, dtype).tensor


def mapped(
    key: str, shape: tuple[int, ...], fill: Callable[[NDArray[Any]], None], dtype: Any = np.uint8
) -> Mapped:
    """The array of this key, filled on first use.

    It is written under another name and renamed when whole, so an interrupted build is never
    mistaken for a finished one, and two processes that build the same array do not clash.
    """
    path = folder() / f"{key}.npy"
    if path.exists():
        with contextlib.suppress(OSError):  # another's cache, which we may only read
            os.utime(path)
    else:
        _sweep()
        draft = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            made = np.lib.format.open_memmap(draft, mode="w+", dtype=dtype, shape=shape)
            fill(made)
            made.flush()
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(f"{path} is not what it should be; delete it.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only: nobody writes to it
        return Mapped(torch.from_numpy(found), found._mmap)


def _sweep() -> None:
    """Remove arrays that nobody used for long, their notes, and what interrupted builds left."""
    for path in folder().iterdir():
        with contextlib.suppress(OSError):  # another process was faster, or it is not ours
            old = path.suffix in (".npy", ".part") and time.time() - path.stat().st_mtime > KEPT
            if old:
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)
