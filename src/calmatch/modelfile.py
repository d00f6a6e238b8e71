"""A model's two files read as data: names looked up, shapes compared before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from calmatch import checkpoint, methods, nets, spec
from calmatch.augment import looks
from calmatch.augment.basic import normalise
from calmatch.config import LOOKS
from calmatch.core import Method, Task

FORMAT = 2
LICENCE = (
    "This model is yours; calmatch claims no rights to it. The pictures and the pretrained weights "
    "it was made from may carry licences of their own."
)
FIRST = {"format", "net", "method", "classes", "size", "mean", "std", "versions"}
SECOND = ("calibration", "conformal", "selective", "provenance", "licence")
LARGEST = {"size": 1024, "classes": 100_000, "name": 1000, "number": 10_000, "bytes": 1 << 26}
TIMM_OWN = ("checkpoint_path", "cache_dir", "features_only", "scriptable", "exportable", "no_jit")


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
        at: Sequence[looks.Look] = (looks.PLAIN,),
    ) -> None:
        super().__init__()
        self.net, self.method, self.at = net, method, at
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self._logits(look(images)) for look in self.at]).mean(0)

    def _logits(self, images: Tensor) -> Tensor:
        x = normalise(images, self.mean, self.std)
        if self.method is not None:  # it has an own way to predict
            return self.method.predict(self.net, x)
        logits: Tensor = self.net(x).logits
        return logits


def write(folder: Path, network: nn.Module, memory: Method | None = None, **entries: Any) -> None:
    """Write model.safetensors and model.json; `entries` are its keys."""
    tensors = {f"net/{k}": v for k, v in network.state_dict().items()}
    tensors |= {f"method/{k}": v for k, v in (memory.state_dict() if memory else {}).items()}
    held = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    checkpoint.write(folder / "model.safetensors", safetensors.torch.save(held))
    later = dict.fromkeys(SECOND) | {"provenance": {}, "licence": LICENCE}
    checkpoint.write_json(folder / "model.json", {"format": FORMAT} | entries | later | entries)


def read_note(path: Path) -> dict[str, Any]:
    """model.json with every entry checked; a ValueError in one sentence."""
    try:
        if path.stat().st_size > LARGEST["bytes"]:
            raise ValueError("it is too large")
        note = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"There is no model in {path.parent}: {path.name} is missing; is its run finished?"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    if not isinstance(note, dict) or note.get("format") not in (1, FORMAT):
        raise ValueError(f"{path} is not a model of format 1 or {FORMAT}; update calmatch?")
    keys = FIRST if note["format"] == 1 else FIRST | set(SECOND)
    if odd := sorted(keys ^ set(note) - {"looks"}):
        raise ValueError(f"{path}: the entry {odd[0]!r} is missing or not known.")
    for key, fine in _FINE.items():
        if not fine(note[key]):
            raise ValueError(f"{path}: {key} is not what it should be.")
    if "looks" in note and not _fine_looks(note["looks"], note["size"]):
        raise ValueError(f"{path}: looks is not what it should be.")
    if not isinstance(note.get("provenance", {}), dict | None):
        raise ValueError(f"{path}: provenance is not what it should be.")
    return note


def _fine_classes(names: Any) -> bool:
    return (
        isinstance(names, list)
        and 2 <= len(names) <= LARGEST["classes"]
        and all(isinstance(name, str) and 0 < len(name) <= LARGEST["name"] for name in names)
        and all(name.encode(errors="ignore").decode() == name for name in names)  # no surrogates
        and len(set(names)) == len(names)
    )


def _fine_looks(found: Any, size: int) -> bool:
    return (
        isinstance(found, list)
        and 1 <= len(found) <= LOOKS
        and all(isinstance(one, list) and len(one) == 3 and one[2] in (0, 1) for one in found)
        and all(type(part) is int and abs(part) < size for one in found for part in one[:2])
    )


def _three(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) == 3
        and all(type(v) in (int, float) and abs(v) < 1e6 for v in values)
    )


_FINE: Mapping[str, Any] = {
    "classes": _fine_classes,
    "size": lambda value: type(value) is int and 1 <= value <= LARGEST["size"],
    "mean": _three,
    "std": lambda values: _three(values) and min(values) > 1e-6,
    "net": lambda text: isinstance(text, str),
    "method": lambda text: isinstance(text, str),
}


def read_network(path: Path, note: Mapping[str, Any], trust: bool) -> Network:
    """Built without memory first and compared with the file's shapes, then for real."""
    text = safe_net(note["net"], trust)
    kind = _find_method(note["method"], trust)
    try:
        with torch.device("meta"):
            sketch = _build(text, note, kind)
            logits = sketch(torch.empty(1, 3, note["size"], note["size"], dtype=torch.uint8))
    except spec.SpecError:
        raise
    except Exception as error:  # whatever a network makes of settings it was not made for
        raise ValueError(f"The network {note['net']!r} cannot be built: {error}") from error
    if tuple(logits.shape) != (1, len(note["classes"])):
        raise ValueError(f"The network {note['net']!r} does not give one logit for each class.")
    tensors = _tensors(path, sketch.state_dict())
    with torch.random.fork_rng(devices=[]):
        network = _build(text, note, kind)
    network.load_state_dict(tensors)
    return network.float()


def _build(text: str, note: Mapping[str, Any], kind: type[Method]) -> Network:
    classes = len(note["classes"])
    body = nets.build(text, classes, note["size"])
    method = None
    heads: dict[str, nn.Module] = {}
    if kind.predict is not Method.predict:
        width = body.eval()(torch.empty(1, 3, note["size"], note["size"])).features.shape[1]
        method = methods.build(note["method"], Task(classes, 1, 1, width, 1, (1,) * classes))
        heads = method.heads()
    at = looks.read(note.get("looks", [looks.PLAIN]))
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


def safe_net(text: str, trust: bool = False) -> str:
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
    if in_timm and (own := [key for key in settings if key in TIMM_OWN]):
        raise ValueError(f"A model file must not set {own[0]!r} of timm.")
    if item.name == "timm" or not all(map(_plain, [*item.args, *settings.values()])):
        raise ValueError(f"The network {text[:80]!r} has settings that a model file must not have.")
    if in_timm or item.name in nets.timm_net.LITE:
        settings["pretrained"] = False
    return spec.write(item._replace(kwargs=settings))


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) <= 16 and all(map(_plain, value))
    if isinstance(value, str):
        return len(value) <= 100
    if isinstance(value, int | float):
        return abs(value) <= LARGEST["number"]
    return value is None


def _tensors(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the network needs from the file, after its names and shapes are known to fit."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name, like in wanted.items():
                stored = _stored(name)
                if stored not in names or file.get_slice(stored).get_shape() != list(like.shape):
                    raise ValueError(f"{path} does not fit the network in model.json: {stored}.")
            tensors = {name: file.get_tensor(_stored(name)) for name in wanted}
    except FileNotFoundError as error:
        raise ValueError(f"There is no {path}.") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is not a safetensors file, so it is not read.") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise ValueError(f"{path}: {_stored(name)} has the wrong type, {tensor.dtype}.")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{path}: {_stored(name)} holds NaN or infinite numbers.")
    return tensors


def _stored(name: str) -> str:
    """The name in the file of a tensor of `Network`."""
    owner, _, rest = name.partition(".")
    return f"{owner}/{rest}"
