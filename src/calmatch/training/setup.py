"""From a Config to the parts of a run: data, split, network, method, losses, batches."""

import copy
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

from calmatch import augment, files, losses, methods, nets, ops, spec
from calmatch.core import Loss, Method, Objective, RandomStream, Task, Transform
from calmatch.data import batches, dataset
from calmatch.data.batches import Batches, Source, Split, stream_seed
from calmatch.metrics import METRICS
from calmatch.training.config import Config, selection_metric

Statistics = tuple[Sequence[float], Sequence[float]]  # channel means and deviations
Sets = dict[str, tuple[Source, Tensor]]  # test, and validation where there is one


@dataclass
class Material:
    """What a run learns from: images, or features that pass for images of one pixel."""

    device: torch.device
    classes: tuple[str, ...]
    labels: Tensor  # [N] class ids of all rows, -1 unknown
    split: Split
    labelled: Source
    unlabelled: Source
    sets: Sets
    views: Mapping[str, Transform]
    statistics: Statistics
    image: tuple[int, ...]  # the shape of one image


@dataclass
class Parts(Material):
    """The parts of a run: its material, and what is built on it."""

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

    @property
    def evaluated(self) -> nets.Net:
        """The network whose predictions count."""
        return self.ema if self.momentum else self.net

    def objective(self, net: nn.Module) -> Objective:
        """What a step minimises, computed by `net`: the run's own, or a working copy of it."""
        truth = self.truth if bool((self.truth >= 0).any()) else None
        ema = self.ema if self.momentum else None
        return Objective(net, self.method, self.labelled_loss, self.unlabelled_loss, ema, truth)


def build_parts(config: Config) -> Parts:
    """Build everything a run needs; a mistake in the config is a ValueError."""
    device = ops.pick_device(config.device)
    data = dataset.build(config.dataset)
    split = _make_split(config, data)
    rows = {name: torch.tensor(ids, dtype=torch.long) for name, ids in split._asdict().items()}

    def place(images: Any, ids: Tensor) -> Source:
        where = (device, config.source, config.memory, config.workers)
        return batches.place_images(images, ids, *where)

    tested = place(data.test_images, torch.arange(len(data.test_labels)))
    sets: Sets = {"test": (tested, data.test_labels)}
    if split.validation:
        ids = rows["validation"]
        sets["validation"] = (place(data.images, ids), data.labels[ids])
    labelled, unlabelled = (place(data.images, rows[k]) for k in ("labelled", "unlabelled"))
    views = {"weak": augment.pipeline(config.weak), "strong": augment.pipeline(config.strong)}
    sources = (split, labelled, unlabelled, sets, views, (data.mean, data.std))
    image = tuple(data.images.shape[1:])
    material = Material(device, data.classes, data.labels, *sources, image)
    return assemble(config, material, lambda: nets.build(config.net, len(data.classes), image[-1]))


def assemble(config: Config, material: Material, make_body: Callable[[], nn.Module]) -> Parts:
    """The parts of a run on this material, with a network made from the run's seed."""
    device, classes, split = material.device, len(material.classes), material.split
    labels = material.labels[torch.tensor(split.labelled, dtype=torch.long)]
    with torch.random.fork_rng():
        torch.manual_seed(stream_seed(config.seed, RandomStream.NET))
        body = make_body()
        width = getattr(body, "width", 0) or nets.feature_size(body, material.image[-1])
        counts = tuple(int((labels == k).sum()) for k in range(classes))
        task = Task(classes, len(labels), len(split.unlabelled), width, config.steps, counts)
        method = methods.build(config.method, task)
        net = nets.Net(body, method.heads(), bf16=config.precision == "bf16")
    method.image_shape = material.image
    for module in net.modules() if ops.world_size() > 1 else ():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d):
            module.__class__ = ops.SyncNorm
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    net, method = net.to(device, dtype), method.to(device, dtype)
    if device.type == "cuda" and sum(isinstance(m, nn.Conv2d) for m in net.modules()) > 1:
        net = net.to(memory_format=torch.channels_last)  # what its convolutions compute in
    momentum = method.ema if config.ema is None else config.ema
    labelled_loss, unlabelled_loss = build_losses(config, method)
    warnings = margin_warnings(config, method, unlabelled_loss)
    if config.cap_threshold:
        caps = losses.margins(unlabelled_loss, classes)
        reachable = [losses.ceiling(config.cap_threshold * m, classes) for m in caps]
        method.threshold = min([method.threshold, *reachable])
    sizes, notes = _batch_sizes(config, split, method)
    sources = (material.labelled, labels.to(device), material.unlabelled)
    settings: Any = {**sizes, "seed": config.seed, "chunk": config.chunk, "dtype": dtype}
    return Parts(
        **vars(material),
        truth=material.labels[torch.tensor(split.unlabelled, dtype=torch.long)].to(device),
        net=net,
        ema=copy.deepcopy(net).requires_grad_(False) if momentum else net,
        momentum=momentum,
        method=method,
        labelled_loss=labelled_loss,
        unlabelled_loss=unlabelled_loss,
        batches=Batches(method, *sources, material.views, material.statistics, **settings),
        size=material.image[-1],
        title=f"{config.method} + {config.penalty}" if config.penalty else config.method,
        notes=[*nets.messages, *notes, *warnings],
    )


