"""All trained weights in one buffer: the optimizer and the averaging are one kernel over it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from calmatch import ops

CAST = (nn.Linear, nn.Conv2d)  # autocast computes these and layers with `cast` in bfloat16


def lowered(net: nn.Module) -> list[str]:
    """Parameters of `net.body` that autocast would turn into bfloat16 at every use."""
    if len(list(net.parameters())) < len(list(net.named_parameters(remove_duplicate=False))):
        return []  # a weight with two names would need one copy with two names
    return [
        f"{module}.{name}"
        for module, layer in net.named_modules()
        if (type(layer) in CAST or hasattr(layer, "cast")) and module.startswith("body.")
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    ]


class Flat:
    """Weights, moments and averages of a run as slices of a few long tensors.

    `net` is the network to train with: in bfloat16 runs its matrices are a bfloat16 copy that the
    update keeps true to the exact weights, otherwise it is the run's own, or shares everything with
    it where it shall be `apart`. The run's parameters and the optimizer's state become views, so
    checkpoints and evaluation see every update.
    """

    def __init__(
        self,
        net: nn.Module,
        ema: nn.Module | None,
        optimizer: torch.optim.Optimizer,
        *,
        bf16: bool,
        momentum: float,
        clip: float,
        compiled: bool = True,
        apart: bool = False,
    ) -> None:
        group_of = {
            id(p): place
            for place, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        named = {k: p for k, p in net.named_parameters() if id(p) in group_of}
        low = set(lowered(net)) if bf16 else set()
        self.adam = isinstance(optimizer, torch.optim.AdamW)
        self.momentum, self.clip = momentum, clip
        self.beta = optimizer.param_groups[0].get("momentum", 0.0)
        self.lrs: list[Tensor] = [group["lr"] for group in optimizer.param_groups]
        device = self.lrs[0].device
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        self.decay = torch.tensor([*decays, 0.0], device=device, dtype=torch.float64)
        self.step = torch.zeros((), device=device)
        self.net = _working(net, low) if low or apart else net
        working = dict(self.net.named_parameters())
        averaged = dict(ema.named_parameters()) if ema is not None else {}
        self.parts = [
            _Part(
                [named[k] for k in names],
                [working[k] for k in names],
                [averaged[k] for k in names] if averaged else [],
                [group_of[id(named[k])] for k in names],
                optimizer,
                self.step,
            )
            for names in ([k for k in named if k in low], [k for k in named if k not in low])
            if names
        ]
        self.others = _others(net, ema, named) if ema is not None else []
        self.update: Callable[..., None] = _adam if self.adam else _sgd
        if compiled:
            self.update = torch.compile(self.update, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def advance(self) -> None:
        """One optimizer step from the gradients there are, and the averages' step after it."""
        grads = [part.gradients() for part in self.parts]
        rates = torch.stack([*self.lrs, torch.zeros_like(self.lrs[0])]).double()
        keep, scale = 1 - rates * self.decay, _clipping(grads, self.clip) if self.clip else None
        self.step += 1
        for part, grad in zip(self.parts, grads, strict=True):
            pull = 1 - self.momentum
            long = (part.exact, part.low, part.mean, grad, part.group, scale, pull)
            if self.adam:
                root = (1 - 0.999 ** self.step.double()).sqrt()
                rate = rates / (1 - 0.9 ** self.step.double())
                self.update(*long, keep, rate, root, part.first, part.second)
            else:
                self.update(*long, self.decay, rates, part.first, self.beta)
        ops.follow(self.others, self.momentum)

    def settle(self) -> None:
        """Leave out weights that got no gradient just now, as torch's optimizers do."""
        for part in self.parts:
            part.settle(len(self.lrs))

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the working weights true again after the exact ones were set from outside."""
        for part in self.parts:
            if part.low is not None:
                part.low.copy_(part.exact)


class _Part:
    """Parameters of one type: exact weights, moments and averages, each as one tensor."""

    def __init__(
        self,
        exact: Sequence[nn.Parameter],
        working: Sequence[nn.Parameter],
        averaged: Sequence[nn.Parameter],
        groups: Sequence[int],
        optimizer: torch.optim.Optimizer,
        step: Tensor,
    ) -> None:
        self.working, self.groups = working, groups
        self.sizes = [p.numel() for p in exact]
        self.exact = _gather(exact)
        _scatter(self.exact, exact)
        self.low = None
        if working[0] is not exact[0]:
            self.low = self.exact.to(torch.bfloat16)
            _scatter(self.low, working)
        self.mean = None
        if averaged:
            self.mean = _gather(averaged)
            _scatter(self.mean, averaged)
        adam = isinstance(optimizer, torch.optim.AdamW)
        names = ["exp_avg", "exp_avg_sq"] if adam else ["momentum_buffer"]
        states: list[Any] = [optimizer.state[p] for p in exact]
        moments = []
        for name in names:
            held = [
                state.get(name, torch.zeros_like(p)) for state, p in zip(states, exact, strict=True)
            ]
            moments.append(torch.cat([_flat(t, p) for t, p in zip(held, exact, strict=True)]))
            for state, view in zip(states, _views(moments[-1], exact), strict=True):
                state[name] = view
        if adam:
            if "step" in states[0]:
                step.copy_(states[0]["step"])
            for state in states:
                state["step"] = step
        self.first, self.second = moments[0], moments[-1]
        self.group = torch.zeros(len(self.exact), dtype=torch.uint8, device=self.exact.device)
        self.settle(None)

    def settle(self, idle: int | None) -> None:
        """Write each weight's group; weights that got no gradient belong to the idle one."""
        pairs = zip(self.working, self.groups, strict=True)
        used = [idle if idle is not None and p.grad is None else group for p, group in pairs]
        sizes = torch.tensor(self.sizes)
        self.group.copy_(torch.tensor(used, dtype=torch.uint8).repeat_interleave(sizes))

    def gradients(self) -> Tensor:
        """All gradients in one tensor; they are let go."""
        found = [
            torch.zeros_like(p).flatten() if p.grad is None else _flat(p.grad, p)
            for p in self.working
        ]
        for parameter in self.working:
            parameter.grad = None
        return torch.cat(found)


