"""How disagreement is punished: each loss maps a Term to a scalar, averaged over all its rows."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from calmatch import ops, spec
from calmatch.core import Loss, Term, between

Where = Literal["agree", "disagree", "all"]


def cross_entropy(term: Term) -> Tensor:
    """Cross-entropy to hard or soft targets."""
    return (term.weight * _cross_entropy(term)).mean()


def _cross_entropy(term: Term) -> Tensor:
    each = ops.hard_loss if term.target.ndim == 1 else ops.soft_loss
    return each(term.logits, term.target)


def mse(term: Term) -> Tensor:
    """Squared distance of probabilities, averaged over classes (unlike the Brier metric)."""
    p = term.logits.softmax(-1)
    return (term.weight * (p - ops.soft(term.target, p)).square().mean(-1)).mean()


def kl(term: Term) -> Tensor:
    """Kullback-Leibler divergence from the target to the prediction."""
    q = ops.soft(term.target, term.logits)
    surplus: Tensor = torch.special.xlogy(q, q).sum(-1)  # minus the target's own entropy
    return (term.weight * (_cross_entropy(term) + surplus)).mean()


def smoothing(term: Term, *, alpha: float = 0.1, where: Where = "agree") -> Tensor:
    """Cross-entropy with the target (1 - alpha) q + alpha / K inside `where`, plain outside."""
    between("alpha", alpha, 0, 1)
    flat = -term.logits.log_softmax(-1).mean(-1)
    share = alpha * _inside(term, where)
    return (term.weight * torch.lerp(_cross_entropy(term), flat, share)).mean()


def _inside(term: Term, where: Where) -> Tensor:
    """1 for the rows that `where` means, 0 for the others."""
    agree = (term.logits.argmax(-1) == ops.ids(term.target)).to(term.weight.dtype)
    return {"agree": agree, "disagree": 1 - agree, "all": torch.ones_like(agree)}[where]


def focal(term: Term, *, gamma: float = 2.0, where: Where = "agree") -> Tensor:
    """Focal loss -sum_k q_k (1 - p_k)^gamma log p_k inside `where`, cross-entropy outside."""
    between("gamma", gamma, 0, math.inf)
    logp = term.logits.log_softmax(-1)
    q = ops.soft(term.target, logp)
    # 1 - p from the other classes' mass: exact where p is close to 1
    factor = (-torch.expm1(logp)).clamp_min(torch.finfo(logp.dtype).tiny) ** gamma
    focused = -(q * factor * logp).sum(-1)
    inside = _inside(term, where)
    return (term.weight * torch.where(inside > 0, focused, -(q * logp).sum(-1))).mean()


def entropy(term: Term, *, weight: float = 0.1, where: Where = "all") -> Tensor:
    """Confidence penalty: minus the entropy of the prediction (Pereyra et al., 2017)."""
    logp = term.logits.log_softmax(-1)
    return weight * (term.weight * _inside(term, where) * (logp.exp() * logp).sum(-1)).mean()


def margin(
    term: Term,
    *,
    m: float | Literal["labels"] = 10.0,
    weight: float = 0.1,
    where: Where = "agree",
    accepted: bool = True,
    cap: float | None = None,
    gate: bool = False,
) -> Tensor:
    """The paper's penalty on logit distances beyond a margin, averaged over the selected rows.

    `where="agree"` is the paper's U''. `accepted=False` drops the threshold, as the paper's
    equation is written. `cap` states the margin as a ceiling on confidence instead, and
    `m="labels"` as what the labels can show (`build` fills it in). `gate` lets the penalty act
    only while the trusted rows are more confident on average than their views agree.
    """
    if cap is not None:
        m = cap_margin(cap, term.logits.shape[-1])
    if isinstance(m, str):
        raise ValueError("m='labels' needs the number of labels: losses.build(..., labelled=N).")
    between("m", m, 0, math.inf)
    share = (term.weight if accepted else torch.ones_like(term.weight)).detach()
    share = share.clamp_min(0) * _inside(term, where)
    top = term.logits.gather(-1, term.logits.argmax(-1, keepdim=True))  # first one on ties
    beyond = (top - term.logits - m).relu().mean(-1)
    # averaged over ranks, so that the mean is over the whole batch's selected rows
    selected = ops.average(share.sum()).clamp_min(torch.finfo(share.dtype).tiny)
    value = weight * (share * beyond).sum() / selected
    if not gate:
        return value
    ahead = term.logits.detach().softmax(-1).amax(-1) - _inside(term, "agree")
    return value * (ops.average((term.weight.detach() * ahead).sum()) > 0)


def cap_margin(cap: float, classes: int) -> float:
    """The margin at which confidence is at most `cap`.

    >>> round(cap_margin(0.99, 10), 3)
    6.792
    """
    between("cap", cap, 1 / classes, 1, strict=True)
    return math.log((classes - 1) * cap / (1 - cap))


def ceiling(m: float, classes: int) -> float:
    """The confidence that a margin allows at most: 1 / (1 + (K - 1) e^-m).

    >>> round(ceiling(4, 10), 3)
    0.858
    """
    return 1 / (1 + (classes - 1) * math.exp(-m))


def labels_margin(labelled: int, classes: int) -> float:
    """The margin whose cap is (n + 1) / (n + 2): what n labels, all predicted right, can show.

    Laplace's rule of succession; a classifier that claims more has no labels to prove it with.

    >>> round(labels_margin(40, 10), 2), round(labels_margin(400, 100), 2)
    (5.91, 10.59)
    """
    return cap_margin((labelled + 1) / (labelled + 2), classes)


def margins(loss: Loss, classes: int) -> list[float]:
    """The margins in a loss that `build` made."""
    parts = getattr(loss, "parts", {"": loss}).values()
    own = [part.keywords for part in parts if getattr(part, "func", None) is margin]
    caps = [(each.get("cap"), each.get("m", 10.0)) for each in own]
    return [m if cap is None else cap_margin(cap, classes) for cap, m in caps]


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    loss.__name__: loss for loss in (cross_entropy, mse, kl, smoothing, focal, entropy, margin)
}


class Sum:
    """Losses added up, and apart by name for the log."""

    def __init__(self, parts: Mapping[str, Loss]) -> None:
        self.parts = parts

    def __call__(self, term: Term) -> Tensor:
        return torch.stack([part(term) for part in self.parts.values()]).sum()


def build(text: str, classes: int = 10, labelled: int = 0) -> Loss:
    """The loss a spec names, `"cross_entropy + margin(m=8)"` for example."""
    parts: dict[str, functools.partial[Tensor]] = {}
    for item in spec.added(text):
        bound = spec.bind(item, LOSSES, "loss", given=1)
        if bound.func is margin and bound.keywords.get("m") == "labels" and labelled:
            bound = functools.partial(bound, m=labels_margin(labelled, classes))
        row = Term(torch.zeros(1, classes), torch.zeros(1, dtype=torch.long), torch.ones(1))
        value = bound(row)  # so that a bad setting is an error now and not at the first step
        if not isinstance(value, Tensor) or value.ndim:
            raise spec.SpecError(f"The loss {text!r} does not return one number.")
        name = item.name.rpartition(".")[2]
        same = sum(key.split("#")[0] == name for key in parts)
        parts[f"{name}#{same + 1}" if same else name] = bound
    return next(iter(parts.values())) if len(parts) == 1 else Sum(parts)
