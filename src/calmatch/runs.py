"""A finished run read back from its folder: config, result, predictions, log, example images."""

import csv
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from calmatch import files, ops, spec
from calmatch.metrics import Interval, as_html, read_predictions_for_html
from calmatch.training.config import FREE_FIELDS, LARGEST_NUMBER, Config, check_config

SCALARS = "step error ece nll accepted agree pseudo_accuracy pseudo_ece".split()  # of a log line
EXAMPLES_FILE = "examples.npz"
THUMBNAIL = 64  # pixels of a thumbnail's longer side
BINS = 15  # as ECE has
PER_BIN = 3  # right and as many wrong ones of every bin of confidence
MISTAKES = 24  # most confidently wrong ones
ASKED = 24  # unlabelled ones whose label would teach most
SAMPLED = 5000  # unlabelled images predicted; all could take long
TakeImages = Callable[[Tensor], Tensor]  # rows -> uint8 [n, 3, H, W]


class Scaled(NamedTuple):
    """What temperature scaling leaves."""

    ece: float
    nll: float


class BestOnTest(NamedTuple):
    """What choosing the step by its error on the TEST set would report, as the paper and USB do."""

    evaluations: int
    step: int
    error: float
    ece: float
    nll: float
    classwise_ece: float | None = None
    adaptive_ece: float | None = None

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Self:
        """From the lines of a log."""
        tested = [line for line in lines if line["kind"] == "test"]
        best = min(tested, key=lambda line: line["error"])
        others = {name: best.get(name) for name in ("classwise_ece", "adaptive_ece")}
        return cls(len(tested), best["step"], best["error"], best["ece"], best["nll"], **others)


@dataclass(frozen=True)
class Result:
    """result.json: what a run measured; shares are fractions, ends are of 95 % intervals."""

    title: str
    classes: tuple[str, ...]
    metrics: Mapping[str, Interval]
    steps: int = 0
    step: int = 0  # whose weights are kept
    selected: str = "last"
    test_selected: bool = False  # those weights were chosen on the test set
    weights: str = "plain"  # or ema
    images: Mapping[str, int] = field(default_factory=dict)  # labelled, unlabelled, test ...
    best_on_test: BestOnTest | None = None
    temperature_scaled: Mapping[str, Scaled] = field(default_factory=dict)
    interval: str = ""  # what the intervals are made by
    notes: tuple[str, ...] = ()
    evaluated_on: str = "test"  # or crossfit, or holdout: labels of a fit
    evaluation_note: str = ""
    before_calibration: Mapping[str, float] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    kept: str = ""  # the candidate of a fit that was chosen
    scores: Mapping[str, float] = field(default_factory=dict)  # of all its candidates
    skipped: tuple[tuple[str, ...], ...] = ()  # files that could not be read, and why
    commands: tuple[str, ...] = ()  # that repeat the run
    folder: Path | None = field(default=None, repr=False, compare=False)  # it was read from

    def dump(self) -> dict[str, Any]:
        """Plain JSON; `read_result` reads it back."""
        return {k: _as_json(value) for k, value in vars(self).items() if k != "folder"}

    def _repr_html_(self) -> str:
        rows = {k: f"{m.value:.4f} ({m.low:.4f} to {m.high:.4f})" for k, m in self.metrics.items()}
        images = {("evaluated" if k == "test" else k): n for k, n in self.images.items()}
        rows |= {f"{kind} pictures": f"{number:,}" for kind, number in images.items()}
        return as_html(self.title, rows, read_predictions_for_html(self.folder))


