"""What a fit will do, decided by measuring: the network, the image size, the views, the steps."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from calmatch import augment, files, methods, nets, ops, spec
from calmatch.core import Method
from calmatch.data.batches import folds
from calmatch.data.folder import ImageFolder
from calmatch.data.images import ImageFiles, Images, take_images
from calmatch.fit import portfolio
from calmatch.fit.portfolio import Extractor, time_call, time_candidates, time_image
from calmatch.options import DINO, HUB, FitOptions, hub_answers, weights_here
from calmatch.predict import count_workers
from calmatch.training.config import Config, check_config
from calmatch.training.step import new_training

METHOD = "freematch"  # of a whole network
PENALTY = "margin(cap=0.98)"
MOST_TTA, CPU_TTA, SEVERAL_TTA = 12, 5, 3  # views of an image whose features are averaged
STRONG = f"{DINO}(pretrained=True, img_size=224)"
SEVERAL, ONE = "efficientnet_lite012", "efficientnet_lite0"
PRETRAINED = (SEVERAL, ONE, "timm.tf_efficientnet_lite0(pretrained=True)")
WRITING = 5.0  # seconds for calibration, files and the page
FEWEST_SEEN = 200  # unlabelled images that are never dropped
MOST_LOOKED_AT = 20_000  # unlabelled images; more would settle nothing, and take memory
SMALLEST_SIZE = 96  # pixels, below which a pretrained network sees too little
HOLD_FROM = 200  # labels from which some are held out when the whole network learns
FEWEST, MOST = 60, 5000  # steps of a whole network
MOST_PRETRAINED = 2000  # after more, fold models with fewer labels mislead (research/log.md)
COMPILE_FROM = 2000  # steps from which compiling, a minute of a GPU, is expected to pay


class FitJob(NamedTuple):
    """What is asked, of which images, by which network."""

    options: FitOptions
    folder: Path
    listed: ImageFolder
    net: str
    notes: tuple[str, ...]
    earlier: Mapping[str, Any] | None  # the plan of an interrupted fit
    digest: str  # of images and labels
    began: float  # by time.monotonic

    def save(self, plan: Any) -> None:
        """What is decided, so that the fit can be continued."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"options": self.options.dump(), "plan": plan, "digest": self.digest}
        files.write_json(self.folder / "fit.json", content)

    def seconds_left(self) -> float:
        """Of the minutes."""
        return 60 * self.options.minutes - (time.monotonic() - self.began)


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
    methods.find(options.method or METHOD)
    if options.start is not None and options.net is not None:
        raise ValueError("--from brings a network of its own; leave out --net.")
    if options.address and options.engine != "ray":
        raise ValueError("--address is of a Ray cluster; add --engine ray.")
    if options.freeze is False and options.tta is not None:
        raise ValueError("--tta is for a frozen network; leave out --no-frozen or --tta.")
    if options.tta is not None and not 1 <= options.tta <= MOST_TTA:
        raise ValueError(f"--tta must lie between 1 and {MOST_TTA}, not {options.tta}.")
    check_config(Config(penalty=options.penalty or ""))


def choose_network(options: FitOptions, device: torch.device) -> tuple[str, bool, list[str]]:
    """The network's spec, whether it is pretrained, and what to say about it."""
    if options.net is not None:
        item = spec.parse(options.net)
        if item.name.startswith("timm."):  # pretrained unless that is declined
            item = item._replace(kwargs={"pretrained": True, **item.kwargs})
        else:  # before anything is measured
            spec.find(item.name, nets.NETS, "net")
        ready = bool(item.kwargs.get("pretrained", item.name in nets.LITE))
        if item.kwargs.get("pretrained") is True and not _can_be_had(item.name):
            nets.build(f"{item.name}(pretrained=False)", 2)  # a sentence if there is none
            raise ValueError(
                f"The weights of {item.name} are not here, and {HUB} does not answer; name a file, "
                f"{item.name}(pretrained='FILE'), or another network of `calmatch nets`."
            )
        return spec.write(item), ready, []
    reason = ""
    for text in (STRONG, *PRETRAINED) if device.type == "cuda" else PRETRAINED:
        if not _can_be_had(spec.parse(text).name):
            continue
        try:
            nets.build(text, 2, 64)
            return text, True, []
        except ValueError as error:
            reason = reason or str(error)
    fresh = "wrn_28_2" if device.type == "cuda" else "small(width=16)"
    note = f"No pretrained network can be had: a small one ({fresh}) learns from scratch, which "
    return fresh, False, [f"{note}needs many more pictures. {reason}"]


