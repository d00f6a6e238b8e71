"""Look at the pictures, measure a few steps, decide: from a wish to a plan, once."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import torch

from calmatch import examples, features, heads, methods, nets, spec, trainer
from calmatch.augment import looks
from calmatch.config import LOOKS, Config
from calmatch.core import Method
from calmatch.data.files import Images, taken
from calmatch.data.pictures import Pictures
from calmatch.data.split import FOLDS, folds
from calmatch.plan import Plan, Wish, body, head
from calmatch.setup import Parts, pick_device, prepare

PRETRAINED = ("efficientnet_lite0", "timm.tf_efficientnet_lite0(pretrained=True)")
SMALLEST = 48  # pixels: below, networks pretrained on photographs see little
HOLD = 200  # labels from which some are held out when the whole network learns
FEW = 3  # labels of a class below which a pretrained network stays frozen (docs/log.md)
STEPS = {"head": (100, 500), "whole": (60, 5000)}  # fewest and most
SHORT = 2000  # steps after which sisters with fewer labels still judged about fairly, EuroSAT-40


def choose(wish: Wish, found: Pictures, images: Images, side: int, size: int) -> Plan:
    """Look at the pictures, measure a few steps, decide.

    Args:
        wish: what was asked for.
        found: the pictures.
        images: decoded at `size`.
        side: the median of their shorter sides.
        size: pixels of a side in training.
    """
    device = pick_device(wish.device)
    net, ready, notes = network(wish, side, device)
    few = min(found.counts) < FEW
    few &= methods.find(wish.method).heads is Method.heads  # others' layers want all of it to learn
    still = ready and (few or device.type == "cpu")
    if still and device.type != "cpu" and wish.frozen is None:
        notes.append(
            f"A class has fewer than {FEW} labels, so the pretrained network stays frozen; "
            "--no-frozen trains all of it."
        )
    whole = not (still if wish.frozen is None else wish.frozen)
    if not whole and not ready:
        notes.append("The frozen network is not pretrained, so its features know nothing.")
    if whole and wish.looks is not None:
        notes.append(
            "The whole network learns, which has one look at a picture, so --looks does nothing."
        )
    weak, strong, said = views(wish, size, grey(images))
    many = len(found.known) >= HOLD and min(found.counts) >= 5
    # sisters that judge a whole network are trained side by side on CUDA; others have no time
    own = 0.2 if many else 0.0 if device.type == "cuda" else 0.5
    hold = own if wish.hold is None else wish.hold
    plan = Plan(
        net=net,
        size=size,
        imagenet=ready,
        whole=whole,
        views=2,
        head_steps=wish.steps or (300 if whole else STEPS["head"][1]),
        steps=wish.steps or 10,
        alone_steps=wish.steps or 10,
        batch=wish.batch or (32 if ready else 20),
        ratio=2 if ready else 3,
        lr=1e-3 if ready else 6e-3,
        ema=0.999 if ready and device.type == "cuda" else 0.95,
        weak=weak,
        strong=strong,
        hold=hold if whole or wish.hold is not None else 0.0,
        holdout=(whole and many) or wish.hold is not None,
        most=0,
        looks=1 if whole else wish.looks or LOOKS,
        notes=(*notes, *said),
    )
    return (_of_whole if whole else _of_head)(wish, plan, found, images)


def network(wish: Wish, side: int, device: torch.device) -> tuple[str, bool, list[str]]:
    """The network's spec, whether it is pretrained, and what to say about it."""
    if wish.net is not None:
        item = spec.parse(wish.net)
        ready = item.name in nets.timm_net.LITE and item.kwargs.get("pretrained", True)
        return wish.net, bool(ready or item.kwargs.get("pretrained")), []
    fresh = "wrn_28_2" if device.type == "cuda" else "small(width=16)"
    if side < SMALLEST:
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


