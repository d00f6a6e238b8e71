"""Are labels that are asked for worth more than random ones? Simulated labelling of eight sets.

`python research/asking.py ZOO WORK` (ZOO: the unpacked sets, each with pool/, new/ and truth.csv)
labels every set from zero to ten labels a class, in five seeds, by calmatch's questions and by what
the literature would ask: random ones, margin, entropy, k-centre, BADGE (gradients spread by
k-means++), typical pictures first (TypiClust). All teach the same model, the transductive student
on features of one plain view; its error is that on new/. It can be stopped and started again; what
is done stays in WORK/asking.jsonl. `--page` writes research/asking.md.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans

from calmatch.data.images import ImageFiles
from calmatch.fit import ask, portfolio
from calmatch.fit.features import compute_blocks

PAGE = Path(__file__).parent / "asking.md"
NET, SEEDS, MOST = "efficientnet_lite0", 5, 10


class World:
    """A set of pictures, somebody who knows every label, and a model of those told so far."""

    def __init__(self, folder: Path, extractor: portfolio.Extractor) -> None:
        with (folder / "truth.csv").open() as file:
            rows = [(r["part"], Path(r["file"]).name, r["label"]) for r in csv.DictReader(file)]
        features, truth = {}, {}
        for part in ("pool", "new"):
            names, truth[part] = zip(
                *sorted(row[1:] for row in rows if row[0] == part), strict=True
            )
            images = ImageFiles(folder / part, names, extractor.size, True)
            features[part] = compute_blocks(extractor, images, True).some()
        classes = sorted(set(truth["pool"]))
        self.classes, self.name = len(classes), folder.name
        self.y, self.new_y = (
            np.array([classes.index(c) for c in truth[p]]) for p in ("pool", "new")
        )
        embedding = portfolio.Embedding.fit(features["pool"])
        self.spaces = embedding.spaces(features["pool"])
        self.teachers = portfolio.Teachers(self.spaces, self.classes)
        self.inputs = self.teachers.inputs
        self.new = portfolio.student_input(embedding.spaces(features["new"]))
        self.questions = ask.Questions(self.spaces, self.teachers.graph)

    def student(self, rows: list[int]) -> tuple[Any, Any]:
        """Probabilities of the pool, and guesses for the new pictures."""
        seen = np.unique(self.y[rows])
        own = self.teachers.student(np.array(rows), np.searchsorted(seen, self.y[rows]), len(seen))
        probs = portfolio.softmax(self.inputs @ own[:-1] + own[-1])
        return probs, seen[(self.new @ own[:-1] + own[-1]).argmax(1)]


def random(world: World, rows: list[int], probs: Any, n: int, draw: Any) -> list[int]:
    """Any pictures."""
    return draw.permutation(np.setdiff1d(np.arange(len(world.y)), rows))[:n].tolist()


def by_score(score: Any) -> Any:
    """The highest scores of a model; random pictures while there is none."""

    def choose(world: World, rows: list[int], probs: Any, n: int, draw: Any) -> list[int]:
        if probs is None or len(rows) < world.classes:
            return random(world, rows, probs, n, draw)
        values = score(probs)
        values[rows] = -np.inf
        return np.argsort(-values, kind="stable")[:n].tolist()

    return choose


def margin(probs: Any) -> Any:
    """How close the second class is."""
    ordered = np.sort(probs, 1)
    return ordered[:, -2] - ordered[:, -1]


def entropy(probs: Any) -> Any:
    """Of the predicted class."""
    return -(probs * np.log(probs + 1e-9)).sum(1)


def k_centre(world: World, rows: list[int], probs: Any, n: int, draw: Any) -> list[int]:
    """Each next picture is the farthest from all labelled ones (Sener and Savarese, 2018)."""
    space = world.spaces[-1]
    chosen = [] if rows else [int(draw.integers(len(space)))]
    near = (space @ space[rows + chosen].T).max(1)
    while len(chosen) < n:
        chosen.append(int(near.argmin()))
        near = np.maximum(near, space @ space[chosen[-1]])
    return chosen[:n]


def badge(world: World, rows: list[int], probs: Any, n: int, draw: Any) -> list[int]:
    """Gradients of the last layer, spread by k-means++ (Ash et al., 2020)."""
    if probs is None or len(rows) < world.classes:
        return random(world, rows, probs, n, draw)
    x, slope = world.inputs, -probs.astype(np.float64)
    slope[np.arange(len(x)), probs.argmax(1)] += 1
    length = (slope**2).sum(1) * (x**2).sum(1)
    free, far, chosen = np.ones(len(x), bool), length, []
    free[rows] = False
    for _ in range(n):
        weight = far * free
        pick = int(draw.choice(len(x), p=weight / weight.sum()) if chosen else weight.argmax())
        chosen.append(pick)
        free[pick] = False
        inner = (slope @ slope[pick]) * (x @ x[pick])
        far = np.minimum(
            far if len(chosen) > 1 else np.inf, np.maximum(length + length[pick] - 2 * inner, 0)
        )
    return chosen


def typical(world: World, rows: list[int], probs: Any, n: int, draw: Any) -> list[int]:
    """The densest picture of the largest clusters without a label (Hacohen et al., 2022)."""
    space = world.spaces[-1]
    density = np.sort(space @ space.T, 1)[:, -21:-1].mean(1)
    state = int(draw.integers(1 << 30))
    cluster = KMeans(len(rows) + n, n_init=1, random_state=state).fit_predict(space)
    sizes = np.bincount(cluster, minlength=len(rows) + n)
    seen = np.bincount(cluster[rows], minlength=len(sizes)) if rows else np.zeros(len(sizes), int)
    chosen: list[int] = []
    while len(chosen) < n:
        best = min(range(len(sizes)), key=lambda c: (seen[c], -sizes[c]))
        own = np.setdiff1d(np.flatnonzero(cluster == best), rows + chosen)
        seen[best] += 1 if len(own) else len(space)
        if len(own):
            chosen.append(int(own[density[own].argmax()]))
    return chosen


def asked(fair: int) -> Any:
    """calmatch's own questions, some of them drawn at random."""

    def choose(world: World, rows: list[int], probs: Any, n: int, draw: Any) -> list[int]:
        return world.questions.next(rows, probs, n, fair=fair).rows.tolist()

    return choose


