"""How far predictions can be trusted, as they are and after temperatures no test label chose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calmatch import evaluate, posthoc, scaled, views
from calmatch.judge import temperature
from calmatch.results import Run

JUDGED, PLAIN = "log_probs", "plain_log_probs"  # in predictions.npz
BINS = 20
LIMITS = (0.5, 0.8, 0.9, 0.95, 0.99)  # of confidence


def by_seeds(run: Run, other: Run) -> dict[str, Any]:
    """The test set scaled by how often another seed agrees on its pictures: no label is used."""
    log_probs, labels = run.predictions()
    theirs = other.predictions()[0]
    scale = posthoc.agreement_temperature(log_probs, theirs, of="first")
    agree = posthoc.agreement(log_probs, theirs).agree
    return _scaled(scale, log_probs, labels) | {"agree": agree}


def by_views(run: Run, seen: views.Views) -> dict[str, Any]:
    pair = [seen.log_probs[name] for name in views.PAIR]
    scale = posthoc.agreement_temperature(*pair)
    return _scaled(scale, *run.predictions()) | {"agree": posthoc.agreement(*pair).agree}


def _scaled(scale: posthoc.Scaling, log_probs: Tensor, labels: Tensor) -> dict[str, Any]:
    found = scale(log_probs.double())
    heat = {"temperature": scale.values["temperature"], "trust": trust(found, labels)}
    return {**scaled.measured(found, labels), **heat}


def trust(log_probs: Tensor, labels: Tensor) -> dict[str, list[list[float]]]:
    """Pictures, their mean confidence and the share that is right: by bins, and above limits."""
    top, guess = evaluate.probabilities(log_probs).max(1)
    right = (guess == labels).double()
    bins = (top * BINS).long().clamp_max(BINS - 1)
    inside = [bins == k for k in range(BINS)]
    above = [top >= limit for limit in LIMITS]
    return {"bins": _shares(inside, top, right), "above": _shares(above, top, right)}


def _shares(chosen: Sequence[Tensor], top: Tensor, right: Tensor) -> list[list[float]]:
    return [
        [int(some.sum()), float(top[some].mean()), float(right[some].mean())]
        if bool(some.any())
        else [0, 0.0, 0.0]
        for some in chosen
    ]


def by_folds(run: Run, folds: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """The test set scaled by the temperature that the run's own labels choose, as `fit` does.

    Each label is predicted by a run that did not see it; empty where some were predicted by none.
    """
    if not folds:
        return {}
    with ExitStack() as stack:
        own, *others = (
            stack.enter_context(np.load(one.folder / "predictions.npz", allow_pickle=False))
            for one in (run, *folds)
        )
        truth = np.concatenate([other["held_labels"] for other in others])
        if len(truth) < run.result["pictures"]["labelled"]:
            return {}
        found = {}
        for name in (JUDGED, PLAIN):
            if name not in own:
                continue
            held = name.replace("log_probs", "held_log_probs")
            judged = np.concatenate([other[held] for other in others])
            scale = temperature(torch.from_numpy(judged), torch.from_numpy(truth), len(folds))
            log_probs, labels = (torch.from_numpy(own[key]) for key in (name, "labels"))
            found[name] = _scaled(scale, log_probs, labels) | {"labels": len(truth)}
        return found


def estimates(seen: views.Views) -> dict[str, float]:
    """How often views agree on unlabelled pictures, and how often they are right, to judge that."""
    plain = seen.log_probs["plain"]
    found = {
        name: posthoc.agreement(plain, seen.log_probs[name]).agree
        for name in seen.log_probs
        if name != "plain"
    }
    found["confidence"] = posthoc.agreement(plain, plain).confidence
    known = seen.truth >= 0
    if bool(known.any()):
        right = (plain.argmax(-1) == seen.truth)[known]
        found["right"] = float(right.double().mean())
    return found