def _make_split(config: Config, data: dataset.Dataset) -> Split:
    """Who is labelled; a ValueError where the config asks for what the data cannot give."""
    metric = selection_metric(config)
    if config.fold and config.validation:
        raise ValueError("--fold and --validation both hold pictures out; choose one.")
    more = {"validation": config.validation, "include_labelled": config.include_labelled}
    split = data.split(config.labels, config.split_seed, **more)
    if config.fold:
        own = data.labels[split.labelled].tolist()
        split = batches.leave_fold_out(split, own, config.fold, config.split_seed)
    if len(data.test_labels) == 0:
        raise ValueError(f"{config.dataset} has no test pictures to measure on.")
    if metric and metric not in METRICS:
        near = spec.nearest(metric, METRICS)
        raise ValueError(f"There is no metric {metric!r} to select by.{near}")
    if metric and config.protocol == "held-out" and not split.validation:
        raise ValueError("That validation share holds no pictures; raise --validation.")
    return split


def margin_warnings(config: Config, method: Method, loss: Loss) -> list[str]:
    """What a person should know before hours are spent."""
    classes = method.task.classes
    caps = [losses.ceiling(m, classes) for m in losses.margins(loss, classes)]
    return [
        f"Warning: margin caps confidence at {cap:.3f}, under the threshold "
        f"{method.threshold} of {config.method}: it will run out of pseudo-labels. Raise m, "
        f"lower the threshold, or set --cap-threshold 0.7."
        for cap in caps
        if cap < method.threshold and not config.cap_threshold
    ]


def build_losses(config: Config, method: Method) -> tuple[Loss, Loss]:
    if not method.u_views and (config.penalty or config.unlabelled_loss):
        raise ValueError(f"{config.method} uses no unlabelled pictures, so it takes no penalty.")
    labelled = config.labelled_loss or method.losses["labelled"]
    unlabelled = config.unlabelled_loss or method.losses["unlabelled"]
    unlabelled += f" + {config.penalty}" if config.penalty else ""
    counts = method.task.classes, method.task.labelled
    return losses.build(labelled, *counts), losses.build(unlabelled, *counts)


def _batch_sizes(config: Config, split: Split, method: Method) -> tuple[dict[str, int], list[str]]:
    """Batch sizes, cut to what there is and to a multiple of the ranks, and words on the cuts."""
    sizes, notes = {}, []
    for side, name, size in (
        ("labelled", "batch", config.batch),
        ("unlabelled", "unlabelled_batch", config.batch * config.ratio),
    ):
        there = len(getattr(split, side))
        cut = min(size, there) // ops.world_size() * ops.world_size()
        if cut == 0 and side == "unlabelled" and not method.u_views:
            cut = size = there  # nobody will look at them
        elif cut == 0:
            raise ValueError(f"{there} {side} pictures are too few to train on.")
        if cut < size:
            notes.append(f"There are {there} {side} pictures, so batches hold {cut}, not {size}.")
        sizes[name] = cut
    return sizes, notes


VERSIONS = ("calmatch", "torch", "torchvision", "timm", "numpy")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without a fixed one cuBLAS may choose other sums each time


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and settings of now that a result depends on besides its config."""
    cpu = _search_file("/proc/cpuinfo", r"model name\s*: (.+)") or platform.machine()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: package_version(name) for name in VERSIONS},
        "cpu": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "ranks": ops.world_size(),
        "deterministic": device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        facts |= {
            "driver": _search_file("/proc/driver/nvidia/version", r"(\d+\.\d[\d.]*)"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    return facts


def package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _search_file(path: str, pattern: str) -> str | None:
    """What a file of the kernel says, where there is one."""
    match = re.search(pattern, files.read_text(Path(path))) if Path(path).exists() else None
    return match[1].strip() if match else None


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, CUDA computes the same bits every time, or an operation that cannot says so."""
    if not wanted:
        yield
        return
    from torch._inductor import config as inductor

    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    before, own = (cudnn.benchmark, cuda.cudnn_sdp_enabled()), WORKSPACE in os.environ
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark = False  # it times algorithms, and time is never the same
    cuda.enable_cudnn_sdp(False)  # flash and memory-efficient attention have an exact backward
    by_rule = {"deterministic": True} if hasattr(inductor, "deterministic") else {}
    try:
        with inductor.patch(by_rule):  # kernels are chosen by rule, not by their speed of now
            yield
    except RuntimeError as error:
        match = re.search(r"(\w+) does not have a deterministic implementation", str(error))
        if not match:
            raise
        raise ValueError(
            f"{match[1]} cannot be computed the same way twice on this device; drop "
            f"--deterministic, or choose another --net or --method."
        ) from error
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        cudnn.benchmark = before[0]
        cuda.enable_cudnn_sdp(before[1])
        if not own:
            os.environ.pop(WORKSPACE, None)
