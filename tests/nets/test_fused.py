"""Fused networks give what the networks give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from calmatch import nets
from calmatch.core import Output
from calmatch.nets import FusedConv2d, fuse


def built(name: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    net = nets.build(name, 5, size).eval()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):  # as after training
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 2)
    return net


@pytest.mark.parametrize(
    ("name", "size", "layers"),
    [
        ("efficientnet_lite0(pretrained=False)", 64, 49),
        ("efficientnet_lite0(pretrained=False)", 75, 49),  # "same" padding of odd maps
        ("efficientnet_lite012(pretrained=False)", 64, 177),
        ("timm.resnet18", 64, 20),
        ("wrn_28_2", 32, 13),
        ("timm.vit_tiny_patch16_224(img_size=32)", 32, 0),
    ],
)
def test_a_fused_network_gives_the_same_features_of_stages_too(name, size, layers):
    net = built(name, size)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    quick = fuse(net, size)
    assert sum(isinstance(layer, FusedConv2d) for layer in quick.modules()) == layers
    assert (quick is net) == (layers == 0)
    images = torch.randn(3, 3, size, size)
    with torch.inference_mode():
        for theirs, ours in zip(
            nets.pooled_features(net, images), nets.pooled_features(quick, images), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


class Twice(nn.Module):
    """Its second use of the convolution's result does not pass the BatchNorm."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.inplace = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), inplace
        self.norm.weight.data.fill_(3)
        self.act = nn.ReLU()

    def forward(self, images: torch.Tensor) -> Output:
        maps = self.conv(images)
        normed = self.norm(maps)
        normed = normed.add_(maps[:, :1]) if self.inplace else normed
        pooled = self.act(normed).mean((2, 3)) + (0 if self.inplace else maps.mean((2, 3)))
        return Output(pooled, pooled)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_network_whose_layers_only_seem_to_follow_each_other_stays_as_it_is(inplace):
    net = Twice(inplace).eval()
    assert fuse(net, 16) is net
