"""Pi-model, Laine and Aila 2017, https://arxiv.org/abs/1610.02242"""

import torch
from torch import Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, frozen


class PiModel(Method):
    """Teaches a second weak view the prediction of the first, by squared distance."""

    u_views = ("weak", "weak")
    losses = {"labelled": "cross_entropy", "unlabelled": "mse"}

    def __init__(self, task: Task, *, weight: float = 10.0, ramp: float = 0.4) -> None:
        super().__init__(task)
        self.weight, self.ramp = weight, ramp

    def teach(self, net: nn.Module, ema: nn.Module, images: Tensor) -> Tensor:
        """The target's logits."""
        with torch.no_grad(), frozen(net):
            logits: Tensor = net(images).logits
        return logits

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x = net(batch.x[0]).logits
        target = self.teach(net, ema, batch.u[0]).softmax(-1)
        with frozen(net):
            u = net(batch.u[1]).logits
        weight = self.weight * ops.ramp(batch.step, self.ramp * self.task.steps)
        return Plan(
            Term(x, batch.y, torch.ones_like(x[:, 0])), Term(u, target, ops.rows(weight, u))
        )
