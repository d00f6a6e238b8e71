"""What does the margin change, and for which method? Last layers on frozen features of the zoo.

`python research/losses.py WORK` (WORK/zoo holds the sets, unpacked) trains the last layer by five
methods, each without a penalty, with the paper's margin and with the margin whose cap `fit` uses,
the same label split for all, and adds a line a fit to WORK/losses.jsonl. It can be stopped and
started again. `--page` writes research/losses.md from those lines: paired differences by set and
split, their mean over sets with an interval over sets, not over seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from zoo import Task, read_features

from calmatch import metrics, nets
from calmatch.fit import fit
from calmatch.model import load_model
from calmatch.options import FitOptions

METHODS = ("freematch", "fixmatch", "flexmatch", "softmatch", "simmatch")
PENALTIES = {"plain": "", "margin": "margin(m=10)", "cap": "margin(cap=0.98)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--net", default="efficientnet_lite0")
    parser.add_argument("--labels", type=int, nargs="*", default=(4,))
    parser.add_argument("--splits", type=int, nargs="*", default=range(5))
    parser.add_argument("--sets", nargs="*")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lines", type=Path)
    options = parser.parse_args()
    path = options.lines or options.work / "losses.jsonl"
    done = {json.loads(line)["key"] for line in path.open()} if path.exists() else set()
    root = options.work / "zoo"
    names = options.sets or sorted(each.parent.name for each in root.rglob("truth.csv"))
    for split in options.splits:
        for number in options.labels:
            for method in METHODS:
                for name in names:
                    for row, penalty in PENALTIES.items():
                        key = f"{options.net} {name} {number} {split} {method} {row}"
                        if key in done:
                            continue
                        line = measure(root / name, number, split, method, penalty, options)
                        line |= {"set": name, "labels": number, "split": split}
                        with path.open("a") as file:
                            file.write(json.dumps({"key": key, "method": method, **line}) + "\n")
                        print(key, line, flush=True)


def measure(
    folder: Path, number: int, split: int, method: str, penalty: str, options: Any
) -> dict[str, Any]:
    """Error and calibration in new/, as trained and as `fit` calibrates it."""
    with (folder / "truth.csv").open() as file:
        rows = [(Path(r["file"]).name, r["label"], r["part"]) for r in csv.DictReader(file)]
    truth = {p: dict(sorted((f, c) for f, c, q in rows if p == q)) for p in ("pool", "new")}
    classes = sorted(set(truth["pool"].values()))
    known: dict[str, str] = {}
    for c in classes:
        own = sorted(f for f, label in truth["pool"].items() if label == c)
        known |= dict.fromkeys(random.Random(split).sample(own, number), c)
    task = Task(folder, truth, known, classes)
    slug = "".join(
        c if c.isalnum() else "-" for c in f"{folder.name}{number}{split}{method}{penalty}"
    )
    table = options.work / f"labels-{slug}.csv"
    table.write_text("file,label\n" + "".join(f"{f},{c}\n" for f, c in known.items()))
    began = time.perf_counter()
    asked = FitOptions(folder / "pool", table, options.work / "runs" / slug, 30, quiet=True, tta=5)
    words = {"net": options.net, "method": method, "penalty": penalty, "steps": options.steps}
    run = fit(FitOptions(**{**vars(asked), **words}))
    seconds = time.perf_counter() - began
    model = load_model(run.folder)
    body: Any = model.network.net.body
    new = read_features(folder / "new", tuple(truth["new"]), options.net, model.network.views.views)
    lasts = [torch.from_numpy(view) for view in new.last]
    layer = nets.classifier(body, lasts[0].shape[1], len(classes))
    with torch.inference_mode():
        logits = layer(torch.stack(lasts).mean(0))
        probs = {"raw": logits.softmax(1), "fit": model.calibration(logits).exp()}
    labels = task.ids("new", truth["new"])
    out: dict[str, Any] = {"penalty": penalty, "seconds": round(seconds, 1)}
    out["error"] = round(float(metrics.error(probs["raw"], labels)), 5)
    for name, each in probs.items():
        each = each / each.sum(1, keepdim=True)
        out[f"ece_{name}"] = round(float(metrics.debiased_ece(each, labels)), 5)
        out[f"sure_{name}"] = round(float(each.amax(1).mean()), 5)
    return out


if __name__ == "__main__":
    main()
