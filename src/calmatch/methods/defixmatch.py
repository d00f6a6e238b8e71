"""DeFixMatch, Schmutz et al. 2023, https://arxiv.org/abs/2203.07512"""

import torch
from torch import Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, apart, between


class DeFixMatch(Method):
    """FixMatch minus FixMatch on the labelled pictures, which takes its bias out."""

    x_views = ("weak", "strong")

    def __init__(self, task: Task, *, threshold: float = 0.95, weight: float = 0.5) -> None:
        super().__init__(task)
        between("threshold", threshold, 0, 1)
        self.threshold, self.weight = threshold, weight

    def trusted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The class of each weak prediction, and whether it is trusted."""
        p = logits.detach().softmax(-1)
        return p.argmax(-1), (p.amax(-1) >= self.threshold).to(p.dtype)

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        views = (*batch.x, *batch.u)
        x, x_strong, weak, strong = apart(net, *views, grad=(True, True, False, True))
        guess, mask = self.trusted(weak.logits)
        x_guess, x_mask = self.trusted(x.logits)
        anti = (x_mask * ops.hard_loss(x_strong.logits, x_guess)).mean()
        both = torch.cat([x.logits, x_strong.logits])
        return Plan(
            Term(both, batch.y.repeat(2), torch.ones_like(both[:, 0])),
            Term(strong.logits, guess, self.weight * mask),
            extra={"anti": -self.weight * anti},
        )