def _working(net: nn.Module, low: set[str]) -> nn.Module:
    """A copy of the network that shares everything but the weights named, which are bfloat16."""
    shared = [p for k, p in net.named_parameters() if k not in low] + list(net.buffers())
    made = copy.deepcopy(net, {id(tensor): tensor for tensor in shared})
    for name in low:
        module, _, leaf = name.rpartition(".")
        weight = made.get_parameter(name).detach().to(torch.bfloat16)
        setattr(made.get_submodule(module), leaf, nn.Parameter(weight))
    return made


def _others(
    net: nn.Module, ema: nn.Module, named: dict[str, nn.Parameter]
) -> list[tuple[Tensor, Tensor]]:
    """What the averaged network holds besides trained weights: statistics and counters."""
    mine, theirs = ema.state_dict(), net.state_dict()
    return [(mine[k], theirs[k]) for k in mine if k not in named]


def _rowed(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with its axes in the order in which `like` lies in memory."""
    last = like.ndim == 4 and not like.is_contiguous()
    return tensor.permute(0, 2, 3, 1) if last else tensor


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    return _rowed(tensor, like).reshape(-1)


def _gather(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_flat(tensor.detach(), tensor) for tensor in tensors])


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Slices of the long tensor with the shapes and memory order of `like`."""
    found = []
    for piece, tensor in zip(flat.split([t.numel() for t in like]), like, strict=True):
        view = piece.view(_rowed(tensor, tensor).shape)
        last = tensor.ndim == 4 and not tensor.is_contiguous()
        found.append(view.permute(0, 3, 1, 2) if last else view)
    return found


def _scatter(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    for parameter, view in zip(parameters, _views(flat, parameters), strict=True):
        parameter.data = view


def _clipping(grads: Sequence[Tensor], clip: float) -> Tensor:
    """What to multiply gradients with, as torch's clip_grad_norm_."""
    wide = torch.promote_types(grads[-1].dtype, torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(grad, dtype=wide) for grad in grads])
    return torch.clamp(clip / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)


def _adam(
    exact: Tensor,
    low: Tensor | None,
    mean: Tensor | None,
    grad: Tensor,
    group: Tensor,
    scale: Tensor | None,
    pull: float,
    keep: Tensor,
    rate: Tensor,
    root: Tensor,
    first: Tensor,
    second: Tensor,
) -> None:
    """AdamW as torch computes it, over one long tensor."""
    g, place, kind = _scaled(grad, scale, exact.dtype), group.long(), exact.dtype
    m = first + (g - first) * (1 - 0.9)
    v = second * 0.999 + (1 - 0.999) * g * g
    w = exact * keep.to(kind)[place]
    w = w - rate.to(kind)[place] * m / (v.sqrt() / root.to(kind) + 1e-8)
    first.copy_(m)
    second.copy_(v)
    _store(w, exact, low, mean, pull)


def _sgd(
    exact: Tensor,
    low: Tensor | None,
    mean: Tensor | None,
    grad: Tensor,
    group: Tensor,
    scale: Tensor | None,
    pull: float,
    decay: Tensor,
    rate: Tensor,
    first: Tensor,
    beta: float,
) -> None:
    """SGD with Nesterov momentum as torch computes it, over one long tensor."""
    place, kind = group.long(), exact.dtype
    g = _scaled(grad, scale, kind) + decay.to(kind)[place] * exact
    m = beta * first + g
    w = exact - rate.to(kind)[place] * (g + beta * m if beta else g)
    first.copy_(m)
    _store(w, exact, low, mean, pull)


def _scaled(grad: Tensor, scale: Tensor | None, kind: torch.dtype) -> Tensor:
    return grad.to(kind) if scale is None else grad.to(kind) * scale.to(kind)


def _store(w: Tensor, exact: Tensor, low: Tensor | None, mean: Tensor | None, pull: float) -> None:
    exact.copy_(w)
    if low is not None:
        low.copy_(w)
    if mean is not None:
        mean.lerp_(w, pull)
