"""What a fit will do, decided by measuring: the network, the image size, the views, the steps."""

from __future__ import annotations

import dataclasses
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calmatch import augment, methods, nets, ops, spec
from calmatch.core import Method
from calmatch.data.batches import folds
from calmatch.data.folder import ImageFolder
from calmatch.data.images import Images, take_images
from calmatch.fit.portfolio import Extractor, time_image
from calmatch.options import FitOptions
from calmatch.training.config import Config, check_config
from calmatch.training.setup import build_parts
from calmatch.training.step import make_training

METHOD = "freematch"  # of a whole network
PENALTY = "margin(cap=0.98)"
MOST_TTA, CPU_TTA = 12, 5  # views of an image whose features are averaged
PRETRAINED = ("efficientnet_lite0", "timm.tf_efficientnet_lite0(pretrained=True)")
FEATURES_SHARE = 0.5  # of the minutes, for features; predicting at the end takes about as long
SMALLEST_SIZE = 96  # pixels, below which a pretrained network sees too little
HOLD_FROM = 200  # labels from which some are held out when the whole network learns
FEWEST, MOST = 60, 5000  # steps of a whole network
MOST_PRETRAINED = 2000  # after more, fold models with fewer labels mislead (research/log.md)
COMPILE_FROM = 2000  # steps from which compiling, a minute of a GPU, is expected to pay


