"""SoftMatch, Chen et al. 2023, https://arxiv.org/abs/2301.10921"""

import torch
from torch import nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, apart, between


class SoftMatch(Method):
    """FixMatch whose weight falls as a Gaussian below the mean confidence, instead of a step."""

    def __init__(
        self,
        task: Task,
        *,
        momentum: float = 0.999,
        sigmas: float = 2.0,
        weight: float = 1.0,
        uniform: bool = True,  # align guesses to uniform, or to the labelled predictions
    ) -> None:
        super().__init__(task)
        between("momentum", momentum, 0, 1)
        self.momentum, self.sigmas, self.weight, self.uniform = momentum, sigmas, weight, uniform
        self.remember(centre=torch.tensor(1 / task.classes), spread=torch.tensor(1.0))
        even = torch.full((task.classes,), 1 / task.classes)
        self.remember(mean=torch.zeros(task.classes), target=even)

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, weak, strong = apart(net, *batch.x, *batch.u, grad=(True, False, True))
        p = weak.logits.softmax(-1)
        mean = ops.running_mean(self.get_buffer("mean"), p, self.momentum)
        target = self.get_buffer("target")
        if not self.uniform:
            known = ops.average(x.logits.detach().softmax(-1).mean(0))
            target = ops.moving(target, known, self.momentum)
        confidence = ops.align(p, mean, target).amax(-1)
        all_ranks = ops.gather(confidence)
        # unbiased, as the reference; one picture alone has no spread
        variance = all_ranks.var(correction=min(1, len(all_ranks) - 1))
        centre = ops.moving(self.get_buffer("centre"), all_ranks.mean(), self.momentum)
        spread = ops.moving(self.get_buffer("spread"), variance, self.momentum)
        below = (confidence - centre).clamp_max(0)
        floor = torch.finfo(p.dtype).tiny
        trust = torch.exp(-below.square() * self.sigmas**2 / (2 * spread).clamp_min(floor))
        labelled = Term(x.logits, batch.y, torch.ones_like(x.logits[:, 0]))
        unlabelled = Term(strong.logits, weak.logits.argmax(-1), self.weight * trust)
        state = {"centre": centre, "spread": spread, "mean": mean, "target": target}
        return Plan(labelled, unlabelled, state=state)
