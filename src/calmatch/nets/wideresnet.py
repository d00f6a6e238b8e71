"""Wide residual networks as the semi-supervised field builds them, quirks included."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from calmatch.core import Output

SLOPE, MOMENTUM = 0.1, 0.001  # of LeakyReLU and of BatchNorm


class Block(nn.Module):
    """Two convolutions around a shortcut.

    Where the width changes, only the first group activates before the shortcut; in the others the
    block's first norm is computed and not used, as in the reference (its statistics do move).
    """

    def __init__(self, inside: int, outside: int, stride: int, activate: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inside, momentum=MOMENTUM)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside, momentum=MOMENTUM)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.same, self.activate = inside == outside, activate
        if not self.same:
            self.convShortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = F.leaky_relu(self.bn1(x), SLOPE)
        if self.same:
            shortcut, inner = x, ready
        else:
            inner = ready if self.activate else x
            shortcut = self.convShortcut(inner)
        out: Tensor = self.conv2(F.leaky_relu(self.bn2(self.conv1(inner)), SLOPE))
        return shortcut + out


class Group(nn.Module):
    """Blocks of one width."""

    def __init__(self, blocks: int, inside: int, outside: int, stride: int, activate: bool) -> None:
        super().__init__()
        widths = [inside] + [outside] * (blocks - 1)
        strides = [stride] + [1] * (blocks - 1)
        self.layer = nn.Sequential(
            *(Block(w, outside, s, activate) for w, s in zip(widths, strides, strict=True))
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """Three (or, for larger pictures, four) groups of residual blocks and a linear classifier."""

    def __init__(self, classes: int, *, depth: int = 28, widen: int = 2, groups: int = 3) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 1 - groups, 2 * groups)
        if rest or blocks < 1:
            raise ValueError(f"A WideResNet of {groups} groups cannot have depth {depth}.")
        widths = [16] + [16 * widen * 2**k for k in range(groups)]
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=True)
        for k in range(groups):
            stride = 1 if k == 0 else 2
            group = Group(blocks, widths[k], widths[k + 1], stride, activate=k == 0)
            self.add_module(f"block{k + 1}", group)
        self.bn1 = nn.BatchNorm2d(widths[-1], momentum=MOMENTUM, eps=1e-3)
        self.classifier = nn.Linear(widths[-1], classes)
        self.groups = groups
        self._start()

    def _start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="leaky_relu")
        nn.init.xavier_normal_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Output:
        x = self.conv1(images)
        for k in range(self.groups):
            x = self.get_submodule(f"block{k + 1}")(x)
        features = F.leaky_relu(self.bn1(x), SLOPE).mean((2, 3))
        return Output(self.classifier(features), features)


def wrn_28_2(classes: int) -> WideResNet:
    """WRN-28-2, 1.5 million parameters: the classic network for CIFAR-10 and SVHN."""
    return WideResNet(classes, depth=28, widen=2)


def wrn_28_8(classes: int) -> WideResNet:
    """WRN-28-8, 23 million parameters: the classic network for CIFAR-100."""
    return WideResNet(classes, depth=28, widen=8)


def wrn_37_2(classes: int) -> WideResNet:
    """WRN-37-2 with four groups: the classic network for STL-10's 96 px."""
    return WideResNet(classes, depth=37, widen=2, groups=4)
