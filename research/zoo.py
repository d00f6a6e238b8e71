"""Is `calmatch fit` better than what a person would do instead? Eight small sets, CPU or GPU.

`python research/zoo.py ZOO.zip WORK` fits every set with 4 and 10 labels a class and five label
splits, beside logistic regression (C by cross-validation), nearest neighbours, label spreading and
self-training on the same network's features of one plain view, and writes research/zoo.md. It can
be stopped and started again; what is done stays in WORK/lines.jsonl. The pictures stay there.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegressionCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier
from sklearn.svm import SVC

from calmatch import metrics
from calmatch.data.images import ImageFiles
from calmatch.fit import fit, portfolio
from calmatch.model import load_model
from calmatch.options import FitOptions

PAGE = Path(__file__).parent / "zoo.md"
LABELS = (4, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--net", default="efficientnet_lite0")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--labels", type=int, nargs="*", default=LABELS)
    parser.add_argument("--sets", nargs="*")
    parser.add_argument("--splits", type=int, default=5)
    options = parser.parse_args()
    root = options.work / "zoo"
    if not root.is_dir():
        with zipfile.ZipFile(options.zoo) as archive:
            archive.extractall(root)
    lines = options.work / "lines.jsonl"
    done = {json.loads(line)["key"] for line in lines.open()} if lines.exists() else set()
    names = options.sets or sorted(path.parent.name for path in root.rglob("truth.csv"))
    for number in options.labels:
        for name in names:
            folder = next(root.rglob(f"{name}/truth.csv")).parent
            for split in range(options.splits):
                key = f"{options.net} {name} {number} {split}"
                if key not in done:
                    line = measure(
                        folder, number, split, options.net, options.minutes, options.work
                    )
                    with lines.open("a") as file:
                        file.write(json.dumps({"key": key, **line}) + "\n")
                    print(
                        key,
                        {k: v for k, v in line.items() if k in ("fit", "lr", "ece")},
                        flush=True,
                    )
    write(lines, options.net)


def measure(
    folder: Path, number: int, split: int, net: str, minutes: float, work: Path
) -> dict[str, Any]:
    """One fit and its opponents; errors in new/, calibration on every label that was not seen."""
    with (folder / "truth.csv").open() as file:
        rows = [(Path(r["file"]).name, r["label"], r["part"]) for r in csv.DictReader(file)]
    truth = {
        part: dict(sorted((f, c) for f, c, p in rows if p == part)) for part in ("pool", "new")
    }
    classes = sorted(set(truth["pool"].values()))
    known: dict[str, str] = {}
    for c in classes:
        own = sorted(f for f, label in truth["pool"].items() if label == c)
        known |= dict.fromkeys(random.Random(split).sample(own, number), c)
    table = work / "labels.csv"
    table.write_text("file,label\n" + "".join(f"{f},{c}\n" for f, c in known.items()))
    out = work / "runs" / f"{net}-{folder.name}-{number}-{split}"
    began = time.perf_counter()
    run = fit(FitOptions(folder / "pool", table, out, minutes, net=net, quiet=True))
    seconds = time.perf_counter() - began
    model = load_model(run.folder)
    probs, labels = [], []
    for part in ("pool", "new"):
        names = tuple(f for f in truth[part] if f not in known)
        pixels = ImageFiles(folder / part, names, model.size, model.squash).take(range(len(names)))
        if part == "pool":
            arrays = np.load(run.folder / "unlabelled.npz")
            order = {f: k for k, f in enumerate(arrays["files"].tolist())}
            own = torch.from_numpy(arrays["log_probs"])[[order[f] for f in names]].exp()
        else:
            own = model.probabilities(pixels)
        probs.append(own / own.sum(1, keepdim=True))
        labels.append(torch.tensor([classes.index(truth[part][f]) for f in names]))
    both = torch.cat(probs), torch.cat(labels)
    error = run.result.metrics["error"]
    wrong = float(metrics.error(*both))
    return {
        "fit": float(metrics.error(probs[1], labels[1])),
        "ece": float(metrics.debiased_ece(*both)),
        "all": wrong,
        "estimate": error.value,
        "holds": error.low <= wrong <= error.high,
        "width": error.high - error.low,
        "kept": run.result.kept,
        "seconds": seconds,
        **opponents(folder, truth, known, classes, net),
    }


def opponents(
    folder: Path,
    truth: dict[str, dict[str, str]],
    known: dict[str, str],
    classes: list[str],
    net: str,
) -> dict[str, float]:
    """What fifteen lines of scikit-learn get on the same network's features of the plain view."""
    extractor = portfolio.load_extractor(net, None, torch.device("cpu"))
    found = {}
    for part in ("pool", "new"):
        files = ImageFiles(folder / part, tuple(truth[part]), extractor.size, squash=True)
        found[part] = portfolio.compute_features(extractor, files, True).last[0]
    scaler = StandardScaler().fit(found["pool"])
    x, new = (scaler.transform(found[part]) for part in ("pool", "new"))
    y = np.array([classes.index(known[f]) if f in known else -1 for f in truth["pool"]])
    tested = np.array([classes.index(c) for c in truth["new"].values()])
    own = y >= 0
    ways: dict[str, Any] = {
        "lr": LogisticRegressionCV(
            Cs=np.logspace(-4, 0, 5), cv=4, scoring="neg_log_loss", max_iter=300
        ),
        "knn": KNeighborsClassifier(1, metric="cosine"),
    }
    errors = {
        name: float((way.fit(x[own], y[own]).predict(new) != tested).mean())
        for name, way in ways.items()
    }
    spread = LabelSpreading("knn", n_neighbors=10).fit(x, y)
    errors["spreading"] = float((spread.predict(new) != tested).mean())
    base = SVC(C=1.0, kernel="linear", probability=True, random_state=0)
    errors["selftraining"] = float(
        (SelfTrainingClassifier(base, threshold=0.75).fit(x, y).predict(new) != tested).mean()
    )
    return errors


