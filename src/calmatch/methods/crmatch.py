"""CRMatch, Fan et al. 2023, https://arxiv.org/abs/2112.05825"""

import torch
from torch import nn

from calmatch import ops
from calmatch.core import Batch, Plan, Task, Term, apart
from calmatch.methods.fixmatch import FixMatch


class CRMatch(FixMatch):
    """FixMatch that keeps features of both views apart and guesses how a picture was turned."""

    turns = True
    u_views = ("weak", "strong", "weak")  # the third is turned four ways

    def __init__(self, task: Task, *, threshold: float = 0.95, weight: float = 1.0) -> None:
        super().__init__(task, threshold=threshold, weight=weight)

    def heads(self) -> dict[str, nn.Module]:
        d = self.task.features
        rotation = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 4))
        return {"distance": nn.Linear(d, d), "rotation": rotation}

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        weak, strong, third = batch.u
        x, w, s, t = apart(net, batch.x[0], weak, strong, ops.quarter_turns(third).flatten(0, 1))
        p = w.logits.detach().softmax(-1)
        mask, _ = self.select(p, batch)
        distance = net.get_submodule("heads.distance")
        a, b = distance(s.features), distance(w.features)  # both are trained, as in USB
        norms = (a.square().sum(-1) + 1e-12) * (b.square().sum(-1) + 1e-12)
        alike = ((a * b).sum(-1) / norms.sqrt()).relu()
        turn = torch.arange(4, device=third.device).repeat_interleave(len(third))
        rotation = ops.hard_loss(net.get_submodule("heads.rotation")(t.features), turn)
        labelled = Term(x.logits, batch.y, torch.ones_like(x.logits[:, 0]))
        unlabelled = Term(s.logits, p.argmax(-1), self.weight * mask)
        extra = {"distance": (mask * alike).mean(), "rotation": rotation.mean()}
        return Plan(labelled, unlabelled, extra=extra)
