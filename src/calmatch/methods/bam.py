"""BaM, Loh et al. 2023, https://arxiv.org/abs/2210.04783"""

import math
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from calmatch import ops
from calmatch.core import Batch, Method, Plan, Task, Term, apart, between


class Bayes(nn.Module):
    """A linear layer whose weights are normal: means, and spreads before softplus."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.mu_weight = nn.Parameter(0.1 * torch.randn(classes, features))
        self.mu_bias = nn.Parameter(0.1 * torch.randn(classes))
        self.rho_weight = nn.Parameter(-3 + 0.1 * torch.randn(classes, features))
        self.rho_bias = nn.Parameter(-3 + 0.1 * torch.randn(classes))

    def forward(self, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Logits [S, n, C] for standard normal draws weight [S, C, D] and bias [S, C]."""
        w = self.mu_weight + nn.functional.softplus(self.rho_weight) * weight
        b = self.mu_bias + nn.functional.softplus(self.rho_bias) * bias
        return features @ w.mT + b[:, None]

    def divergence(self) -> Tensor:
        """KL to the standard normal, mean over weights plus mean over biases."""
        parts = []
        for mu, rho in ((self.mu_weight, self.rho_weight), (self.mu_bias, self.rho_bias)):
            sigma = nn.functional.softplus(rho)
            parts.append((-sigma.log() + (sigma.square() + mu.square()) / 2 - 0.5).mean())
        return parts[0] + parts[1]


class BAM(Method):
    """A Bayesian last layer; pseudo-labels are trusted where draws of it agree.

    The network's own classifier is not used. The reference redraws its noise into the same buffer
    before backward, so its gradients of the spreads are wrong; these are right.
    """

    ema = 0.999

    def __init__(
        self,
        task: Task,
        *,
        on: Literal["fixmatch", "uda"] = "fixmatch",
        samples: int = 50,
        threshold: float = 0.02,  # the first spread that is trusted
        quantile: float = 0.75,  # share of pictures trusted in the end
        first_quantile: float = 0.1,
        warmup: int | None = None,  # steps over which that share grows; steps / 20
        memory: int = 50,  # batches whose quantiles are averaged
        kl: float = 1.0,
        weight: float = 1.0,
        temperature: float = 0.9,  # of uda
        lr: float = 0.01,  # of the last layer, which is not decayed
    ) -> None:
        super().__init__(task)
        self.optim = {"bayes": {"lr": lr, "weight_decay": 0.0}}
        between("samples", samples, 2, math.inf)
        between("memory", memory, 1, math.inf)
        self.on, self.samples, self.kl, self.weight = on, samples, kl, weight
        self.quantile, self.first_quantile = quantile, first_quantile
        self.temperature = temperature if on == "uda" else 1.0
        self.warmup = max(2, task.steps // 20) if warmup is None else warmup
        self.remember(spread=torch.tensor(threshold), quantiles=torch.zeros(memory))
        self.remember(predict_weight=torch.randn(samples, task.classes, task.features))
        self.remember(predict_bias=torch.randn(samples, task.classes))

    def heads(self) -> dict[str, nn.Module]:
        return {"bayes": Bayes(self.task.features, self.task.classes)}

    def draws(self, generator: Generator, b: int, r: int) -> dict[str, Tensor]:
        """The first draw is for the losses, the others choose pseudo-labels; same on all ranks."""
        shape = (1 + self.samples, self.task.classes, self.task.features)
        weight, bias = ops.normal(generator, *shape), ops.normal(generator, *shape[:2])
        return {"eps_weight": weight, "eps_bias": bias}

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        x, w, s = apart(net, *batch.x, *batch.u, grad=(True, False, True))
        layer = net.get_submodule("heads.bayes")
        assert isinstance(layer, Bayes)
        eps = [batch.draws[name].to(x.features.dtype) for name in ("eps_weight", "eps_bias")]
        features = torch.cat([x.features, s.features])
        z_x, z_s = layer(features, *(e[:1] for e in eps))[0].split([len(x.logits), len(s.logits)])
        with torch.no_grad():
            drawn = (layer(w.features, *(e[1:] for e in eps)) / self.temperature).softmax(-1)
        p = drawn.mean(0)
        guess = p.argmax(-1)
        spread = drawn[:, torch.arange(len(guess), device=guess.device), guess].std(0)
        mask = (spread <= self.get_buffer("spread")).to(p.dtype)
        target = ops.sharpen(p, self.temperature) if self.on == "uda" else guess
        labelled = Term(z_x, batch.y, torch.ones_like(z_x[:, 0]))
        unlabelled = Term(z_s, target, self.weight * mask)
        extra = {"kl": self.kl * layer.divergence() / (ops.world_size() * len(z_x))}
        state = self.follow(ops.gather(spread), batch.step)
        return Plan(labelled, unlabelled, extra=extra, state=state)

    def follow(self, spread: Tensor, step: Tensor) -> dict[str, Tensor]:
        """The threshold for the next step: the mean of the last batches' quantiles."""
        progress = (step / max(1, self.warmup - 1)).clamp_max(1).to(spread.dtype)
        level = self.first_quantile + (self.quantile - self.first_quantile) * progress
        memory = self.get_buffer("quantiles")
        place = step % len(memory)
        quantiles = memory.index_copy(0, place[None], ops.quantile(spread, level)[None])
        filled = (step + 1).clamp_max(len(memory))
        return {"quantiles": quantiles, "spread": quantiles.sum() / filled}

    def predict(self, net: nn.Module, images: Tensor) -> Tensor:
        """Log of the mean probability over stored draws."""
        eps = (self.get_buffer("predict_weight"), self.get_buffer("predict_bias"))
        logits = net.get_submodule("heads.bayes")(net(images).features, *eps)
        mean: Tensor = logits.log_softmax(-1).logsumexp(0)
        return mean.log_softmax(-1)