def check_options(options: FitOptions) -> None:
    """Refuse early what cannot be meant."""
    if not options.minutes > 0:
        raise ValueError(f"--minutes must be more than 0, not {options.minutes:g}.")
    if options.size is not None and not 8 <= options.size <= 512:
        raise ValueError(f"--size must lie between 8 and 512 pixels, not {options.size}.")
    if options.hold is not None and not 0 < options.hold < 1:
        raise ValueError(f"--hold is a share of the labels between 0 and 1, not {options.hold:g}.")
    for name, least in (("steps", 1), ("batch", 1), ("seed", 0)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            raise ValueError(f"--{name} must be at least {least}, not {getattr(options, name)}.")
    kind = methods.find(options.method or METHOD)
    if options.freeze and kind.heads is not Method.heads:
        raise ValueError(f"{options.method} has layers of its own; use it with --no-frozen.")
    if options.freeze and kind.turns:
        raise ValueError(f"{options.method} turns pictures; use it with --no-frozen.")
    if options.freeze and options.hold is not None:
        raise ValueError("--hold is for a whole network; a frozen one is cross-validated.")
    if options.freeze is False and options.tta is not None:
        raise ValueError("--tta is for a frozen network; leave out --no-frozen or --tta.")
    if options.tta is not None and not 1 <= options.tta <= MOST_TTA:
        raise ValueError(f"--tta must lie between 1 and {MOST_TTA}, not {options.tta}.")
    check_config(Config(penalty=options.penalty or ""))


def choose_network(options: FitOptions, device: torch.device) -> tuple[str, bool, list[str]]:
    """The network's spec, whether it is pretrained, and what to say about it."""
    if options.start is not None:
        return options.net or "", False, []
    if options.net is not None:
        item = spec.parse(options.net)
        ready = item.name in nets.LITE and item.kwargs.get("pretrained", True)
        return options.net, bool(ready or item.kwargs.get("pretrained")), []
    reason = ""
    for text in PRETRAINED:
        try:
            nets.build(text, 2, 64)
            return text, True, []
        except ValueError as error:
            reason = reason or str(error)
    fresh = "wrn_28_2" if device.type == "cuda" else "small(width=16)"
    note = f"No pretrained network can be had: a small one ({fresh}) learns from scratch, which "
    return fresh, False, [f"{note}needs many more pictures. {reason}"]


def choose_penalty(asked: str | None) -> str:
    """What was asked for, or the default."""
    return PENALTY if asked is None else asked


def dataset_spec(
    options: FitOptions, size: int, hold: float, mean: Any, std: Any, most: int = 0
) -> str:
    """The spec of the images."""
    arguments: dict[str, Any] = {
        "root": str(options.pictures.resolve()),
        "labels": str(options.labels.resolve()) if options.labels else "",
        "size": size,
        "hold": hold,
        "most": most,
        "seed": options.seed,
        "mean": tuple(mean) if mean else None,
        "std": tuple(std) if std else None,
        "strict": options.strict,
    }
    return spec.write(spec.Spec("pictures", (), arguments))


def plan_features(
    options: FitOptions, extractor: Extractor, images: int, grey: bool
) -> dict[str, Any]:
    """The size and views of a frozen network that the minutes allow: its own size first."""
    own = extractor.size
    allowed = 60 * options.minutes * FEATURES_SHARE
    seconds = time_image(extractor) * images
    size = own
    if options.size is None and not extractor.fixed:
        while seconds * (size / own) ** 2 > allowed and size > SMALLEST_SIZE:
            size = max(SMALLEST_SIZE, size - 32)
    most = options.tta or (MOST_TTA if extractor.device.type == "cuda" else CPU_TTA)
    views = augment.tta_views(most, size, flip=not grey, larger=not extractor.fixed)
    while options.tta is None and len(views) > 1:
        if seconds * sum((view.size / own) ** 2 for view in views) <= allowed:
            break
        views.pop()
    shown = f"in {len(views)} views" if len(views) > 1 else "in one view"
    note = f"Pictures are shown to {extractor.net} at {size} px, {shown}."
    if grey:
        note += " They are grey, so none is mirrored: a mirrored letter is another one."
    if size < own:
        note += f" Its own size is {own} px; --minutes allows more."
    return {"views": [list(view) for view in views], "note": note}


@dataclass(frozen=True)
class FitPlan:
    """How a whole network will learn; saved, so that a fit can be continued."""

    net: str
    size: int
    mean: tuple[float, ...] | None  # of the network's own input; None: by the images
    std: tuple[float, ...] | None
    steps: int
    alone_steps: int  # on the labels alone
    batch: int
    ratio: int
    lr: float
    ema: float
    weak: str
    strong: str
    hold: float  # share of each class's labels that is held out; 0: fold models instead
    most: int = 0  # unlabelled images used; 0: all
    notes: tuple[str, ...] = ()


def read_plan(entries: Any, options: FitOptions, folder: Path) -> FitPlan:
    """The plan of an interrupted fit, every entry checked: a stranger may have written it.

    What would be imported is taken from the command line, or refused.
    """
    try:
        plan = FitPlan(**{**entries, "net": options.net, "notes": tuple(entries["notes"])})
        hints = typing.get_type_hints(FitPlan)
        fits = all(spec.fits(getattr(plan, name), hint) for name, hint in hints.items())
        fits = fits and 8 <= plan.size <= 1024 and all(isinstance(n, str) for n in plan.notes)
        for values in filter(None, (plan.mean, plan.std)):
            fits = fits and len(values) == 3 and all(0 <= float(v) <= 1 for v in values)
        if not fits:
            raise TypeError
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"Another version planned {folder}; choose another --out.") from error
    for text, asked in ((plan.weak, options.weak), (plan.strong, options.strong)):
        spec.from_file(text, folder, options.trust or text == asked)
    return plan


