"""Networks written here: wide ResNets as in benchmarks, a small and a tiny one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from calmatch.core import Output

SLOPE, MOMENTUM = 0.1, 0.001  # of LeakyReLU and of BatchNorm


class WideBlock(nn.Module):
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


class WideGroup(nn.Module):
    """Blocks of one width."""

    def __init__(self, blocks: int, inside: int, outside: int, stride: int, activate: bool) -> None:
        super().__init__()
        first = WideBlock(inside, outside, stride, activate)
        rest = [WideBlock(outside, outside, 1, activate) for _ in range(blocks - 1)]
        self.layer = nn.Sequential(first, *rest)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """Three (or, for larger images, four) groups of residual blocks and a linear classifier."""

    def __init__(self, classes: int, *, depth: int = 28, widen: int = 2, groups: int = 3) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 1 - groups, 2 * groups)
        if rest or blocks < 1:
            raise ValueError(f"A WideResNet of {groups} groups cannot have depth {depth}.")
        widths = [16] + [16 * widen * 2**k for k in range(groups)]
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=True)
        for k in range(groups):
            stride = 1 if k == 0 else 2
            group = WideGroup(blocks, widths[k], widths[k + 1], stride, activate=k == 0)
            self.add_module(f"block{k + 1}", group)
        self.bn1 = nn.BatchNorm2d(widths[-1], momentum=MOMENTUM, eps=1e-3)
        self.classifier = nn.Linear(widths[-1], classes)
        self.groups = groups
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


class Layered(nn.Module):
    """Layers that compute features of some width, and a linear classifier."""

    def __init__(self, classes: int, width: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Output:
        features = self.layers(images)
        return Output(self.head(features), features)


class Tiny(Layered):
    """Mean over 2 x 2 squares and one hidden layer, without BatchNorm: for tests."""

    def __init__(self, classes: int, *, width: int = 16) -> None:
        mean, hidden = (nn.AdaptiveAvgPool2d(4), nn.Flatten()), nn.Linear(48, width)
        super().__init__(classes, width, *mean, hidden, nn.Tanh())


class Small(Layered):
    """Three convolutions with BatchNorm, global pooling, one linear layer."""

    def __init__(self, classes: int, *, width: int = 32) -> None:
        first = _conv_block(3, width, pool=True)
        second = _conv_block(width, 2 * width, pool=True)
        third = _conv_block(2 * width, 4 * width, pool=False)
        pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        super().__init__(classes, 4 * width, first, second, third, *pool)


def _conv_block(inside: int, outside: int, pool: bool) -> nn.Sequential:
    conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
    layers = [conv, nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))
