"""ReFixMatch, Nguyen and Yang 2023, https://arxiv.org/abs/2308.00301"""

from typing import Literal

import torch
from torch import nn

from calmatch.core import Batch, Plan, Task, Term, apart
from calmatch.methods.fixmatch import FixMatch


class ReFixMatch(FixMatch):
    """FixMatch that also learns from rejected pictures, by the divergence of soft predictions."""

    def __init__(
        self,
        task: Task,
        *,
        threshold: float = 0.95,
        weight: float = 1.0,
        temperature: float = 0.5,
        faithful: Literal["usb", "paper"] = "usb",
    ) -> None:
        super().__init__(task, threshold=threshold, weight=weight)
        self.temperature, self.faithful = temperature, faithful

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, weak, strong = apart(net, *batch.x, *batch.u, grad=(True, False, True))
        p = weak.logits.softmax(-1)
        mask, _ = self.select(p, batch)
        # USB applies softmax to probabilities, which leaves almost nothing; the paper to logits
        source = p if self.faithful == "usb" else weak.logits
        target = (source / self.temperature).log_softmax(-1)
        logp = (strong.logits / self.temperature).log_softmax(-1)
        apartness = (target.exp() * (target - logp)).sum(-1)
        labelled = Term(x.logits, batch.y, torch.ones_like(x.logits[:, 0]))
        unlabelled = Term(strong.logits, p.argmax(-1), self.weight * mask)
        extra = {"rejected": self.weight * ((1 - mask) * apartness).mean()}
        return Plan(labelled, unlabelled, extra=extra)
