"""None"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from calmatch.training.config import Config

STRONG = "|randaugment(3)|cutout(0.5)"


def digits_40(method: str = "fixmatch", **changes: Any) -> Config:
    """scikit-learn's digits with 4 labels a class: seconds on a laptop."""
    from calmatch import methods

    averaged = methods.find(method).ema > 0
    config = Config(
        dataset="digits",
        labels=40,
        method=method,
        net="small(width=16)",
        weak="translate(0.1)",
        strong="rotate(30)|translate(0.2)|brightness|contrast|cutout(0.5)",
        batch=20,
        ratio=3,
        steps=500,
        lr=6e-3,
        warmup=20,
        ema=0.95 if averaged else None,  # 0.999 would still remember the first weights
        log_every=50,
        eval_every=100,
    )
    return config.replace(**changes)


def _usb(method: str, weak: str, **settings: Any) -> Config:
    """What all of USB's vision runs share (FACTS 2.1)."""
    config = Config(
        method=method,
        weak=weak,
        strong=weak + STRONG,
        batch=8,
        ratio=1,
        steps=204_800,
        warmup=5_120,
        weight_decay=5e-4,
        log_every=256,
        eval_every=2_048,
        checkpoint_every=2_048,
        chunk=256,
    )
    return config.replace(**settings)


def cifar100(method: str = "fixmatch", *, labels: int = 200, **changes: Any) -> Config:
    """CIFAR-100 with ViT-S/2 pretrained on ImageNet at 32 px, as USB."""
    config = _usb(
        method,
        "crop(4)|flip",
        dataset="cifar100",
        labels=labels,
        net="vit_small_patch2_32(pretrained='usb')",
        lr=5e-4,
        layer_decay=0.5,
        warmup=0 if method.startswith("flexmatch") else 5_120,
    )
    return config.replace(**changes)


def eurosat(method: str = "fixmatch", *, labels: int = 40, **changes: Any) -> Config:
    """EuroSAT at 32 px with ViT-S/2, as USB."""
    if method == "simmatch":
        method = "simmatch(temperature=0.2)"
    config = _usb(
        method,
        "crop(4)|flip|vflip",
        dataset="eurosat",
        labels=labels,
        net="vit_small_patch2_32(pretrained='usb')",
        lr=5e-5,
        warmup=0 if method.startswith("flexmatch") else 5_120,
    )
    return config.replace(**changes)


def stl10(method: str = "fixmatch", *, labels: int = 40, **changes: Any) -> Config:
    """STL-10 as USB's configuration: ViT-B/16 at 96 px from MAE, layer decay 0.65."""
    special = {"simmatch": "simmatch(teacher=True)", "comatch": "comatch(contrast=5.0)"}
    config = _usb(
        special.get(method, method),
        "crop(12)|flip",
        dataset="stl10",
        labels=labels,
        net="vit_base_patch16_96(pretrained='usb')",
        lr=1e-4,
        layer_decay=0.65,
    )
    return config.replace(**changes)


def stl10_text(method: str = "fixmatch", *, labels: int = 40, **changes: Any) -> Config:
    """STL-10 as the paper's text has it: ViT-S/16 at 96 px, layer decay 0.95."""
    config = stl10(method, labels=labels, net="vit_small_patch16_96", layer_decay=0.95)
    return config.replace(**changes)


def cifar100_lt(method: str = "fixmatch", *, tail: str = "10,10", **changes: Any) -> Config:
    """Long-tailed CIFAR-100 with ViT-S/2: the only network that explains the published numbers."""
    gamma_l, gamma_u = tail.split(",")
    config = cifar100(
        method,
        dataset=f"cifar100_lt(gamma_l={gamma_l}, gamma_u={gamma_u})",
        labels=0,
        include_labelled=False,
    )
    return config.replace(**changes)


def cifar100_lt_wrn(method: str = "fixmatch", *, tail: str = "10,10", **changes: Any) -> Config:
    """Long-tailed CIFAR-100 with WRN-28-2 from scratch, as the paper's text says."""
    config = cifar100_lt(
        method,
        tail=tail,
        net="wrn_28_2",
        optimizer="sgd",
        lr=0.03,
        layer_decay=1.0,
        batch=64,
        ratio=2,
        steps=262_144,
        warmup=0,
        ema=0.999,
        eval_every=1_024,
        checkpoint_every=1_024,
        chunk=16,
    )
    return config.replace(**changes)


def cifar10(method: str = "fixmatch", *, labels: int = 40, **changes: Any) -> Config:
    """CIFAR-10 with WRN-28-2 from scratch: the field's classic 2^20 steps of 64 + 448 pictures."""
    config = Config(
        dataset="cifar10",
        labels=labels,
        method=method,
        net="wrn_28_2",
        weak="crop(4)|flip",
        strong="crop(4)|flip" + STRONG,
        batch=64,
        ratio=7,
        steps=1_048_576,
        optimizer="sgd",
        lr=0.03,
        weight_decay=5e-4,
        ema=0.999,
        log_every=256,
        eval_every=5_120,
        checkpoint_every=5_120,
    )
    return config.replace(**changes)


RECIPES: Mapping[str, Callable[..., Config]] = {
    "digits_40": digits_40,
    "cifar100_200": functools.partial(cifar100, labels=200),
    "cifar100_400": functools.partial(cifar100, labels=400),
    "cifar100_1000": functools.partial(cifar100, labels=1_000),
    "cifar10_40": functools.partial(cifar10, labels=40),
    "cifar10_250": functools.partial(cifar10, labels=250),
    "eurosat_20": functools.partial(eurosat, labels=20),
    "eurosat_40": functools.partial(eurosat, labels=40),
    "stl10_40": functools.partial(stl10, labels=40),
    "stl10_100": functools.partial(stl10, labels=100),
    "stl10_text_40": functools.partial(stl10_text, labels=40),
    "stl10_text_100": functools.partial(stl10_text, labels=100),
    "cifar100_lt_10_10": functools.partial(cifar100_lt, tail="10,10"),
    "cifar100_lt_10_-10": functools.partial(cifar100_lt, tail="10,-10"),
    "cifar100_lt_15_15": functools.partial(cifar100_lt, tail="15,15"),
    "cifar100_lt_wrn_10_10": functools.partial(cifar100_lt_wrn, tail="10,10"),
    "cifar100_lt_wrn_10_-10": functools.partial(cifar100_lt_wrn, tail="10,-10"),
    "cifar100_lt_wrn_15_15": functools.partial(cifar100_lt_wrn, tail="15,15"),
}
eurosat_20, eurosat_40 = RECIPES["eurosat_20"], RECIPES["eurosat_40"]