def grey(images: Images) -> bool:
    """Whether the pictures have no colour: scans, digits, X-rays."""
    step = max(1, len(images) // 200)
    some = taken(images, torch.arange(0, len(images), step)).int()
    spread = (some.amax(1) - some.amin(1)).flatten(1).float().mean(1)
    return bool((spread < 2).float().mean() > 0.95)


def views(wish: Wish, size: int, colourless: bool) -> tuple[str, str, list[str]]:
    """Weak and strong views; grey pictures are not mirrored, because letters are grey."""
    pad = max(1, size // 8)
    notes = []
    weak = wish.weak or f"flip|crop({pad})"
    strong = wish.strong or f"flip|crop({pad})|randaugment(3)|cutout(0.5)"
    if colourless and not (wish.weak or wish.strong):
        weak = f"crop({max(1, size // 16)})"
        strong = "rotate(30)|translate(0.2)|brightness|contrast|cutout(0.5)"
        notes.append(
            "The pictures are grey, so they are not mirrored (a mirrored letter is another one); "
            '--weak and --strong choose other views, "flip|crop(4)" for example.'
        )
    return weak, strong, notes


def _of_head(wish: Wish, plan: Plan, found: Pictures, images: Images) -> Plan:
    """Views and steps of a frozen network that the minutes allow: half for the features."""
    seconds = 60 * wish.minutes
    view, step = _head_times(wish, plan, images)
    spare = found.labels.count(-1)
    at = len(looks.chosen(plan.looks, plan.weak))
    shown = min(spare, examples.POOL)  # predicted for the page at the end
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
        head_steps=wish.steps or steps,
        most=most if most < spare else 0,
        notes=(*plan.notes, *notes),
    )


def _head_times(wish: Wish, plan: Plan, images: Images) -> tuple[float, float]:
    """Seconds of one view of one picture, and of one step of a head, measured."""
    settings = head(wish, plan, False, plan.net, 1280)
    parts = prepare(settings)
    view = features.timed(settings, parts, taken(images, torch.arange(min(64, len(images)))))
    width = nets.feature_size(parts.net.body, plan.size)
    store = heads.Store([torch.randn(512, 5, width).half().to(parts.device)], 2)
    rows = list(range(min(64, len(parts.split.labelled))))
    labels = torch.full((512,), -1)
    labels[rows] = torch.tensor(rows) % len(parts.classes)
    statistics = ([0.0] * width, [1 / 255] * width)
    made = heads.Frozen(settings, parts, store, labels, store, statistics)
    split = parts.split._replace(labelled=rows, unlabelled=list(range(512)))
    return view, _seconds_a_step(settings, functools.partial(made.parts, split))


def _of_whole(wish: Wish, plan: Plan, found: Pictures, images: Images) -> Plan:
    """Steps of a whole network that the minutes allow: about forty passes at most."""
    parts = [] if plan.hold else folds(found.known, 0)
    if parts:  # one size for all sisters, and one compiled network
        least = len(found.known) - max(map(len, parts))
        plan = dataclasses.replace(plan, batch=min(plan.batch, least))
    if wish.steps:
        return plan
    runs = 1 + len(parts)
    low, high = STEPS["whole"]
    high = SHORT if parts and plan.imagenet else high  # docs/log.md has the numbers
    most = min(high, max(500, 40 * len(images) // (plan.batch * plan.ratio)))
    steps = []
    for alone, share in ((False, 0.5), (True, 0.15)):
        settings = body(wish, plan, alone)
        step = _seconds_a_step(settings, prepare)
        steps.append(int(min(most, max(low, share * 60 * wish.minutes / runs / step))))
    return dataclasses.replace(plan, steps=steps[0], alone_steps=steps[1])


def _seconds_a_step(settings: Config, make: Callable[[Config], Parts]) -> float:
    """Seconds of a training step, augmentation included, the first ones left out."""
    times: list[float] = []
    few = settings.replace(steps=12, chunk=4, compile=False)
    trainer.learn(few, make(few), lambda step: times.append(time.perf_counter()))
    return (times[-1] - times[3]) / 8
