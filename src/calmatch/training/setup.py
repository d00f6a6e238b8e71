"""From a Config to the parts of a run: data, split, network, method, losses, batches; the environment."""

from __future__ import annotations

import copy
import functools
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calmatch import augment, losses, methods, nets, ops, spec
from calmatch.core import Loss, Method, Objective, Task
from calmatch.data.batches import (
    Batches,
    Source,
    Split,
    leave_fold_out,
    place_images,
    split,
    stream_seed,
)
from calmatch.data.dataset import Dataset, build
from calmatch.metrics import METRICS
from calmatch.ops import pick_device
from calmatch.training.config import Config, selection_metric

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


def build_parts(config: Config) -> Parts:
    """Build everything a run needs; a mistake in the config is a ValueError."""
    device = pick_device(config.device)
    dataset = build(config.dataset)
    labels = dataset.labels
    chosen = _make_split(config, dataset)
    _check_sets(config, chosen, len(dataset.test_labels))
    size = dataset.images.shape[-1]
    rows = {name: torch.tensor(ids, dtype=torch.long) for name, ids in chosen._asdict().items()}
    place = functools.partial(
        place_images,
        device=device,
        kind=config.source,
        memory=config.memory,
        workers=config.workers,
    )
    tested = torch.arange(len(dataset.test_labels))
    sets = {"test": (place(dataset.test_images, tested), dataset.test_labels)}
    if chosen.validation:
        held = rows["validation"]
        sets["validation"] = (place(dataset.images, held), labels[held])
    method, net = _build_model(
        config, labels[rows["labelled"]], len(chosen.unlabelled), dataset, device
    )
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    net, method = net.to(device, dtype), method.to(device, dtype)
    if device.type == "cuda" and sum(isinstance(m, nn.Conv2d) for m in net.modules()) > 1:
        net = net.to(memory_format=torch.channels_last)  # what its convolutions compute in
    momentum = method.ema if config.ema is None else config.ema
    ema = copy.deepcopy(net).requires_grad_(False) if momentum else net
    labelled_loss, unlabelled_loss = build_losses(config, method)
    starved = margin_warnings(config, method, len(dataset.classes))
    method.threshold = reachable_threshold(config, method, unlabelled_loss)
    batch, unlabelled_batch, notes = _batch_sizes(config, chosen, method)
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
        title=run_title(config),
        notes=[*nets.messages, *notes, *starved],
    )


def _make_split(config: Config, dataset: Dataset) -> Split:
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
    return leave_fold_out(found, own, config.fold, config.split_seed) if config.fold else found


def _check_sets(config: Config, chosen: Split, tested: int) -> None:
    if tested == 0:
        raise ValueError(f"{config.dataset} has no test pictures to measure on.")
    if (metric := selection_metric(config)) is None:
        return
    if metric not in METRICS:
        raise ValueError(
            f"There is no metric {metric!r} to select by.{spec.nearest(metric, METRICS)}"
        )
    if config.protocol == "honest" and not chosen.validation:
        raise ValueError("That validation share holds no pictures; raise --validation.")


def run_title(config: Config) -> str:
    """A run in a few words."""
    penalty = f" + {config.penalty}" if config.penalty else ""
    return f"{config.method}{penalty}"


def margin_warnings(config: Config, method: Method, classes: int) -> list[str]:
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


def reachable_threshold(config: Config, method: Method, loss: Loss) -> float:
    """The method's fixed threshold, or less where a margin keeps confidence from reaching it."""
    classes = method.task.classes
    found = losses.margins(loss, classes) if config.aware else []
    return min([method.threshold, *(losses.ceiling(config.aware * m, classes) for m in found)])


