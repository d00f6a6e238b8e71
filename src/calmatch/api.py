"""What Python code calls: runs with their report pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calmatch import parallel, trainer
from calmatch.config import Config
from calmatch.report.build import build
from calmatch.results import Run


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
    configs = [config.replace(seed=seed) for seed in seeds]
    outs: list[Path | str | None] = [out] * len(configs)
    if out is not None and len(configs) > 1:
        outs = [Path(out) / f"seed{seed}" for seed in seeds]
    runs = trainer.together(configs, outs, quiet=quiet)
    if parallel.first():
        for run in runs:
            build([run], run.folder / "report.html")
    return runs
