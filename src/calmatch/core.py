"""The nouns: Task, Output, Batch, Term, Plan, Method and Objective.

The network owns parameters, the method owns memory, the batch owns chance and time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from calmatch import ops


class RandomStream(IntEnum):
    """Every use of chance in a run has a stream of its own, seeded by (seed, stream, ...)."""

    NET = 0
    LABELLED_ORDER = 1
    UNLABELLED_ORDER = 2
    LABELLED_VIEWS = 3
    UNLABELLED_VIEWS = 4
    METHOD = 5
    DROPOUT = 6
    FEATURES = 7  # the sample of unlabelled images whose features are kept
    VECTORS = 8  # views of stored features


class Task(NamedTuple):
    """What a method may know of the problem."""

    classes: int
    labelled: int
    unlabelled: int
    features: int
    steps: int
    counts: tuple[int, ...]  # labelled images per class


class Output(NamedTuple):
    """What every network returns for images [B, 3, H, W]."""

    logits: Tensor  # [B, C]
    features: Tensor  # [B, D]


class Batch(NamedTuple):
    """One step's images, ids, time and chance; shapes never change, so the step compiles once."""

    x: tuple[Tensor, ...]  # one [B, 3, H, W] per entry of Method.x_views
    y: Tensor  # [B] class ids
    u: tuple[Tensor, ...]  # one [R, 3, H, W] per entry of Method.u_views
    x_id: Tensor  # [B] row in the labelled set, distinct within a batch
    u_id: Tensor  # [R] row in the unlabelled set, distinct within a batch
    step: Tensor  # [] int64, from 0
    draws: dict[str, Tensor]  # the method's random numbers, made outside the graph


class Term(NamedTuple):
    """Fit logits to target, sample i counting weight[i] times."""

    logits: Tensor  # [n, C]
    target: Tensor  # [n] class ids or [n, C] probabilities
    weight: Tensor  # [n], zero = left out; loss ratio and ramp included


class Plan(NamedTuple):
    """What a method asks for in one step."""

    labelled: Term
    unlabelled: Term | None  # None: supervised
    extra: dict[str, Tensor] = {}  # further scalar losses by name, already weighted
    state: dict[str, Tensor] = {}  # NEW values of the method's memory, stored after backward


Loss = Callable[[Term], Tensor]
Metric = Callable[[Tensor, Tensor], Tensor]
Transform = Callable[[Tensor, Generator], Tensor]


