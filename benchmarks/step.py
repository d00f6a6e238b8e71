"""Time of a training step: end to end, method by method, several runs at once, other networks.

On a CUDA device everything below; on a CPU the share of the loop's own overhead in a demo step.
Prints a table and writes JSON with hardware and versions.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from augment import pillow_operation
from PIL import Image, ImageOps

from calmatch.augment import RANGES
from calmatch.core import Objective
from calmatch.data.batches import Batches
from calmatch.training import loop, recipes
from calmatch.training.config import Config
from calmatch.training.cuda_graph import CapturedStep
from calmatch.training.loop import train, train_first_steps
from calmatch.training.setup import build_parts, describe_environment
from calmatch.training.step import make_training

MARGIN = "margin(m=10)"
USB_MS = 61.2  # USB's FixMatch on one H200, its own configuration (fp32, four workers)


def vit_s(method: str = "fixmatch", **changes: Any) -> Config:
    """The paper's run, on noise of the same size: 10,000 test pictures."""
    fake = "synthetic(classes=10, per_class=4000, size=32)"
    config = recipes.RECIPES["cifar100_200"](method)
    config = config.replace(dataset=fake, labels=40, net="vit_small_patch2_32", precision="bf16")
    return config.replace(penalty=MARGIN, layer_decay=0.5, **changes)


def vit_b(**changes: Any) -> Config:
    fake = "synthetic(classes=10, per_class=300, size=96)"
    config = recipes.RECIPES["stl10_40"]("fixmatch", dataset=fake, net="vit_base_patch16_96")
    return config.replace(precision="bf16", penalty=MARGIN, chunk=64, **changes)


def wrn(**changes: Any) -> Config:
    fake = "synthetic(classes=100, per_class=100, size=32)"
    config = recipes.RECIPES["cifar100_lt_wrn_10_10"]("fixmatch", dataset=fake, labels=400)
    return config.replace(precision="bf16", penalty=MARGIN, **changes)


def lite0(**changes: Any) -> Config:
    """A whole network as `fit` trains it: 32 labelled, 64 weak and 64 strong pictures of 160 px."""
    weak = "flip|crop(20)"
    config = vit_s().replace(
        weak=weak, strong=f"{weak}|randaugment(3)|cutout(0.5)", layer_decay=1.0
    )
    config = config.replace(dataset="synthetic(classes=10, per_class=100, size=160)", chunk=16)
    config = config.replace(net="efficientnet_lite0(pretrained=False)", batch=32, ratio=2)
    return config.replace(**changes)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(act: Callable[[], object], steps: int) -> float:
    """Milliseconds a call."""
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        act()
    wait()
    return 1e3 * (time.perf_counter() - start) / steps


def captured(*configs: Config, steps: int = 256) -> tuple[float, float]:
    """Milliseconds a step of all runs at once, augmentation included, and seconds to the first."""
    start = time.perf_counter()
    engine = CapturedStep([make_training(config, build_parts(config)) for config in configs])
    engine.advance()
    wait()
    first = time.perf_counter() - start
    assert not engine.failed
    clock(engine.advance, configs[0].chunk)
    ms = clock(engine.advance, max(steps, configs[0].chunk))
    return ms, first


def end_to_end(steps: int) -> dict[str, float]:
    """The first steps of the whole run as `calmatch train` makes them, evaluation and all."""
    config = vit_s(device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        train_first_steps(config, Path(folder) / "run", steps, quiet=True)
        lines = [json.loads(line) for line in (Path(folder) / "run/times.jsonl").open()]
    every = config.eval_every
    marks = {line["step"]: line["unix"] for line in lines}  # an evaluation is a step's last line
    first = marks[config.log_every] - began
    ms = 1e3 * (marks[steps] - marks[every]) / (steps - every)  # the first one compiles
    plain = 1e3 * (marks[every - config.log_every] - marks[config.log_every])
    plain /= every - 2 * config.log_every
    return {"ms": ms, "between evaluations": plain, "first": first - config.log_every * plain / 1e3}


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, ...]]):
    """Views made by Pillow, one picture at a time, as the field's loaders do."""

    def __init__(self, images: torch.Tensor, views: int, pad: int) -> None:
        self.images, self.views, self.pad = images.permute(0, 2, 3, 1).numpy(), views, pad

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
        picture = Image.fromarray(self.images[place % len(self.images)])
        return tuple(self._view(picture, view > 0) for view in range(self.views))

    def _view(self, picture: Image.Image, strong: bool) -> torch.Tensor:
        size, pad = picture.width, self.pad
        padded = np.pad(np.asarray(picture), ((pad, pad), (pad, pad), (0, 0)), mode="reflect")
        y, x = random.randint(0, 2 * pad), random.randint(0, 2 * pad)
        picture = Image.fromarray(padded[y : y + size, x : x + size])
        if random.random() < 0.5:
            picture = ImageOps.mirror(picture)
        if strong:
            for name in random.choices(list(RANGES), k=3):
                picture = pillow_operation(name, picture, random.uniform(*RANGES[name]))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()
        return (pixels / 255 - 0.5) / 0.5


def loader(images: torch.Tensor, views: int, batch: int, pad: int, workers: int) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(
        Pictures(images, views, pad), batch, num_workers=workers, pin_memory=True
    )
    return iter(loader)


