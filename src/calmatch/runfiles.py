"""A run folder's files, checked before anything is made of them: a stranger may have sent it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = {"json": 1 << 26, "npz": 1 << 32}  # bytes, of arrays when they are unpacked
NUMBER = 1e300  # beyond it arithmetic overflows


def read_json(path: Path) -> dict[str, Any]:
    """A mapping from a JSON file; a ValueError in one sentence."""
    try:
        if path.stat().st_size > LARGEST["json"]:
            raise ValueError("it is too large")
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold one mapping of names to values.")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not (isinstance(line, dict) and _line(line)):
            raise ValueError(f"{path}, line {number}: expected a step, a kind and numbers.")
    return lines


PLAIN = ("step", "error", "ece", "nll", "accepted", "agree", "pseudo_accuracy", "pseudo_ece")


def _line(line: Mapping[str, Any]) -> bool:
    numbers = [value for key, value in line.items() if key != "kind" and value is not None]
    whole = type(line.get("step")) is int and isinstance(line.get("kind"), str)
    whole = whole and not any(isinstance(line.get(name), list) for name in PLAIN)
    flat = [x for value in numbers for x in (value if isinstance(value, list) else [value])]
    return whole and all(map(_number, flat))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz without running code, and without unpacking a bomb."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(item.file_size for item in archive.infolist()) > LARGEST["npz"]:
                raise ValueError("it is too large")
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except Exception as error:  # whatever zip, zlib and numpy make of a broken or hostile file
        raise ValueError(f"{path} is not a .npz file of plain arrays: {error}.") from error


def _number(value: Any) -> bool:
    return type(value) in (int, float) and not (type(value) is int and abs(value) > NUMBER)


def _text(value: Any) -> bool:
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode() == value


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value)) and all(map(_number, value.values()))


def _tables(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value)) and all(map(_numbers, value.values()))


def _intervals(value: Any) -> bool:
    ends = {"value", "low", "high"}
    return _tables(value) and all(ends <= item.keys() for item in value.values())


def _best(value: Any) -> bool:
    wanted = {"evaluations", "step", "error", "ece", "nll"}
    return _numbers(value) and wanted <= value.keys()


def _ways(value: Any) -> bool:
    ways = ("crossfit", "oracle")
    return _tables(value) and all({"ece", "nll"} <= value.get(way, {}).keys() for way in ways)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value)) and all(map(_count, value.values()))


RESULT: Mapping[str, Callable[[Any], bool]] = {
    "title": _text,
    "classes": _texts,
    "steps": _count,
    "step": _count,
    "selected": _text,
    "leaky": lambda value: isinstance(value, bool),
    "weights": _text,
    "pictures": _counts,
    "metrics": _intervals,
    "best_on_test": _best,
    "temperature_scaled": _ways,
    "notes": _texts,
    "commands": _texts,
    "judged_note": _text,
}


def read_result(path: Path) -> dict[str, Any]:
    """result.json with every entry checked that anybody reads."""
    found = read_json(path)
    for key in ("title", "classes", "metrics"):
        if key not in found:
            raise ValueError(f"{path} has no entry {key!r}.")
    for key, fine in RESULT.items():
        if key in found and not fine(found[key]):
            raise ValueError(f"{path}: {key} is not what it should be.")
    return found


def read_predictions(path: Path, classes: int) -> dict[str, NDArray[Any]]:
    """predictions.npz: log_probs [N, C], labels [N], and files [N] where pictures have names."""
    found = read_arrays(path)
    if not {"log_probs", "labels"} <= found.keys():
        raise ValueError(f"{path} must hold `log_probs` and `labels`.")
    log_probs, labels = found["log_probs"], found["labels"]
    files = found.get("files", labels.astype("U"))
    fine = (
        labels.ndim == 1
        and labels.dtype.kind in "iu"
        and labels.size > 0
        and bool(((labels >= 0) & (labels < classes)).all())
        and log_probs.dtype.kind == "f"
        and log_probs.shape == (len(labels), classes)
        and not bool(np.isnan(log_probs).any())
        and (files.dtype.kind, files.shape) == ("U", labels.shape)
    )
    if not fine:
        raise ValueError(f"{path} does not hold log_probs [N, {classes}] and labels [N] that fit.")
    return found
