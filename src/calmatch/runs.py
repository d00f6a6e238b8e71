"""A finished run read back from its folder: config, result, predictions, log lines, example images."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from calmatch import files, ops, spec
from calmatch.files import read_arrays, read_json, write
from calmatch.training.config import Config, check_config

FREE_FIELDS = (
    "device",
    "compile",
    "engine",
    "eval_batch",
    "source",
    "memory",
    "workers",
    "on_nan",
)  # may change when a run is continued


class Run(NamedTuple):
    """A finished run: its folder, its config and its result."""

    folder: Path
    config: Config
    result: dict[str, Any]

    @property
    def title(self) -> str:
        return str(self.result["title"])

    @property
    def data(self) -> str:
        """What it learned from, for people: a dataset's name, or the name of their own folder."""
        item = spec.parse(self.config.dataset)
        own = item.name in ("pictures", "folder") and item.kwargs.get("root")
        return Path(str(own)).name if own else self.config.dataset

    def lines(self, kind: str = "train") -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind."""
        lines = read_lines(self.folder / "metrics.jsonl")
        return [line for line in lines if line["kind"] == kind]

    def predictions(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, C] and labels [N] of the test set."""
        path = self.folder / "predictions.npz"
        found = read_predictions(path, len(self.result["classes"]))
        return torch.from_numpy(found["log_probs"]), torch.from_numpy(found["labels"])


def run_name(config: Config) -> str:
    """A folder name a person can read, with a hash that tells configs apart."""
    words = re.sub(
        r"[^\w.]+", "-", f"{config.dataset}-{config.labels}-{config.method}-{config.penalty}"
    )
    code = hashlib.blake2b(json.dumps(config.dump()).encode(), digest_size=4).hexdigest()
    return f"{words.strip('-')[:60]}-s{config.seed}-{code}"


def load_run(folder: Path) -> Run:
    """A finished run from its folder."""
    files.refuse_links(folder)
    if not all((folder / name).is_file() for name in ("config.json", "result.json")):
        raise ValueError(f"{folder} is not the folder of a finished run.")
    config = Config().replace(**files.read_json(folder / "config.json"))
    check_config(config)
    return Run(folder, config, read_result(folder / "result.json"))


def find_finished(folder: Path, config: Config) -> Run | None:
    """The run in this folder if it is done; a ValueError if it is another run."""
    path = folder / "config.json"
    if not path.exists():
        return None
    try:  # a field that is younger than the run had its default
        before = Config().dump() | files.read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged; choose another --out.") from error
    other = [k for k, v in config.dump().items() if before.get(k) != v and k not in FREE_FIELDS]
    if other:
        key = other[0]
        raise ValueError(
            f"{folder} holds a run with {key}={before.get(key)!r}, not {config.dump()[key]!r}; "
            f"choose another --out."
        )
    return load_run(folder) if (folder / "result.json").exists() else None


