"""A trained model as two files, loaded without running code: probabilities, sets, sure or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calmatch import checkpoint, nets, posthoc
from calmatch.modelfile import FORMAT, LICENCE, Network, read_network, read_note
from calmatch.posthoc import Conformal, Scaling, Selective


class Answer(NamedTuple):
    """What the model says of one picture."""

    label: str
    confidence: float
    set: tuple[str, ...]  # most probable first; empty where the model has no sets
    sure: bool


@dataclass
class Model:
    """A trained classifier with its calibration and its promises."""

    network: Network
    classes: tuple[str, ...]
    size: int
    calibration: Scaling = field(default_factory=lambda: Scaling("identity"))
    conformal: Conformal | None = None
    selective: Selective | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)  # model.json as it was read

    def to(self, device: torch.device | str) -> Model:
        """The same model, moved."""
        self.network.to(device)
        return self

    @torch.inference_mode()
    def logits(self, images: Tensor, batch: int | None = None) -> Tensor:
        """Uncalibrated logits [N, C] of uint8 pictures [N, 3, size, size], on the CPU.

        `batch` pictures are computed together; unset: 32 on a CPU, 256 on a card.
        """
        wanted = (3, self.size, self.size)
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != wanted:
            raise ValueError(
                f"This model takes uint8 pictures [N, 3, {self.size}, {self.size}], "
                f"not {images.dtype} {list(images.shape)}."
            )
        device = self.network.mean.device
        found = [torch.empty(0, len(self.classes))]
        with _full_precision():
            for some in images.split(batch or nets.at_once(device)):
                found.append(self.network(some.to(device)).float().cpu())
        return torch.cat(found)

    def probabilities(self, images: Tensor, batch: int | None = None) -> Tensor:
        """Calibrated probabilities [N, C] of uint8 pictures [N, 3, size, size], on the CPU."""
        return self.calibration(self.logits(images, batch)).exp()

    def answer(self, probs: Tensor) -> list[Answer]:
        """What to say, from calibrated probabilities [N, C].

        Without a promise of accuracy nothing is sure.
        """
        best, label = probs.max(1)
        point = self.selective.threshold if self.selective else None
        sure = [point is not None and value >= point for value in best.tolist()]
        return [
            Answer(self.classes[k], confidence, names, certain)
            for k, confidence, names, certain in zip(
                label.tolist(), best.tolist(), self._sets(probs), sure, strict=True
            )
        ]

    def _sets(self, probs: Tensor) -> Iterator[tuple[str, ...]]:
        if self.conformal is None:
            yield from [()] * len(probs)
            return
        order = probs.sort(dim=1, descending=True, stable=True).indices
        inside = self.conformal.sets(probs).gather(1, order)
        for ids, kept in zip(order, inside, strict=True):
            yield tuple(self.classes[k] for k in ids[kept].tolist())


@contextmanager
def _full_precision() -> Iterator[None]:
    """Convolutions without TF32, which differs from the CPU by 1e-3."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def load(folder: Path | str, *, device: str | torch.device = "cpu", trust: bool = False) -> Model:
    """The model in a run folder; no code of it is run, and nothing is downloaded.

    Args:
        folder: holds model.safetensors and model.json.
        device: where to compute.
        trust: import a network or method that model.json names by a dotted name.
    """
    folder = Path(folder)
    checkpoint.no_links(folder)
    note = read_note(folder / "model.json")
    classes = tuple(note["classes"])
    network = read_network(folder / "model.safetensors", note, trust)
    parts = {key: note.get(key) for key in ("calibration", "conformal", "selective")}
    scaling = Scaling("identity")
    if parts["calibration"] is not None:
        scaling = posthoc.load(parts["calibration"])
    if scaling.kind == "vector" and len(scaling.values["factor"]) != len(classes):
        raise ValueError(f"The calibration in {folder} is for another number of classes.")
    conformal, selective = parts["conformal"], parts["selective"]
    model = Model(
        network=network.eval().requires_grad_(False),
        classes=classes,
        size=note["size"],
        calibration=scaling,
        conformal=None if conformal is None else posthoc.load_conformal(conformal),
        selective=None if selective is None else posthoc.load_selective(selective),
        provenance=note.get("provenance") or {},
        note=note,
    )
    model.network.to(memory_format=torch.channels_last)  # twice as fast on a CPU
    return model.to(device)


def save_calibration(
    folder: Path,
    scaling: Scaling | None,
    conformal: Conformal | None = None,
    selective: Selective | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write calibration and promises into model.json; `extra` is added to its provenance."""
    if conformal is not None and conformal.seed is not None:
        raise ValueError("A model's prediction sets must be repeatable: leave out the seed.")
    note = read_note(folder / "model.json")
    note |= {
        "format": FORMAT,
        "calibration": scaling.dump() if scaling else None,
        "conformal": conformal.dump() if conformal else None,
        "selective": selective.dump() if selective else None,
        "provenance": {**(note.get("provenance") or {}), **(extra or {})},
        "licence": note.get("licence") or LICENCE,
    }
    checkpoint.write_json(folder / "model.json", note)
