"""The options of `calmatch fit`, the plan made of them by measuring, and the runs a plan means."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from calmatch import augment, methods, nets, spec
from calmatch.core import Method
from calmatch.data.batches import FOLDS, folds
from calmatch.data.folder import ImageFolder
from calmatch.data.images import Images, take_images
from calmatch.ops import pick_device
from calmatch.options import FitOptions
from calmatch.runs import SAMPLED
from calmatch.training.config import MOST_TTA, Config, check_config
from calmatch.training.frozen import FeatureStore, FrozenRun, time_view
from calmatch.training.loop import train_in_memory
from calmatch.training.setup import Parts, build_parts

METHOD = "freematch"
PENALTY = "margin(cap=0.98)"
MILD_PENALTY = "margin(cap=0.995)"  # with test-time augmentation, which lowers confidence too


COMPILE_FROM = 2000  # steps up to which compiling, a minute of a card, is not expected to pay


@dataclass(frozen=True)
class FitPlan:
    """What will be done; saved, so that a run can be continued and repeated."""

    net: str
    size: int
    imagenet: bool  # normalise as ImageNet networks want it
    whole: bool  # the whole network learns first; False: it is frozen as it comes
    views: int  # weak and as many strong views of each picture, for the head
    head_steps: int
    steps: int  # of the whole network
    alone_steps: int  # of the whole network on the labels alone
    batch: int
    ratio: int
    lr: float
    ema: float
    weak: str
    strong: str
    hold: float  # share of each class's labels that the whole network does not see
    holdout: bool  # the head does not see them either
    most: int  # unlabelled pictures used; 0: all
    looks: int = 1  # at a picture that is predicted
    notes: tuple[str, ...] = ()


def check_options(options: FitOptions) -> None:
    """Refuse early what cannot be meant."""
    if not options.minutes > 0:
        raise ValueError(f"--minutes must be more than 0, not {options.minutes:g}.")
    if options.size is not None and not 8 <= options.size <= 512:
        raise ValueError(f"--size must lie between 8 and 512 pixels, not {options.size}.")
    if options.hold is not None and not 0 < options.hold < 1:
        raise ValueError(f"--hold is a share of the labels between 0 and 1, not {options.hold:g}.")
    kind = methods.find(options.method)
    if options.freeze and kind.heads is not Method.heads:
        raise ValueError(f"{options.method} has layers of its own; use it with --no-frozen.")
    if options.freeze is False and options.looks is not None:
        raise ValueError("--looks are for a frozen network; leave out --no-frozen or --looks.")
    at = 1 if options.looks is None else options.looks
    asked = Config(
        penalty=options.penalty or "", steps=options.steps or 1, batch=options.batch or 1
    )
    check_config(asked.replace(looks=at, frozen=1))


def dataset_spec(options: FitOptions, plan: FitPlan, hold: float) -> str:
    """The spec of the pictures."""
    arguments: dict[str, Any] = {
        "root": str(options.pictures.resolve()),
        "labels": str(options.labels.resolve()) if options.labels else "",
        "size": plan.size,
        "hold": hold,
        "most": plan.most,
        "seed": options.seed,
        "imagenet": plan.imagenet,
        "strict": options.strict,
    }
    return spec.write(spec.Spec("pictures", (), arguments))


def choose_penalty(asked: str | None, looks: int = 1) -> str:
    """What was asked for, or what suits so many looks."""
    return (MILD_PENALTY if looks > 1 else PENALTY) if asked is None else asked


def _base_config(
    options: FitOptions, plan: FitPlan, alone: bool, steps: int, hold: float
) -> Config:
    semi = bool(methods.find(options.method).u_views) and not alone
    return Config(
        dataset=dataset_spec(options, plan, hold),
        labels=0,
        method="supervised" if alone else methods.paced(options.method, steps),
        penalty=choose_penalty(options.penalty, plan.looks) if semi else "",
        net=plan.net,
        weak=plan.weak,
        strong=plan.strong,
        batch=plan.batch,
        steps=steps,
        seed=options.seed,
        device=options.device,
        log_every=max(1, steps // 20),
    )


def whole_network_config(options: FitOptions, plan: FitPlan, alone: bool) -> Config:
    """The run in which the whole network learns, on all pictures or on the labels alone."""
    steps = plan.alone_steps if alone else plan.steps
    return _base_config(options, plan, alone, steps, plan.hold).replace(
        ratio=plan.ratio,
        lr=plan.lr,
        ema=min(plan.ema, max(0.95, 1 - 10 / steps)),  # the start must not weigh on the end
        warmup=min(100, steps // 20),
        precision="bf16" if pick_device(options.device).type == "cuda" else "fp32",
        eval_every=max(1, steps // 5) if plan.hold else 0,  # nothing is held out to look at
        compile=None if steps > COMPILE_FROM else False,
    )


def head_config(options: FitOptions, plan: FitPlan, alone: bool, net: str, features: int) -> Config:
    """The run in which the last layer learns, on features of the network as it is then."""
    hold = plan.hold if plan.holdout else 0.0
    return _base_config(options, plan, alone, plan.head_steps, hold).replace(
        net=net,
        frozen=plan.views,
        looks=plan.looks,
        ratio=7,
        # logits reach the same size whatever the number of steps and features
        lr=round(min(0.05, 0.5 / plan.head_steps * (1280 / features) ** 0.5), 6),
        ema=0.99,
    )


PRETRAINED = ("efficientnet_lite0", "timm.tf_efficientnet_lite0(pretrained=True)")
SMALLEST_PRETRAINED = 48  # pixels: below, networks pretrained on photographs see little
HOLD_FROM = 200  # labels from which some are held out when the whole network learns
FROZEN_BELOW = 3  # labels of a class below which a pretrained network stays frozen (docs/log.md)
STEPS = {"head": (100, 500), "whole": (60, 5000)}  # fewest and most
MOST_WHOLE_STEPS = (
    2000  # steps after which sisters with fewer labels still judged about fairly, EuroSAT-40
)


def make_plan(
    options: FitOptions, found: ImageFolder, images: Images, side: int, size: int
) -> FitPlan:
    """Look at the pictures, measure a few steps, decide.

    Args:
        options: what was asked for.
        found: the pictures.
        images: decoded at `size`.
        side: the median of their shorter sides.
        size: pixels of a side in training.
    """
    device = pick_device(options.device)
    net, ready, notes = choose_network(options, side, device)
    few = min(found.counts) < FROZEN_BELOW
    few &= (
        methods.find(options.method).heads is Method.heads
    )  # others' layers want all of it to learn
    still = ready and (few or device.type == "cpu")
    if still and device.type != "cpu" and options.freeze is None:
        notes.append(
            f"A class has fewer than {FROZEN_BELOW} labels, so the pretrained network stays frozen; "
            "--no-frozen trains all of it."
        )
    whole = not (still if options.freeze is None else options.freeze)
    if not whole and not ready:
        notes.append("The frozen network is not pretrained, so its features know nothing.")
    if whole and options.looks is not None:
        notes.append(
            "The whole network learns, which has one look at a picture, so --looks does nothing."
        )
    weak, strong, said = choose_views(options, size, is_grey(images))
    many = len(found.known) >= HOLD_FROM and min(found.counts) >= 5
    # sisters that judge a whole network are trained side by side on CUDA; others have no time
    own = 0.2 if many else 0.0 if device.type == "cuda" else 0.5
    hold = own if options.hold is None else options.hold
    plan = FitPlan(
        net=net,
        size=size,
        imagenet=ready,
        whole=whole,
        views=2,
        head_steps=options.steps or (300 if whole else STEPS["head"][1]),
        steps=options.steps or 10,
        alone_steps=options.steps or 10,
        batch=options.batch or (32 if ready else 20),
        ratio=2 if ready else 3,
        lr=1e-3 if ready else 6e-3,
        ema=0.999 if ready and device.type == "cuda" else 0.95,
        weak=weak,
        strong=strong,
        hold=hold if whole or options.hold is not None else 0.0,
        holdout=(whole and many) or options.hold is not None,
        most=0,
        looks=1 if whole else options.looks or MOST_TTA,
        notes=(*notes, *said),
    )
    return (_plan_whole if whole else _plan_head)(options, plan, found, images)


def choose_network(
    options: FitOptions, side: int, device: torch.device
) -> tuple[str, bool, list[str]]:
    """The network's spec, whether it is pretrained, and what to say about it."""
    if options.net is not None:
        item = spec.parse(options.net)
        ready = item.name in nets.LITE and item.kwargs.get("pretrained", True)
        return options.net, bool(ready or item.kwargs.get("pretrained")), []
    fresh = "wrn_28_2" if device.type == "cuda" else "small(width=16)"
    if side < SMALLEST_PRETRAINED:
        return (
            fresh,
            False,
            [
                f"Pictures of {side} pixels are too small for a pretrained network: a small one "
                f"({fresh}) learns from scratch."
            ],
        )
    for text in PRETRAINED:
        try:
            nets.build(text, 2, 64)
            return text, True, []
        except ValueError as error:
            reason = str(error)
    return (
        fresh,
        False,
        [
            f"No pretrained network can be had: a small one ({fresh}) learns from scratch, which "
            f"needs many more pictures. {reason}"
        ],
    )


