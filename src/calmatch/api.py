"""What Python code calls: a run with its report page."""

from __future__ import annotations

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
    run = trainer.train(config, out, quiet=quiet)
    if parallel.first():
        build([run], run.folder / "report.html")
    return run
