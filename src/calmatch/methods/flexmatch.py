"""FlexMatch, Zhang et al. 2021, https://arxiv.org/abs/2110.08263"""

import torch
from torch import Tensor

from calmatch import ops
from calmatch.core import Batch, Task
from calmatch.methods.fixmatch import FixMatch


class FlexMatch(FixMatch):
    """FixMatch whose threshold is lower for classes it has learnt less of."""

    def __init__(
        self,
        task: Task,
        *,
        threshold: float = 0.95,
        weight: float = 1.0,
        hard: bool = True,
        mixup: float = 0.0,
        warmup: bool = True,
    ) -> None:
        super().__init__(task, threshold=threshold, weight=weight, hard=hard, mixup=mixup)
        self.warmup = warmup  # unused pictures hold the thresholds down at first
        unused = torch.full((task.unlabelled,), task.classes)  # the class after the last: unused
        counts = torch.zeros(task.classes + 1, dtype=torch.long)
        counts[-1] = task.unlabelled
        self.remember(table=unused, counts=counts, learnt=torch.zeros(task.classes))

    def select(self, p: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        confidence, guess = p.amax(-1), p.argmax(-1)
        learnt = self.get_buffer("learnt")[guess]
        mask = (confidence >= self.threshold * learnt / (2 - learnt)).to(p.dtype)
        # the table remembers the last class held with the full threshold, for each picture
        rows = (batch.u_id, guess, confidence >= self.threshold)
        ids, guess, sure = [ops.gather(each) for each in rows]
        old = self.get_buffer("table")[ids]
        new = torch.where(sure, guess, old)
        one = torch.ones_like(new)
        counts = self.get_buffer("counts").index_add(0, old, -one).index_add(0, new, one)
        table = self.get_buffer("table").index_copy(0, ids, new)
        return mask, {"table": table, "counts": counts, "learnt": self._status(counts)}

    def _status(self, counts: Tensor) -> Tensor:
        """How much of each class is learnt, in 0..1, from the counts with the unused last."""
        learnt = self.get_buffer("learnt")
        most = counts.amax() if self.warmup else counts[:-1].amax()
        # as in the reference, nothing changes while every picture is unused (or of one class)
        started = counts.amax() < counts.sum()
        fresh = counts[:-1].to(learnt.dtype) / most.clamp_min(1).to(learnt.dtype)
        return torch.where(started, fresh, learnt)