def best_on_test(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What choosing the step by its error on the TEST set would report, as the paper and USB do."""
    tested = [line for line in lines if line["kind"] == "test"]
    best = min(tested, key=lambda line: line["error"])
    return {"evaluations": len(tested), **{k: best[k] for k in ("step", "error", "ece", "nll")}}


LARGEST_NUMBER = 1e300  # beyond it arithmetic overflows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not (isinstance(line, dict) and _is_line(line)):
            raise ValueError(f"{path}, line {number}: expected a step, a kind and numbers.")
    return lines


SCALARS = ("step", "error", "ece", "nll", "accepted", "agree", "pseudo_accuracy", "pseudo_ece")


def _is_line(line: Mapping[str, Any]) -> bool:
    numbers = [value for key, value in line.items() if key != "kind" and value is not None]
    whole = type(line.get("step")) is int and isinstance(line.get("kind"), str)
    whole = whole and not any(isinstance(line.get(name), list) for name in SCALARS)
    flat = [x for value in numbers for x in (value if isinstance(value, list) else [value])]
    return whole and all(map(_is_number, flat))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not (type(value) is int and abs(value) > LARGEST_NUMBER)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode() == value


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_numbers(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(map(_is_text, value))
        and all(map(_is_number, value.values()))
    )


def _are_tables(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(map(_is_text, value))
        and all(map(_are_numbers, value.values()))
    )


def _are_intervals(value: Any) -> bool:
    ends = {"value", "low", "high"}
    return _are_tables(value) and all(ends <= item.keys() for item in value.values())


def _is_best(value: Any) -> bool:
    wanted = {"evaluations", "step", "error", "ece", "nll"}
    return _are_numbers(value) and wanted <= value.keys()


def _are_scalings(value: Any) -> bool:
    ways = ("crossfit", "oracle")
    return _are_tables(value) and all({"ece", "nll"} <= value.get(way, {}).keys() for way in ways)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _are_counts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(map(_is_text, value))
        and all(map(_is_count, value.values()))
    )


RESULT_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "title": _is_text,
    "classes": _are_texts,
    "steps": _is_count,
    "step": _is_count,
    "selected": _is_text,
    "leaky": lambda value: isinstance(value, bool),
    "weights": _is_text,
    "pictures": _are_counts,
    "metrics": _are_intervals,
    "best_on_test": _is_best,
    "temperature_scaled": _are_scalings,
    "notes": _are_texts,
    "commands": _are_texts,
    "judged_note": _is_text,
}


def read_result(path: Path) -> dict[str, Any]:
    """result.json with every entry checked that anybody reads."""
    found = read_json(path)
    for key in ("title", "classes", "metrics"):
        if key not in found:
            raise ValueError(f"{path} has no entry {key!r}.")
    for key, fine in RESULT_CHECKS.items():
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


def probabilities(log_probs: Tensor) -> Tensor:
    """Float64 probabilities that sum to one."""
    return log_probs.double().log_softmax(-1).exp()


def logit_gap(log_probs: Tensor) -> Tensor:
    """Largest logit distance of each picture [N]; log-probabilities keep logit differences."""
    return log_probs.amax(-1) - log_probs.amin(-1)


def load_predictions(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Probabilities and labels from a .npz (`probs` or `log_probs`, `labels`) or a .csv.

    The .csv has a header; the column `label` holds class ids, every other column is the
    probability of one class, in order.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    return _load_npz(path) if path.suffix == ".npz" else _load_csv(path)


def _load_npz(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    arrays = files.read_arrays(path)
    if "labels" not in arrays or not {"probs", "log_probs"} & set(arrays):
        raise ValueError(f"{path} must hold `labels` and `probs` (or `log_probs`).")
    if "probs" in arrays:
        return arrays["probs"], arrays["labels"]
    if arrays["log_probs"].dtype.kind != "f" or arrays["log_probs"].ndim != 2:
        raise ValueError(f"{path}: log_probs must be numbers [N, C].")
    return np.asarray(probabilities(torch.from_numpy(arrays["log_probs"]))), arrays["labels"]


def _load_csv(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a UTF-8 CSV file.") from error
    if not rows or "label" not in rows[0]:
        raise ValueError(f"{path} needs a header with the column `label`.")
    place = rows[0].index("label")
    probs, labels = [], []
    for number, row in enumerate(rows[1:], start=2):
        try:
            labels.append(int(np.int64(row[place])))
            probs.append([float(cell) for k, cell in enumerate(row) if k != place])
        except (ValueError, IndexError, OverflowError) as error:
            raise ValueError(
                f"{path}, row {number}: expected numbers under every column."
            ) from error
        if len(row) != len(rows[0]):
            raise ValueError(f"{path}, row {number}: {len(row)} cells, the header {len(rows[0])}.")
    return np.array(probs), np.array(labels, dtype=np.int64)


EXAMPLES_FILE = "examples.npz"
THUMBNAIL = 64  # pixels of a thumbnail's longer side
EXAMPLE_BINS = 15  # as ECE has
PER_BIN = 3  # right and as many wrong ones of every bin of confidence
MISTAKES = 24  # most confidently wrong ones
ASKED = 24  # unlabelled ones whose label would teach most
SAMPLED = 5000  # unlabelled pictures looked at; predicting all could take long

TakeImages = Callable[[Tensor], Tensor]  # rows -> uint8 [n, 3, H, W]


class Predicted(NamedTuple):
    """Predicted pictures, of which some may be shown."""

    log_probs: Tensor  # [N, C]
    take: TakeImages  # pictures by row of log_probs
    rows: Tensor | None = None  # [N] their rows in the set they are from; 0..N-1 by default
    files: Sequence[str] | None = None  # [N] where they have names
    whole: int = 0  # pictures of the set they are a sample of; N by default


class Examples(NamedTuple):
    """What examples.npz holds: judged pictures, and unlabelled ones worth a label."""

    rows: list[int]  # of the judged pictures, in predictions.npz
    pictures: Tensor  # uint8 [n, 3, h, w]
    asked_rows: list[int]
    asked_pictures: Tensor
    asked_log_probs: Tensor
    asked_files: list[str]  # empty where there are no names
    looked: int  # unlabelled pictures among which they were chosen ...
    whole: int  # ... of so many


def write_examples(
    folder: Path, judged: Predicted, labels: Tensor, unlabelled: Predicted | None = None
) -> None:
    """Choose pictures worth looking at and keep their thumbnails in the run folder.

    Args:
        folder: the run folder.
        judged: pictures whose truth is known, in the order of predictions.npz.
        labels: [N] class ids of the judged pictures.
        unlabelled: pictures without a label (or a sample of them; see `sample`).
    """
    shown = choose_examples(judged.log_probs, labels)
    arrays: dict[str, Any] = {
        "rows": shown.numpy(),
        "pictures": _thumbnails(judged.take, shown).numpy(),
    }
    if unlabelled is not None and len(unlabelled.log_probs):
        asked = most_informative(unlabelled.log_probs)
        rows = asked if unlabelled.rows is None else unlabelled.rows[asked]
        number = len(unlabelled.log_probs)
        arrays |= {
            "asked_rows": rows.numpy(),
            "asked_pictures": _thumbnails(unlabelled.take, asked).numpy(),
            "asked_log_probs": unlabelled.log_probs[asked].float().numpy(),
            "asked_of": np.array([number, unlabelled.whole or number]),
        }
        if unlabelled.files is not None:
            arrays["asked_files"] = np.array([unlabelled.files[k] for k in asked.tolist()])
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write(folder / EXAMPLES_FILE, packed.getvalue())


def load_examples(folder: Path) -> Examples | None:
    """The pictures of a run folder; None where there are none."""
    path = folder / EXAMPLES_FILE
    if not path.is_file():
        return None
    held = read_arrays(path)
    if not _are_examples(held):
        raise ValueError(f"{path} does not hold pictures with their rows; remove it.")
    none = np.zeros((0, 3, 1, 1), dtype=np.uint8)
    looked, whole = held.get("asked_of", (0, 0))
    return Examples(
        held["rows"].tolist(),
        torch.from_numpy(held["pictures"]),
        held.get("asked_rows", np.zeros(0, dtype=np.int64)).tolist(),
        torch.from_numpy(held.get("asked_pictures", none)),
        torch.from_numpy(held.get("asked_log_probs", np.zeros((0, 2), dtype=np.float32))),
        [str(file) for file in held.get("asked_files", ())],
        int(looked),
        int(whole),
    )


def _are_examples(held: Mapping[str, Any]) -> bool:
    """Whether arrays from a file have the types and shapes that `write` gives them."""
    if not {"rows", "pictures"} <= held.keys():
        return False
    parts = [(held["rows"], held["pictures"])]
    if "asked_rows" in held:
        if not {"asked_pictures", "asked_log_probs", "asked_of"} <= held.keys():
            return False
        parts.append((held["asked_rows"], held["asked_pictures"]))
        number = len(held["asked_rows"]) if held["asked_rows"].ndim else -1
        probs, counts, files = held["asked_log_probs"], held["asked_of"], held.get("asked_files")
        if (probs.ndim, probs.dtype.kind, probs.shape[:1]) != (2, "f", (number,)):
            return False
        if counts.shape != (2,) or counts.dtype.kind != "i" or not (counts >= 0).all():
            return False
        if files is not None and (files.shape != (number,) or files.dtype.kind != "U"):
            return False
    elif any(name.startswith("asked") for name in held):
        return False
    return all(
        rows.ndim == 1
        and rows.dtype.kind == "i"
        and bool((rows >= 0).all())
        and pictures.dtype == np.uint8
        and pictures.ndim == 4
        and pictures.shape[:2] == (len(rows), 3)
        and (len(rows) == 0 or min(pictures.shape) > 0)
        and max(pictures.shape[2:]) <= THUMBNAIL
        for rows, pictures in parts
    )


def choose_examples(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Rows worth showing: the most confidently wrong, and some right and wrong ones of every bin.

    The order within a bin is a fixed shuffle, because test sets are often sorted by class.
    """
    confidence, guess = log_probs.double().log_softmax(-1).exp().max(-1)
    right = guess == labels
    found = set(most_confident_mistakes(confidence, right).tolist())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    place = ops.bin_of(confidence, EXAMPLE_BINS)
    for k in place.unique().tolist():
        for kind in (right, ~right):
            found |= set(order[(kind & (place == k))[order]][:PER_BIN].tolist())
    return torch.tensor(sorted(found), dtype=torch.long)


def most_confident_mistakes(confidence: Tensor, right: Tensor, number: int = MISTAKES) -> Tensor:
    """Rows of the most confidently wrong pictures, most confident first."""
    wrong = (~right).nonzero()[:, 0]
    return wrong[confidence[wrong].argsort(descending=True, stable=True)[:number]]


def most_informative(log_probs: Tensor, number: int = ASKED) -> Tensor:
    """Rows of pictures whose label would teach most, best first: uncertain and unlike each other.

    Each next picture has the largest product of its entropy and its Hellinger distance to the
    nearest one chosen, so that one frequent confusion does not fill the list.
    """
    log_p = log_probs.double().log_softmax(-1)
    probs = log_p.exp()
    entropy = -(probs * log_p).nan_to_num(0.0).sum(-1)
    roots = probs.sqrt()
    far = torch.ones_like(entropy)
    picked: list[int] = []
    for _ in range(min(number, len(entropy))):
        score = entropy * far
        score[picked] = -1.0
        picked.append(int(score.argmax()))
        distance = (1 - roots @ roots[picked[-1]]).clamp_min(0).sqrt()
        far = torch.minimum(far, distance)
    return torch.tensor(picked, dtype=torch.long)


def sample_rows(rows: Tensor, seed: int, number: int = SAMPLED) -> Tensor:
    """At most so many of these rows, chosen by seed, in order."""
    if len(rows) <= number:
        return rows
    pick = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:number]
    return rows[pick.sort().values]


def _thumbnails(take: TakeImages, rows: Tensor) -> Tensor:
    """uint8 [n, 3, h, w] with sides of at most 64 pixels."""
    if not len(rows):
        return torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
    pictures = take(rows).cpu()
    high, wide = pictures.shape[-2:]
    if max(high, wide) <= THUMBNAIL:
        return pictures
    scale = THUMBNAIL / max(high, wide)
    size = [max(1, round(high * scale)), max(1, round(wide * scale))]
    small = F.interpolate(pictures.float(), size, mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).to(torch.uint8)
