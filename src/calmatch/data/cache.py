"""Decoded pictures kept on disk as one memory-mapped array, keyed by their content."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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


def array(
    key: str, shape: tuple[int, ...], fill: Callable[[NDArray[Any]], None], dtype: Any = np.uint8
) -> Tensor:
    """The array of this key, filled on first use.

    It is written under another name and renamed when whole, so an interrupted build is never
    mistaken for a finished one, and two processes that build the same array do not clash.
    """
    path = folder() / f"{key}.npy"
    if not path.exists():
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
        return torch.from_numpy(found)
