"""SimMatch, Zheng et al. 2022, https://arxiv.org/abs/2203.06915"""

from typing import Literal

import torch
from torch import Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Plan, Task, Term, apart, frozen
from calmatch.methods.comatch import Projected, embed


class SimMatch(Projected):
    """Teaches the strong view the weak view's class and its likeness to labelled pictures."""

    def __init__(
        self,
        task: Task,
        *,
        threshold: float = 0.95,
        temperature: float = 0.1,
        smoothing: float = 0.9,
        weight: float = 1.0,
        instance: float = 1.0,
        size: int = 128,  # of the embedding
        queue: int = 32,  # batches over which guesses are aligned
        gate: int | None = None,  # steps before the bank is used; steps / 200
        teacher: bool = False,  # fill the bank with the averaged weights' embeddings
        faithful: Literal["usb", "paper"] = "usb",
    ) -> None:
        super().__init__(task, threshold=threshold, size=size, queue=queue, gate=gate)
        self.temperature, self.smoothing, self.weight = temperature, smoothing, weight
        self.instance, self.teacher, self.faithful = instance, teacher, faithful
        bank = ops.unit(torch.randn(task.labelled, size))  # one row a labelled picture
        self.remember(bank=bank, labels=torch.zeros(task.labelled, dtype=torch.long))

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, w, s = apart(net, *batch.x, *batch.u, grad=(True, False, True))
        f_x, f_w, f_s = embed(net, x, w, s)
        f_x, f_w = f_x.detach(), f_w.detach()
        aligned, memory = self.align(w.logits)
        bank, labels = self.get_buffer("bank"), self.get_buffer("labels")
        like = (f_w @ bank.T / self.temperature).softmax(-1)
        target = ops.normalise(like * aligned[:, labels])
        by_class = torch.zeros_like(aligned).index_add(1, labels, like)
        started = batch.step >= self.gate
        p = torch.where(started, torch.lerp(by_class, aligned, self.smoothing), aligned)
        mask = (p.amax(-1) >= self.threshold).to(p.dtype)
        instance = ops.soft_loss(f_s @ bank.T / self.temperature, target).mean()
        if self.teacher:
            with torch.no_grad(), frozen(ema):
                (f_x,) = embed(ema, ema(batch.x[0]))
        labelled = Term(x.logits, batch.y, torch.ones_like(x.logits[:, 0]))
        unlabelled = Term(s.logits, p, self.weight * mask)
        extra = {"instance": self.instance * torch.where(started, instance, 0.0)}
        return Plan(labelled, unlabelled, extra=extra, state=self.store(f_x, batch) | memory)

    def store(self, features: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Move the batch's rows of the bank towards its embeddings."""
        ids, features, y = ops.gather(batch.x_id), ops.gather(features), ops.gather(batch.y)
        bank = self.get_buffer("bank")
        if not self.teacher:
            features = 0.7 * bank[ids] + 0.3 * features
            # USB normalises each dimension over the batch; the paper each row
            axis = 0 if self.faithful == "usb" else 1
            features = torch.nn.functional.normalize(features, dim=axis)
        labels = self.get_buffer("labels").index_copy(0, ids, y)
        return {"bank": bank.index_copy(0, ids, features), "labels": labels}
