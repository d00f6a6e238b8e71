"""A trained model as two files, loaded without running code: probabilities, sets, sure or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from calmatch import augment, files, methods, nets, posthoc, spec
from calmatch.core import Method, Task
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
            for some in images.split(batch or nets.batch_size(device)):
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


def load_model(
    folder: Path | str, *, device: str | torch.device = "cpu", trust: bool = False
) -> Model:
    """The model in a run folder; no code of it is run, and nothing is downloaded.

    Args:
        folder: holds model.safetensors and model.json.
        device: where to compute.
        trust: import a network or method that model.json names by a dotted name.
    """
    folder = Path(folder)
    files.refuse_links(folder)
    note = read_model_json(folder / "model.json")
    classes = tuple(note["classes"])
    network = read_network(folder / "model.safetensors", note, trust)
    parts = {key: note.get(key) for key in ("calibration", "conformal", "selective")}
    scaling = Scaling("identity")
    if parts["calibration"] is not None:
        scaling = posthoc.load_scaling(parts["calibration"])
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
    note = read_model_json(folder / "model.json")
    note |= {
        "format": FORMAT,
        "calibration": scaling.dump() if scaling else None,
        "conformal": conformal.dump() if conformal else None,
        "selective": selective.dump() if selective else None,
        "provenance": {**(note.get("provenance") or {}), **(extra or {})},
        "licence": note.get("licence") or LICENCE,
    }
    files.write_json(folder / "model.json", note)


FORMAT = 2
LICENCE = (
    "This model is yours; calmatch claims no rights to it. The pictures and the pretrained weights "
    "it was made from may carry licences of their own."
)
KEYS_1 = {"format", "net", "method", "classes", "size", "mean", "std", "versions"}
KEYS_2 = ("calibration", "conformal", "selective", "provenance", "licence")
LIMITS = {"size": 1024, "classes": 100_000, "name": 1000, "number": 10_000, "tta": 16}
TIMM_FORBIDDEN = (
    "checkpoint_path",
    "cache_dir",
    "features_only",
    "scriptable",
    "exportable",
    "no_jit",
)


class Network(nn.Module):
    """Bytes [N, 3, size, size] to logits [N, C], normalisation and looks included."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        net: nets.Net,
        method: Method | None,
        mean: Any,
        std: Any,
        at: Sequence[augment.View] = (augment.PLAIN,),
    ) -> None:
        super().__init__()
        self.net, self.method, self.at = net, method, at
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self._logits(look(images)) for look in self.at]).mean(0)

    def _logits(self, images: Tensor) -> Tensor:
        x = augment.normalise(images, self.mean, self.std)
        if self.method is not None:  # it has an own way to predict
            return self.method.predict(self.net, x)
        logits: Tensor = self.net(x).logits
        return logits


def write_model(
    folder: Path, network: nn.Module, memory: Method | None = None, **entries: Any
) -> None:
    """Write model.safetensors and model.json; `entries` are its keys."""
    tensors = {f"net/{k}": v for k, v in network.state_dict().items()}
    tensors |= {f"method/{k}": v for k, v in (memory.state_dict() if memory else {}).items()}
    held = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    files.write(folder / "model.safetensors", safetensors.torch.save(held))
    later = dict.fromkeys(KEYS_2) | {"provenance": {}, "licence": LICENCE}
    files.write_json(folder / "model.json", {"format": FORMAT} | entries | later | entries)


def read_model_json(path: Path) -> dict[str, Any]:
    """model.json with every entry checked; a ValueError in one sentence."""
    if not path.exists():
        raise ValueError(
            f"There is no model in {path.parent}: {path.name} is missing; is its run finished?"
        )
    note = files.read_json(path)
    if note.get("format") not in (1, FORMAT):
        raise ValueError(f"{path} is not a model of format 1 or {FORMAT}; update calmatch?")
    keys = KEYS_1 if note["format"] == 1 else KEYS_1 | set(KEYS_2)
    if odd := sorted(keys ^ set(note) - {"looks"}):
        raise ValueError(f"{path}: the entry {odd[0]!r} is missing or not known.")
    for key, fine in _CHECKS.items():
        if not fine(note[key]):
            raise ValueError(f"{path}: {key} is not what it should be.")
    if "looks" in note and not _are_tta(note["looks"], note["size"]):
        raise ValueError(f"{path}: looks is not what it should be.")
    if not isinstance(note.get("provenance", {}), dict | None):
        raise ValueError(f"{path}: provenance is not what it should be.")
    return note


def _are_classes(names: Any) -> bool:
    return (
        isinstance(names, list)
        and 2 <= len(names) <= LIMITS["classes"]
        and all(isinstance(name, str) and 0 < len(name) <= LIMITS["name"] for name in names)
        and all(name.encode(errors="ignore").decode() == name for name in names)  # no surrogates
        and len(set(names)) == len(names)
    )


