"""The whole training step as one CUDA graph: the host feeds chunks of batches and replays it.

Objective, backward, commit, optimizer, EMA and log sums are captured once. A chunk of many steps'
batches lies in fixed buffers on the device; which step is due is a counter there too. Dropout draws
from a generator of the run's own, which is seeded by (seed, step) before each replay, so a run
continues with the same numbers. Several runs are branches of one graph and fill each other's gaps.
All trained weights lie in one buffer: the optimizer and the averaging are one kernel over it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from calmatch import console, ops
from calmatch.core import Batch
from calmatch.data.batches import stream_seed

if TYPE_CHECKING:
    from calmatch.training.step import Training


WARMUP_STEPS = 3  # eager steps before the capture, undone afterwards
Values = tuple[dict[str, Tensor], dict[str, Tensor]]


class CapturedStep:
    """Replays the step of one or more runs; where it cannot be captured they step eagerly, aloud.

    Runs must be at the same step and differ in nothing that changes shapes.
    """

    def __init__(self, runs: Sequence[Training], quiet: bool = False) -> None:
        self.quiet = quiet
        self.lanes = [RunBranch(run) for run in runs]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = False

    def advance(self) -> None:
        """One training step of every run."""
        if not self.failed:
            for lane in self.lanes:
                lane.feed()
            if self.graph is None:
                self._capture()
        for lane in self.lanes:
            lane.due(self.failed)
        if self.graph is not None:
            self.graph.replay()

    def _capture(self) -> None:
        """Warm up, capture, and undo the warm-up; give up where that fails."""
        before = [lane.snapshot() for lane in self.lanes]
        try:
            graph = torch.cuda.CUDAGraph()
            for lane in self.lanes:
                lane.warm()
                with lane.own_chance():
                    graph.register_generator_state(lane.default)
            with torch.cuda.graph(graph):
                self._branches()
            self.graph = graph
        except Exception as error:  # whatever a plug-in may do: the eager step still works
            if console.caused_by_memory(error):  # but not where it would find the device as full
                raise torch.OutOfMemoryError(str(error)) from error
            self.failed = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            console.message(
                f"The step cannot be captured ({reason}); running it step by step.", self.quiet
            )
            torch.cuda.synchronize()
        for lane, snapshot in zip(self.lanes, before, strict=True):
            lane.undo(snapshot, self.failed)

    def _branches(self) -> None:
        """Each run's step on a stream of its own, all joined at the end."""
        main = torch.cuda.current_stream()
        others = [torch.cuda.Stream() for _ in self.lanes[1:]]
        for stream in others:
            stream.wait_stream(main)
        for lane, stream in zip(self.lanes, [main, *others], strict=True):
            with torch.cuda.stream(stream), lane.own_chance():
                lane.body()
        for stream in others:
            main.wait_stream(stream)


