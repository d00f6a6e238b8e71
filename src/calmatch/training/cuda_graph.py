"""The whole training step as one CUDA graph: the host feeds chunks of batches and replays it.

Objective, backward, commit, optimizer, EMA and log sums are captured once. A chunk of many steps'
batches lies in fixed buffers on the device; which step is due is a counter there too. Dropout draws
from a generator of the run's own, which is seeded by (seed, step) before each replay, so a run
continues with the same numbers. Several runs are branches of one graph and fill each other's gaps.
All trained weights lie in one buffer: the optimizer and the averaging are one kernel over it."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from calmatch import console, ops
from calmatch.core import Batch, RandomStream
from calmatch.data.batches import stream_seed
from calmatch.training.step import Training, Values

WARMUP_STEPS = 3  # eager steps before the capture, undone afterwards


class CapturedStep:
    """Replays the step of one or more runs; where it cannot be captured they step eagerly, aloud.

    Runs must be at the same step and differ in nothing that changes shapes.
    """

    def __init__(self, runs: Sequence[Training], quiet: bool = False) -> None:
        self.quiet = quiet
        self.branches = [RunBranch(run) for run in runs]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = False

    def advance(self) -> None:
        """One training step of every run."""
        if not self.failed:
            for branch in self.branches:
                branch.feed()
            if self.graph is None:
                self._capture()
        for branch in self.branches:
            branch.count_step(self.failed)
        if self.graph is not None:
            self.graph.replay()

    def _capture(self) -> None:
        """Warm up, capture, and undo the warm-up; give up where that fails."""
        before = [branch.snapshot() for branch in self.branches]
        try:
            graph = torch.cuda.CUDAGraph()
            for branch in self.branches:
                branch.warm()
                with branch.own_chance():
                    graph.register_generator_state(branch.default)
            with torch.cuda.graph(graph):
                self._branches()
            self.graph = graph
        except Exception as error:  # whatever a plug-in may do: the eager step still works
            if console.caused_by_memory(error):  # but not where it would find the device as full
                raise torch.OutOfMemoryError(str(error)) from error
            self.failed = True
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            line = f"The step cannot be captured ({reason}); running it step by step."
            console.message(line, self.quiet)
            torch.cuda.synchronize()
        for branch, snapshot in zip(self.branches, before, strict=True):
            branch.undo(snapshot, self.failed)

    def _branches(self) -> None:
        """Each run's step on a stream of its own, all joined at the end."""
        main = torch.cuda.current_stream()
        others = [torch.cuda.Stream() for _ in self.branches[1:]]
        for stream in others:
            stream.wait_stream(main)
        for branch, stream in zip(self.branches, [main, *others], strict=True):
            with torch.cuda.stream(stream), branch.own_chance():
                branch.body()
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
        number, place = divmod(self.run.step, self.size)
        if number == self.number:
            return
        fresh = self.batches.whole(number)
        if self.chunk is None:
            self.chunk = tree_map(torch.clone, fresh)
        else:
            torch._foreach_copy_(tree_leaves(self.chunk), tree_leaves(fresh))
        rates = [self.run.rate(number * self.size + k) for k in range(self.size)]
        self.rates.copy_(ops.sent(torch.tensor(rates), self.rates.device))
        self.place.fill_(place)
        self.number = number

    def count_step(self, failed: bool) -> None:
        """Count the step that is replayed next, or make it where nothing could be captured."""
        run = self.run
        if failed:
            run.advance()
            return
        self.chance.manual_seed(stream_seed(run.config.seed, RandomStream.DROPOUT, run.step))
        run.step += 1
        run.sums.steps += 1

    def warm(self) -> None:
        """Build what the graph needs, and run it a few times so that all memory is there."""
        run, parts = self.run, self.run.parts
        compiled = run.config.compile is not False
        ema = parts.ema if parts.momentum else None
        settings: Any = {"momentum": parts.momentum, "clip": run.config.clip, "compiled": compiled}
        settings["bf16"] = run.config.precision == "bf16"
        settings["apart"] = run.config.compile == "net"  # evaluations use the run's own as it is
        self.flat = FlatState(parts.net, ema, run.optimizer, **settings)
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
                self.body(first=number == 0)
        torch.cuda.current_stream().wait_stream(side)

    def body(self, first: bool = False) -> None:
        """What the graph holds; it reads and writes fixed buffers only."""
        chunk, here = self.chunk, self.place[None]
        assert chunk is not None
        rate = self.rates.index_select(0, here)[0]
        torch._foreach_copy_(self.lrs, torch._foreach_mul(self.peaks, rate))

        def update() -> None:
            if first:
                self.flat.leave_out_idle()
            self.flat.advance()

        self.run.learn(lambda: self.forward(self.objective, chunk, here), update)
        self.place.add_(1)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of everything a step changes."""
        state = {name: tensor.clone() for name, tensor in self.run.tensors().items()}
        return state | {"place": self.place.clone()}

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
    values: Values = objective(tree_map(lambda tensor: tensor.index_select(0, here)[0], chunk))
    return values


AUTOCAST_LAYERS = (nn.Linear, nn.Conv2d)  # in bfloat16, as layers with `cast` are


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
        groups = enumerate(optimizer.param_groups)
        group_of = {id(p): place for place, group in groups for p in group["params"]}
        named = {k: p for k, p in net.named_parameters() if id(p) in group_of}
        low = set(bf16_parameters(net)) if bf16 else set()
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
        theirs, own = net.state_dict(), {} if ema is None else ema.state_dict()
        self.others = [(own[k], theirs[k]) for k in own if k not in named]  # statistics, counters
        self.update = _update
        if compiled:
            self.update = torch.compile(_update, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def advance(self) -> None:
        """One optimizer step from the gradients there are, and the averages' step after it."""
        grads = [part.gradients() for part in self.parts]
        rates = torch.stack([*self.lrs, torch.zeros_like(self.lrs[0])]).double()
        scale = None  # as torch's clip_grad_norm_
        if self.clip:
            wide = torch.promote_types(grads[-1].dtype, torch.float32)
            norms = torch.stack([torch.linalg.vector_norm(grad, dtype=wide) for grad in grads])
            scale = torch.clamp(self.clip / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)
        self.step += 1
        for part, grad in zip(self.parts, grads, strict=True):
            decay, rate, root = self.decay, rates, None
            if part.flat.second is not None:
                root = (1 - 0.999 ** self.step.double()).sqrt()
                decay, rate = 1 - rates * self.decay, rates / (1 - 0.9 ** self.step.double())
            self.update(part.flat, grad, scale, 1 - self.momentum, decay, rate, root, self.beta)
        ops.update_average(self.others, self.momentum)

    def leave_out_idle(self) -> None:
        """Leave out weights that got no gradient just now, as torch's optimizers do."""
        for part in self.parts:
            part.write_groups(len(self.lrs))

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the working weights true again after the exact ones were set from outside."""
        for part in self.parts:
            if part.flat.low is not None:
                part.flat.low.copy_(part.flat.exact)


class _FlatTensors(NamedTuple):
    """Weights with all that belongs to them, each as one long tensor."""

    exact: Tensor
    low: Tensor | None  # the bfloat16 copy
    mean: Tensor | None  # the average
    group: Tensor  # of the optimizer
    first: Tensor  # moment
    second: Tensor | None  # moment, of AdamW


class _FlatPart:
    """Parameters of one type: exact weights, moments and averages, each as one tensor."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        working: Sequence[nn.Parameter],
        averaged: Sequence[nn.Parameter],
        groups: Sequence[int],
        optimizer: torch.optim.Optimizer,
        step: Tensor,
    ) -> None:
        self.working, self.groups = working, groups
        low = mean = None
        exact = _gather_flat(weights, weights)
        _scatter_flat(exact, weights)
        if working[0] is not weights[0]:
            low = exact.to(torch.bfloat16)
            _scatter_flat(low, working)
        if averaged:
            mean = _gather_flat(averaged, averaged)
            _scatter_flat(mean, averaged)
        adam = isinstance(optimizer, torch.optim.AdamW)
        states: list[Any] = [optimizer.state[p] for p in weights]
        moments = []
        for name in ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",):
            pairs = zip(states, weights, strict=True)
            values = [state.get(name, torch.zeros_like(p)) for state, p in pairs]
            moments.append(_gather_flat(values, weights))
            for state, view in zip(states, _flat_views(moments[-1], weights), strict=True):
                state[name] = view
        if adam:
            if "step" in states[0]:
                step.copy_(states[0]["step"])
            for state in states:
                state["step"] = step
        group = torch.zeros(len(exact), dtype=torch.uint8, device=exact.device)
        second = moments[1] if adam else None
        self.flat = _FlatTensors(exact, low, mean, group, moments[0], second)
        self.write_groups(None)

    def write_groups(self, idle: int | None) -> None:
        """Write each weight's group; weights that got no gradient belong to the idle one."""
        pairs = zip(self.working, self.groups, strict=True)
        used = [idle if idle is not None and p.grad is None else group for p, group in pairs]
        sizes = torch.tensor([p.numel() for p in self.working])
        self.flat.group.copy_(torch.tensor(used, dtype=torch.uint8).repeat_interleave(sizes))

    def gradients(self) -> Tensor:
        """All gradients in one tensor; they are let go."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.working]
        for parameter in self.working:
            parameter.grad = None
        return _gather_flat(grads, self.working)


def _working_copy(net: nn.Module, low: set[str]) -> nn.Module:
    """A copy of the network that shares everything but the weights named, which are bfloat16."""
    shared = [p for k, p in net.named_parameters() if k not in low] + list(net.buffers())
    working = copy.deepcopy(net, {id(tensor): tensor for tensor in shared})
    for name in low:
        module, _, leaf = name.rpartition(".")
        weight = working.get_parameter(name).detach().to(torch.bfloat16)
        setattr(working.get_submodule(module), leaf, nn.Parameter(weight))
    return working


def _gather_flat(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """One long tensor, each piece in the order in which its `like` lies in memory."""
    pairs = zip(tensors, like, strict=True)
    return torch.cat([_memory_order(t.detach(), other).reshape(-1) for t, other in pairs])


def _memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1) if _channels_last(like) else tensor


def _channels_last(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and not tensor.is_contiguous()


def _scatter_flat(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Make the parameters views of the long tensor."""
    for parameter, view in zip(parameters, _flat_views(flat, parameters), strict=True):
        parameter.data = view