WAYS: dict[str, Any] = {
    "random": random,
    "calmatch": asked(ask.FAIR),
    "calmatch, no random ones": asked(0),
    "typical first": typical,
    "margin": by_score(margin),
    "entropy": by_score(entropy),
    "k-centre": k_centre,
    "BADGE": badge,
}


BLIND = ("random", "typical first", "k-centre")  # no model chooses


def simulate(world: World, way: str, seed: int) -> dict[str, Any]:
    """One session: its errors on new pictures, when it had seen every class, its estimates."""
    draw = np.random.default_rng([seed, 23])
    world.questions.order = np.random.default_rng(seed).permutation(len(world.y))
    rows: list[int] = []
    probs, errors, estimates = None, {}, {}
    for half in range(1, 2 * MOST + 1):
        wanted = round(half * world.classes / 2)
        rows += WAYS[way](world, rows, probs, wanted - len(rows), draw)
        assert len(set(rows)) == wanted
        if len(np.unique(world.y[rows])) < 2:
            errors[half] = float((world.new_y != world.y[rows[0]]).mean())
            continue
        if half % 2 and way in BLIND:
            continue
        probs, guess = world.student(rows)
        errors[half] = float((guess != world.new_y).mean())
        if way == "calmatch" and half in (4, 8, 12, 20):
            estimates[half] = estimate(world, rows, errors[half])
    first = [rows.index(next(r for r in rows if world.y[r] == c)) for c in np.unique(world.y[rows])]
    full = max(first) + 1 if len(first) == world.classes else None
    return {"errors": errors, "estimates": estimates, "full": full}


