"""Named runs: functions that return a Config, each with the protocol it follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from calmatch.config import Config


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


RECIPES: Mapping[str, Callable[..., Config]] = {"digits_40": digits_40}
