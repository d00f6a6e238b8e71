"""Pseudo-label, Lee 2013, the ICML workshop on challenges in representation learning"""

import torch
from torch import nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, between, frozen


class PseudoLabel(Method):
    """Teaches a confident prediction its own class, more and more."""

    u_views = ("weak",)

    def __init__(
        self, task: Task, *, threshold: float = 0.95, weight: float = 1.0, ramp: float = 0.4
    ) -> None:
        super().__init__(task)
        between("threshold", threshold, 0, 1)
        self.threshold, self.weight, self.ramp = threshold, weight, ramp

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x = net(batch.x[0]).logits
        with frozen(net):
            u = net(batch.u[0]).logits
        p = u.detach().softmax(-1)
        mask = (p.amax(-1) >= self.threshold).to(p.dtype)
        ramp = ops.ramp(batch.step, self.ramp * self.task.steps).to(p.dtype)
        labelled = Term(x, batch.y, torch.ones_like(x[:, 0]))
        return Plan(labelled, Term(u, p.argmax(-1), self.weight * ramp * mask))