def plain(config: Config, workers: int, steps: int = 30) -> float:
    """An eager float32 step fed by Pillow workers, in milliseconds."""
    config = config.replace(precision="fp32", engine="eager", compile=False)
    run = make_training(config, build_parts(config))
    run.parts.net.to(memory_format=torch.contiguous_format)
    batches, pad = run.parts.batches, config.weak.count("crop(12)") * 8 + 4
    images = torch.randint(0, 256, (512, 3, run.parts.size, run.parts.size), dtype=torch.uint8)
    x = loader(images, 1, config.batch, pad, 1)
    u = loader(images, 2, config.batch * config.ratio, pad, workers - 1)
    template = batches[0]

    def step() -> None:
        (labelled,), unlabelled = next(x), next(u)
        sent = [view.cuda(non_blocking=True) for view in (labelled, *unlabelled)]
        run.advance(template._replace(x=(sent[0],), u=tuple(sent[1:])))

    clock(step, 10)
    return clock(step, steps)


@contextmanager
def counted(thing: Any, name: str, total: list[float]) -> Iterator[None]:
    """Add the time spent in thing.name to the total."""
    before = getattr(thing, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return before(*args, **kwargs)
        finally:
            total[0] += time.perf_counter() - start

    setattr(thing, name, timed)
    try:
        yield
    finally:
        setattr(thing, name, before)


def overhead(steps: int = 200) -> dict[str, float]:
    """The demo's step on a CPU: how much of it is neither network, augmentation nor optimizer."""
    config = recipes.RECIPES["digits_40"]("fixmatch", penalty=MARGIN, device="cpu", steps=steps)
    config = config.replace(eval_every=0, checkpoint_every=10**9)
    arithmetic, aside = [0.0], [0.0]
    with (
        tempfile.TemporaryDirectory() as folder,
        counted(Objective, "forward", arithmetic),
        counted(torch.Tensor, "backward", arithmetic),
        counted(torch.optim.AdamW, "step", arithmetic),
        counted(Batches, "_make", arithmetic),
        counted(loop, "_begin", aside),
        counted(loop, "_evaluate", aside),
        counted(loop, "_save", aside),
        counted(loop, "finish", aside),
    ):
        start = time.perf_counter()
        train(config, Path(folder) / "run", quiet=True)
        whole = time.perf_counter() - start - aside[0]
    return {
        "ms": 1e3 * whole / steps,
        "arithmetic": 1e3 * arithmetic[0] / steps,
        "share": 1 - arithmetic[0] / whole,
    }


def on_cuda(options: argparse.Namespace, say: Callable[..., None]) -> None:
    if "end" in options.parts:
        times = end_to_end(options.evaluations * 2048 + 2048)
        say("ViT-S/2 FixMatch + margin, end to end", times["ms"], times)
    base = None
    for method in options.methods if "methods" in options.parts else []:
        ms, first = captured(vit_s(method, device="cuda"))
        base = base or ms
        say(f"ViT-S/2 {method} + margin, step", ms, {"ratio": ms / base, "first": first})
    for runs in options.together if "together" in options.parts else []:
        ms, _ = captured(*(vit_s(seed=seed, device="cuda") for seed in range(runs)))
        say(f"ViT-S/2 {runs} runs together, each", ms / runs, {"all": ms})
    for name, config in NETWORKS.items():
        if name in options.parts:
            ms, first = captured(config(device="cuda"))
            slow = plain(config(device="cuda"), options.workers)
            say(f"{name}, step", ms, {"plain": slow, "ratio": slow / ms, "first": first})


NETWORKS = {"vit_s": vit_s, "vit_b": vit_b, "wrn": wrn, "lite0": lite0}
METHODS = ["fixmatch", "flexmatch", "freematch", "softmatch", "simmatch"]
PARTS = ["cpu", "end", "methods", "together", *NETWORKS]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, help="JSON file; by default in benchmarks/results/")
    options.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    options.add_argument("--methods", nargs="*", default=METHODS)
    options.add_argument("--evaluations", type=int, default=3)
    options.add_argument("--together", type=int, nargs="*", default=[3, 6])
    options.add_argument("--workers", type=int, default=8, help="of the plain loop")
    chosen = options.parse_args()
    cuda = torch.cuda.is_available()
    rows: list[dict[str, Any]] = []

    def say(name: str, ms: float, more: dict[str, float]) -> None:
        rows.append({"what": name, "ms": ms, **more})
        extra = "  ".join(f"{key} {value:.3g}" for key, value in more.items() if key != "ms")
        print(f"{name:<44} {ms:8.2f} ms   {extra}", flush=True)

    if "cpu" in chosen.parts:
        times = overhead()
        say("demo step on the CPU, loop overhead share", times["ms"], times)
    if cuda:
        on_cuda(chosen, say)
        print(f"USB's FixMatch on one H200 (measured before, same data size): {USB_MS} ms")
    device = torch.device("cuda" if cuda else "cpu")
    record = {"date": str(date.today()), "environment": describe_environment(device), "rows": rows}
    record["environment"]["processor"] = platform.processor() or platform.machine()
    kind = "cuda" if cuda else "cpu"
    path = chosen.out or Path(__file__).parent / f"results/step-{kind}-{date.today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
