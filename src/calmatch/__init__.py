"""calmatch: semi-supervised image classifiers whose confidence can be believed."""

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
MODULES = {name: name for name in "augment data losses methods metrics nets posthoc".split()}
MODULES["recipes"] = "training.recipes"
WHERE = {
    **dict.fromkeys(CORE.split(), "core"),
    **{"Config": "training.config", "Classifier": "estimator"},
    **{"Model": "model", "Run": "runs", "load_run": "runs"},
}  # the module that each public name is in
__all__ = ["load", "train", "train_seeds", *MODULES, *WHERE]


def load(folder: Path | str, *, device: str = "cpu", trust: bool = False) -> "Model":
    """The model in a run folder, or at `hf://user/name` on the Hub; it computes on `device`.

    `load("runs/mine").predict("x.jpg")`; `trust` imports code that the model names.
    """
    from calmatch.model import load_model

    if str(folder).startswith("hf:"):
        from calmatch.hub import pull

        folder = pull(str(folder))
    return load_model(folder, device=device, trust=trust)


def train(config: "Config", out: Path | str | None = None, *, quiet: bool = False) -> "Run":
    """Train one run (see `recipes`) into its folder; the same call again continues or returns it.

    By default the folder is `runs/` and a name made from the config.
    """
    return train_seeds(config, [config.seed], out, quiet=quiet)[0]


def train_seeds(
    config: "Config", seeds: Sequence[int], out: Path | str | None = None, *, quiet: bool = False
) -> list["Run"]:
    """Train several seeds side by side on one device, each as if alone.

    `out` holds a folder for each (`seed0`, ...); of a single seed it is the run folder itself.
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
    if name in MODULES:
        return importlib.import_module(f"calmatch.{MODULES[name]}")
    if name not in WHERE:
        raise AttributeError(f"module 'calmatch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"calmatch.{WHERE[name]}"), name)
