"""A research run: one method with and without the margin, three seeds, paired.

    python examples/research_run.py FOLDER

Takes about two minutes on two cores; `--steps 20` only shows that it works.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, stdev

import calmatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    changes = []
    for seed in range(3):
        ece = {}
        for penalty in ("", "margin(m=8)"):
            # split_seed chooses the 40 labels, seed everything else: both change together
            config = calmatch.recipes.digits_40(
                "freematch", penalty=penalty, seed=seed, split_seed=seed, steps=options.steps
            )
            folder = options.folder / f"{'margin' if penalty else 'plain'}-{seed}"
            run = calmatch.train(config, folder, quiet=True)  # finished runs are not repeated
            metrics = run.result.metrics
            ece[penalty] = 100 * metrics["ece"].value
            print(
                f"seed {seed}  {penalty or 'no penalty':<12} "
                f"error {100 * metrics['error'].value:5.1f} %   ECE {ece[penalty]:4.1f} % "
                f"({100 * metrics['ece'].low:.1f} to {100 * metrics['ece'].high:.1f})",
                flush=True,
            )
        changes.append(ece["margin(m=8)"] - ece[""])
    spread = stdev(changes) / len(changes) ** 0.5
    print(f"The margin changes ECE by {mean(changes):+.1f} points (standard error {spread:.1f}).")


if __name__ == "__main__":
    main()
