"""One training step and everything that it changes; optimizers and schedule; predictions."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from calmatch import augment, metrics, ops
from calmatch.core import Batch, RandomStream
from calmatch.data.batches import Source, stream_seed
from calmatch.runs import probabilities
from calmatch.training.config import Config
from calmatch.training.setup import Parts, build_parts

EXEMPT = ("pos_embed", "cls_token")  # as one-dimensional parameters, never decayed
RECOMPILES = 1_000  # versions of a function that a process may compile
OFTEN = 20  # evaluations in a run from which compiling them pays
Values = tuple[dict[str, Tensor], dict[str, Tensor]]  # losses with statistics, and new state


def new_training(config: Config) -> "Training":
    """A run before its first step."""
    return make_training(config, build_parts(config))


def make_training(config: Config, parts: Parts) -> "Training":
    """Parts of a run with their objective, optimizer and predictor."""
    objective: nn.Module = parts.objective(parts.net)
    cuda = parts.device.type == "cuda"
    compiled = cuda if config.compile is None else config.compile
    if compiled:  # the step of every run that this process makes; else torch stops after eight
        from torch._dynamo import config as dynamo

        for name in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(dynamo, name, max(RECOMPILES, getattr(dynamo, name)))
    if compiled is True:  # the net alone is compiled by the captured step
        objective.compile(fullgraph=True)
    if ops.world_size() > 1:
        objective = nn.parallel.DistributedDataParallel(objective, static_graph=True)
    rates = (config.lr, config.weight_decay, config.layer_decay)
    groups = parameter_groups(parts.net, *rates, parts.method.optim)
    optimizer = build_optimizer(config.optimizer, groups, config.momentum, parts.device)
    often = config.eval_every > 0 and config.steps / config.eval_every >= OFTEN
    fast = cuda and often and config.compile is not False
    predict = Predictor(parts, config.eval_batch, bf16=config.precision == "bf16", compiled=fast)
    return Training(config, parts, objective, optimizer, predict)


class Sums:
    """Running sums on the device; the host reads them only when a line is due."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.steps = 0

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add in place, so that a captured step keeps adding to the same memory."""
        for name, value in values.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros_like(value, requires_grad=False)
        totals = [self.totals[name] for name in values]
        torch._foreach_add_(totals, [value.detach() for value in values.values()])

    def read(self) -> dict[str, Any]:
        """Means since the last reading, with counts turned into shares; starts anew."""

        def share(part: float, whole: float) -> float | None:
            return part / whole if whole > 0 else None

        means = {k: ops.average(v) / max(1, self.steps) for k, v in sorted(self.totals.items())}
        for total in self.totals.values():
            total.zero_()
        self.steps = 0
        bins = means.pop("bins", None)
        line: dict[str, Any] = {name: value.tolist() for name, value in means.items()}
        if "agreeing" in line:
            line["agree"] = share(line.pop("agreeing"), line["accepted"])
        if bins is not None:
            known = line.pop("known")
            line["pseudo_accuracy"] = share(line.pop("right"), known)
            line["pseudo_ece"] = share(float((bins[1] - bins[2]).abs().sum()), known)
        return line


@dataclass
class Training:
    """Everything that changes while a run goes on."""

    config: Config
    parts: Parts
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    predict: "Predictor"  # for evaluations on the way: as fast as it trains
    step: int = 0
    sums: Sums = field(default_factory=Sums)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_value: float | None = None
    best_step: int | None = None
    rollbacks: int = 0

    def advance(self, batch: Batch | None = None) -> None:
        """One training step, eagerly; by default on the batch that is due."""
        due = self.parts.batches[self.step] if batch is None else batch
        self.seed_dropout()
        for group in self.optimizer.param_groups:
            group["lr"].fill_(group["peak"] * self.rate(self.step))
        self.learn(lambda: self.objective(due), self._update)
        self.sums.steps += 1
        self.step += 1

    def learn(self, forward: Callable[[], Values], update: Callable[[], None]) -> None:
        """What every step does on the device, eager or captured; nothing depends on the host."""
        values, state = forward()
        values["loss"].backward()
        self.parts.method.commit(state)
        update()
        self.sums.add(values)

    def _update(self) -> None:
        """Optimizer and averaged weights, by torch's own kernels."""
        parts = self.parts
        if self.config.clip:
            nn.utils.clip_grad_norm_(parts.net.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if parts.momentum:
            states = (parts.ema.state_dict().values(), parts.net.state_dict().values())
            ops.update_average(list(zip(*states, strict=True)), parts.momentum)

    def rate(self, step: int) -> float:
        """Learning rate of a step relative to the highest; every rollback halves it."""
        schedule = (self.config.steps, self.config.warmup, self.config.schedule)
        return rate_factor(step, *schedule) / float(2**self.rollbacks)

    def seed_dropout(self) -> None:
        """Seed dropout and drop-path; torch.manual_seed spends a millisecond on the rest."""
        seed = stream_seed(self.config.seed, RandomStream.DROPOUT, self.step)
        torch.default_generator.manual_seed(seed)
        if self.parts.device.type != "cpu":
            torch.get_device_module(self.parts.device).manual_seed(seed)

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, for a checkpoint."""
        parts = self.parts
        groups = {"net": parts.net.state_dict()}
        groups |= {"ema": parts.ema.state_dict()} if parts.momentum else {}
        groups |= {"method": parts.method.state_dict(), "best": self.best, "sums": self.sums.totals}
        state = {f"{group}/{k}": v for group, values in groups.items() for k, v in values.items()}
        for name, parameter in parts.net.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        return state

    def restore(self, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint."""
        parts, state = self.parts, {k: v.to(self.parts.device) for k, v in tensors.items()}

        def under(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}

        parts.net.load_state_dict(under("net/"))
        if parts.momentum:
            parts.ema.load_state_dict(under("ema/"))
        parts.method.load_state_dict(under("method/"))
        self.best = under("best/")
        self.sums.totals = {k: v.clone() for k, v in under("sums/").items()}
        self.step, self.sums.steps = int(note["step"]), int(note["sums"])
        self.best_value, self.best_step = note["best"], note["best_step"]
        self.rollbacks = int(note.get("rollbacks", 0))
        for name, parameter in parts.net.named_parameters():
            # fused steps keep their step count on the parameter's device
            for key, value in under(f"optimizer/{name}/").items():
                # moments lie in memory as their weights do
                like = parameter.detach() if value.shape == parameter.shape else value
                self.optimizer.state[parameter][key] = torch.empty_like(like).copy_(value)


class Predictor:
    """Predicts images with the network that counts, many times while it learns or once when it has.

    Exact by default. `bf16` computes like a bfloat16 run does; `compiled` pays where the same
    images are predicted again and again.
    """

    def __init__(
        self, parts: Parts, batch: int, *, bf16: bool = False, compiled: bool = False
    ) -> None:
        self.net, self.method = parts.evaluated, parts.method
        like = next(self.net.parameters())
        self.mean, self.std = (like.new_tensor(values) for values in parts.statistics)
        self.batch, self.bf16, self.compiled = batch, bf16, compiled
        self.forward = torch.compile(self._forward, dynamic=False) if compiled else self._forward

    @torch.inference_mode()
    def __call__(self, source: Source, *, logits: bool = False) -> Tensor:
        """Log-probabilities [N, C] or the network's own logits, in float32 on the CPU."""
        training = self.net.training
        self.net.eval()
        outputs = []
        for some in source.batches(self.batch):
            missing = self.batch - len(some) if self.compiled else 0  # one shape, one graph
            full = torch.cat([some, some.new_zeros(missing, *some.shape[1:])]) if missing else some
            outputs.append(self.forward(full, logits)[: len(some)])
        self.net.train(training)
        return torch.cat(outputs).cpu()

    def _forward(self, pixels: Tensor, logits: bool) -> Tensor:
        images = augment.normalise(pixels, self.mean, self.std)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            if logits:
                return self.net(images).logits.float()  # type: ignore[no-any-return]
            return self.method.predict(self.net, images).float()


def measure(log_probs: Tensor, labels: Tensor, resamples: int = 0) -> dict[str, metrics.Interval]:
    """Every metric of the predictions."""
    return metrics.summary(probabilities(log_probs), labels, resamples=resamples)


def rate_factor(step: int, steps: int, warmup: int, schedule: str = "cosine") -> float:
    """Learning rate at a step, relative to the highest: linear warm-up, then cos(7 pi t / 16)."""
    if step < warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, steps - warmup)
    return max(0.0, math.cos(math.pi * 7 / 16 * progress))