def _are_tta(found: Any, size: int) -> bool:
    return (
        isinstance(found, list)
        and 1 <= len(found) <= LIMITS["tta"]
        and all(isinstance(one, list) and len(one) == 3 and one[2] in (0, 1) for one in found)
        and all(type(part) is int and abs(part) < size for one in found for part in one[:2])
    )


def _are_three(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) == 3
        and all(type(v) in (int, float) and abs(v) < 1e6 for v in values)
    )


_CHECKS: Mapping[str, Any] = {
    "classes": _are_classes,
    "size": lambda value: type(value) is int and 1 <= value <= LIMITS["size"],
    "mean": _are_three,
    "std": lambda values: _are_three(values) and min(values) > 1e-6,
    "net": lambda text: isinstance(text, str),
    "method": lambda text: isinstance(text, str),
}


def read_network(path: Path, note: Mapping[str, Any], trust: bool) -> Network:
    """Built without memory first and compared with the file's shapes, then for real."""
    text = safe_net_spec(note["net"], trust)
    kind = _find_method(note["method"], trust)
    try:
        with torch.device("meta"):
            sketch = _build_network(text, note, kind)
            logits = sketch(torch.empty(1, 3, note["size"], note["size"], dtype=torch.uint8))
    except spec.SpecError:
        raise
    except Exception as error:  # whatever a network makes of settings it was not made for
        raise ValueError(f"The network {note['net']!r} cannot be built: {error}") from error
    if tuple(logits.shape) != (1, len(note["classes"])):
        raise ValueError(f"The network {note['net']!r} does not give one logit for each class.")
    tensors = _read_tensors(path, sketch.state_dict())
    with torch.random.fork_rng(devices=[]):
        network = _build_network(text, note, kind)
    network.load_state_dict(tensors)
    return network.float()


def _build_network(text: str, note: Mapping[str, Any], kind: type[Method]) -> Network:
    classes = len(note["classes"])
    body = nets.build(text, classes, note["size"])
    method = None
    heads: dict[str, nn.Module] = {}
    if kind.predict is not Method.predict:
        width = body.eval()(torch.empty(1, 3, note["size"], note["size"])).features.shape[1]
        method = methods.build(note["method"], Task(classes, 1, 1, width, 1, (1,) * classes))
        heads = method.heads()
    at = augment.read_tta(note.get("looks", [augment.PLAIN]))
    return Network(nets.Net(body, heads), method, note["mean"], note["std"], at).eval()


def _find_method(text: str, trust: bool) -> type[Method]:
    name = spec.parse(text).name
    if "." in name and not trust:
        raise _untrusted(name)
    return methods.find(text)


def _untrusted(name: str) -> ValueError:
    return ValueError(
        f"This model needs the code {name!r}, which is not imported from a model file; "
        f"add --trust if it is yours."
    )


def safe_net_spec(text: str, trust: bool = False) -> str:
    """A network's spec without anything that would import, download or read a file."""
    item = spec.parse(text)
    known, in_timm = item.name in nets.NETS, item.name.startswith("timm.")
    if not (known or in_timm or trust):
        raise (
            _untrusted(item.name)
            if "." in item.name
            else spec.SpecError(
                f"There is no net called {item.name!r}.{spec.nearest(item.name, nets.NETS)}"
            )
        )
    settings = {k: v for k, v in item.kwargs.items() if not k.startswith("pretrained")}
    if in_timm and (own := [key for key in settings if key in TIMM_FORBIDDEN]):
        raise ValueError(f"A model file must not set {own[0]!r} of timm.")
    if item.name == "timm" or not all(map(_is_plain, [*item.args, *settings.values()])):
        raise ValueError(f"The network {text[:80]!r} has settings that a model file must not have.")
    if in_timm or item.name in nets.LITE:
        settings["pretrained"] = False
    return spec.write(item._replace(kwargs=settings))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) <= 16 and all(map(_is_plain, value))
    if isinstance(value, str):
        return len(value) <= 100
    if isinstance(value, int | float):
        return abs(value) <= LIMITS["number"]
    return value is None


def _read_tensors(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the network needs from the file, after its names and shapes are known to fit."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name, like in wanted.items():
                stored = _stored_name(name)
                if stored not in names or file.get_slice(stored).get_shape() != list(like.shape):
                    raise ValueError(f"{path} does not fit the network in model.json: {stored}.")
            tensors = {name: file.get_tensor(_stored_name(name)) for name in wanted}
    except FileNotFoundError as error:
        raise ValueError(f"There is no {path}.") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is not a safetensors file, so it is not read.") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise ValueError(f"{path}: {_stored_name(name)} has the wrong type, {tensor.dtype}.")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{path}: {_stored_name(name)} holds NaN or infinite numbers.")
    return tensors


def _stored_name(name: str) -> str:
    """The name in the file of a tensor of `Network`."""
    owner, _, rest = name.partition(".")
    return f"{owner}/{rest}"
