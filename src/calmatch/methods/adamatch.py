"""AdaMatch, Berthelot et al. 2022, https://arxiv.org/abs/2106.04732"""

import math
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, apart, between, frozen


class AdaMatch(Method):
    """FixMatch with guesses aligned to the labelled ones and a threshold relative to them.

    `faithful="paper"` adds what USB leaves out: labelled logits mixed at random with those of a
    forward without unlabelled pictures, a slow start of the unlabelled loss, the threshold 0.9.
    """

    def __init__(
        self,
        task: Task,
        *,
        threshold: float | None = None,  # 0.95 (usb) or 0.9 (paper)
        weight: float = 1.0,
        momentum: float = 0.999,
        faithful: Literal["usb", "paper"] = "usb",
    ) -> None:
        super().__init__(task)
        self.relative = (0.95 if faithful == "usb" else 0.9) if threshold is None else threshold
        between("threshold", self.relative, 0, 1)
        between("momentum", momentum, 0, 1)
        self.weight, self.momentum, self.faithful = weight, momentum, faithful
        even = torch.full((task.classes,), 1 / task.classes)
        self.remember(mean=torch.zeros(task.classes), target=even)

    def draws(self, generator: Generator, b: int, r: int) -> dict[str, Tensor]:
        if self.faithful == "usb":
            return {}
        return {"x_mix": ops.uniform(generator, b, self.task.classes)}

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, weak, strong = apart(net, *batch.x, *batch.u, grad=(True, False, True))
        logits, start = x.logits, torch.ones((), dtype=x.logits.dtype, device=x.logits.device)
        if self.faithful == "paper":
            with frozen(net):
                alone = net(batch.x[0]).logits
            logits = torch.lerp(alone, logits, batch.draws["x_mix"].to(logits.dtype))
            turn = (2 * math.pi * batch.step / self.task.steps).clamp_max(math.pi)
            start = (0.5 - turn.cos() / 2).to(logits.dtype)
        p_x = logits.detach().softmax(-1)
        p = weak.logits.softmax(-1)
        mean = ops.running_mean(self.get_buffer("mean"), p, self.momentum)
        target = ops.moving(self.get_buffer("target"), ops.average(p_x.mean(0)), self.momentum)
        p = ops.align(p, mean, target)
        threshold = self.relative * ops.average(p_x.amax(-1).mean())
        mask = (p.amax(-1) >= threshold).to(p.dtype)
        labelled = Term(logits, batch.y, torch.ones_like(logits[:, 0]))
        unlabelled = Term(strong.logits, p.argmax(-1), self.weight * start * mask)
        return Plan(labelled, unlabelled, state={"mean": mean, "target": target})
