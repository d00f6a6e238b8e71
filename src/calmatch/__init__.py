"""calmatch: semi-supervised image classifiers whose confidence can be believed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calmatch import augment, data, losses, methods, metrics, nets, posthoc, recipes
    from calmatch.api import train, train_seeds
    from calmatch.config import Config
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
    from calmatch.model import load as load_model
    from calmatch.results import Run
    from calmatch.results import load as load_run

__version__ = "0.1.0"
_MODULES = ["augment", "data", "losses", "methods", "metrics", "nets", "posthoc", "recipes"]
_WHERE = {
    "Classifier": ("calmatch.estimator", "Classifier"),
    "Config": ("calmatch.config", "Config"),
    "Model": ("calmatch.model", "Model"),
    "Run": ("calmatch.results", "Run"),
    "load_model": ("calmatch.model", "load"),
    "load_run": ("calmatch.results", "load"),
    "train": ("calmatch.api", "train"),
    "train_seeds": ("calmatch.api", "train_seeds"),
}
__all__ = [
    "Batch",
    "Classifier",
    "Config",
    "Loss",
    "Method",
    "Metric",
    "Model",
    "Objective",
    "Output",
    "Plan",
    "Run",
    "Task",
    "Term",
    "Transform",
    "apart",
    "augment",
    "data",
    "frozen",
    "load_model",
    "load_run",
    "losses",
    "methods",
    "metrics",
    "nets",
    "posthoc",
    "recipes",
    "train",
    "train_seeds",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line answers at once."""
    if name in _MODULES:
        return importlib.import_module(f"calmatch.{name}")
    if name in __all__:
        module, attribute = _WHERE.get(name, ("calmatch.core", name))
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'calmatch' has no attribute {name!r}")
