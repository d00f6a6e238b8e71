"""Several runs of a suite in one process, side by side on one card: `python -m` this FOLDER ..."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from calmatch import trainer
from calmatch.config import Config
from calmatch.edge import guarded
from calmatch.report.build import build


def run(folders: Sequence[Path]) -> int:
    """Train the runs whose config.json lies in these folders; they differ in their seeds only."""
    texts = [(folder / "config.json").read_text("utf-8") for folder in folders]
    configs = [Config().replace(**json.loads(text)) for text in texts]
    for done in trainer.together(configs, list(folders), quiet=True):
        build([done], done.folder / "report.html")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: run([Path(word) for word in sys.argv[1:]]), "train"))
