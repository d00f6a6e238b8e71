"""Networks: images [B, 3, H, W] to Output(logits, features); weights from files; fused layers."""

import copy
import hashlib
import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calmatch import files, ops, spec
from calmatch.core import Output

VITS = "vit_tiny_patch2_32 vit_small_patch2_32 vit_small_patch16_96 vit_base_patch16_96".split()
Norm = nn.modules.batchnorm._BatchNorm
LITE = tuple(f"efficientnet_lite{number}" for number in ("0", "1", "2", "012"))  # pretrained
WIDE = ("wrn_28_2", "wrn_28_8", "wrn_37_2")
CONVOLUTIONAL = (*LITE, *WIDE, "small", "tiny")  # they take images of any size
NETS = spec.Lookup({name: f"nets.timm.{name}" for name in VITS})
NETS |= {name: f"nets.classic.{name}" for name in (*WIDE, *LITE)}
NETS |= {name: f"nets.classic.{name.title()}" for name in ("embedded", "small", "tiny")}
NETS["timm"] = "nets.timm.Timm"  # written timm.NAME


class Net(nn.Module):
    """A body with the method's extra heads; bfloat16 only inside it, and only while it trains."""

    def __init__(self, body: nn.Module, heads: Mapping[str, nn.Module], bf16: bool = False) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ModuleDict(dict(heads))
        self.bf16 = bf16
        self.separable = not any(isinstance(module, Norm) for module in body.modules())

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
    source = item.kwargs.get("pretrained")
    file = source if isinstance(source, str) else ""
    settings = {k: v for k, v in item.kwargs.items() if k != "pretrained" or not file}
    messages.clear()
    if item.name.startswith("timm."):
        built: Any = NETS["timm"](classes, item.name.removeprefix("timm."), **settings)
    else:
        takes = inspect.signature(spec.find(item.name, NETS, "net")).parameters
        if "size" in takes:
            settings.setdefault("size", size)
        if file and "pretrained" in takes:
            settings["pretrained"] = False  # the file replaces its own weights
        built = spec.bind(spec.Spec(item.name, item.args, settings), NETS, "net", given=1)(classes)
    if not isinstance(built, nn.Module):
        raise spec.SpecError(f"{text!r} is not an nn.Module.")
    if file:
        path = _download(item.name) if file == "usb" else Path(file)
        ours = built.state_dict()  # all but the head must be there
        own = [k for k, v in ours.items() if v.shape[:1] != (classes,) and "num_batches" not in k]
        state = fit_state(read_state(path), ours)
        if not state:
            raise ValueError(f"{path} has no weights that fit {item.name}.")
        if (share := sum(k in state for k in own) / max(1, len(own))) < 0.9 and own:
            raise ValueError(
                f"Only {share:.0%} of {item.name} is in {path}: they are another network's weights."
            )
        load_state(built, state, str(path))
    return built


class Input(NamedTuple):
    """How a network was shown images when it was pretrained."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fixed: bool = False  # whether it takes no other size


def input_of(net: nn.Module) -> Input:
    """A network's own input, by its weights' configuration; of an unknown one 64 px, -1 to 1."""
    config = getattr(getattr(net, "model", None), "pretrained_cfg", None) or {}
    if "mean" not in config:
        patches, half = getattr(net, "patch_embed", None), (0.5, 0.5, 0.5)
        size = patches.img_size[-1] if patches else 64  # our own transformer takes one alone
        return Input(size, half, half, patches is not None)
    fixed, size = bool(config.get("fixed_input_size", False)), config["input_size"][-1]
    if fixed:  # a transformer may be built for another size than it was pretrained at
        size = getattr(getattr(net.model, "patch_embed", None), "img_size", [size])[-1]
    return Input(size, tuple(config["mean"]), tuple(config["std"]), fixed)


def batch_size(device: torch.device) -> int:
    """How many images a network predicts together: on a CPU what fits its cache, by each thread."""
    return 8 if device.type == "cpu" else 64


def order(device: torch.device) -> torch.memory_format:
    """Channels last is twice as fast on a CPU; on GPUs cuDNN looks 5 s for each shape's kernels."""
    return torch.channels_last if device.type == "cpu" else torch.contiguous_format


