"""MixMatch, Berthelot et al. 2019, https://arxiv.org/abs/1905.02249"""

import torch
from torch import Generator, Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, frozen


class MixMatch(Method):
    """Guesses sharpened labels, then mixes labelled and unlabelled pictures and their labels."""

    u_views: tuple[str, ...] = ("weak", "weak")
    losses = {"labelled": "cross_entropy", "unlabelled": "mse"}

    def __init__(
        self,
        task: Task,
        *,
        weight: float = 10.0,
        temperature: float = 0.5,
        alpha: float = 0.5,
        ramp: float = 0.4,
    ) -> None:
        super().__init__(task)
        self.weight, self.temperature, self.alpha, self.ramp = weight, temperature, alpha, ramp

    def draws(self, generator: Generator, b: int, r: int) -> dict[str, Tensor]:
        """One mixing share for the batch, and a key per row whose order is the partner's."""
        beta, x_key = ops.beta(generator, self.alpha), ops.uniform(generator, b)
        u_key = ops.uniform(generator, r, len(self.u_views))
        return {"beta": beta, "x_key": x_key, "u_key": u_key}

    def mix(self, batch: Batch, images: list[Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
        """All pictures with all labels, each moved towards a partner's by the same share."""
        y = ops.soft(batch.y, target.new_zeros(len(batch.y), target.shape[1]))
        labels = torch.cat([y, *[target] * (len(images) - 1)])
        pictures = torch.cat(images)
        share = torch.maximum(batch.draws["beta"], 1 - batch.draws["beta"]).to(pictures.dtype)
        partner = torch.cat([batch.draws["x_key"], batch.draws["u_key"].T.flatten()]).argsort()
        mixed = torch.lerp(pictures[partner], pictures, share)
        return mixed, torch.lerp(labels[partner], labels, share)

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        with torch.no_grad(), frozen(net):
            both = [net(view).logits.softmax(-1) for view in batch.u]
        guess = ops.sharpen((both[0] + both[1]) / 2, self.temperature)  # [R, C]
        return self.plan(net, batch, *self.mix(batch, [batch.x[0], *batch.u], guess))

    def plan(self, net: nn.Module, batch: Batch, pictures: Tensor, labels: Tensor) -> Plan:
        """The first B mixed rows count as labelled, the rest as unlabelled."""
        b = len(batch.y)
        x = net(pictures[:b]).logits
        with frozen(net):
            u = net(pictures[b:]).logits
        weight = self.weight * ops.ramp(batch.step, self.ramp * self.task.steps)
        labelled = Term(x, labels[:b], torch.ones_like(x[:, 0]))
        return Plan(labelled, Term(u, labels[b:], ops.rows(weight, u)))
