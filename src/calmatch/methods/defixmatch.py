"""DeFixMatch, Schmutz et al. 2023, https://arxiv.org/abs/2203.07512"""

import torch
from torch import nn

from calmatch import ops
from calmatch.core import Batch, Plan, Task, Term, apart
from calmatch.methods.fixmatch import FixMatch


class DeFixMatch(FixMatch):
    """FixMatch minus FixMatch on the labelled pictures, which takes its bias out."""

    x_views = ("weak", "strong")

    def __init__(self, task: Task, *, threshold: float = 0.95, weight: float = 0.5) -> None:
        super().__init__(task, threshold=threshold, weight=weight)

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        views = (*batch.x, *batch.u)
        x, x_strong, weak, strong = apart(net, *views, grad=(True, True, False, True))
        p, p_x = (out.logits.detach().softmax(-1) for out in (weak, x))
        mask, x_mask = self.select(p, batch)[0], self.select(p_x, batch)[0]
        anti = (x_mask * ops.hard_loss(x_strong.logits, p_x.argmax(-1))).mean()
        both = torch.cat([x.logits, x_strong.logits])
        labelled = Term(both, batch.y.repeat(2), torch.ones_like(both[:, 0]))
        unlabelled = Term(strong.logits, p.argmax(-1), self.weight * mask)
        return Plan(labelled, unlabelled, extra={"anti": -self.weight * anti})
