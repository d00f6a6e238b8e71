"""Networks: each maps images [B, 3, H, W] to Output(logits, features); pretrained weights from files."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calmatch import spec
from calmatch.core import Output

CLASSIC = (
    "vit_tiny_patch2_32 vit_small_patch2_32 vit_small_patch16_96 vit_base_patch16_96 "
    "wrn_28_2 wrn_28_8 wrn_37_2"
)
LITE = ("efficientnet_lite0", "efficientnet_lite2")  # pretrained by default
NETS = spec.Table(
    {name: f"nets.classic.{name}" for name in CLASSIC.split()}
    | {name: f"nets.timm.{name}" for name in LITE}
    | {"small": "nets.classic.Small", "tiny": "nets.classic.Tiny", "timm": "nets.timm.Timm"}
)  # `timm` is written timm.NAME


class Net(nn.Module):
    """A body with the method's extra heads, in the precision of the run.

    While training, the body may compute in bfloat16; what leaves it has the type of the pictures,
    so methods, losses and predictions are exact.
    """

    def __init__(self, body: nn.Module, heads: Mapping[str, nn.Module], bf16: bool = False) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ModuleDict(dict(heads))
        self.bf16 = bf16
        norms = nn.modules.batchnorm._BatchNorm
        self.separable = not any(isinstance(module, norms) for module in body.modules())

    def forward(self, images: Tensor) -> Output:
        if not (self.bf16 and self.training):
            plain: Output = self.body(images)
            return plain
        with torch.autocast(images.device.type, torch.bfloat16):
            out: Output = self.body(images)
        return Output(out.logits.to(images.dtype), out.features.to(images.dtype))


def build(text: str, classes: int, size: int = 32) -> nn.Module:
    """The network a spec names, `"wrn_28_2"` or `"timm.resnet18(pretrained=True)"` for example.

    `pretrained` may be a file of weights for any network, or "usb" for USB's published ones.
    """
    item = spec.parse(text)
    settings = dict(item.kwargs)
    source = settings.get("pretrained")
    if isinstance(source, str):
        del settings["pretrained"]
    messages.clear()
    if item.name.startswith("timm."):
        built: Any = NETS["timm"](classes, item.name.removeprefix("timm."), **settings)
    else:
        target = spec.find(item.name, NETS, "net")
        takes = inspect.signature(target).parameters
        if "size" in takes:
            settings.setdefault("size", size)
        if isinstance(source, str) and "pretrained" in takes:
            settings["pretrained"] = False  # the file replaces its own weights
        bound = spec.Spec(item.name, item.args, settings)
        built = spec.bind(bound, NETS, "net", given=1)(classes)
    if not isinstance(built, nn.Module):
        raise spec.SpecError(f"{text!r} is not an nn.Module.")
    if isinstance(source, str):
        load_pretrained(built, item.name, source)
    return built


def batch_size(device: torch.device) -> int:
    """How many pictures a network predicts together: on a CPU what fits its cache."""
    return 32 if device.type == "cpu" else 256


@torch.no_grad()
def feature_size(net: nn.Module, size: int) -> int:
    """Width of the features, found with one black picture."""
    training = net.training
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    out: Output = net.eval()(torch.zeros(1, 3, size, size, device=device))
    net.train(training)
    return out.features.shape[1]


def classifier(net: nn.Module, features: int, classes: int) -> nn.Linear:
    """The last layer, which turns features into logits."""
    found = [m for m in net.modules() if isinstance(m, nn.Linear)]
    found = [m for m in found if (m.in_features, m.out_features) == (features, classes)]
    if not found or found[-1].bias is None:
        raise ValueError("This network does not end in one linear layer, so it cannot be frozen.")
    return found[-1]


DROPPED_HEADS = ("fc.", "fc_norm.", "classifier.", "mlp.", "head.")  # what USB's loader drops
USB = "https://github.com/microsoft/Semi-supervised-learning/releases/download/v.0.0.0/"
PUBLISHED = {  # by name of the network, USB's checkpoints
    "vit_small_patch2_32": USB + "vit_small_patch2_32_mlp_im_1k_32.pth",
    "vit_tiny_patch2_32": USB + "vit_tiny_patch2_32_mlp_im_1k_32.pth",
    "vit_base_patch16_96": USB + "mae_pretrain_vit_base.pth",
}
messages: list[str] = []  # what was loaded, for the run's notes


def load_pretrained(net: nn.Module, name: str, source: str) -> None:
    """Fill a network from a local file, or from USB's published one with `source="usb"`."""
    path = _download(name) if source == "usb" else Path(source)
    state = fit_state(read_state(path), net.state_dict())
    found = net.load_state_dict(state, strict=False)
    if not state:
        raise ValueError(f"{path} has no weights that fit {name}.")
    report_loaded(str(path), found, state)


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Tensors by name from .safetensors, or from a pickle read without running code."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no weights file {path}.")
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an old pickle protocol is no matter
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a file of plain weights, so it is not read.") from error
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file.") from error
    for key in ("ema_model", "model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds no weights by name.")
    tensors = {str(k): v for k, v in found.items() if isinstance(v, Tensor)}
    for prefix in ("module.", "backbone.", "model."):
        if tensors and all(k.startswith(prefix) for k in tensors):
            tensors = {k.removeprefix(prefix): v for k, v in tensors.items()}
    return tensors


