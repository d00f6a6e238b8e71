"""ShrinkMatch, Yang et al. 2023, https://arxiv.org/abs/2308.06777"""

import math

import torch
from torch import Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, apart, between


class ShrinkMatch(Method):
    """Uses unsure pictures too, over a class space shrunk until their top class is sure."""

    def __init__(
        self,
        task: Task,
        *,
        threshold: float = 0.95,
        weight: float = 1.0,
        momentum: float = 0.999,
        queue: int = 0,  # batches over which guesses are aligned; 0: not aligned
    ) -> None:
        super().__init__(task)
        between("threshold", threshold, 0, 1)
        between("momentum", momentum, 0, 1)
        self.threshold, self.weight, self.momentum, self.aligns = threshold, weight, momentum, queue
        means = torch.zeros(max(1, queue), task.classes)
        self.remember(accepted=torch.tensor(0.0), queue=means, queue_place=torch.tensor(0))

    def heads(self) -> dict[str, nn.Module]:
        d, narrow = self.task.features, max(1, self.task.features // 4)
        layers: list[nn.Module] = []
        for inside in (d, narrow):
            layers += [nn.Linear(inside, narrow), nn.BatchNorm1d(narrow), nn.LeakyReLU(0.1)]
        return {"auxiliary": nn.Sequential(*layers, nn.Linear(narrow, self.task.classes))}

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, weak, strong = apart(net, *batch.x, *batch.u, grad=(True, False, True))
        p = weak.logits.softmax(-1)
        state: dict[str, Tensor] = {}
        if self.aligns:
            queue, place = self.get_buffer("queue"), self.get_buffer("queue_place")
            p, state["queue"], state["queue_place"] = ops.align_by_queue(p, queue, place)
        mask = (p.amax(-1) >= self.threshold).to(p.dtype)
        accepted = ops.moving(self.get_buffer("accepted"), ops.average(mask.mean()), self.momentum)
        rows = strong.features
        rows = rows.repeat(2, 1) if len(rows) == 1 else rows  # BatchNorm takes no single row
        auxiliary = net.get_submodule("heads.auxiliary")(rows)[: len(strong.features)]
        labelled = Term(x.logits, batch.y, torch.ones_like(x.logits[:, 0]))
        unlabelled = Term(strong.logits, p, self.weight * mask)
        extra = {"shrunk": accepted * ((1 - mask) * self.shrunk(p, auxiliary)).mean()}
        return Plan(labelled, unlabelled, extra=extra, state=state | {"accepted": accepted})

    def shrunk(self, p: Tensor, logits: Tensor) -> Tensor:
        """Loss of the top class against the least likely ones only, as many as leave it sure."""
        ordered, order = p.sort(-1, descending=True)
        top = ordered[:, :1]
        # [R, C]: mass of the classes from c on; CUDA knows no deterministic cumsum
        tail = ordered @ torch.ones(p.shape[-1], p.shape[-1], dtype=p.dtype, device=p.device).tril()
        sure = top / (top + tail) >= self.threshold
        places = torch.arange(p.shape[-1], device=p.device)
        sure = sure & (places >= 2)  # dropping no class is FixMatch's own test
        first = torch.where(sure, places, p.shape[-1]).amin(-1, keepdim=True)
        keep = (places == 0) | (places >= first)
        logits = logits.gather(-1, order)
        against = logits.masked_fill(~keep, -math.inf).logsumexp(-1) - logits[:, 0]
        return top[:, 0] * sure.any(-1) * against