def _can_be_had(name: str) -> bool:
    """Whether weights are here or can be fetched; nothing waits for a hub that does not answer."""
    return not name.startswith("timm.") or bool(weights_here(name)) or hub_answers()


def refuse_idle_options(options: FitOptions, frozen: bool) -> None:
    """An option that would do nothing is a mistake."""
    if frozen and options.hold is not None:
        raise ValueError(
            "--hold is for a whole network (--no-frozen): this one is cross-validated."
        )
    if not frozen and options.engine != "local":
        raise ValueError("--engine ray is for a frozen network, whose features are computed once.")
    if frozen and options.method is not None:
        refuse_features(options.method, "use it with --no-frozen")
    idle = dict.fromkeys(("weak", "strong"), "--no-frozen")
    if options.method is None:
        idle |= dict.fromkeys(("penalty", "steps", "batch"), "--method NAME or --no-frozen")
    for name, more in idle.items() if frozen else ():
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} does nothing while the network is frozen; add {more}.")


def refuse_features(method: str, instead: str) -> None:
    """A method that needs images, or another classifier than one linear layer."""
    kind = methods.find(method)
    if kind.turns:
        raise ValueError(f"{method} turns pictures, which stored features cannot show; {instead}.")
    if kind.predict is not Method.predict:
        raise ValueError(f"{method} predicts by a layer of its own, not a linear one; {instead}.")


def dataset_spec(
    options: FitOptions, size: int, hold: float, mean: Any, std: Any, most: int = 0
) -> str:
    """The spec of the images."""
    labels = str(options.labels.resolve()) if options.labels else ""
    arguments: dict[str, Any] = {"root": str(options.pictures.resolve()), "labels": labels}
    arguments |= {"size": size, "hold": hold, "most": most, "seed": options.seed}
    arguments |= {"mean": tuple(mean) if mean else None, "std": tuple(std) if std else None}
    return spec.write(spec.Spec("pictures", (), {**arguments, "strict": options.strict}))