class RunBranch:
    """One run's fixed buffers and what happens to them in a step."""

    def __init__(self, run: Training) -> None:
        self.run, self.batches, self.size = run, run.parts.batches, run.config.chunk
        device = run.parts.device
        self.place = torch.zeros((), dtype=torch.long, device=device)
        self.rates = torch.zeros(self.size, device=device)
        groups = run.optimizer.param_groups
        self.lrs: list[Tensor] = [group["lr"] for group in groups]
        self.peaks = [torch.tensor(group["peak"], device=device) for group in groups]
        self.default = torch.cuda.default_generators[torch.cuda.current_device()]
        self.chance = self.default.clone_state()
        self.number = -1
        self.chunk: Batch | None = None

    def feed(self) -> None:
        """Put the chunk that is due into the fixed buffers, with its learning rates."""
        run = self.run
        number, place = divmod(run.step, self.size)
        if number == self.number:
            return
        fresh = self.batches.whole(number)
        if self.chunk is None:
            self.chunk = _map_batch(fresh, torch.clone)
        else:
            torch._foreach_copy_(_batch_tensors(self.chunk), _batch_tensors(fresh))
        steps = range(number * self.size, (number + 1) * self.size)
        rates = [run.rate(k) for k in steps]
        self.rates.copy_(ops.sent(torch.tensor(rates), self.rates.device))
        self.place.fill_(place)
        self.number = number

    def due(self, eagerly: bool) -> None:
        """Count the step that comes, or make it where nothing was captured."""
        run = self.run
        if eagerly:
            run.advance(self.batches[run.step])
            return
        self.chance.manual_seed(stream_seed(run.config.seed, 6, run.step))
        run.step += 1
        run.sums.steps += 1

    def warm(self) -> None:
        """Build what the graph needs, and run it a few times so that all memory is there."""
        run, parts = self.run, self.run.parts
        compiled = run.config.compile is not False
        self.flat = FlatState(
            parts.net,
            parts.ema if parts.momentum else None,
            run.optimizer,
            bf16=run.config.precision == "bf16",
            momentum=parts.momentum,
            clip=run.config.clip,
            compiled=compiled,
            apart=run.config.compile == "net",  # evaluations use the run's own as it is
        )
        self.objective = parts.objective(self.flat.net)
        self.forward: Callable[[nn.Module, Batch, Tensor], Values] = _forward
        how: Any = {"fullgraph": True, "dynamic": False, "options": {"combo_kernels": True}}
        if run.config.compile == "net":
            self.flat.net.get_submodule("body").compile(**how)
        elif compiled:
            self.forward = torch.compile(_forward, **how)
        place = self.place.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self.own_chance():
            for number in range(WARMUP_STEPS):
                self.place.copy_(place)
                self.body(settle=number == 0)
        torch.cuda.current_stream().wait_stream(side)

    def body(self, settle: bool = False) -> None:
        """What the graph holds; it reads and writes fixed buffers only."""
        assert self.chunk is not None
        here = self.place[None]
        rate = self.rates.index_select(0, here)[0]
        torch._foreach_copy_(self.lrs, torch._foreach_mul(self.peaks, rate))
        values, state = self.forward(self.objective, self.chunk, here)
        values["loss"].backward()
        self.run.parts.method.commit(state)
        if settle:
            self.flat.settle()
        self.flat.advance()
        self.run.sums.add(values)
        self.place.add_(1)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of everything a step changes."""
        found = {name: tensor.clone() for name, tensor in self.run.tensors().items()}
        return found | {"place": self.place.clone()}

    def undo(self, before: dict[str, Tensor], failed: bool) -> None:
        """Be as before the warm-up; after a failure also as the eager step expects it."""
        run = self.run
        for name, tensor in run.tensors().items():
            tensor.copy_(before[name]) if name in before else tensor.zero_()
        self.place.copy_(before["place"])
        if not failed:
            self.flat.refresh()
            return
        run.optimizer.zero_grad(set_to_none=True)
        run.objective = run.parts.objective(run.parts.net)
        for state in run.optimizer.state.values():
            state |= {k: v.clone() for k, v in state.items() if k == "step"}

    @contextmanager
    def own_chance(self) -> Iterator[None]:
        """Draws inside come from this run's generator, then and at every replay."""
        before = self.default.graphsafe_get_state()
        self.default.graphsafe_set_state(self.chance)
        try:
            yield
        finally:
            self.default.graphsafe_set_state(before)


def _forward(objective: nn.Module, chunk: Batch, here: Tensor) -> Values:
    """The objective of one step of a chunk; apart, so that runs share what is compiled."""
    values: Values = objective(_map_batch(chunk, lambda tensor: tensor.index_select(0, here)[0]))
    return values


def _batch_tensors(batch: Batch) -> list[Tensor]:
    return [*batch.x, batch.y, *batch.u, batch.x_id, batch.u_id, batch.step, *batch.draws.values()]


def _map_batch(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor changed."""
    return Batch(
        x=tuple(change(view) for view in batch.x),
        y=change(batch.y),
        u=tuple(change(view) for view in batch.u),
        x_id=change(batch.x_id),
        u_id=change(batch.u_id),
        step=change(batch.step),
        draws={name: change(draw) for name, draw in batch.draws.items()},
    )


AUTOCAST_LAYERS = (
    nn.Linear,
    nn.Conv2d,
)  # autocast computes these and layers with `cast` in bfloat16


def bf16_parameters(net: nn.Module) -> list[str]:
    """Parameters of `net.body` that autocast would turn into bfloat16 at every use."""
    if len(list(net.parameters())) < len(list(net.named_parameters(remove_duplicate=False))):
        return []  # a weight with two names would need one copy with two names
    return [
        f"{module}.{name}"
        for module, layer in net.named_modules()
        if (type(layer) in AUTOCAST_LAYERS or hasattr(layer, "cast")) and module.startswith("body.")
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    ]


class FlatState:
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
        low = set(bf16_parameters(net)) if bf16 else set()
        self.adam = isinstance(optimizer, torch.optim.AdamW)
        self.momentum, self.clip = momentum, clip
        self.beta = optimizer.param_groups[0].get("momentum", 0.0)
        self.lrs: list[Tensor] = [group["lr"] for group in optimizer.param_groups]
        device = self.lrs[0].device
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        self.decay = torch.tensor([*decays, 0.0], device=device, dtype=torch.float64)
        self.step = torch.zeros((), device=device)
        self.net = _working_copy(net, low) if low or apart else net
        working = dict(self.net.named_parameters())
        averaged = dict(ema.named_parameters()) if ema is not None else {}
        self.parts = [
            _FlatPart(
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
        self.others = _other_state(net, ema, named) if ema is not None else []
        self.update: Callable[..., None] = _adam_update if self.adam else _sgd_update
        if compiled:
            self.update = torch.compile(self.update, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def advance(self) -> None:
        """One optimizer step from the gradients there are, and the averages' step after it."""
        grads = [part.gradients() for part in self.parts]
        rates = torch.stack([*self.lrs, torch.zeros_like(self.lrs[0])]).double()
        keep, scale = 1 - rates * self.decay, _clip_factor(grads, self.clip) if self.clip else None
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
        ops.update_average(self.others, self.momentum)

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


class _FlatPart:
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
        self.exact = _gather_flat(exact)
        _scatter_flat(self.exact, exact)
        self.low = None
        if working[0] is not exact[0]:
            self.low = self.exact.to(torch.bfloat16)
            _scatter_flat(self.low, working)
        self.mean = None
        if averaged:
            self.mean = _gather_flat(averaged)
            _scatter_flat(self.mean, averaged)
        adam = isinstance(optimizer, torch.optim.AdamW)
        names = ["exp_avg", "exp_avg_sq"] if adam else ["momentum_buffer"]
        states: list[Any] = [optimizer.state[p] for p in exact]
        moments = []
        for name in names:
            held = [
                state.get(name, torch.zeros_like(p)) for state, p in zip(states, exact, strict=True)
            ]
            moments.append(torch.cat([_flatten(t, p) for t, p in zip(held, exact, strict=True)]))
            for state, view in zip(states, _flat_views(moments[-1], exact), strict=True):
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
            torch.zeros_like(p).flatten() if p.grad is None else _flatten(p.grad, p)
            for p in self.working
        ]
        for parameter in self.working:
            parameter.grad = None
        return torch.cat(found)


