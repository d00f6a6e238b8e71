"""Networks: each maps pictures [B, 3, H, W] to Output(logits, features)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from calmatch import spec
from calmatch.core import Output
from calmatch.nets import small

NETS: Mapping[str, Callable[..., nn.Module]] = {
    "small": small.Small,
    "tiny": small.Tiny,
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

    def forward(self, images: Tensor) -> Output:
        if not (self.bf16 and self.training):
            plain: Output = self.body(images)
            return plain
        with torch.autocast(images.device.type, torch.bfloat16):
            out: Output = self.body(images)
        return Output(out.logits.to(images.dtype), out.features.to(images.dtype))


def body(text: str, classes: int) -> nn.Module:
    """The network a spec names, `"small(width=16)"` for example."""
    built = spec.bind(spec.parse(text), NETS, "net", given=1)(classes)
    if not isinstance(built, nn.Module):
        raise spec.SpecError(f"{text!r} is not an nn.Module.")
    return built


@torch.no_grad()
def feature_size(net: nn.Module, size: int) -> int:
    """Width of the features, found with one black picture."""
    training = net.training
    out: Output = net.eval()(torch.zeros(1, 3, size, size))
    net.train(training)
    return out.features.shape[1]
