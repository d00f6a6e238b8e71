"""`calmatch fit` on a GPU over the zoo, through the real commands; several fits share the card.

`python research/gpu_zoo.py ZOO WORK --splits 1 --at-once 4` prints a line a fit: error and debiased
ECE on new/, seconds, and what was kept. ZOO is the unpacked zoo, WORK gets runs and lines.jsonl.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from zoo import draw_task

from calmatch import metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--labels", type=int, nargs="*", default=[4])
    parser.add_argument("--minutes", default="2")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--sets", nargs="*")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    names = options.sets or sorted(p.parent.name for p in options.zoo.glob("*/truth.csv"))
    jobs = [(k, n, name) for k in range(options.splits) for n in options.labels for name in names]
    with ThreadPoolExecutor(options.at_once) as pool:
        for line in pool.map(lambda job: measure(options, *job), jobs):
            with (options.work / "lines.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


def measure(options: Any, split: int, number: int, name: str) -> dict[str, Any]:
    """One fit, its prediction of new/ and how right that is."""
    home, base = options.zoo / name, options.work / f"{name}-{number}-{split}"
    task, labels = draw_task(home, number, split), Path(f"{base}.csv")
    task.write_labels(labels)
    began = time.perf_counter()
    fit = ["fit", home / "pool", "--labels", labels, "--out", base, "--minutes", options.minutes]
    call(*fit, "--net", "efficientnet_lite012", "--quiet")
    seconds = time.perf_counter() - began
    call("predict", base, home / "new", "-o", f"{base}-new.csv", "--probs", "--quiet")
    with Path(f"{base}-new.csv").open() as file:
        answers = {Path(r["file"]).name: r for r in csv.DictReader(file)}
    files = [f for f in task.truth["new"] if f in answers]
    probs = [[float(answers[f][f"p({c})"]) for c in task.classes] for f in files]
    both = torch.tensor(probs, dtype=torch.float64), task.ids("new", files)
    result = json.loads((base / "result.json").read_text())
    return {
        "key": f"{name} {number} {split}",
        "error": float(metrics.error(*both)),
        "ece": float(metrics.debiased_ece(both[0] / both[0].sum(1, keepdim=True), both[1])),
        "estimate": result["metrics"]["error"],
        "seconds": round(seconds, 1),
        "kept": result.get("kept"),
        "scores": result.get("scores"),
    }


def call(*words: Any) -> None:
    subprocess.run([sys.executable, "-m", "calmatch", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
