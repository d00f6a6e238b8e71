"""A temperature without labels: mean confidence made equal to how often two predictions agree."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from calmatch.posthoc.scaling import RANGE, Scaling, checked_logits, log_softmax


class Agreement(NamedTuple):
    """How often two predictions of the same pictures agree, and how sure they are."""

    agree: float  # share of pictures whose classes are the same
    confidence: float  # mean over pictures and both predictions
    number: int


def agreement(first: Any, second: Any) -> Agreement:
    """Compare two sets of logits [N, C] of the same pictures, no labels needed.

    >>> agreement([[2.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [1.0, 0.0]]).agree
    0.5
    """
    a, b = _pair(first, second)
    same = float((a.argmax(1) == b.argmax(1)).mean())
    return Agreement(same, (_confidence(a, 1.0) + _confidence(b, 1.0)) / 2, len(a))


def agreement_temperature(
    first: Any, second: Any, *, of: Literal["both", "first"] = "both"
) -> Scaling:
    """The temperature at which mean confidence (of both, or the first) equals their agreement.

    Two networks trained apart (other seed, other labels) agree on average as often as they are
    right, if together they are calibrated class by class (Jiang et al., 2022, "Assessing
    generalization of SGD via disagreement"). Then this temperature makes mean confidence equal to
    accuracy, with no label at all.

    It fails where the two share mistakes: two views of one network agree on what that network
    gets wrong, so agreement overstates accuracy and the temperature is too cold. Views that are
    harder than the pictures to be predicted err the other way. Mean confidence is all that is
    matched: it says nothing about single bins.

    Agreement of one or under chance asks for a temperature of 0 or infinity; it stops at 0.05 and
    20. Before that, one picture more on either side is assumed (Laplace).
    """
    from scipy import optimize

    a, b = _pair(first, second)
    judged = (a, b) if of == "both" else (a,)
    wanted = (float((a.argmax(1) == b.argmax(1)).sum()) + 1) / (len(a) + 2)

    def surplus(log_heat: float) -> float:
        heat = float(np.exp(log_heat))
        return float(np.mean([_confidence(z, heat) for z in judged])) - wanted

    low, high = (float(np.log(limit)) for limit in RANGE)
    if surplus(low) <= 0:  # falls with the temperature
        heat = RANGE[0]
    elif surplus(high) >= 0:
        heat = RANGE[1]
    else:
        heat = float(np.exp(optimize.brentq(surplus, low, high, xtol=1e-10)))
    return Scaling("temperature", {"temperature": heat}, 0)


def _confidence(z: Any, heat: float) -> float:
    return float(np.exp(log_softmax(z / heat).max(1)).mean())


def _pair(first: Any, second: Any) -> tuple[Any, Any]:
    a, b = (checked_logits(torch.as_tensor(each)) for each in (first, second))
    if a.shape != b.shape:
        raise ValueError(
            f"Two predictions of the same pictures have the same shape; these are "
            f"{a.shape} and {b.shape}."
        )
    return a, b
