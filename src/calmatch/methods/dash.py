"""Dash, Xu et al. 2021, https://proceedings.mlr.press/v139/xu21e.html"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, apart


class Dash(Method):
    """Trusts pseudo-labels whose own loss is under a threshold that falls with time.

    No separate stage: unlabelled pictures count nothing during the first `warmup` steps, over which
    the starting loss is measured on labelled ones. USB takes it from the test set, in effect log K.
    """

    def __init__(
        self,
        task: Task,
        *,
        factor: float = 1.0001,
        gamma: float = 1.27,
        least: float = 0.05,
        temperature: float = 0.5,
        weight: float = 1.0,
        warmup: int | None = None,  # steps; 1 % of the run
        every: int | None = None,  # steps between falls; 5 % of the run, ten of USB's epochs
        start: float | None = None,  # the starting loss, if known
        faithful: Literal["usb", "paper"] = "paper",  # usb: start at log K
    ) -> None:
        super().__init__(task)
        self.factor, self.gamma, self.least = factor, gamma, least
        self.temperature, self.weight = temperature, weight
        self.warmup = max(1, task.steps // 100) if warmup is None else warmup
        if self.warmup == 0 and start is None and faithful == "paper":
            raise ValueError("dash measures its starting loss over warmup steps: at least 1.")
        self.every = every or max(1, task.steps // 20)
        self.start = math.log(task.classes) if start is None and faithful == "usb" else start
        self.remember(loss=torch.tensor(self.start or 0.0))

    def threshold_at(self, step: Tensor, start: Tensor) -> Tensor:
        """The loss under which a pseudo-label is trusted, before its floor."""
        falls = ((step - self.warmup).clamp_min(0) // self.every).to(start.dtype)
        return self.factor * self.gamma ** (-falls) * start

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, weak, strong = apart(net, *batch.x, *batch.u, grad=(True, False, True))
        loss = self.get_buffer("loss")
        if self.start is None:
            now = ops.average(ops.hard_loss(x.logits.detach(), batch.y).mean())
            mean = loss + (now - loss) / (batch.step + 1)
            loss = torch.where(batch.step < self.warmup, mean, loss)
        fallen = self.threshold_at(batch.step, loss)
        soft = (weak.logits / self.temperature).softmax(-1)
        hard = ops.soft(weak.logits.argmax(-1), soft)
        target = torch.where(fallen <= self.least, hard, soft)
        trusted = ops.soft_loss(weak.logits, target) <= fallen.clamp_min(self.least)
        mask = (trusted & (batch.step >= self.warmup)).to(soft.dtype)
        labelled = Term(x.logits, batch.y, torch.ones_like(x.logits[:, 0]))
        unlabelled = Term(strong.logits, target, self.weight * mask)
        return Plan(labelled, unlabelled, state={"loss": loss})
