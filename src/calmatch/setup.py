"""From a Config to the parts of a run: data, split, network, method, losses, batches."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calmatch import augment, data, losses, methods, nets, parallel, spec
from calmatch.config import Config, selection
from calmatch.core import Loss, Method, Objective, Task
from calmatch.data.batches import Batches, stream_seed
from calmatch.data.resident import Source, source
from calmatch.data.split import Split, split, without
from calmatch.metrics import METRICS

Statistics = tuple[Sequence[float], Sequence[float]]


@dataclass
class Parts:
    """The parts of a run."""

    device: torch.device
    classes: tuple[str, ...]
    statistics: Statistics
    split: Split
    sets: dict[str, tuple[Source, Tensor]]  # test, and validation where there is one
    truth: Tensor  # [unlabelled] class ids, -1 unknown
    net: nets.Net
    ema: nets.Net
    momentum: float
    method: Method
    labelled_loss: Loss
    unlabelled_loss: Loss
    batches: Batches
    size: int
    title: str
    notes: list[str]
    whole: Callable[[], tuple[nets.Net, Statistics] | None] | None = None  # of a frozen one's head

    @property
    def judged(self) -> nets.Net:
        """The network whose predictions count."""
        return self.ema if self.momentum else self.net

    def objective(self, net: nn.Module) -> Objective:
        """What a step minimises, computed by `net`: the run's own, or a working copy of it."""
        truth = self.truth if bool((self.truth >= 0).any()) else None
        ema = self.ema if self.momentum else None
        return Objective(net, self.method, self.labelled_loss, self.unlabelled_loss, ema, truth)


def prepare(config: Config) -> Parts:
    """Build everything a run needs; a mistake in the config is a ValueError."""
    device = pick_device(config.device)
    dataset = data.build(config.dataset)
    labels = dataset.labels
    chosen = _split(config, dataset)
    _check_sets(config, chosen, len(dataset.test_labels))
    size = dataset.images.shape[-1]
    rows = {name: torch.tensor(ids, dtype=torch.long) for name, ids in chosen._asdict().items()}
    place = functools.partial(
        source, device=device, kind=config.source, memory=config.memory, workers=config.workers
    )
    tested = torch.arange(len(dataset.test_labels))
    sets = {"test": (place(dataset.test_images, tested), dataset.test_labels)}
    if chosen.validation:
        held = rows["validation"]
        sets["validation"] = (place(dataset.images, held), labels[held])
    method, net = _model(config, labels[rows["labelled"]], len(chosen.unlabelled), dataset, device)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    net, method = net.to(device, dtype), method.to(device, dtype)
    if device.type == "cuda" and sum(isinstance(m, nn.Conv2d) for m in net.modules()) > 1:
        net = net.to(memory_format=torch.channels_last)  # what its convolutions compute in
    momentum = method.ema if config.ema is None else config.ema
    ema = copy.deepcopy(net).requires_grad_(False) if momentum else net
    labelled_loss, unlabelled_loss = losses_of(config, method)
    starved = warnings(config, method, len(dataset.classes))
    method.threshold = reachable(config, method, unlabelled_loss)
    batch, unlabelled_batch, notes = _sizes(config, chosen, method)
    batches = Batches(
        method,
        place(dataset.images, rows["labelled"]),
        labels[rows["labelled"]].to(device),
        place(dataset.images, rows["unlabelled"]),
        {"weak": augment.pipeline(config.weak), "strong": augment.pipeline(config.strong)},
        (dataset.mean, dataset.std),
        batch=batch,
        unlabelled_batch=unlabelled_batch,
        seed=config.seed,
        chunk=config.chunk,
        dtype=dtype,
    )
    return Parts(
        device=device,
        classes=dataset.classes,
        statistics=(dataset.mean, dataset.std),
        split=chosen,
        sets=sets,
        truth=labels[rows["unlabelled"]].to(device),
        net=net,
        ema=ema,
        momentum=momentum,
        method=method,
        labelled_loss=labelled_loss,
        unlabelled_loss=unlabelled_loss,
        batches=batches,
        size=size,
        title=title(config),
        notes=[*nets.pretrained.messages, *notes, *starved],
    )