def write(lines: Path, net: str) -> None:
    """The table, a line a set, means over label splits."""
    every = [json.loads(line) for line in lines.open()]
    page = [f"# `calmatch fit` on pictures nobody tuned on: {net}\n"]
    for number in LABELS:
        own = [line for line in every if line["key"].split()[0] == net]
        own = [line for line in own if line["key"].split()[2] == str(number)]
        if not own:
            continue
        names = sorted({line["key"].split()[1] for line in own})
        page += [
            f"## {number} labels a class\n",
            "Error in %, mean over label splits; ECE debiased (Kumar et al.), in %, over every "
            "picture whose label was not seen; seconds of the fit, features cached or not.\n",
            "| set | fit | LR-CV | ratio | 1-NN | label spreading | self-training | ECE | "
            "estimated error | truth | interval holds | seconds |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        ratios, eces = [], []
        for name in names:
            some = [line for line in own if line["key"].split()[1] == name]
            mean = {
                k: float(np.mean([line[k] for line in some]))
                for k in some[0]
                if k not in ("key", "kept")
            }
            ratios.append(mean["fit"] / mean["lr"])
            eces.append(100 * mean["ece"])
            cells = [f"{100 * mean[k]:.1f}" for k in ("fit", "lr")]
            cells += [f"{ratios[-1]:.2f}"]
            cells += [
                f"{100 * mean[k]:.1f}"
                for k in ("knn", "spreading", "selftraining", "ece", "estimate", "all")
            ]
            cells += [f"{mean['holds']:.2f}", f"{mean['seconds']:.0f}"]
            page.append(f"| {name} | " + " | ".join(cells) + " |")
        geometric = np.exp(np.mean(np.log(ratios)))
        holds = np.mean([line["holds"] for line in own])
        page.append(
            f"\nError over LR-CV's: geometric mean **{geometric:.3f}**, median "
            f"**{np.median(ratios):.3f}**, largest {max(ratios):.2f}. ECE: mean "
            f"**{np.mean(eces):.2f}**, largest {max(eces):.1f}. Intervals hold in {holds:.0%} "
            f"of {len(own)} fits.\n"
        )
    PAGE.write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    main()