@torch.no_grad()
def feature_size(net: nn.Module, size: int) -> int:
    """Width of the features, measured with one black image."""
    training = net.training
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    out: Output = net.eval()(torch.zeros(1, 3, size, size, device=device))
    net.train(training)
    return out.features.shape[1]


def pooled_features(net: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Features before the classifier [B, D], and of the last three stages' maps [B, M].

    Of a map, each channel's mean and the logarithm of its deviation; none where the network does
    not show its stages.
    """
    model: Any = getattr(net, "model", None)
    if model is None or not hasattr(model, "forward_intermediates"):
        features: Tensor = net(images).features
        return features, features[:, :0]
    final, maps = model.forward_intermediates(images, indices=3, output_fmt="NCHW")
    maps = [each if each.dtype == torch.float64 else each.float() for each in maps]  # of bfloat16
    means = [each.mean((2, 3)) for each in maps]
    pairs = zip(maps, means, strict=True)
    spreads = [each.square().mean((2, 3)) - mean.square() for each, mean in pairs]
    logs = [(spread.clamp_min(0) + 1e-8).sqrt().add(1e-3).log() for spread in spreads]
    return model.forward_head(final, pre_logits=True), torch.cat([*means, *logs], 1)


def classifier(net: nn.Module, features: int, classes: int) -> nn.Linear:
    """The last layer, which turns features into logits."""
    layers = [m for m in net.modules() if isinstance(m, nn.Linear)]
    layers = [m for m in layers if (m.in_features, m.out_features) == (features, classes)]
    if not layers or layers[-1].bias is None:
        raise ValueError("This network does not end in one linear layer, so it cannot be frozen.")
    return layers[-1]


DROPPED_HEADS = ("fc.", "fc_norm.", "classifier.", "mlp.", "head.")  # what USB's loader drops
USB = "https://github.com/microsoft/Semi-supervised-learning/releases/download/v.0.0.0/"
PUBLISHED = {  # by name of the network, USB's checkpoints
    "vit_small_patch2_32": "vit_small_patch2_32_mlp_im_1k_32.pth",
    "vit_tiny_patch2_32": "vit_tiny_patch2_32_mlp_im_1k_32.pth",
    "vit_base_patch16_96": "mae_pretrain_vit_base.pth",
}
messages: list[str] = []  # what was loaded, for the run's notes


def _download(name: str) -> Path:
    """USB's checkpoint; its checksum is what FILE.sha256 says, else that of the first download."""
    if name not in PUBLISHED:
        known = ", ".join(PUBLISHED)
        raise ValueError(f"USB has published no weights for {name!r}, only: {known}.")
    url = USB + PUBLISHED[name]
    path = Path(torch.hub.get_dir()) / "checkpoints" / PUBLISHED[name]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(url, str(path), progress=False)
        except (URLError, OSError) as error:
            raise ValueError(
                f"The weights of {name} cannot be downloaded ({error}). Fetch {url} yourself and "
                f"put it at {path}, or name the file: `bench --weights FILE`, `train --net "
                f"\"{name}(pretrained='FILE')\"`. Weights of your own (.safetensors, .pth) do too: "
                f"research/paper_runs.py pretrains ViT-S/2. Without any: --net {name}."
            ) from error
    with files.open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    note = path.with_name(f"{path.name}.sha256")
    if not note.exists():
        files.write(note, f"{digest}  {path.name}\n")
        messages.append(f"{path.name}: no checksum is published; {digest} is remembered from now.")
    elif files.read_bytes(note).decode("utf-8", "replace").split()[:1] != [digest]:
        raise ValueError(
            f"{path} is not what {note.name} remembers, so it is not read; delete it to fetch it "
            f"anew, or both if you know why it changed."
        )
    return path


def load_state(net: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load these tensors and note for the run what was and what was not loaded."""
    missing = net.load_state_dict(state, strict=False).missing_keys
    fresh = [name for name in missing if not name.endswith("num_batches_tracked")]
    start = f"Weights from {source}: {len(state)} tensors loaded"
    messages.append(f"{start}, started anew: {', '.join(fresh[:6]) or 'none'}.")


OURS = "net/body."  # before the names of a network's tensors in a model of ours


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Tensors by name from .safetensors, or from a pickle read without running code."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no weights file {path}.")
    try:
        if path.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(files.regular(path))
            start = f"{OURS}body." if f"{OURS}axes" in tensors else OURS  # of a model of ours
            own = [name for name in tensors if name.startswith(start)]
            return {k.removeprefix(start): tensors[k] for k in own or tensors}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an old pickle protocol is no matter
            content: Any = torch.load(files.regular(path), map_location="cpu", weights_only=True)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file.") from error
    except MemoryError:
        raise
    except Exception as error:  # whatever an unpickler makes of a damaged or hostile file
        raise ValueError(f"{path} is not a file of plain weights, so it is not read.") from error
    for key in ("ema_model", "model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds no weights by name.")
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}
    for prefix in ("module.", "backbone.", "model."):
        if tensors and all(k.startswith(prefix) for k in tensors):
            tensors = {k.removeprefix(prefix): v for k, v in tensors.items()}
    return tensors


def fit_state(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names and shapes; heads and what does not fit are left out."""
    prefix = "model." if all(name.startswith("model.") for name in ours) else ""
    state = {}
    for name, tensor in theirs.items():
        name = name.removeprefix(prefix)
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
    """Position embeddings [1, 1 + g², D] for the grid of `like`: bicubic; the class token stays."""
    if old.shape[1] == like.shape[1]:
        return old
    token, grid = old[:, :1].float(), old[:, 1:].float()
    side, wanted = round(grid.shape[1] ** 0.5), round((like.shape[1] - 1) ** 0.5)
    square = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    square = F.interpolate(square, (wanted, wanted), mode="bicubic", align_corners=False)
    return torch.cat([token, square.permute(0, 2, 3, 1).flatten(1, 2)], 1)


# what oneDNN computes while a convolution's result is still in the cache, by activation
POINTWISE: dict[type[nn.Module], tuple[str, list[float]]] = {
    nn.Identity: ("none", []),
    nn.ReLU: ("relu", []),
    nn.ReLU6: ("hardtanh", [0.0, 6.0]),
    nn.SiLU: ("swish", []),
}
SAME = "Conv2dSame"  # timm's layer whose padding depends on the size of the map
PLAIN = ("Conv2d", "TrimmedConv2d")  # the second computes the same in another way
FUSED_TOLERANCE = 1e-4  # of the largest output, beyond which a network stays as it is


def fuse(net: nn.Module, size: int, portable: bool = False) -> nn.Module:
    """A copy that gives the same in fewer passes over memory; `net` itself where nothing is to do.

    A portable one has only layers that exporters know, and changes nothing in place, which takes
    them ten times as long. Which layers follow each other is seen with an image of noise, and with
    a second one the copy is compared. EfficientNet-Lite0 at 224 px, one core: 12.8, not 17.4 ms.
    """
    if net.training or not any(isinstance(layer, Norm) for layer in net.modules()):
        return net
    like, seeded = next(net.parameters()), torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad(), ops.exact_convolutions(like.device):
        noise = (2 * torch.rand(2, 1, 3, size, size, generator=seeded) - 1).to(like)
        quick = copy.deepcopy(net).requires_grad_(False)
        chains = _follow(quick, noise[0])
        names = {layer: name for name, layer in quick.named_modules()}
        for conv, norm, activation in chains:
            folded = nn.utils.fusion.fuse_conv_bn_eval(conv, norm)
            quick.set_submodule(names[conv], folded)
            own = getattr(norm, "act", nn.Identity())  # timm's BatchNorm may have one inside
            after = activation if type(own) is nn.Identity and activation is not None else own
            if not portable and _can_fuse(folded, after):
                quick.set_submodule(names[conv], FusedConv2d(folded, after))
                if after is activation:
                    quick.set_submodule(names[activation], nn.Identity())
                own = nn.Identity()
            quick.set_submodule(names[norm], own)
        for layer in quick.modules() if portable else ():
            if hasattr(layer, "inplace"):
                setattr(layer, "inplace", False)  # noqa: B010
        wanted, answer = (torch.cat([*each(noise[1])], 1) for each in (net, quick))
    close = (answer - wanted).abs().max() <= FUSED_TOLERANCE * wanted.abs().max()
    return quick if chains and bool(close) else net


def _follow(net: nn.Module, image: Tensor) -> list[tuple[nn.Conv2d, Norm, nn.Module | None]]:
    """Convolutions, the BatchNorms that take their results, and activations that take those."""
    makers: dict[int, tuple[nn.Module, Tensor, int]] = {}  # by identity, kept by the tensor itself
    before: dict[nn.Module, nn.Module] = {}  # the layer whose result a layer takes
    calls: list[nn.Module] = []

    def enter(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls.append(layer)
        maker, tensor, version = makers.get(id(inputs[0]), (None, inputs[0], 0))
        if maker is not None and tensor._version == version:  # not changed in place since
            before[layer] = maker

    def leave(layer: nn.Module, inputs: Any, result: Tensor) -> None:
        makers[id(result)] = (layer, result, result._version)

    layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | Norm) or type(m) in POINTWISE]
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    net(image)
    for hook in hooks:
        hook.remove()
    once = {layer for layer in calls if calls.count(layer) == 1 and type(layer) is not nn.Identity}
    acts = {maker: layer for layer, maker in before.items() if {layer, maker} <= once}
    return [
        (conv, norm, None if isinstance(acts.get(norm), nn.Conv2d | Norm) else acts.get(norm))
        for norm, conv in before.items()
        if isinstance(norm, Norm) and isinstance(conv, nn.Conv2d) and {norm, conv} <= once
    ]


def _can_fuse(conv: nn.Conv2d, activation: nn.Module) -> bool:
    """Whether oneDNN computes such a layer: on a CPU, padded with zeros in the usual way."""
    kind, halving = type(conv).__name__, conv.stride == (2, 2) and conv.dilation == (1, 1)
    odd = all(side % 2 for side in conv.kernel_size)
    plain = kind in PLAIN or (kind == SAME and halving and odd)
    numbers = conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
    there = conv.weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    exact = conv.weight.dtype in (torch.float32, torch.bfloat16)
    return plain and numbers and there and exact and type(activation) in POINTWISE


class FusedConv2d(nn.Module):
    """A convolution and the activation after it, as one operation of oneDNN's."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, activation: nn.Module) -> None:
        super().__init__()
        self.same, self.kernel = type(conv).__name__ == SAME, conv.kernel_size
        # "same" padding puts fewer zeros before than after, which oneDNN has no word for: a kernel
        # with a row and a column of zeros in front, and one more of padding, come to the same
        weight = F.pad(conv.weight, (1, 0, 1, 0)) if self.same else conv.weight
        self.padding = [int(number) for number in conv.padding]
        self.stride, self.dilation, self.groups = conv.stride, conv.dilation, conv.groups
        how: Any = (self.padding, self.stride, self.dilation, self.groups)
        packed = torch._C._nn.mkldnn_reorder_conv2d_weight(weight.detach().to_mkldnn(), *how)
        self.register_buffer("weight", packed)  # in oneDNN's order: one image takes a fifth less
        self.register_buffer("bias", conv.bias)
        self.activation = POINTWISE[type(activation)]

    def forward(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        padding = self.padding
        if self.same:
            sides = zip(images.shape[2:], self.kernel, strict=True)
            padding = [(kernel - 2 + side % 2) // 2 + 1 for side, kernel in sides]
        result: Tensor = torch.ops.mkldnn._convolution_pointwise(
            *(images, self.weight, self.bias, padding, self.stride, self.dilation),
            *(self.groups, *self.activation, ""),
        )
        return result
