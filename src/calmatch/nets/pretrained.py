"""Pretrained weights from files that cannot run code: heads dropped, embeddings resized."""

from __future__ import annotations

import hashlib
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

HEADS = ("fc.", "fc_norm.", "classifier.", "mlp.", "head.")  # what USB's loader drops
USB = "https://github.com/microsoft/Semi-supervised-learning/releases/download/v.0.0.0/"
PUBLISHED = {  # by name of the network, USB's checkpoints
    "vit_small_patch2_32": USB + "vit_small_patch2_32_mlp_im_1k_32.pth",
    "vit_tiny_patch2_32": USB + "vit_tiny_patch2_32_mlp_im_1k_32.pth",
    "vit_base_patch16_96": USB + "mae_pretrain_vit_base.pth",
}
messages: list[str] = []  # what was loaded, for the run's notes


def load(net: nn.Module, name: str, source: str) -> None:
    """Fill a network from a local file, or from USB's published one with `source="usb"`."""
    path = _download(name) if source == "usb" else Path(source)
    state = fitted(state_of(path), net.state_dict())
    found = net.load_state_dict(state, strict=False)
    if not state:
        raise ValueError(f"{path} has no weights that fit {name}.")
    report(str(path), found, state)


def state_of(path: str | Path) -> dict[str, Tensor]:
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


def fitted(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names and shapes; heads and what does not fit are left out."""
    prefix = "model." if all(name.startswith("model.") for name in ours) else ""
    state = {}
    for name, tensor in theirs.items():
        wanted = ours.get(prefix + name)
        if wanted is None or name.startswith(HEADS):
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


def report(source: str, found: Any, state: Mapping[str, Tensor]) -> None:
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
