"""Predictions of a split, and their metrics; anybody's predictions from a file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from calmatch import metrics, runfiles
from calmatch.augment.basic import normalise
from calmatch.core import Method
from calmatch.data.resident import Source
from calmatch.views import Changed


class Predictor:
    """Predicts pictures with a network, many times while it learns or once when it has.

    Exact by default. `bf16` computes like a bfloat16 run does; `compiled` pays where the same
    pictures are predicted again and again.
    """

    def __init__(
        self,
        net: nn.Module,
        method: Method,
        statistics: tuple[Sequence[float], Sequence[float]],
        batch: int,
        *,
        bf16: bool = False,
        compiled: bool = False,
    ) -> None:
        self.net, self.method, self.batch, self.bf16 = net, method, batch, bf16
        weight = next(net.parameters())
        self.mean, self.std = (
            torch.tensor(v, device=weight.device, dtype=weight.dtype) for v in statistics
        )
        self.compiled = compiled
        self.forward = torch.compile(self._forward, dynamic=False) if compiled else self._forward

    @torch.inference_mode()
    def __call__(self, pictures: Source | Changed) -> Tensor:
        """Log-probabilities [N, C] in float32 on the CPU."""
        training = self.net.training
        self.net.eval()
        found = []
        for some in pictures.batches(self.batch):
            missing = self.batch - len(some) if self.compiled else 0  # one shape, one graph
            full = torch.cat([some, some.new_zeros(missing, *some.shape[1:])]) if missing else some
            found.append(self.forward(full)[: len(some)])
        self.net.train(training)
        return torch.cat(found).cpu()

    def _forward(self, pictures: Tensor) -> Tensor:
        images = normalise(pictures, self.mean, self.std)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return self.method.predict(self.net, images).float()


def predict(
    net: nn.Module,
    method: Method,
    pictures: Source | Changed,
    statistics: tuple[Sequence[float], Sequence[float]],
    batch: int,
) -> Tensor:
    """Exact log-probabilities [N, C] in float32 on the CPU."""
    return Predictor(net, method, statistics, batch)(pictures)


def measure(log_probs: Tensor, labels: Tensor, resamples: int = 0) -> dict[str, metrics.Interval]:
    """Every metric of the predictions."""
    return metrics.summary(probabilities(log_probs), labels, resamples=resamples)


def probabilities(log_probs: Tensor) -> Tensor:
    """Float64 probabilities that sum to one."""
    return log_probs.double().log_softmax(-1).exp()


def gap(log_probs: Tensor) -> Tensor:
    """Largest logit distance of each picture [N]; log-probabilities keep logit differences."""
    return log_probs.amax(-1) - log_probs.amin(-1)


def load(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Probabilities and labels from a .npz (`probs` or `log_probs`, `labels`) or a .csv.

    The .csv has a header; the column `label` holds class ids, every other column is the
    probability of one class, in order.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    return _load_npz(path) if path.suffix == ".npz" else _load_csv(path)


def _load_npz(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    arrays = runfiles.read_arrays(path)
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
