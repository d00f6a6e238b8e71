"""FixMatch, Sohn et al. 2020, https://arxiv.org/abs/2001.07685"""

import torch
from torch import Generator, Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, apart, between


class FixMatch(Method):
    """Teaches the strong view the weak view's class where that is confident."""

    def __init__(
        self,
        task: Task,
        *,
        threshold: float = 0.95,
        weight: float = 1.0,
        hard: bool = True,  # the weak view's class, or its whole prediction
        mixup: float = 0.0,  # mix strong views by shares from Beta(mixup, mixup); 0: not
    ) -> None:
        super().__init__(task)
        between("threshold", threshold, 0, 1)
        between("mixup", mixup, 0, 100)
        self.threshold, self.weight, self.hard, self.mixup = threshold, weight, hard, mixup

    def select(self, p: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Which weak predictions p [R, C] are trusted, as weights [R], and new memory."""
        return (p.amax(-1) >= self.threshold).to(p.dtype), {}

    def draws(self, generator: Generator, b: int, r: int) -> dict[str, Tensor]:
        if not self.mixup:
            return {}
        return {"beta": ops.beta(generator, self.mixup), "u_key": ops.uniform(generator, r)}

    def mixed(self, own: Tensor, others: Tensor, batch: Batch) -> Tensor:
        """Rows moved towards their partners' by a share under one half."""
        share = torch.maximum(batch.draws["beta"], 1 - batch.draws["beta"]).to(own.dtype)
        return torch.lerp(others[batch.draws["u_key"].argsort()], own, share)

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        seen = self.mixed(batch.u[1], batch.u[1], batch) if self.mixup else batch.u[1]
        x, weak, strong = apart(net, *batch.x, batch.u[0], seen, grad=(True, False, True))
        p = weak.logits.softmax(-1)
        mask, state = self.select(p, batch)
        target = p.argmax(-1) if self.hard else p
        if self.mixup:  # a partner need not be trusted: it counts as what it is thought to be
            target = self.mixed(ops.soft(target, p), p, batch)
        labelled = Term(x.logits, batch.y, torch.ones_like(x.logits[:, 0]))
        unlabelled = Term(strong.logits, target, self.weight * mask)
        return Plan(labelled, unlabelled, state=state)
