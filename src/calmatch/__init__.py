"""calmatch: semi-supervised image classifiers whose confidence can be believed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calmatch import augment, data, losses, methods, metrics, nets, posthoc
    from calmatch.core import (
        Batch,
        Loss,
        Method,
        Metric,
        Objective,
        Output,
        Plan,
        Task,
        Term,
        Transform,
        apart,
        frozen,
    )
    from calmatch.estimator import Classifier
    from calmatch.model import Model
    from calmatch.runs import Run, load_run
    from calmatch.training import recipes
    from calmatch.training.config import Config

__version__ = "0.1.0"
CORE = "Batch Loss Method Metric Objective Output Plan Task Term Transform apart frozen"
WHERE = {
    **dict.fromkeys(CORE.split(), "core"),
    **dict.fromkeys("augment data losses methods metrics nets posthoc".split(), ""),
    **{"recipes": "training", "Config": "training.config", "Classifier": "estimator"},
    **{"Model": "model", "Run": "runs", "load_run": "runs"},
}  # the module that each public name is in
__all__ = ["load", "train", "train_seeds", *WHERE]


def load(folder: Path | str, *, device: str = "cpu", trust: bool = False) -> Model:
    """The model in a run folder: `load("runs/mine").predict("x.jpg")`.

    Args:
        folder: made by `calmatch fit` or `calmatch train`; or `hf://user/name` on the Hub.
        device: where to compute.
        trust: import code that the model names.
    """
    from calmatch.model import load_model

    if str(folder).startswith("hf:"):
        from calmatch.hub import pull

        folder = pull(str(folder))
    return load_model(folder, device=device, trust=trust)


def train(config: Config, out: Path | str | None = None, *, quiet: bool = False) -> Run:
    """Train one run into its folder; the same call again continues or returns it.

    Args:
        config: what to run; see `recipes`.
        out: the run folder; by default `runs/` and a name made from the config.
        quiet: no progress bar and no lines.
    """
    return train_seeds(config, [config.seed], out, quiet=quiet)[0]


def train_seeds(
    config: Config, seeds: Sequence[int], out: Path | str | None = None, *, quiet: bool = False
) -> list[Run]:
    """Train several seeds side by side on one device, each as if alone.

    Args:
        config: what to run; its own seed is replaced.
        seeds: one run for each.
        out: holds a folder per seed (`seed0`, ...); of a single seed it is the run folder itself.
        quiet: no progress bar and no lines.
    """
    from calmatch.console import is_first_rank
    from calmatch.report import build
    from calmatch.training.loop import train_together

    configs = [config.replace(seed=seed) for seed in seeds]
    outs: list[Path | str | None] = [out] * len(configs)
    if out is not None and len(configs) > 1:
        outs = [Path(out) / f"seed{seed}" for seed in seeds]
    runs = train_together(configs, outs, quiet=quiet)
    if is_first_rank():
        for run in runs:
            build([run], run.folder / "report.html")
    return runs


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line answers at once."""
    if name not in WHERE:
        raise AttributeError(f"module 'calmatch' has no attribute {name!r}")
    if not WHERE[name]:
        return importlib.import_module(f"calmatch.{name}")
    module = importlib.import_module(f"calmatch.{WHERE[name]}")
    return (
        getattr(module, name)
        if hasattr(module, name)
        else importlib.import_module(f"{module.__name__}.{name}")
    )