def layer_depths(names: list[str]) -> dict[str, int]:
    """Depth of each parameter, 0 nearest the image.

    What comes before the numbered blocks is 0, block i is i + 1, what comes after is one more; a
    transformer's final `norm` joins its last block.

    >>> layer_depths(["stem.w", "blocks.0.w", "blocks.1.w", "norm.w", "head.w"])
    {'stem.w': 0, 'blocks.0.w': 1, 'blocks.1.w': 2, 'norm.w': 2, 'head.w': 3}
    """
    if len({name.split(".")[0] for name in names}) == 1 and all("." in name for name in names):
        # a wrapper around the network
        inner = layer_depths([name.partition(".")[2] for name in names])
        return dict(zip(names, inner.values(), strict=True))
    depth: dict[str, int] = {}
    blocks: dict[str, int] = {}  # in order, with their depths
    for name in names:
        if match := re.match(r"(.*?\.\d+)\.", name):
            depth[name] = blocks.setdefault(match[1], len(blocks) + 1)
        else:
            depth[name] = len(blocks) + int(bool(blocks) and not name.startswith("norm."))
    return depth


def layer_rates(
    shapes: Mapping[str, int], weight_decay: float, layer_decay: float, exempt: Collection[str] = ()
) -> dict[str, tuple[float, float]]:
    """Relative learning rate and weight decay of each body parameter, given its dimensions."""
    depth, rates = layer_depths(list(shapes)), {}
    top = max(depth.values())
    for name, dims in shapes.items():
        plain = dims <= 1 or name.split(".")[-1] in EXEMPT or name in exempt
        rates[name] = (layer_decay ** (top - depth[name]), 0.0 if plain else weight_decay)
    return rates


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
    plain = layer_rates({k[5:]: p.ndim for k, p in body.items()}, weight_decay, layer_decay, exempt)
    groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name, parameter in net.named_parameters():
        if name in body:
            scale, decay = plain[name[5:]]
            groups[lr * scale, decay].append(parameter)
        elif parameter.requires_grad:
            own = special.get(name.split(".")[1], {})
            decay = own.get("weight_decay", 0.0 if parameter.ndim <= 1 else weight_decay)
            groups[own.get("lr", lr), decay].append(parameter)
    return [
        {"params": params, "peak": peak, "lr": torch.tensor(peak), "weight_decay": decay}
        for (peak, decay), params in groups.items()
    ]


def build_optimizer(
    name: str, parameters: list[dict[str, Any]], momentum: float, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW or SGD with Nesterov momentum, with learning rates held in tensors."""
    for group in parameters:
        group["lr"] = group["lr"].to(device)
    if name == "sgd":
        settings: Any = {"momentum": momentum, "nesterov": momentum > 0}
        return torch.optim.SGD(parameters, fused=True, **settings)
    capturable = device.type == "cuda"  # the step may be captured as a graph
    return torch.optim.AdamW(parameters, fused=True, capturable=capturable)