def _working_copy(net: nn.Module, low: set[str]) -> nn.Module:
    """A copy of the network that shares everything but the weights named, which are bfloat16."""
    shared = [p for k, p in net.named_parameters() if k not in low] + list(net.buffers())
    made = copy.deepcopy(net, {id(tensor): tensor for tensor in shared})
    for name in low:
        module, _, leaf = name.rpartition(".")
        weight = made.get_parameter(name).detach().to(torch.bfloat16)
        setattr(made.get_submodule(module), leaf, nn.Parameter(weight))
    return made


def _other_state(
    net: nn.Module, ema: nn.Module, named: dict[str, nn.Parameter]
) -> list[tuple[Tensor, Tensor]]:
    """What the averaged network holds besides trained weights: statistics and counters."""
    mine, theirs = ema.state_dict(), net.state_dict()
    return [(mine[k], theirs[k]) for k in mine if k not in named]


def _memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with its axes in the order in which `like` lies in memory."""
    last = like.ndim == 4 and not like.is_contiguous()
    return tensor.permute(0, 2, 3, 1) if last else tensor


def _flatten(tensor: Tensor, like: Tensor) -> Tensor:
    return _memory_order(tensor, like).reshape(-1)


def _gather_flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_flatten(tensor.detach(), tensor) for tensor in tensors])


def _flat_views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Slices of the long tensor with the shapes and memory order of `like`."""
    found = []
    for piece, tensor in zip(flat.split([t.numel() for t in like]), like, strict=True):
        view = piece.view(_memory_order(tensor, tensor).shape)
        last = tensor.ndim == 4 and not tensor.is_contiguous()
        found.append(view.permute(0, 3, 1, 2) if last else view)
    return found


def _scatter_flat(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    for parameter, view in zip(parameters, _flat_views(flat, parameters), strict=True):
        parameter.data = view


def _clip_factor(grads: Sequence[Tensor], clip: float) -> Tensor:
    """What to multiply gradients with, as torch's clip_grad_norm_."""
    wide = torch.promote_types(grads[-1].dtype, torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(grad, dtype=wide) for grad in grads])
    return torch.clamp(clip / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)


def _adam_update(
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
    g, place, kind = _scale_gradient(grad, scale, exact.dtype), group.long(), exact.dtype
    m = first + (g - first) * (1 - 0.9)
    v = second * 0.999 + (1 - 0.999) * g * g
    w = exact * keep.to(kind)[place]
    w = w - rate.to(kind)[place] * m / (v.sqrt() / root.to(kind) + 1e-8)
    first.copy_(m)
    second.copy_(v)
    _store_update(w, exact, low, mean, pull)


def _sgd_update(
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
    g = _scale_gradient(grad, scale, kind) + decay.to(kind)[place] * exact
    m = beta * first + g
    w = exact - rate.to(kind)[place] * (g + beta * m if beta else g)
    first.copy_(m)
    _store_update(w, exact, low, mean, pull)


def _scale_gradient(grad: Tensor, scale: Tensor | None, kind: torch.dtype) -> Tensor:
    return grad.to(kind) if scale is None else grad.to(kind) * scale.to(kind)


def _store_update(
    w: Tensor, exact: Tensor, low: Tensor | None, mean: Tensor | None, pull: float
) -> None:
    exact.copy_(w)
    if low is not None:
        low.copy_(w)
    if mean is not None:
        mean.lerp_(w, pull)
