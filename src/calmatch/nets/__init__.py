"""Networks: each maps pictures [B, 3, H, W] to Output(logits, features)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from calmatch import spec
from calmatch.core import Output
from calmatch.nets import pretrained, small, timm_net, vit, wideresnet

NETS: Mapping[str, Callable[..., nn.Module]] = {
    "vit_tiny_patch2_32": vit.vit_tiny_patch2_32,
    "vit_small_patch2_32": vit.vit_small_patch2_32,
    "vit_small_patch16_96": vit.vit_small_patch16_96,
    "vit_base_patch16_96": vit.vit_base_patch16_96,
    "wrn_28_2": wideresnet.wrn_28_2,
    "wrn_28_8": wideresnet.wrn_28_8,
    "wrn_37_2": wideresnet.wrn_37_2,
    "efficientnet_lite0": timm_net.efficientnet_lite0,
    "efficientnet_lite2": timm_net.efficientnet_lite2,
    "small": small.Small,
    "tiny": small.Tiny,
    "timm": timm_net.Timm,  # written timm.NAME
}


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
    pretrained.messages.clear()
    if item.name.startswith("timm."):
        built: Any = timm_net.Timm(classes, item.name.removeprefix("timm."), **settings)
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
        pretrained.load(built, item.name, source)
    return built


def at_once(device: torch.device) -> int:
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
