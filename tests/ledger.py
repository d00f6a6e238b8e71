"""A method that counts, in a file, how often its run came to the end: for the Ray test."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from calmatch.core import Task
from calmatch.methods.fixmatch import FixMatch


class Counted(FixMatch):
    """FixMatch that writes a line whenever its predictions are asked for: twice at the end."""

    def __init__(self, task: Task, *, book: str, **settings: Any) -> None:
        super().__init__(task, **settings)
        self.book = book

    def predict(self, net: nn.Module, images: Tensor) -> Tensor:
        line = os.open(self.book, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(line, f"{os.getpid()}\n".encode())
        os.close(line)
        return super().predict(net, images)
