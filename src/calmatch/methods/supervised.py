"""Supervised: cross-entropy on the labelled pictures alone, the baseline of every comparison."""

import torch
from torch import nn

from calmatch.core import Batch, Method, Plan, Term


class Supervised(Method):
    """Learns from the labelled pictures alone."""

    u_views = ()

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        logits = net(batch.x[0]).logits
        return Plan(Term(logits, batch.y, torch.ones_like(logits[:, 0])), None)