def plan_features(job: FitJob, extractor: Extractor, grey: bool, ray: Any = None) -> dict[str, Any]:
    """Views, size and number of images that the minutes allow, and what is dropped for them.

    First goes what the teachers do not see anyway, then views, then size, then unlabelled images.
    """
    options, own = job.options, extractor.size
    labels, whole = len(job.listed.known), len(job.listed.names)
    everything = whole if ray is not None else min(whole, labels + MOST_LOOKED_AT)
    gpus, cores = count_workers(ray) if ray is not None else (0, ops.count_cores())
    faster = cores / ops.count_cores()  # than this machine, where the cluster has no GPU
    reading = time_decoding(job.listed, own) / faster
    showing = time_image(extractor) / (gpus or faster)
    seen_most = min(everything, labels + portfolio.MOST)
    learning = time_candidates(extractor, seen_most, len(job.listed.classes))
    usual = MOST_TTA if extractor.device.type == "cuda" else CPU_TTA
    most = options.tta or (SEVERAL_TTA if extractor.net == SEVERAL else usual)
    shape = {"flip": not grey, "larger": not extractor.fixed}
    views = augment.tta_views(most, own, **shape)
    wanted, size, number = len(views), own, everything

    def fits() -> bool:
        area = sum((view.size / own) ** 2 for view in views)
        seen = min(number, labels + portfolio.MOST) / seen_most
        seconds = number * (reading + showing * area) + learning * seen
        return seconds <= job.seconds_left() - WRITING

    def drop(kept: int) -> int:
        return max(min(everything, labels + FEWEST_SEEN), min(number, kept))

    if not fits():
        number = drop(labels + portfolio.MOST)
    while options.tta is None and len(views) > 1 and not fits():
        views.pop()
    if extractor.net == SEVERAL and options.net is None and not fits():  # then rather one network
        one = portfolio.load_extractor(ONE, options.size, extractor.device)
        return plan_features(job, one, grey, ray)
    while options.size is None and not extractor.fixed and size > SMALLEST_SIZE and not fits():
        size = max(SMALLEST_SIZE, size - 32)
        views = augment.tta_views(len(views), size, **shape)
    while number > drop(0) and not fits():
        number = drop(number * 4 // 5)
    shown = f"in {len(views)} views" if len(views) > 1 else "in one view"
    name = spec.parse(extractor.net).name
    note = f"Pictures are shown to {name} at {size} px, {shown}."
    if grey:
        note += " They are grey, so none is mirrored: a mirrored letter is another one."
    if everything < whole:
        note += f" A sample of {MOST_LOOKED_AT:,} unlabelled pictures is looked at."
    dropped = [f"{wanted - len(views)} of {wanted} views"] if len(views) < wanted else []
    dropped += [f"{own - size} of {own} px"] if size < own else []
    dropped += [f"{everything - number:,} unlabelled pictures"] if number < everything else []
    if dropped:
        note += f" For --minutes {options.minutes:g} it does without {', '.join(dropped)}."
    if not fits():
        note += " Even so it will take longer."
    return {"net": extractor.net, "views": [*map(list, views)], "note": note, "images": number}


def time_decoding(listed: ImageFolder, size: int) -> float:
    """Seconds of one image, by some of them; threads share the work."""
    names = listed.names[:: max(1, len(listed.names) // 8)][:8]
    seconds = time_call(lambda: decode_some(listed.root, names, size))
    return seconds / len(names) / ops.count_cores()


def decode_some(root: Path, names: tuple[str, ...], size: int) -> list[Any]:
    """Pixels of those images that can be decoded."""
    some, pixels = ImageFiles(root, names, size, squash=True), []
    for place in range(len(names)):
        with contextlib.suppress(ValueError):
            pixels.append(some.image(place))
    return pixels


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
        kinds = spec.field_types(FitPlan).items()
        fits = all(spec.fits(getattr(plan, name), kind) for name, kind in kinds)
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


def make_plan(
    options: FitOptions, own: ImageFolder, images: Images, size: int, allowed: float
) -> FitPlan:
    """Look at the images, measure a few steps, decide what can be done in the seconds allowed."""
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
    steps, lasting, late = [], 0.0, False
    for alone, share in ((False, 0.5), (True, 0.15)):
        seconds = (1 + len(parts)) * _time_step(network_config(options, plan, alone))
        late |= share * allowed < FEWEST * seconds
        steps.append(max(FEWEST, int(min(most, share * allowed / seconds))))
        lasting += steps[-1] * seconds / 60
    if late:
        note = f"It takes about {lasting:.{int(lasting < 2)}f} minutes instead of "
        note += f"{options.minutes:g}, because fewer than {FEWEST} steps teach nothing. "
        note += "A smaller --size is faster."
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    return dataclasses.replace(plan, steps=steps[0], alone_steps=steps[1])


def network_config(options: FitOptions, plan: FitPlan, alone: bool) -> Config:
    """The run in which the whole network learns, on all images or on the labels alone."""
    method, steps = options.method or METHOD, plan.alone_steps if alone else plan.steps
    semi = bool(methods.find(method).u_views) and not alone
    penalty = PENALTY if options.penalty is None else options.penalty
    method = "supervised" if alone else methods.adapt_momentum(method, steps)
    data = dataset_spec(options, plan.size, plan.hold, plan.mean, plan.std, plan.most)
    config = Config(data, labels=0, method=method, penalty=penalty if semi else "", net=plan.net)
    config = config.replace(weak=plan.weak, strong=plan.strong, batch=plan.batch, ratio=plan.ratio)
    config = config.replace(steps=steps, lr=plan.lr, seed=options.seed, device=options.device)
    config = config.replace(warmup=min(100, steps // 20), log_every=max(1, steps // 20))
    cuda = ops.pick_device(options.device).type == "cuda"
    return config.replace(
        ema=min(plan.ema, max(0.95, 1 - 10 / steps)),  # the start must not weigh on the end
        precision="bf16" if cuda else "fp32",
        compile=None if steps > COMPILE_FROM else False,
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
    strong = "rotate(30)|translate(0.2)|brightness|contrast|cutout(0.5)"
    note = "The pictures are grey, so they are not mirrored (a mirrored letter is another one); "
    note += '--weak and --strong choose other views, "flip|crop(4)" for example.'
    return f"crop({max(1, size // 16)})", strong, [note]


def _time_step(config: Config) -> float:
    """Seconds of a training step, augmentation included, the first ones left out."""
    few = config.replace(steps=12, chunk=4, compile=False)
    with torch.random.fork_rng():
        run = new_training(few)
        time_call(run.advance)  # it loads kernels, and augments for several
        second = time_call(run.advance)
        return second if second > 1 else time_call(run.advance, 10)