def _as_json(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return value._asdict()
    return {k: _as_json(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def read_result(path: Path) -> Result:
    """result.json, every entry checked by its type: a stranger may have written it."""
    entries, values = files.read_json(path), dict[str, Any](folder=path.parent)
    for name, hint in spec.field_types(Result).items():
        if name in entries and name != "folder":
            try:
                values[name] = spec.read_as(entries[name], hint)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}: {name} is not what it should be.") from error
        elif name in ("title", "classes", "metrics"):
            raise ValueError(f"{path} has no entry {name!r}.")
    return Result(**values)


class Run(NamedTuple):
    """A finished run: its folder, its config and its result."""

    folder: Path
    config: Config
    result: Result

    @property
    def title(self) -> str:
        return self.result.title

    @property
    def data(self) -> str:
        """What it learned from, for people: a dataset's name, or the name of their own folder."""
        item = spec.parse(self.config.dataset)
        own = item.kwargs.get("root") or item.kwargs.get("path")  # of pictures, of folder
        return Path(str(own)).name if own else self.config.dataset

    def log(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; none where nothing was trained step by step."""
        path = self.folder / "metrics.jsonl"
        return read_lines(path) if path.is_file() else []

    def lines(self, kind: str = "train") -> list[dict[str, Any]]:
        return [line for line in self.log() if line["kind"] == kind]

    def frame(self) -> Any:
        """The log as a pandas DataFrame, a row for each line."""
        (pandas,) = spec.import_extra("A frame needs pandas: pip install pandas.", "pandas")
        return pandas.DataFrame(self.log())

    def _repr_html_(self) -> str:
        return replace(self.result, folder=self.folder)._repr_html_()

    def predictions(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, C] and labels [N] of the test set."""
        arrays = read_predictions(self.folder / "predictions.npz", len(self.result.classes))
        return torch.from_numpy(arrays["log_probs"]), torch.from_numpy(arrays["labels"])

    def mean_logits(self) -> NDArray[Any] | None:
        """The mean over classes of each test image's logits [N], where the run kept it."""
        path = self.folder / "predictions.npz"
        return read_predictions(path, len(self.result.classes)).get("mean_logit")


def run_name(config: Config) -> str:
    """A folder name a person can read, with a hash that differs between configs."""
    words = f"{config.dataset}-{config.labels}-{config.method}-{config.penalty}"
    words = re.sub(r"[^\w.]+", "-", words).strip("-")[:60]
    code = hashlib.blake2b(json.dumps(config.dump()).encode(), digest_size=4).hexdigest()
    return f"{words}-s{config.seed}-{code}"


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
    for key, value in config.dump().items():
        if before.get(key) != value and key not in FREE_FIELDS:
            other = f"{folder} holds a run with {key}={before.get(key)!r}, not {value!r}"
            raise ValueError(f"{other}; choose another --out.")
    return load_run(folder) if (folder / "result.json").exists() else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    try:
        lines = [json.loads(line) for line in files.read_bytes(path).splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {files.reason(error)}.") from error
    for number, line in enumerate(lines, 1):
        if not (isinstance(line, dict) and _is_line(line)):
            raise ValueError(f"{path}, line {number}: expected a step, a kind and numbers.")
    return lines


def _is_line(line: Mapping[str, Any]) -> bool:
    whole = type(line.get("step")) is int and isinstance(line.get("kind"), str)
    whole = whole and not any(isinstance(line.get(name), list) for name in SCALARS)
    values = [value for key, value in line.items() if key != "kind" and value is not None]
    flat = [x for value in values for x in (value if isinstance(value, list) else [value])]
    numbers = [x for x in flat if type(x) is float or (type(x) is int and abs(x) <= LARGEST_NUMBER)]
    return whole and len(numbers) == len(flat)  # larger whole numbers are none for arithmetic


def read_predictions(path: Path, classes: int) -> dict[str, NDArray[Any]]:
    """predictions.npz: log_probs [N, C], labels [N], and files [N] where images have names."""
    arrays = files.read_arrays(path)
    if not {"log_probs", "labels"} <= arrays.keys():
        raise ValueError(f"{path} must hold `log_probs` and `labels`.")
    log_probs, labels = arrays["log_probs"], arrays["labels"]
    names = arrays.get("files", labels.astype("U"))
    fits = _is_array(labels, "iu", None) and labels.size > 0
    fits = fits and bool(((labels >= 0) & (labels < classes)).all())
    fits = fits and _is_array(log_probs, "f", len(labels), classes)
    fits = fits and not np.isnan(log_probs).any() and _is_array(names, "U", len(labels))
    means = arrays.get("mean_logit", np.zeros(labels.shape))
    fits = fits and _is_array(means, "f", len(labels)) and bool(np.isfinite(means).all())
    if not fits:
        raise ValueError(f"{path} does not hold log_probs [N, {classes}] and labels [N] that fit.")
    return arrays


def _is_array(array: NDArray[Any], kinds: str, *shape: int | None) -> bool:
    """Whether an array from a file is of one of numpy's kinds and has this shape; None: any."""
    if array.dtype.kind not in kinds or array.ndim != len(shape):
        return False
    return all(want in (None, have) for have, want in zip(array.shape, shape, strict=True))


def probabilities(log_probs: Tensor) -> Tensor:
    """Float64 probabilities that sum to one."""
    return log_probs.double().log_softmax(-1).exp()


def logit_gap(log_probs: Tensor) -> Tensor:
    """Largest logit distance of each image [N]; log-probabilities keep logit differences."""
    return log_probs.amax(-1) - log_probs.amin(-1)


def load_predictions(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Anybody's probabilities and labels from a .npz (`probs` or `log_probs`, `labels`) or a .csv.

    The .csv has a header; the column `label` holds class ids, every other column is the
    probability of one class, in order.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if path.suffix != ".npz":
        return _load_csv(path)
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
        text = files.read_bytes(path).decode("utf-8-sig")
        header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a UTF-8 CSV file.") from error
    if "label" not in header:
        raise ValueError(f"{path} needs a header with the column `label`.")
    place = header.index("label")
    probs, labels = [], []
    for number, row in enumerate(rows, start=2):
        try:
            labels.append(int(np.int64(row[place])))
            probs.append([float(cell) for k, cell in enumerate(row) if k != place])
        except (ValueError, IndexError, OverflowError) as error:
            message = f"{path}, row {number}: expected numbers under every column."
            raise ValueError(message) from error
        if len(row) != len(header):
            raise ValueError(f"{path}, row {number}: {len(row)} cells, the header {len(header)}.")
    return np.array(probs), np.array(labels, dtype=np.int64)


class Predicted(NamedTuple):
    """Predicted images, of which some may be shown."""

    log_probs: Tensor  # [N, C]
    take: TakeImages  # images by row of log_probs
    rows: Tensor | None = None  # [N] their rows in the set they are from; 0..N-1 by default
    files: Sequence[str] | None = None  # [N] where they have names
    whole: int = 0  # images of the set they are a sample of; N by default
    best: Tensor | None = None  # rows whose label would teach most, where features tell

    def teaching(self, number: int) -> Tensor:
        """Rows whose label would teach most, best first."""
        return most_informative(self.log_probs, number) if self.best is None else self.best[:number]


class Examples(NamedTuple):
    """What examples.npz holds: evaluated images, and unlabelled ones worth a label."""

    rows: list[int]  # of the evaluated images, in predictions.npz
    images: Tensor  # uint8 [n, 3, h, w]
    asked_rows: list[int]
    asked_images: Tensor
    asked_log_probs: Tensor
    asked_files: list[str]  # empty where there are no names
    considered: int  # unlabelled images among which they were chosen ...
    whole: int  # ... of so many


def write_examples(
    folder: Path, evaluated: Predicted, labels: Tensor, unlabelled: Predicted | None = None
) -> None:
    """Keep thumbnails of images worth looking at; `evaluated` are those of predictions.npz."""
    rows = choose_examples(evaluated.log_probs, labels)
    arrays: dict[str, Any] = {"rows": rows.numpy(), "pictures": _thumbnails(evaluated.take, rows)}
    if unlabelled is not None and len(unlabelled.log_probs):
        asked, number = unlabelled.teaching(ASKED), len(unlabelled.log_probs)
        arrays |= {
            "asked_rows": (asked if unlabelled.rows is None else unlabelled.rows[asked]).numpy(),
            "asked_pictures": _thumbnails(unlabelled.take, asked),
            "asked_log_probs": unlabelled.log_probs[asked].float().numpy(),
            "asked_of": np.array([number, unlabelled.whole or number]),
        }
        if unlabelled.files is not None:
            arrays["asked_files"] = np.array([unlabelled.files[k] for k in asked.tolist()])
    files.write_npz(folder / EXAMPLES_FILE, **arrays)


def command_line(*words: str) -> str:
    """Words as one types them in this system's shell."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def label_command(run: Run) -> str:
    """The command that asks for the labels a fit would learn most from; "" without a CSV."""
    settings = spec.parse(run.config.dataset).kwargs
    root, table = str(settings.get("root", "")), str(settings.get("labels", ""))
    places = [
        os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
        for path in (root, table, str(run.folder))
    ]
    words = ["calmatch", "label", places[0], "--labels", places[1], "--first", places[2]]
    return command_line(*words) if root and table.endswith(".csv") else ""


def describe_guessing(error: float, labels: Sequence[int], classes: Sequence[str]) -> list[str]:
    """What to do where a fit is worth no more than chance, or than the class of most labels."""
    most = max(set(labels), key=labels.count)
    share = labels.count(most) / len(labels)
    if error >= 0.9 * (1 - 1 / len(classes)):
        text = "No better than guessing: with these labels the classes cannot be told apart. Label "
        text += "more pictures of every class, and check that labels and pictures belong together."
        return [text]
    if share > 0.5 and error >= 0.9 * (1 - share):
        text = f"No better than always answering {classes[most]!r}, as {share:.0%} of the labels do"
        return [f"{text}: label more pictures of the other classes."]
    return []


def load_examples(folder: Path) -> Examples | None:
    """The images of a run folder; None where there are none."""
    path = folder / EXAMPLES_FILE
    if not path.is_file():
        return None
    arrays: dict[str, Any] = {
        "asked_rows": np.zeros(0, dtype=np.int64),
        "asked_pictures": np.zeros((0, 3, 1, 1), dtype=np.uint8),
        "asked_log_probs": np.zeros((0, 2), dtype=np.float32),
        "asked_of": np.zeros(2, dtype=np.int64),
        **files.read_arrays(path),
    }
    if not _are_examples(arrays):
        raise ValueError(f"{path} does not hold pictures with their rows; remove it.")
    names = ("pictures", "asked_pictures", "asked_log_probs")
    images, asked_images, log_probs = (torch.from_numpy(arrays[name]) for name in names)
    asked_files = [str(file) for file in arrays.get("asked_files", ())]
    asked = (arrays["asked_rows"].tolist(), asked_images, log_probs, asked_files)
    return Examples(arrays["rows"].tolist(), images, *asked, *arrays["asked_of"].tolist())


def _are_examples(arrays: Mapping[str, Any]) -> bool:
    """Whether arrays from a file have the types and shapes that `write_examples` gives them."""
    if not {"rows", "pictures"} <= arrays.keys():
        return False
    counts, fits = arrays["asked_of"], True
    for rows, images in (("rows", "pictures"), ("asked_rows", "asked_pictures")):
        ids, pixels = arrays[rows], arrays[images]
        fits = fits and _is_array(ids, "i", None) and bool((ids >= 0).all())
        fits = fits and _is_array(pixels, "u", len(ids), 3, None, None) and pixels.itemsize == 1
        fits = fits and (len(ids) == 0 or min(pixels.shape) > 0)
        fits = fits and max(pixels.shape[2:]) <= THUMBNAIL
    names = arrays.get("asked_files", ids.astype("U"))
    fits = fits and _is_array(arrays["asked_log_probs"], "f", len(ids), None)
    fits = fits and _is_array(counts, "i", 2) and bool((counts >= 0).all())
    return fits and _is_array(names, "U", len(ids))


def choose_examples(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Rows worth showing: the most confidently wrong, and some right and wrong ones of every bin.

    The order within a bin is a fixed shuffle, because test sets are often sorted by class.
    """
    confidence, guess = probabilities(log_probs).max(-1)
    right = guess == labels
    rows = set(most_confident_mistakes(confidence, right).tolist())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    place = ops.bin_of(confidence, BINS)
    for k in place.unique().tolist():
        for kind in (right, ~right):
            rows |= set(order[(kind & (place == k))[order]][:PER_BIN].tolist())
    return torch.tensor(sorted(rows), dtype=torch.long)


def most_confident_mistakes(confidence: Tensor, right: Tensor) -> Tensor:
    """Rows of the most confidently wrong images, most confident first."""
    wrong = (~right).nonzero()[:, 0]
    return wrong[confidence[wrong].argsort(descending=True, stable=True)[:MISTAKES]]


def most_informative(log_probs: Tensor, number: int = ASKED) -> Tensor:
    """Rows of images whose label would teach most, best first: uncertain and unlike each other.

    Each next image has the largest product of its entropy and its Hellinger distance to the
    nearest one chosen, so that one frequent confusion does not fill the list.
    """
    log_p = log_probs.double().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)
    roots = log_p.exp().sqrt()
    far = torch.ones_like(entropy)
    picked: list[int] = []
    for _ in range(min(number, len(entropy))):
        score = entropy * far
        score[picked] = -1.0
        picked.append(int(score.argmax()))
        far = torch.minimum(far, (1 - roots @ roots[picked[-1]]).clamp_min(0).sqrt())
    return torch.tensor(picked, dtype=torch.long)


def sample_rows(rows: Tensor, seed: int, number: int = SAMPLED) -> Tensor:
    """At most so many of these rows, chosen by seed, in order."""
    if len(rows) <= number:
        return rows
    pick = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:number]
    return rows[pick.sort().values]


def _thumbnails(take: TakeImages, rows: Tensor) -> NDArray[np.uint8]:
    """uint8 [n, 3, h, w] with sides of at most 64 pixels."""
    images = take(rows).cpu() if len(rows) else torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
    scale = THUMBNAIL / max(images.shape[-2:])
    if scale < 1:
        size = [max(1, round(side * scale)) for side in images.shape[-2:]]
        small = F.interpolate(images.float(), size, mode="bilinear", antialias=True)
        images = small.round().clamp(0, 255).to(torch.uint8)
    return images.numpy()