def is_grey(images: Images) -> bool:
    """Whether the pictures have no colour: scans, digits, X-rays."""
    step = max(1, len(images) // 200)
    some = take_images(images, torch.arange(0, len(images), step)).int()
    spread = (some.amax(1) - some.amin(1)).flatten(1).float().mean(1)
    return bool((spread < 2).float().mean() > 0.95)


def choose_views(options: FitOptions, size: int, colourless: bool) -> tuple[str, str, list[str]]:
    """Weak and strong views; grey pictures are not mirrored, because letters are grey."""
    pad = max(1, size // 8)
    notes = []
    weak = options.weak or f"flip|crop({pad})"
    strong = options.strong or f"flip|crop({pad})|randaugment(3)|cutout(0.5)"
    if colourless and not (options.weak or options.strong):
        weak = f"crop({max(1, size // 16)})"
        strong = "rotate(30)|translate(0.2)|brightness|contrast|cutout(0.5)"
        notes.append(
            "The pictures are grey, so they are not mirrored (a mirrored letter is another one); "
            '--weak and --strong choose other views, "flip|crop(4)" for example.'
        )
    return weak, strong, notes


def _plan_head(options: FitOptions, plan: FitPlan, found: ImageFolder, images: Images) -> FitPlan:
    """Views and steps of a frozen network that the minutes allow: half for the features."""
    seconds = 60 * options.minutes
    view, step = _time_head(options, plan, images)
    spare = found.labels.count(-1)
    at = len(augment.tta_views(plan.looks, plan.weak))
    shown = min(spare, SAMPLED)  # predicted for the page at the end
    allowed = max(0.0, seconds / 2 / view - at * shown)  # views in all
    most = max(1000, int(allowed / (4 + at)) - (len(images) - spare))
    notes = []
    if most < spare:
        notes.append(
            f"Of {spare:,} unlabelled pictures {most:,} are learned from; --minutes allows more."
        )
    number = len(images) - max(0, spare - most)
    low, high = STEPS["head"]
    steps = int(min(high, max(low, 0.4 * seconds / (2 * (FOLDS + 1)) / step)))
    return dataclasses.replace(
        plan,
        views=max(2, min(6, int((allowed / number - at) / 2))),
        head_steps=options.steps or steps,
        most=most if most < spare else 0,
        notes=(*plan.notes, *notes),
    )


def _time_head(options: FitOptions, plan: FitPlan, images: Images) -> tuple[float, float]:
    """Seconds of one view of one picture, and of one step of a head, measured."""
    settings = head_config(options, plan, False, plan.net, 1280)
    parts = build_parts(settings)
    view = time_view(settings, parts, take_images(images, torch.arange(min(64, len(images)))))
    width = nets.feature_size(parts.net.body, plan.size)
    store = FeatureStore([torch.randn(512, 5, width).half().to(parts.device)], 2)
    rows = list(range(min(64, len(parts.split.labelled))))
    labels = torch.full((512,), -1)
    labels[rows] = torch.tensor(rows) % len(parts.classes)
    statistics = ([0.0] * width, [1 / 255] * width)
    made = FrozenRun(settings, parts, store, labels, store, statistics)
    split = parts.split._replace(labelled=rows, unlabelled=list(range(512)))
    return view, _time_step(settings, functools.partial(made.parts, split))


def _plan_whole(options: FitOptions, plan: FitPlan, found: ImageFolder, images: Images) -> FitPlan:
    """Steps of a whole network that the minutes allow: about forty passes at most."""
    parts = [] if plan.hold else folds(found.known, 0)
    if parts:  # one size for all sisters, and one compiled network
        least = len(found.known) - max(map(len, parts))
        plan = dataclasses.replace(plan, batch=min(plan.batch, least))
    if options.steps:
        return plan
    runs = 1 + len(parts)
    low, high = STEPS["whole"]
    high = MOST_WHOLE_STEPS if parts and plan.imagenet else high  # docs/log.md has the numbers
    most = min(high, max(500, 40 * len(images) // (plan.batch * plan.ratio)))
    steps = []
    for alone, share in ((False, 0.5), (True, 0.15)):
        settings = whole_network_config(options, plan, alone)
        step = _time_step(settings, build_parts)
        steps.append(int(min(most, max(low, share * 60 * options.minutes / runs / step))))
    return dataclasses.replace(plan, steps=steps[0], alone_steps=steps[1])


def _time_step(settings: Config, make: Callable[[Config], Parts]) -> float:
    """Seconds of a training step, augmentation included, the first ones left out."""
    times: list[float] = []
    few = settings.replace(steps=12, chunk=4, compile=False)
    train_in_memory(few, make(few), lambda step: times.append(time.perf_counter()))
    return (times[-1] - times[3]) / 8