def pick_device(name: str) -> torch.device:
    """The device a config names; `auto` is the first of cuda, mps and cpu that is there."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, found in there.items() if found)
    if name == "cuda" and there["cuda"] and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"  # each rank its own card
        torch.cuda.set_device(name)
    if not there.get(name.partition(":")[0], False):
        raise ValueError(f"There is no device {name!r} here; use --device auto or cpu.")
    return torch.device(name)


def _split(config: Config, dataset: data.Dataset) -> Split:
    counts = dataset.labelled_counts
    if config.fold and config.validation:
        raise ValueError("--fold and --validation both hold pictures out; choose one.")
    if config.labels == 0 and counts is None:
        raise ValueError(f"{config.dataset} does not say how many labels; set --labels.")
    found = split(
        dataset.labels.numpy(),
        counts if config.labels == 0 and counts else config.labels,
        config.split_seed,
        unlabelled=dataset.unlabelled_counts if config.labels == 0 else None,
        validation=config.validation,
        include_labelled=config.include_labelled,
        whole_pool=dataset.whole_pool,
        shuffle_first=dataset.shuffle_first,
    )
    own = dataset.labels[found.labelled].tolist()
    return without(found, own, config.fold, config.split_seed) if config.fold else found


def _check_sets(config: Config, chosen: Split, tested: int) -> None:
    if tested == 0:
        raise ValueError(f"{config.dataset} has no test pictures to measure on.")
    if (metric := selection(config)) is None:
        return
    if metric not in METRICS:
        raise ValueError(
            f"There is no metric {metric!r} to select by.{spec.nearest(metric, METRICS)}"
        )
    if config.protocol == "honest" and not chosen.validation:
        raise ValueError("That validation share holds no pictures; raise --validation.")


def title(config: Config) -> str:
    """A run in a few words."""
    penalty = f" + {config.penalty}" if config.penalty else ""
    return f"{config.method}{penalty}"


def warnings(config: Config, method: Method, classes: int) -> list[str]:
    """What a person should know before hours are spent."""
    texts = [text for text in (config.penalty, config.unlabelled_loss) if text]
    if not texts or config.aware:
        return []
    loss = losses.build(" + ".join(texts), classes, method.task.labelled)
    caps = [losses.ceiling(m, classes) for m in losses.margins(loss, classes)]
    return [
        f"Warning: margin caps confidence at {cap:.3f}, under the threshold "
        f"{method.threshold} of {config.method}: it will run out of pseudo-labels. Raise m, "
        f"lower the threshold, or set --aware 0.7."
        for cap in caps
        if cap < method.threshold
    ]


def reachable(config: Config, method: Method, loss: Loss) -> float:
    """The method's fixed threshold, or less where a margin keeps confidence from reaching it."""
    classes = method.task.classes
    found = losses.margins(loss, classes) if config.aware else []
    return min([method.threshold, *(losses.ceiling(config.aware * m, classes) for m in found)])


def _model(
    config: Config, labels: Tensor, unlabelled: int, dataset: data.Dataset, device: torch.device
) -> tuple[Method, nets.Net]:
    with torch.random.fork_rng():
        torch.manual_seed(stream_seed(config.seed, 0))
        classes = len(dataset.classes)
        size = dataset.images.shape[-1]
        body = nets.build(config.net, classes, size)
        task = Task(
            classes=classes,
            labelled=len(labels),
            unlabelled=unlabelled,
            features=nets.feature_size(body, size),
            steps=config.steps,
            counts=tuple(int((labels == k).sum()) for k in range(classes)),
        )
        method = methods.build(config.method, task)
        method.picture = tuple(dataset.images.shape[1:])
        net = nets.Net(body, method.heads(), bf16=config.precision == "bf16")
    parallel.synchronised(net)
    return method, net


def losses_of(config: Config, method: Method) -> tuple[Loss, Loss]:
    if not method.u_views and (config.penalty or config.unlabelled_loss):
        raise ValueError(f"{config.method} uses no unlabelled pictures, so it takes no penalty.")
    labelled = config.labelled_loss or method.losses["labelled"]
    unlabelled = config.unlabelled_loss or method.losses["unlabelled"]
    if config.penalty:
        unlabelled = f"{unlabelled} + {config.penalty}"
    known = method.task.classes, method.task.labelled
    return losses.build(labelled, *known), losses.build(unlabelled, *known)


def _sizes(config: Config, chosen: Split, method: Method) -> tuple[int, int, list[str]]:
    """Batch sizes, cut to what there is and to a multiple of the ranks."""
    notes = []
    sizes = []
    wanted = {"labelled": config.batch, "unlabelled": config.batch * config.ratio}
    for side, size in wanted.items():
        there = len(getattr(chosen, side))
        cut = min(size, there) // parallel.world() * parallel.world()
        if cut == 0 and side == "unlabelled" and not method.u_views:
            cut = size = there  # nobody will look at them
        elif cut == 0:
            raise ValueError(f"{there} {side} pictures are too few to train on.")
        if cut < size:
            notes.append(f"There are {there} {side} pictures, so batches hold {cut}, not {size}.")
        sizes.append(cut)
    return sizes[0], sizes[1], notes