def _build_model(
    config: Config, labels: Tensor, unlabelled: int, dataset: Dataset, device: torch.device
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
    ops.synchronise_norms(net)
    return method, net


def build_losses(config: Config, method: Method) -> tuple[Loss, Loss]:
    if not method.u_views and (config.penalty or config.unlabelled_loss):
        raise ValueError(f"{config.method} uses no unlabelled pictures, so it takes no penalty.")
    labelled = config.labelled_loss or method.losses["labelled"]
    unlabelled = config.unlabelled_loss or method.losses["unlabelled"]
    if config.penalty:
        unlabelled = f"{unlabelled} + {config.penalty}"
    known = method.task.classes, method.task.labelled
    return losses.build(labelled, *known), losses.build(unlabelled, *known)


def _batch_sizes(config: Config, chosen: Split, method: Method) -> tuple[int, int, list[str]]:
    """Batch sizes, cut to what there is and to a multiple of the ranks."""
    notes = []
    sizes = []
    wanted = {"labelled": config.batch, "unlabelled": config.batch * config.ratio}
    for side, size in wanted.items():
        there = len(getattr(chosen, side))
        cut = min(size, there) // ops.world_size() * ops.world_size()
        if cut == 0 and side == "unlabelled" and not method.u_views:
            cut = size = there  # nobody will look at them
        elif cut == 0:
            raise ValueError(f"{there} {side} pictures are too few to train on.")
        if cut < size:
            notes.append(f"There are {there} {side} pictures, so batches hold {cut}, not {size}.")
        sizes.append(cut)
    return sizes[0], sizes[1], notes


VERSIONS = ("calmatch", "torch", "torchvision", "timm", "numpy")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without a fixed one cuBLAS may choose other sums each time
RECOMPILES = 1_000  # versions of a function that a process may compile


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and settings of now that a result depends on."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _package_version(name) for name in VERSIONS},
        "cpu": f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "ranks": ops.world_size(),
        "deterministic": device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        found |= {
            "driver": _search_file(Path("/proc/driver/nvidia/version"), r"(\d+\.\d[\d.]*)"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    return found


def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    return _search_file(Path("/proc/cpuinfo"), r"model name\s*: (.+)") or platform.machine()


def _search_file(path: Path, pattern: str) -> str | None:
    """What a file of the kernel says, where there is one."""
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        return None
    return found[1].strip() if found else None


def environment_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What two environments do not share, a few words each."""
    first, second = _flatten_environment(one), _flatten_environment(other)
    return [
        f"{name} {first[name]} -> {second[name]}"
        for name in first
        if name in second and first[name] != second[name]
    ]


def _flatten_environment(found: Mapping[str, Any]) -> dict[str, Any]:
    versions = found.get("versions", {})
    return {**{k: v for k, v in found.items() if k != "versions"}, **versions}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, CUDA computes the same bits every time, or an operation that cannot says so."""
    if not wanted:
        yield
        return
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.benchmark,
        cuda.cudnn_sdp_enabled(),
        os.environ.get(WORKSPACE),
    )
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark = False  # it times algorithms, and time is never the same
    cuda.enable_cudnn_sdp(False)  # flash and memory-efficient attention have an exact backward
    try:
        with _deterministic_compiler():
            yield
    except RuntimeError as error:
        found = re.search(r"(\w+) does not have a deterministic implementation", str(error))
        if not found:
            raise
        raise ValueError(
            f"{found[1]} cannot be computed the same way twice on this device; drop "
            f"--deterministic, or choose another --net or --method."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark = before[2]
        cuda.enable_cudnn_sdp(before[3])
        if before[4] is None:
            os.environ.pop(WORKSPACE, None)


@contextmanager
def _deterministic_compiler() -> Iterator[None]:
    """The compiler chooses kernels by rule, not by their speed of the moment."""
    from torch._inductor import config

    if not hasattr(config, "deterministic"):
        yield
        return
    with config.patch(deterministic=True):
        yield


def allow_recompiles() -> None:
    """Let this process compile the step of every run it makes; else it stops after eight.

    The limits are torch's, for the whole process, and stay raised: a step is compiled when it is
    first made, long after the run was asked for.
    """
    from torch._dynamo import config

    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, name, max(RECOMPILES, getattr(config, name)))
