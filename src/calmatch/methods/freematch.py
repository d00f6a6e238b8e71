"""FreeMatch, Wang et al. 2023, https://arxiv.org/abs/2205.07246"""

import torch
from torch import Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Plan, Task, between
from calmatch.methods.fixmatch import FixMatch


class FreeMatch(FixMatch):
    """FixMatch whose threshold follows the confidence, overall and for each class."""

    def __init__(
        self,
        task: Task,
        *,
        momentum: float = 0.999,
        fairness: float = 0.001,  # USB's configurations; its class default is 0.01
        weight: float = 1.0,
        hard: bool = True,
        mixup: float = 0.0,
        quantile: bool = False,  # follow the 0.8 quantile instead of the mean
        clip: bool = False,  # hold the overall threshold in [0, 0.95]
    ) -> None:
        super().__init__(task, threshold=0.0, weight=weight, hard=hard, mixup=mixup)  # none fixed
        between("momentum", momentum, 0, 1)
        self.momentum, self.fairness, self.quantile, self.clip = momentum, fairness, quantile, clip
        uniform = torch.full((task.classes,), 1 / task.classes)
        self.remember(overall=uniform[0].clone(), mean=uniform.clone(), histogram=uniform.clone())

    def select(self, p: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        confidence, guess = p.amax(-1), p.argmax(-1)
        everywhere = ops.gather(confidence)
        level = everywhere.quantile(0.8) if self.quantile else everywhere.mean()
        seen = ops.count(guess, p.shape[-1], torch.ones_like(confidence)) / len(guess)
        overall = self._follow("overall", level)
        overall = overall.clamp(0, 0.95) if self.clip else overall
        mean = self._follow("mean", ops.average(p.mean(0)))
        histogram = self._follow("histogram", ops.average(seen))
        threshold = overall * mean / mean.amax()
        state = {"overall": overall, "mean": mean, "histogram": histogram}
        return (confidence >= threshold[guess]).to(p.dtype), state

    def _follow(self, name: str, new: Tensor) -> Tensor:
        return ops.moving(self.get_buffer(name), new, self.momentum)

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        plan = super().forward(net, ema, batch)
        assert plan.unlabelled is not None
        accepted = (plan.unlabelled.weight > 0).to(plan.unlabelled.logits.dtype)
        fair = self._fairness(plan.unlabelled.logits.softmax(-1), accepted, plan.state)
        return plan._replace(extra={"fairness": self.fairness * fair})

    def _fairness(self, p: Tensor, accepted: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Minus the cross-entropy of class marginals, each divided by its histogram."""
        number = ops.total(accepted.sum())
        n = number.clamp_min(1)
        marginal = ops.total((accepted[:, None] * p).sum(0)) / n
        counts = ops.total(ops.count(p.argmax(-1), p.shape[-1], accepted)) / n
        inverse = torch.where(counts > 0, 1 / counts.clamp_min(torch.finfo(p.dtype).tiny), 0.0)
        goal = ops.normalise(state["mean"] / state["histogram"])
        drawn = ops.normalise(marginal * inverse)
        return torch.where(number > 0, (goal * (drawn + 1e-12).log()).sum(), 0.0)
