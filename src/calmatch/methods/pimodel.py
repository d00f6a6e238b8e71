"""Pi-model, Laine and Aila 2017, https://arxiv.org/abs/1610.02242"""

import torch
from torch import nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, frozen


class PiModel(Method):
    """Teaches a second weak view the prediction of the first, by squared distance."""

    u_views = ("weak", "weak")
    losses = {"labelled": "cross_entropy", "unlabelled": "mse"}

    def __init__(self, task: Task, *, weight: float = 10.0, ramp: float = 0.4) -> None:
        super().__init__(task)
        self.weight, self.ramp = weight, ramp

    def teacher(self, net: nn.Module, ema: nn.Module) -> nn.Module:
        """Whose predictions are the targets."""
        return net

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x = net(batch.x[0]).logits
        with torch.no_grad(), frozen(self.teacher(net, ema)) as teacher:
            target = teacher(batch.u[0]).logits.softmax(-1)
        with frozen(net):
            u = net(batch.u[1]).logits
        weight = self.weight * ops.ramp(batch.step, self.ramp * self.task.steps)
        labelled = Term(x, batch.y, torch.ones_like(x[:, 0]))
        return Plan(labelled, Term(u, target, ops.rows(weight, u)))
