"""A set of pictures held whole on the device as uint8."""

from __future__ import annotations

import torch
from torch import Tensor


class Resident:
    """Pictures on the device, taken by row."""

    def __init__(self, images: Tensor, device: torch.device) -> None:
        self.images = images.to(device)
        self.device = device

    def __len__(self) -> int:
        return len(self.images)

    def take(self, ids: Tensor) -> Tensor:
        """uint8 [len(ids), 3, H, W]."""
        return self.images[ids]
