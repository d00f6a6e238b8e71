"""A run's log as TensorBoard event files, for those who watch many runs there."""

from __future__ import annotations

import json
from pathlib import Path

from calmatch.results import Run

FOLDER = "tensorboard"


def write(run: Run) -> Path:
    """Write the numbers of metrics.jsonl under tensorboard/ in the run folder, anew."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "TensorBoard is not installed; pip install 'calmatch[tensorboard]'."
        ) from error
    folder = run.folder / FOLDER
    for old in folder.glob("events.out.*"):
        old.unlink()
    times = _times(run.folder / "times.jsonl")
    with SummaryWriter(folder) as writer:
        writer.add_text("config", f"    {json.dumps(run.config.dump(), indent=4)}")
        for kind in ("train", "test", "validation"):
            for line in run.lines(kind):
                step, when = line["step"], times.get(line["step"])
                for name, value in line.items():
                    if name != "step" and isinstance(value, int | float):
                        writer.add_scalar(f"{kind}/{name}", value, step, walltime=when)
    return folder


def _times(path: Path) -> dict[int, float]:
    """When each step was reached; a continued run wrote some steps twice, and the last counts."""
    if not path.is_file():
        return {}
    with path.open() as file:
        return {line["step"]: line["unix"] for line in map(json.loads, file)}
