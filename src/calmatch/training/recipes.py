"""Ready-made configs by name: the paper's datasets as USB trains them, and digits for a laptop."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from calmatch import spec
from calmatch.training.config import Config

STRONG = "|randaugment(3)|cutout(0.5)"
USB_START: dict[str, Any] = {"faithful": "usb"}  # of Dash: at log K, which USB's test loss comes to
EPOCH = 1_024  # steps; where a run has not 200 of them, gates that count them are set
CLASSIC: dict[str, dict[str, Any]] = {
    "comatch": {"gate": EPOCH},
    "simmatch": {"gate": EPOCH},
    "bam": {"warmup": 10 * EPOCH},
    "dash": {**USB_START, "warmup": 2 * EPOCH, "every": 10 * EPOCH},
}


def digits_40(method: str = "fixmatch", **changes: Any) -> Config:
    """scikit-learn's digits with 4 labels a class: seconds on a laptop."""
    from calmatch import methods

    strong = "rotate(30)|translate(0.2)|brightness|contrast|cutout(0.5)"
    config = Config(dataset="digits", labels=40, method=method, net="small(width=16)")
    config = config.replace(weak="translate(0.1)", strong=strong, batch=20, ratio=3)
    config = config.replace(steps=500, lr=6e-3, warmup=20, log_every=50, eval_every=100)
    if methods.find(method).ema > 0:
        config = config.replace(ema=0.95)  # 0.999 would still remember the first weights
    return config.replace(**changes)


def digits_hard(method: str = "fixmatch", **changes: Any) -> Config:
    """Digits with noise and 2 labels a class, lightly augmented: wrong and sure in seconds."""
    config = digits_40(method, dataset="digits(noise=30)", labels=20, batch=10, steps=400)
    config = config.replace(net="small(width=12)")
    config = config.replace(weak="translate(0.05)", strong="translate(0.15)|cutout(0.3)")
    return config.replace(**changes)


def cifar100(method: str = "fixmatch", *, labels: int = 200, **changes: Any) -> Config:
    """CIFAR-100 with ViT-S/2 pretrained on ImageNet at 32 px, as USB."""
    config = _usb("cifar100", labels, method, "vit_small_patch2_32", "crop(4)|flip", warmup=0)
    return _rates(config, 5e-4, 0.5).replace(**changes)


def _usb(dataset: str, labels: int, method: str, net: str, weak: str, warmup: int) -> Config:
    """What all of USB's vision runs share; `warmup` is FlexMatch's (docs/paper.md)."""
    config = Config(dataset=dataset, labels=labels, net=f"{net}(pretrained='usb')")
    config = config.replace(method=_tied(method, {"dash": USB_START}))
    config = config.replace(weak=weak, strong=weak + STRONG, batch=8, ratio=1, weight_decay=5e-4)
    special = spec.parse(method).name == "flexmatch"
    config = config.replace(steps=204_800, warmup=warmup if special else 5_120, chunk=256)
    return config.replace(log_every=256, eval_every=2_048, checkpoint_every=2_048)


def _tied(method: str, settings: Mapping[str, Mapping[str, Any]]) -> str:
    """A method with what a dataset or schedule sets in it, unless the spec sets it itself."""
    from calmatch import methods

    item = spec.parse(method)
    if item.name not in settings:
        return method
    names = list(inspect.signature(methods.find(method)).parameters)[1:]  # the task comes first
    own = {k: v for k, v in settings[item.name].items() if k not in names[: len(item.args)]}
    return spec.write(item._replace(kwargs={**own, **item.kwargs}))


def _rates(config: Config, lr: float, layer_decay: float = 1.0) -> Config:
    """Learning rate and layer decay; ReFixMatch has its own in all of USB's configurations."""
    if spec.parse(config.method).name == "refixmatch":
        lr, layer_decay = 5e-5, 1.0
    return config.replace(lr=lr, layer_decay=layer_decay)


