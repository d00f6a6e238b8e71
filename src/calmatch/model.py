"""A trained model as two files, loaded without running code: probabilities, sets, sure or not."""

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from calmatch import augment, files, nets, ops, posthoc, spec
from calmatch.core import Method, Task
from calmatch.nets import fuse
from calmatch.posthoc import Conformal, Scaling, Selective

FORMAT = 2
LICENCE = (
    "This model is yours; calmatch claims no rights to it. The pictures and the pretrained weights "
    "it was made from may carry licences of their own."
)
NEEDED = {"format", "net", "method", "classes", "size", "mean", "std", "versions"}
LATER = ("calibration", "conformal", "selective", "provenance", "licence")  # than the weights
LIMITS = {"size": 1024, "classes": 100_000, "name": 1000, "number": 10_000, "tta": 16}
OWN_PREDICTION = ("bam",)  # methods that do not predict by the network's logits alone


class Answer(NamedTuple):
    """What the model says of one image."""

    label: str
    confidence: float
    set: tuple[str, ...]  # most probable first; empty where the model has no sets
    sure: bool


@dataclass
class Model:
    """A trained classifier with its calibration and its promises."""

    network: "Network"
    classes: tuple[str, ...]
    size: int
    calibration: Scaling = field(default_factory=lambda: Scaling("identity"))
    conformal: Conformal | None = None
    selective: Selective | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)  # model.json as it was read
    folder: Path | None = field(default=None, repr=False)  # it was loaded from

    def _repr_html_(self) -> str:
        from calmatch.metrics import as_html, read_predictions_for_html

        sets, sure = self.conformal, self.selective.threshold if self.selective else None
        promise = f"{sets.coverage:.0%}" if sets and sets.threshold is not None else "no promise"
        rows = {
            "classes": f"{len(self.classes)}: {', '.join(self.classes[:12])}",
            "network": f"{self.note.get('net', '')}, {self.size} px",
            "calibration": self.calibration.kind,
            "sets hold the truth": promise,
            "sure from confidence": "never" if sure is None else f"{sure:.3f}",
        }
        return as_html(self.version, rows, read_predictions_for_html(self.folder))

    @property
    def squash(self) -> bool:
        """Whether images are made square whole, instead of their middle being cut out."""
        return bool(self.note.get("squash", False))

    @property
    def version(self) -> str:
        """A short name that a model with other settings, training or calibration does not have."""
        text = json.dumps(self.note, sort_keys=True)
        return f"calmatch-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"

    def to(self, device: torch.device | str) -> "Model":
        """The same model, moved."""
        device = torch.device(device)
        self.network.to(device).to(memory_format=nets.order(device))
        self.__dict__.pop("quick", None)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "quick"}

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.network.mean.device

    @cached_property
    def quick(self) -> "Network":
        """The network with its layers fused, made at the first prediction."""
        return self.fused()

    def fused(self, portable: bool = False) -> "Network":
        """The network with its layers fused; portable: into such as exporters know."""
        quick, own = self.network, self.network.net
        if (body := fuse(own.body, self.size, portable)) is not own.body:
            quick = copy.copy(self.network)
            quick._modules = {**quick._modules, "net": nets.Net(body, dict(own.heads))}
        return quick.eval()

    @torch.inference_mode()
    def logits(self, images: Tensor, batch: int | None = None) -> Tensor:
        """Uncalibrated logits [N, C] of uint8 images [N, 3, size, size], `batch` at a time."""
        images = torch.as_tensor(images)
        if images.dtype != torch.uint8 or images.shape[1:] != (3, self.size, self.size):
            raise ValueError(
                f"This model takes uint8 pictures [N, 3, {self.size}, {self.size}], "
                f"not {images.dtype} {list(images.shape)}."
            )
        network, logits = self.quick, [torch.empty(0, len(self.classes))]
        with ops.exact_convolutions(self.device):
            for some in images.split(batch or nets.batch_size(self.device)):
                logits.append(network(some.to(self.device)).float().cpu())
        return torch.cat(logits)

    def probabilities(self, images: Tensor, batch: int | None = None) -> Tensor:
        """Calibrated probabilities [N, C] of uint8 images [N, 3, size, size], on the CPU."""
        return self.calibration(self.logits(images, batch)).exp()

    def predict(self, images: Any) -> Any:
        """An `Answer` for a path, a PIL image or an array [H, W(, 3)]; a list for a list."""
        several = isinstance(images, list | tuple)
        items = list(images) if several else [images]
        if not items:
            return []
        pixels = torch.from_numpy(np.stack([self._pixels(item) for item in items]))
        answers = self.answer(self.probabilities(pixels))
        return answers if several else answers[0]

    def _pixels(self, item: Any) -> Any:
        """uint8 [3, size, size], as `calmatch predict` decodes a file."""
        from PIL import Image
        from PIL.ImageOps import exif_transpose as upright

        from calmatch.data.images import ImageFiles, plain_colours, square_image

        if isinstance(item, str | Path):
            path = Path(item)
            return ImageFiles(path.parent, (path.name,), self.size, self.squash).image(0)
        if isinstance(item, np.ndarray):
            if item.dtype != np.uint8 or item.shape[2:] not in ((), (3,)) or item.ndim < 2:
                raise ValueError("An array holds bytes [H, W] or [H, W, 3].")
            item = Image.fromarray(item)
        if not isinstance(item, Image.Image):
            raise ValueError("Predict a path, a PIL image, an array, or a list of such.")
        if not min(item.size):
            raise ValueError("An image needs at least one pixel.")
        with contextlib.suppress(SyntaxError, OSError, ValueError):  # of damaged EXIF
            item = upright(item)
        return square_image(plain_colours(item), self.size, self.squash)

    def answer(self, probs: Tensor) -> list[Answer]:
        """What to say, from calibrated probabilities [N, C]; nothing is sure without a promise."""
        best, label = probs.max(1)
        sets: list[tuple[str, ...]] = [()] * len(probs)
        if self.conformal is not None:
            order = probs.sort(dim=1, descending=True, stable=True).indices
            pairs = zip(order, self.conformal.sets(probs).gather(1, order), strict=True)
            sets = [tuple(self.classes[k] for k in ids[mask].tolist()) for ids, mask in pairs]
        columns = label.tolist(), best.tolist(), sets, self.sure(best).tolist()
        return [Answer(self.classes[k], *rest) for k, *rest in zip(*columns, strict=True)]

    def sure(self, confidence: Tensor) -> Tensor:
        """From the threshold on; 1e-5 less, so that rounding in another runtime decides nothing."""
        point = self.selective.threshold if self.selective else None
        return confidence >= (torch.inf if point is None else point - 1e-5)


