"""An own method in fifteen lines, used by name: no registration, no fork.

    python examples/own_method.py FOLDER

The same works on the command line, in the folder of this file:
    calmatch train digits_40 --method "own_method.Doubtful(trust=0.8)"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import calmatch
from calmatch.methods.fixmatch import FixMatch


class Doubtful(FixMatch):
    """FixMatch that trusts the most confident share of each batch instead of a fixed threshold."""

    def __init__(self, task: calmatch.Task, *, trust: float = 0.7) -> None:
        super().__init__(task, threshold=0.0)
        self.trust = trust

    def select(self, p: Tensor, batch: calmatch.Batch) -> tuple[Tensor, dict[str, Tensor]]:
        confidence = p.amax(-1)
        level = torch.quantile(confidence, 1 - self.trust)
        return (confidence >= level).to(p.dtype), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    for method in ("fixmatch", "own_method.Doubtful(trust=0.8)"):
        # a penalty works with every method, because they all hand over the same kind of term
        config = calmatch.recipes.digits_40(method, penalty="margin(m=8)", steps=options.steps)
        run = calmatch.train(config, options.folder / method.split("(")[0], quiet=True)
        error, ece = (100 * run.result.metrics[name].value for name in ("error", "ece"))
        print(f"{method:<32} error {error:5.1f} %   ECE {ece:4.1f} %", flush=True)


if __name__ == "__main__":
    main()