def eurosat(method: str = "fixmatch", *, labels: int = 40, **changes: Any) -> Config:
    """EuroSAT at 32 px with ViT-S/2, as USB."""
    method = _tied(method, {"simmatch": {"temperature": 0.2}})
    config = _usb("eurosat", labels, method, "vit_small_patch2_32", "crop(4)|flip|vflip", warmup=0)
    return _rates(config, 5e-5).replace(**changes)


def stl10(method: str = "fixmatch", *, labels: int = 40, **changes: Any) -> Config:
    """STL-10 as USB's configuration: ViT-B/16 at 96 px from MAE, layer decay 0.65."""
    method = _tied(method, {"simmatch": {"teacher": True}, "comatch": {"contrast": 5.0}})
    config = _usb("stl10", labels, method, "vit_base_patch16_96", "crop(12)|flip", warmup=5_120)
    return _rates(config, 1e-4, 0.65).replace(**changes)


def stl10_text(method: str = "fixmatch", *, labels: int = 40, **changes: Any) -> Config:
    """STL-10 as the paper's text has it: ViT-S/16 at 96 px (timm's weights), layer decay 0.95."""
    net = "timm.vit_small_patch16_224(pretrained=True, img_size=96, drop_path_rate=0.2)"
    return _rates(stl10(method, labels=labels, net=net), 1e-4, 0.95).replace(**changes)


def cifar100_lt(method: str = "fixmatch", *, tail: str = "10,10", **changes: Any) -> Config:
    """Long-tailed CIFAR-100 with ViT-S/2: the only network that explains the published numbers."""
    gamma_l, gamma_u = tail.split(",")
    dataset = f"cifar100_lt(gamma_l={gamma_l}, gamma_u={gamma_u})"
    return cifar100(method, dataset=dataset, labels=0, include_labelled=False).replace(**changes)


def cifar100_lt_wrn(method: str = "fixmatch", *, tail: str = "10,10", **changes: Any) -> Config:
    """Long-tailed CIFAR-100 with WRN-28-2 from scratch, as the paper's text says."""
    method = _tied(method, CLASSIC)
    config = cifar100_lt(method, tail=tail, net="wrn_28_2", optimizer="sgd", lr=0.03, ema=0.999)
    config = config.replace(layer_decay=1.0, batch=64, ratio=2, steps=262_144, warmup=0)
    config = config.replace(eval_every=1_024, checkpoint_every=1_024, chunk=16)
    return config.replace(**changes)


def cifar10(method: str = "fixmatch", *, labels: int = 40, **changes: Any) -> Config:
    """CIFAR-10 with WRN-28-2 from scratch: the field's classic 2^20 steps of 64 + 448 pictures."""
    weak = "crop(4)|flip"
    own = CLASSIC | {"bam": {**CLASSIC["bam"], "quantile": 0.95, "lr": 0.005}}
    config = Config(dataset="cifar10", labels=labels, net="wrn_28_2", ema=0.999)
    config = config.replace(method=_tied(method, own))
    config = config.replace(weak=weak, strong=weak + STRONG, batch=64, ratio=7, steps=1_048_576)
    config = config.replace(optimizer="sgd", lr=0.03, weight_decay=5e-4)
    config = config.replace(log_every=256, eval_every=5_120, checkpoint_every=5_120)
    return config.replace(**changes)


_SETTINGS: Mapping[Callable[..., Config], tuple[str, Sequence[Any]]] = {
    cifar100: ("labels", (200, 400, 1_000)),
    cifar10: ("labels", (40, 250)),
    eurosat: ("labels", (20, 40)),
    **dict.fromkeys((stl10, stl10_text), ("labels", (40, 100))),
    **dict.fromkeys((cifar100_lt, cifar100_lt_wrn), ("tail", ("10,10", "10,-10", "15,15"))),
}
RECIPES: Mapping[str, Callable[..., Config]] = {
    "digits_40": digits_40,
    "digits_hard": digits_hard,
} | {
    f"{recipe.__name__}_{value}".replace(",", "_"): functools.partial(recipe, **{setting: value})
    for recipe, (setting, values) in _SETTINGS.items()
    for value in values
}