def load_model(
    folder: Path | str, *, device: str | torch.device = "cpu", trust: bool = False
) -> Model:
    """The model in a run folder; no code of it is run, and nothing is downloaded.

    `trust` imports a network or method that model.json names by a dotted name.
    """
    folder = Path(folder)
    files.refuse_links(folder)
    ops.keep_freed_memory()
    note = read_model_json(folder / "model.json")
    note["net"] = _safe_net_spec(note["net"], folder, trust)
    spec.from_file(note["method"], folder, trust)
    network = _read_network(folder / "model.safetensors", note)
    parts = read_calibration(note)
    scaling: Scaling = parts.get("calibration", Scaling("identity"))
    if scaling.kind == "vector" and len(scaling.values["factor"]) != len(note["classes"]):
        raise ValueError(f"The calibration in {folder} is for another number of classes.")
    network.requires_grad_(False)
    parts |= {"provenance": note.get("provenance") or {}, "note": note, "folder": folder}
    return Model(network, tuple(note["classes"]), note["size"], **parts).to(device)


def read_calibration(note: Mapping[str, Any]) -> dict[str, Any]:
    """Calibration and promises of a model.json, every entry checked."""
    readers: dict[str, Callable[..., Any]] = {
        "calibration": posthoc.load_scaling,
        "conformal": partial(posthoc.load_rule, kind=Conformal),
        "selective": partial(posthoc.load_rule, kind=Selective),
    }
    return {key: read(note[key]) for key, read in readers.items() if note.get(key) is not None}


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
        "conformal": conformal._asdict() if conformal else None,
        "selective": selective._asdict() if selective else None,
        "provenance": {**(note.get("provenance") or {}), **(extra or {})},
        "licence": note.get("licence") or LICENCE,
    }
    files.write_json(folder / "model.json", note)


