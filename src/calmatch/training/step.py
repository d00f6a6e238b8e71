"""One training step and everything it changes; the optimizer and its schedule; predictions."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from calmatch import metrics, ops
from calmatch.augment import normalise
from calmatch.core import Batch, Method
from calmatch.data.batches import AugmentedSource, Source, stream_seed
from calmatch.runs import probabilities
from calmatch.training import checkpoint
from calmatch.training.config import Config
from calmatch.training.setup import Parts


@dataclass
class Training:
    """Everything that changes while a run goes on."""

    config: Config
    parts: Parts
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    predict: Predictor
    step: int = 0
    sums: checkpoint.Sums = field(default_factory=checkpoint.Sums)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_value: float | None = None
    best_step: int | None = None
    rollbacks: int = 0

    def advance(self, batch: Batch) -> None:
        """One training step."""
        self.seed()
        set_learning_rate(self.optimizer, self.rate(self.step))
        self.learn(batch)
        self.sums.steps += 1
        self.step += 1

    def rate(self, step: int) -> float:
        """Learning rate of a step relative to the highest; every rollback halves it."""
        config = self.config
        full = rate_factor(step, config.steps, config.warmup, config.schedule)
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
            ops.update_average(list(pairs), parts.momentum)
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


class Predictor:
    """Predicts pictures with a network, many times while it learns or once when it has.

    Exact by default. `bf16` computes like a bfloat16 run does; `compiled` pays where the same
    pictures are predicted again and again.
    """

    def __init__(
        self,
        net: nn.Module,
        method: Method,
        statistics: tuple[Sequence[float], Sequence[float]],
        batch: int,
        *,
        bf16: bool = False,
        compiled: bool = False,
    ) -> None:
        self.net, self.method, self.batch, self.bf16 = net, method, batch, bf16
        weight = next(net.parameters())
        self.mean, self.std = (
            torch.tensor(v, device=weight.device, dtype=weight.dtype) for v in statistics
        )
        self.compiled = compiled
        self.forward = torch.compile(self._forward, dynamic=False) if compiled else self._forward

    @torch.inference_mode()
    def __call__(self, pictures: Source | AugmentedSource) -> Tensor:
        """Log-probabilities [N, C] in float32 on the CPU."""
        training = self.net.training
        self.net.eval()
        found = []
        for some in pictures.batches(self.batch):
            missing = self.batch - len(some) if self.compiled else 0  # one shape, one graph
            full = torch.cat([some, some.new_zeros(missing, *some.shape[1:])]) if missing else some
            found.append(self.forward(full)[: len(some)])
        self.net.train(training)
        return torch.cat(found).cpu()

    def _forward(self, pictures: Tensor) -> Tensor:
        images = normalise(pictures, self.mean, self.std)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return self.method.predict(self.net, images).float()


def predict_source(
    net: nn.Module,
    method: Method,
    pictures: Source | AugmentedSource,
    statistics: tuple[Sequence[float], Sequence[float]],
    batch: int,
) -> Tensor:
    """Exact log-probabilities [N, C] in float32 on the CPU."""
    return Predictor(net, method, statistics, batch)(pictures)


def measure(log_probs: Tensor, labels: Tensor, resamples: int = 0) -> dict[str, metrics.Interval]:
    """Every metric of the predictions."""
    return metrics.summary(probabilities(log_probs), labels, resamples=resamples)


EXEMPT = ("pos_embed", "cls_token")  # as one-dimensional parameters, never decayed


def rate_factor(step: int, steps: int, warmup: int, schedule: str = "cosine") -> float:
    """Learning rate at a step, relative to the highest: linear warm-up, then cos(7 pi t / 16)."""
    if step < warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, steps - warmup)
    return max(0.0, math.cos(math.pi * 7 / 16 * progress))


def layer_depths(names: list[str]) -> dict[str, int]:
    """Depth of each parameter, 0 nearest the picture.

    What comes before the numbered blocks is 0, block i is i + 1, what comes after is one more; a
    transformer's final `norm` joins its last block.

    >>> layer_depths(["stem.w", "blocks.0.w", "blocks.1.w", "norm.w", "head.w"])
    {'stem.w': 0, 'blocks.0.w': 1, 'blocks.1.w': 2, 'norm.w': 2, 'head.w': 3}
    """
    depth: dict[str, int] = {}
    blocks: list[str] = []
    if len({name.split(".")[0] for name in names}) == 1 and all("." in name for name in names):
        inner = layer_depths(
            [name.partition(".")[2] for name in names]
        )  # a wrapper around the network
        return {name: inner[name.partition(".")[2]] for name in names}
    for name in names:
        if found := re.match(r"(.*?\.\d+)\.", name):
            if found[1] not in blocks:
                blocks.append(found[1])
            depth[name] = blocks.index(found[1]) + 1
        elif name.startswith("norm."):
            depth[name] = len(blocks)
        else:
            depth[name] = len(blocks) + 1 if blocks else 0
    return depth


def layer_rates(
    shapes: Mapping[str, int],
    weight_decay: float,
    layer_decay: float,
    exempt: Collection[str] = (),
) -> dict[str, tuple[float, float]]:
    """Relative learning rate and weight decay of each body parameter, given its dimensions."""
    depth = layer_depths(list(shapes))
    top = max(depth.values())
    return {
        name: (
            layer_decay ** (top - depth[name]),
            0.0 if dims <= 1 or name.split(".")[-1] in EXEMPT or name in exempt else weight_decay,
        )
        for name, dims in shapes.items()
    }


def parameter_groups(
    net: nn.Module,
    lr: float,
    weight_decay: float,
    layer_decay: float,
    special: Mapping[str, Mapping[str, float]],
) -> list[dict[str, Any]]:
    """Optimizer groups of `net.body` and `net.heads`; each remembers its highest rate as `peak`."""
    body = {k: p for k, p in net.named_parameters() if k.startswith("body.") and p.requires_grad}
    exempt: Collection[str] = getattr(net.get_submodule("body"), "no_weight_decay", tuple)()
    dims = {k[5:]: p.ndim for k, p in body.items()}
    plain = layer_rates(dims, weight_decay, layer_decay, exempt)
    found: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in body:
            scale, decay = plain[name[5:]]
            found[lr * scale, decay].append(parameter)
        else:
            own = special.get(name.split(".")[1], {})
            decay = own.get("weight_decay", 0.0 if parameter.ndim <= 1 else weight_decay)
            found[own.get("lr", lr), decay].append(parameter)
    return [
        {"params": params, "peak": peak, "lr": torch.tensor(peak), "weight_decay": decay}
        for (peak, decay), params in found.items()
    ]


def build_optimizer(
    name: str, parameters: list[dict[str, Any]], momentum: float, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW or SGD with Nesterov momentum, with learning rates held in tensors."""
    for group in parameters:
        group["lr"] = group["lr"].to(device)
    if name == "sgd":
        nesterov = momentum > 0
        return torch.optim.SGD(parameters, momentum=momentum, nesterov=nesterov, fused=True)
    capturable = device.type == "cuda"  # the step may be captured as a graph
    return torch.optim.AdamW(
        parameters, betas=(0.9, 0.999), eps=1e-8, fused=True, capturable=capturable
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, relative: float) -> None:
    """Give every group this share of its highest rate."""
    for group in optimizer.param_groups:
        group["lr"].fill_(group["peak"] * relative)
