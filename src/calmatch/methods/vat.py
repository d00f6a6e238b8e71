"""VAT, Miyato et al. 2018, https://arxiv.org/abs/1704.03976"""

import torch
from torch import Generator, Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, frozen


class VAT(Method):
    """Teaches a picture, changed in the direction that changes its prediction most, to keep it."""

    u_views = ("weak",)
    losses = {"labelled": "cross_entropy", "unlabelled": "kl"}

    def __init__(
        self,
        task: Task,
        *,
        eps: float = 6.0,
        xi: float | None = None,  # the probe's length
        entropy: float = 0.06,
        weight: float = 1.0,
        ramp: float = 0.4,
    ) -> None:
        super().__init__(task)
        self.eps, self.xi, self.entropy, self.weight, self.ramp = eps, xi, entropy, weight, ramp

    def draws(self, generator: Generator, b: int, r: int) -> dict[str, Tensor]:
        return {"u_noise": ops.normal(generator, r, *self.image_shape)}

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        images = batch.u[0]
        x = net(batch.x[0]).logits
        with frozen(net):
            u = net(images).logits
            q = u.detach().softmax(-1)
            away = self.direction(net, images, q, batch.draws["u_noise"].to(images.dtype))
            moved = net(images + self.eps * away).logits
        weight = self.weight * ops.ramp(batch.step, self.ramp * self.task.steps)
        entropy = ops.soft_loss(u, u.softmax(-1)).mean()
        labelled = Term(x, batch.y, torch.ones_like(x[:, 0]))
        unlabelled = Term(moved, q, ops.rows(weight, moved))
        return Plan(labelled, unlabelled, extra={"entropy": self.entropy * entropy})

    def direction(self, net: nn.Module, images: Tensor, q: Tensor, noise: Tensor) -> Tensor:
        """Unit directions in which the prediction changes most: one power iteration."""
        # the reference's 1e-6 is below rounding in float32, its directions there are noise
        xi = self.xi or (1e-6 if images.dtype == torch.float64 else 1e-2)

        def divergence(d: Tensor) -> Tensor:
            return ops.soft_loss(net(images + d).logits, q).mean()

        gradient: Tensor = torch.func.grad(divergence)(xi * _unit(noise))
        return _unit(gradient.detach())


def _unit(d: Tensor) -> Tensor:
    return d / (d.square().sum((1, 2, 3), keepdim=True).sqrt() + 1e-16)