class Network(nn.Module):
    """Bytes [N, 3, size, size] to logits [N, C], normalisation and tta included."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, net: nets.Net, method: Method | None, mean: Any, std: Any, views: augment.Views
    ) -> None:
        super().__init__()
        self.net, self.method, self.views = net, method, views
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        shown = [augment.normalise(view, self.mean, self.std) for view in self.views(images)]
        body: Any = self.net.body
        if hasattr(body, "forward_views"):
            averaged: Tensor = body.forward_views(shown).logits
            return averaged
        own = self.method  # where it has an own way to predict
        logits = [own.predict(self.net, x) if own else self.net(x).logits for x in shown]
        return torch.stack(logits).mean(0)


def write_model(
    folder: Path, network: nn.Module, memory: Method | None = None, **entries: Any
) -> None:
    """Write model.safetensors and model.json; `entries` are its keys."""
    tensors = {f"net/{k}": v for k, v in network.state_dict().items()}
    tensors |= {f"method/{k}": v for k, v in (memory.state_dict() if memory else {}).items()}
    copies = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    files.write(folder / "model.safetensors", safetensors.torch.save(copies))
    later = dict.fromkeys(LATER) | {"provenance": {}, "licence": LICENCE}
    files.write_json(folder / "model.json", {"format": FORMAT} | entries | later | entries)


def read_model_json(path: Path) -> dict[str, Any]:
    """model.json with every entry checked; a ValueError in one sentence."""
    if not path.exists():
        raise ValueError(
            f"There is no model in {path.parent}: {path.name} is missing; is its run finished?"
        )
    note = files.read_json(path)
    if note.get("format") != FORMAT:
        raise ValueError(f"{path} is not a model of format {FORMAT}; update calmatch?")
    if odd := sorted(NEEDED.union(LATER) ^ set(note) - {"tta", "squash"}):
        raise ValueError(f"{path}: the entry {odd[0]!r} is missing or not known.")
    for key, fits in _CHECKS.items():
        if key in note and not fits(note[key]):
            raise ValueError(f"{path}: {key} is not what it should be.")
    return note


def _are_classes(names: Any) -> bool:
    return (
        isinstance(names, list)
        and 2 <= len(names) <= LIMITS["classes"]
        and all(isinstance(name, str) and 0 < len(name) <= LIMITS["name"] for name in names)
        and all(name.encode(errors="ignore").decode() == name for name in names)  # no surrogates
        and len(set(names)) == len(names)
    )


def are_tta(views: Any) -> bool:
    """Lists of size, left, top, side and mirrored, of parts that lie within the image."""
    if not isinstance(views, list) or not 1 <= len(views) <= LIMITS["tta"]:
        return False
    for view in views:
        if not isinstance(view, list) or [*map(type, view)] != [int, float, float, float, bool]:
            return False
        size, left, top, side, _ = view
        inside = left >= 0 and top >= 0 and 0 < side <= 1.001 - max(left, top)
        if not (1 <= size <= LIMITS["size"] and inside):
            return False
    return True


def _are_three(values: Any, least: float = -1e6) -> bool:
    three = isinstance(values, list) and len(values) == 3
    return three and all(type(v) in (int, float) and least < v < 1e6 for v in values)


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "classes": _are_classes,
    "size": lambda value: type(value) is int and 1 <= value <= LIMITS["size"],
    "mean": _are_three,
    "std": lambda values: _are_three(values, 1e-6),
    "net": lambda text: isinstance(text, str),
    "method": lambda text: isinstance(text, str),
    "tta": are_tta,
    "squash": lambda value: isinstance(value, bool),
    "provenance": lambda facts: isinstance(facts, dict | None),
}


def _read_network(path: Path, note: Mapping[str, Any]) -> Network:
    """Built without memory first and compared with the file's shapes, then for real."""
    text, own = note["net"], _predicts_itself(note["method"])
    try:
        with torch.device("meta"):
            sketch = _build_network(text, note, own)
            shape: tuple[int, ...] = (1, len(note["classes"]))
            item = spec.parse(text)
            if spec.parse(str(item.kwargs.get("on", text))).name not in nets.CONVOLUTIONAL or own:
                # seconds of imports, so only of networks whose settings can go wrong
                pixels = torch.empty(1, 3, note["size"], note["size"], dtype=torch.uint8)
                shape = tuple(sketch(pixels).shape)
    except spec.SpecError:
        raise
    except Exception as error:  # whatever a network makes of settings it was not made for
        raise ValueError(f"The network {note['net']!r} cannot be built: {error}") from error
    if shape != (1, len(note["classes"])):
        raise ValueError(f"The network {note['net']!r} does not give one logit for each class.")
    tensors = _read_tensors(path, sketch.state_dict())
    with torch.random.fork_rng(devices=[]):
        network = _build_network(text, note, own)
    network.load_state_dict(tensors)
    return network.float()


