"""One training step, in order, and everything that it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from calmatch import evaluate, log, ops, optim
from calmatch.config import Config
from calmatch.core import Batch
from calmatch.data.batches import stream_seed
from calmatch.setup import Parts


@dataclass
class Training:
    """Everything that changes while a run goes on."""

    config: Config
    parts: Parts
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    predict: evaluate.Predictor
    step: int = 0
    sums: log.Sums = field(default_factory=log.Sums)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_value: float | None = None
    best_step: int | None = None
    rollbacks: int = 0

    def advance(self, batch: Batch) -> None:
        """One training step."""
        self.seed()
        optim.set_rate(self.optimizer, self.rate(self.step))
        self.learn(batch)
        self.sums.steps += 1
        self.step += 1

    def rate(self, step: int) -> float:
        """Learning rate of a step relative to the highest; every rollback halves it."""
        config = self.config
        full = optim.factor(step, config.steps, config.warmup, config.schedule)
        return full / float(2**self.rollbacks)

    def seed(self) -> None:
        """Seed dropout and drop-path; torch.manual_seed spends a millisecond on the rest."""
        seed = stream_seed(self.config.seed, 6, self.step)
        torch.default_generator.manual_seed(seed)
        if self.parts.device.type != "cpu":
            torch.get_device_module(self.parts.device).manual_seed(seed)

    def learn(self, batch: Batch) -> None:
        """What a step does on the device: nothing in it depends on the host."""
        parts = self.parts
        values, state = self.objective(batch)
        values["loss"].backward()
        parts.method.commit(state)
        if self.config.clip:
            nn.utils.clip_grad_norm_(parts.net.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if parts.momentum:
            pairs = zip(
                parts.ema.state_dict().values(), parts.net.state_dict().values(), strict=True
            )
            ops.follow(list(pairs), parts.momentum)
        self.sums.add(values)

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, for a checkpoint."""
        found = {f"net/{k}": v for k, v in self.parts.net.state_dict().items()}
        if self.parts.momentum:
            found |= {f"ema/{k}": v for k, v in self.parts.ema.state_dict().items()}
        found |= {f"method/{k}": v for k, v in self.parts.method.state_dict().items()}
        found |= {f"best/{k}": v for k, v in self.best.items()}
        found |= {f"sums/{k}": v for k, v in self.sums.totals.items()}
        for name, parameter in self.parts.net.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        return found

    def restore(self, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint."""
        held = {k: v.to(self.parts.device) for k, v in tensors.items()}
        self.parts.net.load_state_dict(_under("net/", held))
        if self.parts.momentum:
            self.parts.ema.load_state_dict(_under("ema/", held))
        self.parts.method.load_state_dict(_under("method/", held))
        self.best = _under("best/", held)
        self.sums.totals = {k: v.clone() for k, v in _under("sums/", held).items()}
        self.step, self.sums.steps = int(note["step"]), int(note["sums"])
        self.best_value, self.best_step = note["best"], note["best_step"]
        self.rollbacks = int(note.get("rollbacks", 0))
        for name, parameter in self.parts.net.named_parameters():
            # fused steps keep their step count on the parameter's device
            own = _under(f"optimizer/{name}/", held)
            for key, value in own.items():  # moments lie in memory as their weights do
                like = parameter.detach() if value.shape == parameter.shape else value
                self.optimizer.state[parameter][key] = torch.empty_like(like).copy_(value)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
