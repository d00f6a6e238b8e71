"""What a person wishes, the plan made of it, and the runs that a plan means."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calmatch import methods, spec
from calmatch.config import Config, check
from calmatch.core import Method
from calmatch.recipes import METHOD, MILD, PENALTY
from calmatch.setup import pick_device

EARNED = 2000  # steps up to which compiling, a minute of a card, is not expected to pay


@dataclass(frozen=True)
class Wish:
    """What a person asked for; None: choose well."""

    pictures: Path
    labels: Path | None = None
    minutes: float = 10.0
    start: Path | None = None
    method: str = METHOD
    penalty: str | None = None
    net: str | None = None
    frozen: bool | None = None
    looks: int | None = None
    size: int | None = None
    steps: int | None = None
    hold: float | None = None
    weak: str | None = None
    strong: str | None = None
    batch: int | None = None
    seed: int = 0
    strict: bool = False
    device: str = "auto"

    def dump(self) -> dict[str, Any]:
        """JSON; paths made absolute, so that the same folder is the same wish."""
        found = dataclasses.asdict(self)
        for name, value in found.items():
            if isinstance(value, Path):
                found[name] = str(value.resolve())
        return found


@dataclass(frozen=True)
class Plan:
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


def check_wish(wish: Wish) -> None:
    """Refuse early what cannot be meant."""
    if not wish.minutes > 0:
        raise ValueError(f"--minutes must be more than 0, not {wish.minutes:g}.")
    if wish.size is not None and not 8 <= wish.size <= 512:
        raise ValueError(f"--size must lie between 8 and 512 pixels, not {wish.size}.")
    if wish.hold is not None and not 0 < wish.hold < 1:
        raise ValueError(f"--hold is a share of the labels between 0 and 1, not {wish.hold:g}.")
    kind = methods.find(wish.method)
    if wish.frozen and kind.heads is not Method.heads:
        raise ValueError(f"{wish.method} has layers of its own; use it with --no-frozen.")
    if wish.frozen is False and wish.looks is not None:
        raise ValueError("--looks are for a frozen network; leave out --no-frozen or --looks.")
    at = 1 if wish.looks is None else wish.looks
    asked = Config(penalty=wish.penalty or "", steps=wish.steps or 1, batch=wish.batch or 1)
    check(asked.replace(looks=at, frozen=1))


def dataset(wish: Wish, plan: Plan, hold: float) -> str:
    """The spec of the pictures."""
    arguments: dict[str, Any] = {
        "root": str(wish.pictures.resolve()),
        "labels": str(wish.labels.resolve()) if wish.labels else "",
        "size": plan.size,
        "hold": hold,
        "most": plan.most,
        "seed": wish.seed,
        "imagenet": plan.imagenet,
        "strict": wish.strict,
    }
    return spec.write(spec.Spec("pictures", (), arguments))


def penalty(asked: str | None, looks: int = 1) -> str:
    """What was asked for, or what suits so many looks."""
    return (MILD if looks > 1 else PENALTY) if asked is None else asked


def _config(wish: Wish, plan: Plan, alone: bool, steps: int, hold: float) -> Config:
    semi = bool(methods.find(wish.method).u_views) and not alone
    return Config(
        dataset=dataset(wish, plan, hold),
        labels=0,
        method="supervised" if alone else methods.paced(wish.method, steps),
        penalty=penalty(wish.penalty, plan.looks) if semi else "",
        net=plan.net,
        weak=plan.weak,
        strong=plan.strong,
        batch=plan.batch,
        steps=steps,
        seed=wish.seed,
        device=wish.device,
        log_every=max(1, steps // 20),
    )


def body(wish: Wish, plan: Plan, alone: bool) -> Config:
    """The run in which the whole network learns, on all pictures or on the labels alone."""
    steps = plan.alone_steps if alone else plan.steps
    return _config(wish, plan, alone, steps, plan.hold).replace(
        ratio=plan.ratio,
        lr=plan.lr,
        ema=min(plan.ema, max(0.95, 1 - 10 / steps)),  # the start must not weigh on the end
        warmup=min(100, steps // 20),
        precision="bf16" if pick_device(wish.device).type == "cuda" else "fp32",
        eval_every=max(1, steps // 5) if plan.hold else 0,  # nothing is held out to look at
        compile=None if steps > EARNED else False,
    )


def head(wish: Wish, plan: Plan, alone: bool, net: str, features: int) -> Config:
    """The run in which the last layer learns, on features of the network as it is then."""
    hold = plan.hold if plan.holdout else 0.0
    return _config(wish, plan, alone, plan.head_steps, hold).replace(
        net=net,
        frozen=plan.views,
        looks=plan.looks,
        ratio=7,
        # logits reach the same size whatever the number of steps and features
        lr=round(min(0.05, 0.5 / plan.head_steps * (1280 / features) ** 0.5), 6),
        ema=0.99,
    )
