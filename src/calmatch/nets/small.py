"""Small networks for the demo, for tests and for pictures of few pixels."""

from __future__ import annotations

from torch import Tensor, nn

from calmatch.core import Output


class Small(nn.Module):
    """Three convolutions with BatchNorm, global pooling, one linear layer."""

    def __init__(self, classes: int, *, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _block(3, width, pool=True),
            _block(width, 2 * width, pool=True),
            _block(2 * width, 4 * width, pool=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Output:
        features = self.layers(images)
        return Output(self.head(features), features)


class Tiny(nn.Module):
    """Mean over 2 x 2 squares and one hidden layer, without BatchNorm: for tests."""

    def __init__(self, classes: int, *, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, width), nn.Tanh()
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Output:
        features = self.layers(images)
        return Output(self.head(features), features)


def _block(inside: int, outside: int, pool: bool) -> nn.Sequential:
    conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
    layers = [conv, nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))
