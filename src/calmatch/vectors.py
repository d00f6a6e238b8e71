"""Vectors that are features already: one layer learns from them by the same methods."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from calmatch import methods, nets
from calmatch.config import Config
from calmatch.core import Task
from calmatch.data.batches import Batches, stream_seed
from calmatch.data.split import Split
from calmatch.heads import VIEWS, Frozen, Head, Rows, Store
from calmatch.setup import Parts, losses_of, reachable


def given(config: Config, features: Tensor, labels: Tensor, classes: int, views: int = 4) -> Frozen:
    """A frozen run on vectors: a view adds noise, a strong one also mixes in other rows.

    Args:
        config: of the head's training.
        features: [N, D], of a variance about 1.
        labels: [N] class ids, -1 unknown.
        classes: how many there are.
        views: weak and as many strong ones of each vector.
    """
    chance = Generator().manual_seed(stream_seed(config.seed, 8))
    x = features
    made = [x]
    for name in VIEWS:
        for _ in range(views):
            view = x + 0.1 * torch.randn(x.shape, generator=chance)
            if name == "strong":
                others = view[torch.randperm(len(x), generator=chance)]
                view = torch.where(torch.rand(x.shape, generator=chance) < 0.2, others, view)
            made.append(view)
    store = Store([torch.stack(made, 1)], views)
    rows = Split((labels >= 0).nonzero()[:, 0].tolist(), list(range(len(x))), [])
    width = x.shape[1]
    task = Task(classes, len(rows.labelled), len(x), width, config.steps, (1,) * classes)
    method = methods.build(config.method, task)
    labelled_loss, unlabelled_loss = losses_of(config, method)
    method.threshold = reachable(config, method, unlabelled_loss)
    nothing = Rows(store, torch.arange(0))
    net = nets.Net(Head(width, classes), {})
    base = Parts(
        device=torch.device("cpu"),
        classes=tuple(str(k) for k in range(classes)),
        statistics=([0.0] * width, [1 / 255] * width),
        split=rows,
        sets={"test": (nothing, labels[:0])},
        truth=labels,
        net=net,
        ema=net,
        momentum=0.0,
        method=method,
        labelled_loss=labelled_loss,
        unlabelled_loss=unlabelled_loss,
        batches=Batches(
            method,
            nothing,
            labels[:0],
            nothing,
            {},
            ((0.0,), (1.0,)),
            batch=1,
            unlabelled_batch=1,
            seed=0,
            chunk=1,
        ),
        size=1,
        title=config.method,
        notes=[],
    )
    return Frozen(config, base, store, labels, store, base.statistics)
