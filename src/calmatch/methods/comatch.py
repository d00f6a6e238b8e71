"""CoMatch, Li et al. 2021, https://arxiv.org/abs/2011.11183"""

import math

import torch
from torch import Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Output, Plan, Task, Term, apart, between


def embed(net: nn.Module, *outputs: Output) -> tuple[Tensor, ...]:
    """Embeddings of length one, all through the projector together."""
    features = torch.cat([out.features for out in outputs])
    together: Tensor = ops.unit(net.get_submodule("heads.project")(features))
    return tuple(together.split([len(out.features) for out in outputs]))


class Projected(Method):
    """A method with an embedding beside the classifier, and guesses aligned by a queue of means."""

    ema = 0.999

    def __init__(
        self, task: Task, *, threshold: float, size: int, queue: int, gate: int | None
    ) -> None:
        super().__init__(task)
        between("threshold", threshold, 0, 1)
        between("queue", queue, 1, math.inf)
        self.threshold, self.size = threshold, size
        self.gate = task.steps // 200 if gate is None else gate
        self.remember(queue=torch.zeros(queue, task.classes), queue_place=torch.tensor(0))

    def heads(self) -> dict[str, nn.Module]:
        wide = self.task.features
        layers = (nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, self.size))
        return {"project": nn.Sequential(*layers)}

    def align(self, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Aligned guesses, and the queue's new memory."""
        queue, place = self.get_buffer("queue"), self.get_buffer("queue_place")
        p, queue, place = ops.align_by_queue(logits.detach().softmax(-1), queue, place)
        return p, {"queue": queue, "queue_place": place}


class CoMatch(Projected):
    """Smooths guesses over neighbours in a bank, and pulls embeddings of alike guesses together."""

    u_views = ("weak", "strong", "strong")

    def __init__(
        self,
        task: Task,
        *,
        threshold: float = 0.95,
        contrast_threshold: float = 0.8,
        temperature: float = 0.2,
        smoothing: float = 0.9,
        weight: float = 1.0,
        contrast: float = 1.0,
        size: int = 64,  # of the embedding
        bank: int = 512,  # rows; USB keeps 32 batches of 8 + 8
        queue: int = 32,  # batches over which guesses are aligned
        gate: int | None = None,  # steps before smoothing starts; steps / 200
    ) -> None:
        super().__init__(task, threshold=threshold, size=size, queue=queue, gate=gate)
        self.contrast_threshold, self.temperature = contrast_threshold, temperature
        self.smoothing, self.weight, self.contrast = smoothing, weight, contrast
        features, probs = torch.zeros(bank, size), torch.zeros(bank, task.classes)
        self.remember(features=features, probs=probs, place=torch.tensor(0))

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, w, s, other = apart(net, *batch.x, *batch.u, grad=(True, False, True, True))
        f_x, f_w, f_s, f_o = embed(net, x, w, s, other)
        aligned, memory = self.align(w.logits)
        p = self.smooth(aligned, f_w.detach(), batch)
        mask = (p.amax(-1) >= self.threshold).to(p.dtype)
        probs = torch.cat([aligned, ops.soft(batch.y, x.logits)])
        labelled = Term(x.logits, batch.y, torch.ones_like(x.logits[:, 0]))
        unlabelled = Term(s.logits, p, self.weight * mask)
        extra = {"contrast": self.contrast * self.contrastive(p, f_s, f_o)}
        state = self.store(torch.cat([f_w, f_x]).detach(), probs) | memory
        return Plan(labelled, unlabelled, extra=extra, state=state)

    def smooth(self, p: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Mix each guess with its neighbours' in the bank, once that is filled."""
        bank = self.get_buffer("features")
        near = (features @ bank.T / self.temperature).softmax(-1)
        mixed = torch.lerp(near @ self.get_buffer("probs"), p, self.smoothing)
        batches = len(bank) // (len(p) + len(batch.y))
        ready = (batch.step >= self.gate) & (batch.step > batches)
        return torch.where(ready, mixed, p)

    def store(self, features: Tensor, probs: Tensor) -> dict[str, Tensor]:
        """Overwrite the oldest rows of the bank."""
        bank, place = self.get_buffer("features"), self.get_buffer("place")
        n = min(len(features), len(bank))
        rows = (place + torch.arange(n, device=place.device)) % len(bank)
        features = bank.index_copy(0, rows, features[:n])
        probs = self.get_buffer("probs").index_copy(0, rows, probs[:n])
        return {"features": features, "probs": probs, "place": (place + n) % len(bank)}

    def contrastive(self, p: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Cross-entropy from the graph of alike guesses to the graph of alike embeddings."""
        alike = (p @ p.T).fill_diagonal_(1.0)
        graph = ops.normalise(alike * (alike >= self.contrast_threshold))
        near = (first @ second.T / self.temperature).softmax(-1)
        return -(graph * (near + 1e-7).log()).sum(-1).mean()
