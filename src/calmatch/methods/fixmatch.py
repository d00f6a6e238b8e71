"""FixMatch, Sohn et al. 2020, https://arxiv.org/abs/2001.07685"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from calmatch.core import Batch, Method, Plan, Task, Term, apart, between


class FixMatch(Method):
    """Teaches the strong view the weak view's class where that is confident."""

    def __init__(
        self, task: Task, *, threshold: float = 0.95, weight: float = 1.0, hard: bool = True
    ) -> None:
        super().__init__(task)
        between("threshold", threshold, 0, 1)
        self.threshold, self.weight, self.hard = threshold, weight, hard

    def select(self, p: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Which weak predictions p [R, C] are trusted, as weights [R], and new memory."""
        return (p.amax(-1) >= self.threshold).to(p.dtype), {}

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, weak, strong = apart(net, *batch.x, *batch.u, grad=(True, False, True))
        p = weak.logits.softmax(-1)
        mask, state = self.select(p, batch)
        target = p.argmax(-1) if self.hard else p
        return Plan(
            Term(x.logits, batch.y, torch.ones_like(x.logits[:, 0])),
            Term(strong.logits, target, self.weight * mask),
            state=state,
        )