def _safe_net_spec(text: str, folder: Path, trust: bool) -> str:
    """A network's spec without anything that would import, download or read a file."""
    item = spec.parse(text)
    settings = {k: v for k, v in item.kwargs.items() if not k.startswith("pretrained")}
    for key in spec.NESTED:
        if isinstance(settings.get(key), str):
            settings[key] = _safe_net_spec(settings[key], folder, trust)
    item = item._replace(kwargs=settings)
    spec.from_file(spec.write(item), folder, trust, "timm")
    in_timm = item.name.startswith("timm.")
    if not (item.name in nets.NETS or in_timm or trust):
        known_names = spec.nearest(item.name, nets.NETS)
        raise spec.SpecError(f"There is no net called {item.name!r}.{known_names}")
    if not all(map(_is_plain, [*item.args, *settings.values()])):
        raise ValueError(f"The network {text[:80]!r} has settings that a model file must not have.")
    if in_timm or item.name in nets.LITE:
        settings["pretrained"] = False
    return spec.write(item)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) <= 16 and all(map(_is_plain, value))
    if isinstance(value, str):
        return len(value) <= 100
    return abs(value) <= LIMITS["number"] if isinstance(value, int | float) else value is None


def _predicts_itself(text: str) -> bool:
    """Whether a method predicts in its own way; the others' code is not even imported."""
    name, ours = spec.parse(text).name, Path(__file__).with_name("methods").iterdir()
    if name.isalnum() and f"{name}.py" in {path.name for path in ours}:
        return name in OWN_PREDICTION
    from calmatch import methods

    return methods.find(text).predict is not Method.predict


def _build_network(text: str, note: Mapping[str, Any], own: bool) -> Network:
    classes = len(note["classes"])
    body = nets.build(text, classes, note["size"])
    method, heads = None, {}
    if own:
        from calmatch import methods

        width = body.eval()(torch.empty(1, 3, note["size"], note["size"])).features.shape[1]
        method = methods.build(note["method"], Task(classes, 1, 1, width, 1, (1,) * classes))
        heads = method.heads()
    tta = note.get("tta", [augment.View(note["size"])])
    views = augment.Views([augment.View(*view) for view in tta], note["size"])
    return Network(nets.Net(body, heads), method, note["mean"], note["std"], views).eval()


def _read_tensors(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the network needs from the file, after its names and shapes are known to fit."""
    stored = {name: name.replace(".", "/", 1) for name in wanted}  # net/..., method/...
    try:
        with safetensors.safe_open(files.regular(path), framework="pt") as file:
            names = set(file.keys())
            for name, key in stored.items():
                fits = key in names and file.get_slice(key).get_shape() == list(wanted[name].shape)
                if not fits:
                    raise ValueError(f"{path} does not fit the network in model.json: {key}.")
            tensors = {name: file.get_tensor(key) for name, key in stored.items()}
    except FileNotFoundError as error:
        raise ValueError(f"There is no {path}.") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is not a safetensors file, so it is not read.") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise ValueError(f"{path}: {stored[name]} has the wrong type, {tensor.dtype}.")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{path}: {stored[name]} holds NaN or infinite numbers.")
    return tensors
