"""Networks by timm, which takes seconds to import: any by name, and the field's transformers."""

import math
from functools import partial
from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from calmatch.core import Output
from calmatch.nets.classic import Modelled


class Timm(Modelled):
    """A timm model that returns logits and the features before its classifier."""

    def __init__(self, classes: int, name: str, **settings: Any) -> None:
        try:
            model: Any = timm.create_model(name, num_classes=classes, **settings)
        except RuntimeError as error:  # timm's own for an unknown name
            raise ValueError(f"timm has no model {name!r}: {error}.") from error
        except TypeError as error:
            raise ValueError(f"timm's {name!r} does not take that: {error}.") from error
        except OSError as error:
            raise ValueError(
                f"The weights of {name!r} cannot be had: {error}. Give a local file instead, "
                f"timm.{name}(pretrained='FILE.safetensors'), or use pretrained=False."
            ) from error
        head, known = model.get_classifier(), model.pretrained_cfg.get("num_classes")
        loaded = "checkpoint_path" in settings or (settings.get("pretrained") and classes == known)
        fresh = not loaded and isinstance(head, nn.Linear) and not head.weight.is_meta
        if fresh and head.weight.std() * math.sqrt(head.in_features) > 1:
            head.reset_parameters()  # else confident methods learn its sure, random guesses
        super().__init__(model)

    def no_weight_decay(self) -> set[str]:
        exempt = getattr(self.model, "no_weight_decay", None)
        return {f"model.{name}" for name in exempt()} if exempt else set()


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


# USB's for 32 px, and for STL-10's 96 px as the paper's text says and as its configuration does
vit_tiny_patch2_32 = partial(ViT, size=32, patch=2, width=192, heads=3, drop_path=0.1)
vit_small_patch2_32 = partial(ViT, size=32, patch=2, width=384, heads=6)
vit_small_patch16_96 = partial(ViT, size=96, patch=16, width=384, heads=6)
vit_base_patch16_96 = partial(ViT, size=96, patch=16, width=768, heads=12)