class Method(nn.Module):
    """Decides who teaches whom: from a batch it makes targets and weights.

    A method holds buffers and no parameters; extra layers it needs come from `heads`.
    """

    x_views: tuple[str, ...] = ("weak",)
    u_views: tuple[str, ...] = ("weak", "strong")
    losses: Mapping[str, str] = {"labelled": "cross_entropy", "unlabelled": "cross_entropy"}
    ema: float = 0.0
    optim: Mapping[str, Mapping[str, float]] = {}
    turns: bool = False  # turns images, so that stored features cannot stand for them
    threshold: float = 0.0  # fixed confidence from which guesses are trusted; 0: none is fixed
    image_shape: tuple[int, ...] = (3, 32, 32)  # set before the first draws

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def heads(self) -> dict[str, nn.Module]:
        """Extra layers: they become `net.heads`, trained, averaged, saved and exported with it."""
        return {}

    def draws(self, generator: Generator, b: int, r: int) -> dict[str, Tensor]:
        """Random numbers for one step over b labelled and r unlabelled rows.

        A name starting with `x_` or `u_` has one entry per labelled or unlabelled row and is
        divided among ranks; any other is the same on every rank.
        """
        return {}

    def remember(self, **tensors: Tensor) -> None:
        """Declare memory: it moves with the method and is checkpointed."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, net: nn.Module, ema: nn.Module, batch: Batch) -> Plan:
        raise NotImplementedError

    @torch.no_grad()
    def commit(self, state: dict[str, Tensor]) -> None:
        """Store what `forward` returned; called after backward."""
        for name, value in state.items():
            self.get_buffer(name).copy_(value)

    def predict(self, net: nn.Module, images: Tensor) -> Tensor:
        """Log-probabilities [N, C]."""
        logits: Tensor = net(images).logits
        return logits.log_softmax(-1)


def apart(net: nn.Module, *views: Tensor, grad: Sequence[bool] | None = None) -> list[Output]:
    """One net call over all views together, one Output each; `grad=False` detaches a view's.

    A network that says `separable` (its rows do not influence each other) computes the detached
    views in a call of their own, without the backward pass that nobody would use.
    """
    keep = [True] * len(views) if grad is None else list(grad)
    if getattr(net, "separable", False) and not all(keep) and any(keep):
        pairs = list(zip(views, keep, strict=True))
        with torch.no_grad():
            aside = iter(_call_once(net, [view for view, learns in pairs if not learns]))
        main = iter(_call_once(net, [view for view, learns in pairs if learns]))
        return [next(main if learns else aside) for learns in keep]
    return [
        out if learns else Output(out.logits.detach(), out.features.detach())
        for out, learns in zip(_call_once(net, views), keep, strict=True)
    ]


def _call_once(net: nn.Module, views: Sequence[Tensor]) -> list[Output]:
    sizes = [len(view) for view in views]
    pieces = [part.split(sizes) for part in net(torch.cat(list(views)))]
    return [Output(*both) for both in zip(*pieces, strict=True)]


@contextmanager
def frozen(net: nn.Module) -> Iterator[nn.Module]:
    """BatchNorm inside normalises by the batch but does not update its running statistics."""
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [norm.track_running_stats for norm in norms]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield net
    finally:
        for norm, value in zip(norms, before, strict=True):
            norm.track_running_stats = value


class Objective(nn.Module):
    """Network, method and losses as one module: compiled inside, wrapped for ranks outside."""

    truth: Tensor | None

    def __init__(
        self,
        net: nn.Module,
        method: Method,
        labelled: Loss,
        unlabelled: Loss,
        ema: nn.Module | None = None,
        truth: Tensor | None = None,  # [unlabelled] class ids, -1 unknown: for statistics only
    ) -> None:
        super().__init__()
        self.net, self.ema, self.method = net, net if ema is None else ema, method
        self.labelled, self.unlabelled = labelled, unlabelled
        self.register_buffer("truth", truth, persistent=False)

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses (their sum under `loss`) with detached statistics, and the new state."""
        parts, plan = self.parts(batch)
        loss = torch.stack(list(parts.values())).sum()
        with torch.no_grad():
            values = {name: part.detach() for name, part in parts.items()}
            values |= self.statistics(plan, batch)
        return {"loss": loss} | values, plan.state

    def parts(self, batch: Batch) -> tuple[dict[str, Tensor], Plan]:
        """Every loss of the step by name, and the plan they follow."""
        plan: Plan = self.method(self.net, self.ema, batch)
        parts = _parts("labelled", self.labelled, plan.labelled)
        if plan.unlabelled is not None:
            parts |= _parts("unlabelled", self.unlabelled, plan.unlabelled)
        assert all(k not in parts and k != "loss" for k in plan.extra), "extras need own names"
        return parts | plan.extra, plan

    def statistics(self, plan: Plan, batch: Batch) -> dict[str, Tensor]:
        """Per-step means and counts; `training.step.Sums` turns their sums into shares."""
        if plan.unlabelled is None:
            return {"gap": _gap(plan.labelled.logits)}
        term = Term(*(part.detach() for part in plan.unlabelled))
        logp = term.logits.log_softmax(-1)
        guess = ops.ids(term.target)
        accepted = (term.weight > 0).to(logp.dtype)
        agree = (logp.argmax(-1) == guess).to(logp.dtype)
        pseudo = -(ops.soft(term.target, logp) * logp).sum(-1)
        stats = {
            "gap": _gap(term.logits),
            "accepted": accepted.mean(),
            "agreeing": (accepted * agree).mean(),
            "pseudo_ce": (term.weight * (1 - agree) * pseudo).mean(),
            "min_entropy": (term.weight * agree * -logp.amax(-1)).mean(),
            "histogram": ops.count(guess, logp.shape[-1], accepted) / len(guess),
        }
        if self.truth is not None and len(guess) % len(batch.u_id) == 0:
            truth = self.truth[batch.u_id].repeat(len(guess) // len(batch.u_id))  # MixMatch: 2R
            known = accepted * (truth >= 0)
            confidence = logp.exp().gather(-1, guess[:, None])[:, 0]
            right = known * (truth == guess)
            stats |= {"known": known.mean(), "right": right.mean()}
            columns = torch.stack([known, known * confidence, right])
            sums = columns.new_zeros(3, 15).index_add(1, ops.bin_of(confidence, 15), columns)
            stats["bins"] = sums / len(guess)
        return stats


def _parts(side: str, loss: Loss, term: Term) -> dict[str, Tensor]:
    """A sum of losses is logged part by part."""
    losses: Mapping[str, Loss] = getattr(loss, "parts", {"": loss})
    return {f"{side}/{name}".rstrip("/"): part(term) for name, part in losses.items()}


def _gap(logits: Tensor) -> Tensor:
    """The largest logit distance in the whole batch, on whichever rank it is."""
    return ops.gather(logits.amax(-1) - logits.amin(-1)).amax()


def between(name: str, value: float, low: float, high: float, strict: bool = False) -> None:
    """Refuse a setting outside its range."""
    if not (low < value < high if strict else low <= value <= high):
        raise ValueError(f"{name} is {value}, but it must lie between {low} and {high}.")