def _flat_views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Slices of the long tensor with the shapes and memory order of `like`."""
    views = []
    for piece, tensor in zip(flat.split([t.numel() for t in like]), like, strict=True):
        view = piece.view(_memory_order(tensor, tensor).shape)
        views.append(view.permute(0, 3, 1, 2) if _channels_last(tensor) else view)
    return views


def _update(
    flat: _FlatTensors,
    grad: Tensor,
    scale: Tensor | None,  # of the gradient, where it is clipped
    pull: float,  # of the average towards the weights
    decay: Tensor,  # each group's: AdamW multiplies with it, SGD adds it to the gradient
    rate: Tensor,  # each group's
    root: Tensor | None,  # AdamW's correction of the second moment
    beta: float,  # SGD's momentum
) -> None:
    """AdamW, or SGD with Nesterov momentum, as torch computes them, then the average."""
    exact, low, mean, group, first, second = flat
    place, kind = group.long(), exact.dtype
    g = grad.to(kind) if scale is None else grad.to(kind) * scale.to(kind)
    if second is not None and root is not None:
        m = first + (g - first) * (1 - 0.9)
        v = second * 0.999 + (1 - 0.999) * g * g
        w = exact * decay.to(kind)[place]
        w = w - rate.to(kind)[place] * m / (v.sqrt() / root.to(kind) + 1e-8)
        second.copy_(v)
    else:
        g = g + decay.to(kind)[place] * exact
        m = beta * first + g
        w = exact - rate.to(kind)[place] * (g + beta * m if beta else g)
    first.copy_(m)
    exact.copy_(w)
    if low is not None:
        low.copy_(w)
    if mean is not None:
        mean.lerp_(w, pull)
