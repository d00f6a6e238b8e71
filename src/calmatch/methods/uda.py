"""UDA, Xie et al. 2020, https://arxiv.org/abs/1904.12848"""

from typing import Literal

import torch
from torch import Tensor, nn

from calmatch.core import Batch, Method, Plan, Task, Term, apart, between


class UDA(Method):
    """Teaches the strong view the weak view's whole prediction where that is confident."""

    def __init__(
        self,
        task: Task,
        *,
        threshold: float = 0.8,
        temperature: float = 0.4,
        weight: float = 1.0,
        annealing: Literal["none", "linear", "exp", "log"] = "none",
        faithful: Literal["usb", "paper"] = "usb",
    ) -> None:
        super().__init__(task)
        between("threshold", threshold, 0, 1)
        self.threshold, self.temperature, self.weight = threshold, temperature, weight
        self.annealing, self.faithful = annealing, faithful

    def signal(self, step: Tensor) -> Tensor:
        """Labelled pictures predicted with more than this confidence are left out for now."""
        s = step / self.task.steps
        shares = {"linear": s, "exp": torch.exp(5 * (s - 1)), "log": 1 - torch.exp(-5 * s)}
        return shares[self.annealing] * (1 - 1 / self.task.classes) + 1 / self.task.classes

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, weak, strong = apart(net, *batch.x, *batch.u, grad=(True, False, True))
        p = weak.logits.softmax(-1)
        mask = (p.amax(-1) >= self.threshold).to(p.dtype)
        # USB never applies the temperature; the paper sharpens with it
        target = p if self.faithful == "usb" else (weak.logits / self.temperature).softmax(-1)
        keep = torch.ones_like(x.logits[:, 0])
        if self.annealing != "none":
            p_x = x.logits.detach().softmax(-1)
            known = p_x.gather(-1, batch.y[:, None])[:, 0]  # the paper takes the true class's
            signal = p_x.amax(-1) if self.faithful == "usb" else known
            keep = (signal <= self.signal(batch.step)).to(p.dtype)
        return Plan(Term(x.logits, batch.y, keep), Term(strong.logits, target, self.weight * mask))
