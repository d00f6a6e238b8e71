"""Edges of the problem that every method must survive with finite numbers; a new one included."""

from __future__ import annotations

import pytest
import torch

from calmatch.data.dataset import synthetic
from calmatch.training import checkpoint
from calmatch.training.setup import deterministic
from calmatch.training.step import new_training
from conftest import ALL_METHODS


def few(*, unlabelled: int):
    """One labelled picture a class and very few unlabelled ones."""
    counts = [unlabelled // 4 + (k < unlabelled % 4) for k in range(4)]
    return synthetic()._replace(labelled_counts=(1,) * 4, unlabelled_counts=tuple(counts))


def one_class(net):
    """Every pseudo-label is the same class: the others are never seen."""
    net.body.head.weight.zero_()
    net.body.head.bias.copy_(torch.eye(len(net.body.head.bias))[0] * 20)


def saturated(net):
    """Confidence is exactly 1, and exactly 0 for the other classes."""
    net.body.head.weight.mul_(1e5)


def huge(net):
    """Logits that bfloat16 keeps no digit of."""
    net.body.head.weight.mul_(1e8)


def plain(net):
    """As it is."""


EDGES = {
    "classes never seen": ({}, one_class),
    "confidence 0 or 1": ({}, saturated),
    "huge logits in bfloat16": ({"precision": "bf16"}, huge),
    "two classes": ({"dataset": "synthetic(classes=2)", "labels": 4}, plain),
    "a thousand classes": (
        {"dataset": "synthetic(classes=1000, per_class=3)", "labels": 1000, "steps": 2},
        plain,
    ),
    "one label a class": ({"labels": 4}, plain),
    "fewer unlabelled pictures than the batch": (
        {"dataset": f"{__name__}.few(unlabelled=5)", "labels": 0, "include_labelled": False},
        plain,
    ),
    "one unlabelled picture": (
        {"dataset": f"{__name__}.few(unlabelled=1)", "labels": 0, "include_labelled": False},
        plain,
    ),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_numbers_stay_finite_at_every_edge(tiny, method, edge):
    changes, change = EDGES[edge]
    penalty = "" if method == "supervised" else "margin(m=1)"
    settings = {"steps": 3, "ema": 0.9, "lr": 1e-4, "penalty": penalty, **changes}
    run = new_training(tiny(method, **settings))
    with torch.no_grad():
        change(run.parts.net)
    while run.step < run.config.steps:
        run.advance()
        assert all(bool(each.isfinite().all()) for each in run.tensors().values()), run.step
    pictures = run.parts.batches[0].x[0]
    log_probs = run.parts.method.predict(run.parts.net, pictures)
    assert not log_probs.isnan().any()
    sums = log_probs.double().exp().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-4, rtol=0)


def test_the_edges_are_what_they_say(tiny):
    run = new_training(tiny())
    batch = run.parts.batches[0]
    with torch.no_grad():
        saturated(run.parts.net)
        p = run.parts.net(batch.x[0]).logits.softmax(-1)
        assert (p.amax(-1) == 1).any()
        assert (p == 0).any()
        one_class(run.parts.net)
        assert (run.parts.net(batch.x[0]).logits.argmax(-1) == 0).all()
    for rows, edge in (
        (5, "fewer unlabelled pictures than the batch"),
        (1, "one unlabelled picture"),
    ):
        run = new_training(tiny(**EDGES[edge][0]))
        assert len(run.parts.split.labelled) == 4
        assert len(run.parts.batches[0].u_id) == rows


@pytest.mark.parametrize("method", ALL_METHODS)
def test_what_overflows_all_the_same_is_noticed(tiny, method):
    """Weights beyond what any arithmetic can carry."""
    run = new_training(tiny(method, precision="bf16"))
    with torch.no_grad():
        for weight in run.parts.net.parameters():
            weight.fill_(3e38)
    run.advance(run.parts.batches[0])
    assert not checkpoint.is_finite(run)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_steps_where_only_deterministic_operations_are_allowed(tiny, method):
    with deterministic(True):
        run = new_training(tiny(method, deterministic=True))
        run.advance(run.parts.batches[0])
    assert checkpoint.is_finite(run)
    assert not torch.are_deterministic_algorithms_enabled()