def make_plan(options: FitOptions, own: ImageFolder, images: Images, size: int) -> FitPlan:
    """Look at the images, measure a few steps, decide."""
    device = ops.pick_device(options.device)
    net = str(options.net)
    item = spec.parse(net)
    ready = bool(item.kwargs.get("pretrained", item.name in nets.LITE))
    shown = nets.input_of(nets.build(net, 2, size)) if ready else None
    weak, strong, notes = choose_views(options, size, is_grey(images))
    if options.tta is not None:
        notes.append("The whole network learns and predicts one view, so --tta does nothing.")
    many = len(own.known) >= HOLD_FROM and min(own.counts) >= 5
    plan = FitPlan(
        net=net,
        size=size,
        mean=shown.mean if shown else None,
        std=shown.std if shown else None,
        steps=options.steps or 10,
        alone_steps=options.steps or 10,
        batch=options.batch or (32 if ready else 20),
        ratio=2 if ready else 3,
        lr=1e-3 if ready else 6e-3,
        ema=0.999 if ready and device.type == "cuda" else 0.95,
        weak=weak,
        strong=strong,
        hold=(0.2 if many else 0.0) if options.hold is None else options.hold,
        notes=tuple(notes),
    )
    parts = [] if plan.hold else folds(own.known, 0)
    if parts:  # one size for all fold models, and one compiled network
        least = len(own.known) - max(map(len, parts))
        plan = dataclasses.replace(plan, batch=min(plan.batch, least))
    if options.steps:
        return plan
    high = MOST_PRETRAINED if parts and ready else MOST
    most = min(high, max(500, 40 * len(images) // (plan.batch * plan.ratio)))
    steps = []
    for alone, share in ((False, 0.5), (True, 0.15)):
        seconds = _time_step(whole_network_config(options, plan, alone))
        steps.append(int(share * 60 * options.minutes / (1 + len(parts)) / seconds))
    steps = [min(most, max(FEWEST, number)) for number in steps]
    return dataclasses.replace(plan, steps=steps[0], alone_steps=steps[1])


def whole_network_config(options: FitOptions, plan: FitPlan, alone: bool) -> Config:
    """The run in which the whole network learns, on all images or on the labels alone."""
    method, steps = options.method or METHOD, plan.alone_steps if alone else plan.steps
    semi = bool(methods.find(method).u_views) and not alone
    return Config(
        dataset=dataset_spec(options, plan.size, plan.hold, plan.mean, plan.std, plan.most),
        labels=0,
        method="supervised" if alone else methods.paced(method, steps),
        penalty=choose_penalty(options.penalty) if semi else "",
        net=plan.net,
        weak=plan.weak,
        strong=plan.strong,
        batch=plan.batch,
        ratio=plan.ratio,
        steps=steps,
        lr=plan.lr,
        ema=min(plan.ema, max(0.95, 1 - 10 / steps)),  # the start must not weigh on the end
        warmup=min(100, steps // 20),
        precision="bf16" if ops.pick_device(options.device).type == "cuda" else "fp32",
        compile=None if steps > COMPILE_FROM else False,
        seed=options.seed,
        device=options.device,
        log_every=max(1, steps // 20),
    )


def is_grey(images: Images) -> bool:
    """Whether the images have no colour: scans, digits, X-rays."""
    step = max(1, len(images) // 200)
    some = take_images(images, torch.arange(0, len(images), step)).int()
    spread = (some.amax(1) - some.amin(1)).flatten(1).float().mean(1)
    return bool((spread < 2).float().mean() > 0.95)


def choose_views(options: FitOptions, size: int, colourless: bool) -> tuple[str, str, list[str]]:
    """Weak and strong views; grey images are not mirrored, because letters are grey."""
    pad = max(1, size // 8)
    weak = options.weak or f"flip|crop({pad})"
    strong = options.strong or f"flip|crop({pad})|randaugment(3)|cutout(0.5)"
    if not colourless or options.weak or options.strong:
        return weak, strong, []
    return (
        f"crop({max(1, size // 16)})",
        "rotate(30)|translate(0.2)|brightness|contrast|cutout(0.5)",
        [
            "The pictures are grey, so they are not mirrored (a mirrored letter is another one); "
            '--weak and --strong choose other views, "flip|crop(4)" for example.'
        ],
    )


def _time_step(config: Config) -> float:
    """Seconds of a training step, augmentation included, the first ones left out."""
    few = config.replace(steps=12, chunk=4, compile=False)
    with torch.random.fork_rng():
        run = make_training(few, build_parts(few))
        for _ in range(4):
            run.advance()
        began = time.perf_counter()
        for _ in range(8):
            run.advance()
    return (time.perf_counter() - began) / 8