def fit_state(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names and shapes; heads and what does not fit are left out."""
    prefix = "model." if all(name.startswith("model.") for name in ours) else ""
    state = {}
    for name, tensor in theirs.items():
        wanted = ours.get(prefix + name)
        if wanted is None or name.startswith(DROPPED_HEADS):
            continue
        if name == "pos_embed":
            tensor = resize_positions(tensor, wanted)
        elif name == "patch_embed.proj.weight" and tensor.shape[2:] != wanted.shape[2:]:
            tensor = F.interpolate(tensor.float(), wanted.shape[2:], mode="bicubic")
        if tensor.shape == wanted.shape:
            state[prefix + name] = tensor
    return state


def resize_positions(old: Tensor, like: Tensor) -> Tensor:
    """Position embeddings [1, 1 + g², D] for another grid: bicubic, the class token kept."""
    if old.shape[1] == like.shape[1]:
        return old
    token, grid = old[:, :1].float(), old[:, 1:].float()
    side, wanted = round(grid.shape[1] ** 0.5), round((like.shape[1] - 1) ** 0.5)
    square = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    square = F.interpolate(square, (wanted, wanted), mode="bicubic", align_corners=False)
    return torch.cat([token, square.permute(0, 2, 3, 1).flatten(1, 2)], 1)


def report_loaded(source: str, found: Any, state: Mapping[str, Tensor]) -> None:
    """Say what was and what was not loaded."""
    start = f"Weights from {source}: {len(state)} tensors loaded"
    fresh = [name for name in found.missing_keys if not name.endswith("num_batches_tracked")]
    messages.append(f"{start}, started anew: {', '.join(fresh[:6]) or 'none'}.")


def _download(name: str) -> Path:
    if name not in PUBLISHED:
        raise ValueError(
            f"USB has published no weights for {name!r}, only: {', '.join(PUBLISHED)}."
        )
    url = PUBLISHED[name]
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path = folder / url.rpartition("/")[2]
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(url, str(path), progress=False)
        except (URLError, OSError) as error:
            raise ValueError(
                f"The weights of {name} cannot be downloaded ({error}); fetch {url} yourself and "
                f"write {name}(pretrained='FILE')."
            ) from error
    _verify(path)
    return path


def _verify(path: Path) -> None:
    """Compare with the checksum of the first use: USB publishes none.

    Whoever knows the right one writes it into FILE.sha256 before the first download.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    note = path.with_name(f"{path.name}.sha256")
    if not note.exists():
        draft = note.with_name(f".{note.name}.{os.getpid()}")
        draft.write_text(f"{found}  {path.name}\n")
        draft.replace(note)
        messages.append(f"{path.name}: no checksum is published; {found} is remembered from now.")
    elif note.read_text("utf-8", "replace").split()[:1] != [found]:
        raise ValueError(
            f"{path} is not what {note.name} remembers, so it is not read; delete it to fetch it "
            f"anew, or both if you know why it changed."
        )
