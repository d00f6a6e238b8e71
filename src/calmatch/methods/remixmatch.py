"""ReMixMatch, Berthelot et al. 2020, https://arxiv.org/abs/1911.09785"""

import torch
from torch import Generator, Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Plan, Task, frozen
from calmatch.methods.mixmatch import MixMatch


class ReMixMatch(MixMatch):
    """MixMatch with aligned guesses, strong views and a guess of how a picture was turned."""

    turns = True
    u_views = ("weak", "strong", "strong")
    losses = {"labelled": "cross_entropy", "unlabelled": "cross_entropy"}

    def __init__(
        self,
        task: Task,
        *,
        weight: float = 1.5,
        temperature: float = 0.5,
        alpha: float = 0.75,
        ramp: float = 1 / 64,
        unmixed: float = 0.5,
        rotation: float = 0.5,
        momentum: float = 0.999,
    ) -> None:
        super().__init__(task, weight=weight, temperature=temperature, alpha=alpha, ramp=ramp)
        self.unmixed, self.rotation, self.momentum = unmixed, rotation, momentum
        counts = torch.tensor(task.counts, dtype=torch.float64)
        self.remember(mean=torch.zeros(task.classes), target=(counts / counts.sum()).float())

    def heads(self) -> dict[str, nn.Module]:
        return {"rotation": nn.Linear(self.task.features, 4)}

    def draws(self, generator: Generator, b: int, r: int) -> dict[str, Tensor]:
        turns = torch.randint(4, (r,), generator=generator, device=generator.device)
        return super().draws(generator, b, r) | {"u_turn": turns}

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        weak, strong, other = batch.u
        with torch.no_grad(), frozen(net):
            p = net(weak).logits.softmax(-1)
        mean = ops.running_mean(self.get_buffer("mean"), p, self.momentum)
        q = ops.sharpen(ops.align(p, mean, self.get_buffer("target")), self.temperature)
        plan = self.plan(net, batch, *self.mix(batch, [batch.x[0], strong, other, weak], q))
        turn = batch.draws["u_turn"]
        turned = ops.quarter_turns(strong)[turn, torch.arange(len(turn), device=turn.device)]
        with frozen(net):
            unmixed = ops.soft_loss(net(strong).logits, q).mean()
            turns = net.get_submodule("heads.rotation")(net(turned).features)
        ramp = ops.ramp(batch.step, self.ramp * self.task.steps).to(p.dtype)
        rotation = self.rotation * ops.hard_loss(turns, turn).mean()
        extra = {"unmixed": self.unmixed * ramp * unmixed, "rotation": rotation}
        return plan._replace(extra=extra, state={"mean": mean})
