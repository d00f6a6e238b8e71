"""Does bfloat16 change results? The same runs on EuroSAT in both precisions, seed by seed.

Prints a table and writes JSON: error, ECE and NLL of each run, and the paired differences with
Student's 95 % interval. EuroSAT must be there (docs/data.md); by default a network that a CPU can
train.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from datetime import date
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from calmatch import Config, train_seeds
from calmatch.fit.plan import METHOD, PENALTY
from calmatch.training import recipes
from calmatch.training.setup import describe_environment

METRICS = ("error", "ece", "nll")


def settings(options: argparse.Namespace) -> Config:
    """FreeMatch with fit's margin at 32 px, as EuroSAT's recipe augments it, or another recipe."""
    if options.recipe:
        return recipes.RECIPES[options.recipe](METHOD, penalty=PENALTY)
    config = recipes.RECIPES["eurosat_40"](METHOD)
    return config.replace(
        dataset=options.dataset,
        labels=options.labels,
        net=options.net,
        penalty=PENALTY,
        batch=32,
        ratio=2,
        steps=options.steps,
        warmup=0,
        optimizer="sgd",
        lr=0.03,
        layer_decay=1.0,
        ema=0.99,
        log_every=50,
        eval_every=0,
        chunk=16,
    )


def difference(pairs: np.ndarray) -> tuple[float, float]:
    """Mean of second minus first, and half the width of its 95 % interval."""
    gaps = pairs[:, 1] - pairs[:, 0]
    half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps))
    return float(gaps.mean()), float(half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", help="a recipe as it is, instead of what follows")
    parser.add_argument("--dataset", default="eurosat", help="EuroSAT at 32 px")
    parser.add_argument("--net", default="small(width=24)")
    parser.add_argument("--labels", type=int, default=100)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="JSON file; by default in benchmarks/results/")
    options = parser.parse_args()
    config, values_of = settings(options), {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("fp32", "bf16"):
            chosen = config.replace(precision=precision)
            for run in train_seeds(chosen, options.seeds, Path(folder) / precision):
                measured = run.result.metrics
                values_of[precision, run.config.seed] = {k: measured[k].value for k in METRICS}
                words = "  ".join(
                    f"{k} {values_of[precision, run.config.seed][k]:.4f}" for k in METRICS
                )
                print(f"{precision}  seed {run.config.seed}  {words}", flush=True)
    rows = [{"precision": p, "seed": s, **values} for (p, s), values in values_of.items()]
    gaps = {}
    for metric in METRICS:
        pairs = [[values_of[p, s][metric] for p in ("fp32", "bf16")] for s in options.seeds]
        mean, half = difference(np.array(pairs))
        gaps[metric] = {"mean": mean, "half": half}
        print(f"bf16 - fp32, {metric}: {mean:+.4f} +- {half:.4f} ({len(pairs)} paired seeds, 95 %)")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {"date": str(date.today()), "environment": describe_environment(device)}
    record |= {"config": config.dump(), "rows": rows, "differences": gaps}
    path = options.out
    if path is None:
        path = Path(__file__).parent / f"results/precision-{device.type}-{date.today()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