def estimate(world: World, rows: list[int], new: float) -> list[float]:
    """Truth over all pictures whose label was not seen; estimate, ends, random ones, agreement."""
    seen, y = np.unique(world.y[rows], return_inverse=True)
    fair = world.questions.fair_rows(rows)
    learned = ask.learn(world.teachers, rows, y, fair)
    rest = np.setdiff1d(np.arange(len(world.y)), rows)
    wrong = int((seen[learned.probs(world.inputs[rest]).argmax(1)] != world.y[rest]).sum())
    truth = (wrong + new * len(world.new_y)) / (len(rest) + len(world.new_y))
    return [truth, *learned.error, len(learned.truth), learned.gain[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--sets", nargs="*")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--page", action="store_true", help="write the page from what is there")
    options = parser.parse_args()
    lines = options.work / "asking.jsonl"
    done = [json.loads(line) for line in lines.open()] if lines.exists() else []
    keys = {(line["set"], line["way"], line["seed"]) for line in done}
    names = options.sets or sorted(path.parent.name for path in options.zoo.glob("*/truth.csv"))
    extractor = None if options.page else portfolio.load_extractor(NET, None, torch.device("cpu"))
    for name in [] if options.page else names:
        todo = [(w, s) for w in options.ways for s in range(options.seeds)]
        if all((name, *one) in keys for one in todo):
            continue
        world = World(options.zoo / name, extractor)
        for way, seed in todo:
            if (name, way, seed) not in keys:
                result = simulate(world, way, seed)
                line = {"set": name, "way": way, "seed": seed, "classes": world.classes, **result}
                with lines.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(
                    name, way, seed, f"{100 * result['errors'][8]:.1f}", result["full"], flush=True
                )
    write([json.loads(line) for line in lines.open()])


def write(lines: list[dict[str, Any]]) -> None:
    """The page: a table of all ways, one of every set, and what the estimates were worth."""
    sets = sorted({line["set"] for line in lines})
    ways = [way for way in WAYS if any(line["way"] == way for line in lines)]
    some: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        some.setdefault((line["set"], line["way"]), []).append(line)
    curves = {key: mean_curve(own) for key, own in some.items()}
    page = [
        "# Are labels that are asked for worth more than random ones?\n",
        f"`python research/asking.py ZOO WORK`: {len(sets)} sets of about 770 pictures with 5 to "
        "15 classes, simulated labelling from zero to ten labels a class (K classes). Every way "
        "teaches the same transductive student; its error is measured on pictures of `new/`. "
        "Ratios are geometric means over the sets, of means over seeds. calmatch's row includes "
        f"the one question in {ask.FAIR} that is drawn at random.\n",
        "| way | error / random's at 2 K | at 4 K | at 10 K | worse at 4 K on | labels for "
        "random's error at 4 K | at 8 K | labels until every class is seen / random's |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for way in ways:
        own = [name for name in sets if (name, way) in some]
        cells = []
        for half in (4, 8, 20):
            pairs = [(curves[name, way][half], curves[name, "random"][half]) for name in own]
            cells.append(f"{geometric([a / b for a, b in pairs]):.3f}")
        worse = sum(curves[name, way][8] > curves[name, "random"][8] for name in own)
        cells.append(f"{worse} of {len(own)}")
        for half in (8, 16):
            shares = [labels_for(curves[n, way], curves[n, "random"][half]) / half for n in own]
            cells.append(f"{geometric(shares):.2f}")
        full = [mean_full(some[n, way]) / mean_full(some[n, "random"]) for n in own]
        cells.append(f"{geometric(full):.2f}")
        page.append(f"| {way} | " + " | ".join(cells) + " |")
    page += ["", "Error in % at 4 K labels:\n", "| set | K | " + " | ".join(ways) + " |"]
    page.append("|---|---:|" + "---:|" * len(ways))
    for name in sets:
        row = [f"{100 * curves[name, w][8]:.1f}" if (name, w) in some else "" for w in ways]
        page.append(f"| {name} | {some[name, ways[0]][0]['classes']} | " + " | ".join(row) + " |")
    page += ["", "The estimate during labelling, by random questions and by agreement: truth is "
             "the error over every picture whose label was not seen.\n",
             "| labels | sessions | interval holds | mean width | mean estimate - truth | random "
             "answers |", "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    every = []
    for half in ("4", "8", "12", "20"):
        points = np.array([x["estimates"][half] for x in lines if half in x["estimates"]])
        if len(points):
            truth, value, low, high, number = points[:, :5].T
            every.append((low <= truth) & (truth <= high))
            page.append(
                f"| {int(half) // 2} K | {len(points)} | {every[-1].mean():.1%} | "
                f"{(high - low).mean():.3f} | {(value - truth).mean():+.3f} | {number.mean():.1f} |"
            )
    holds = np.concatenate(every) if every else np.zeros(1)
    page.append(f"\nOver all: {holds.mean():.1%} of {len(holds)}.\n")
    PAGE.write_text("\n".join(page))
    print("\n".join(page))


def mean_curve(own: list[dict[str, Any]]) -> dict[int, float]:
    """Errors by half K of labels; at least half a picture wrong, so that ratios exist."""
    shared = set.intersection(*({int(k) for k in line["errors"]} for line in own))
    return {
        k: max(float(np.mean([line["errors"][str(k)] for line in own])), 1e-3)
        for k in sorted(shared)
    }


def labels_for(curve: dict[int, float], error: float) -> float:
    """Half K of labels, interpolated, from which on the error is no larger for good."""
    halves = sorted(curve)
    above = [k for k in halves if curve[k] > error]
    if not above:
        return float(halves[0])
    last = above[-1]
    after = [k for k in halves if k > last]
    if not after:
        return float(halves[-1])
    a, b = curve[last], curve[after[0]]
    return last + (after[0] - last) * (a - error) / max(a - b, 1e-9)


def mean_full(own: list[dict[str, Any]]) -> float:
    """Labels until every class was seen; never within the session counts as its end."""
    return float(np.mean([line["full"] or MOST * line["classes"] for line in own]))


def geometric(values: list[float]) -> float:
    """Mean."""
    return float(np.exp(np.mean(np.log(values))))


if __name__ == "__main__":
    main()
