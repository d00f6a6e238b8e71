"""Which loss when? Heads on frozen features: methods, the margin, smoothing, focal, EMA, views.

`python research/losses.py WORK --zoo ZOO.zip --eurosat EuroSAT.zip --cifar FOLDER` (as trust.py):
features of EfficientNet-Lite0 at 224 px once a set (WORK/NAME.npz), then a head for every row and
label split, as `Classifier` and `fit --method` train it (300 steps, views by noise), a line each in
WORK/losses.jsonl; it can be stopped and started again. `--page` writes research/losses.md and the
table in docs/results.md from the lines kept in research/results/losses.jsonl.

The rule by which the default penalty of such heads is chosen, written before the last three sets
(cifar10, food101_10, sketch_pacs) were opened: among FreeMatch's rows with no penalty, margin 10
(published), margin(cap=0.98) (the default so far), smoothing and focal, over the other seven sets,
both numbers of labels, the one with the least mean ECE of those whose mean error is within half a
point of the least; if it is not the default so far, it replaces it only where the paired difference
in ECE over sets excludes zero (95 %), and only if the last three sets do not contradict it (their
mean ECE is not higher).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trust import LAST, datasets, draw, extract

from calmatch import metrics
from calmatch.fit import crossval, plan

LINES = Path(__file__).parent / "results" / "losses.jsonl"
PAGE = Path(__file__).parent / "losses.md"
LABELS, SPLITS = (4, 10), 5
METHODS = ("freematch", "fixmatch", "flexmatch", "softmatch", "simmatch")
MARGINS = {"margin 10": "margin(m=10)", "cap 0.98": plan.PENALTY}
PLAIN: dict[str, Any] = {"method": "freematch", "penalty": ""}
ROWS: dict[str, dict[str, Any]] = {
    "labels alone": {"method": "supervised", "penalty": ""},
    **{method: {"method": method, "penalty": ""} for method in METHODS},
    **{
        f"{method} + {name}": {"method": method, "penalty": penalty}
        for method in METHODS
        for name, penalty in MARGINS.items()
    },
    "freematch + smoothing": {**PLAIN, "unlabelled_loss": "smoothing(alpha=0.1)"},
    "freematch + focal": {**PLAIN, "unlabelled_loss": "focal(gamma=2)"},
    "freematch, no EMA": {**PLAIN, "ema": 0.0},
    "freematch, three views": {**PLAIN, "views": 3},
}
CHOICE = (
    "freematch",
    *(f"freematch + {x}" for x in ("margin 10", "cap 0.98", "smoothing", "focal")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--zoo", type=Path)
    parser.add_argument("--eurosat", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--last", action="store_true", help="the last three sets too")
    parser.add_argument("--page", action="store_true", help="write the tables")
    options = parser.parse_args()
    options.tiny = None
    options.work.mkdir(parents=True, exist_ok=True)
    for name, parts in datasets(options):
        if not (path := options.work / f"{name}.npz").exists():
            extract(path, parts, "cpu", plan.ONE)
    lines = options.work / "losses.jsonl"
    done = {line["key"] for line in read_lines(lines)}
    names = sorted(path.stem for path in options.work.glob("*.npz"))
    names = [name for name in names if options.last or name not in LAST]
    jobs = [
        (options.work / f"{name}.npz", each, split, done)
        for split in range(options.splits)
        for each in LABELS
        for name in names
    ]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for some in pool.imap_unordered(measure, jobs):
            with lines.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in some)
            if some:
                print(some[0]["key"], flush=True)
    if options.page:
        LINES.write_text("".join(json.dumps(line) + "\n" for line in read_lines(lines)))
        write_page(read_lines(LINES))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()] if path.exists() else []


def measure(job: tuple[Path, int, int, set[str]]) -> list[dict[str, Any]]:
    """Every row of one label split that has no line yet."""
    path, each, split, done = job
    torch.set_num_threads(1)
    todo = {row: f"{path.stem} {each} {split} {row}" for row in ROWS}
    if not (todo := {row: key for row, key in todo.items() if key not in done}):
        return []
    with np.load(path) as stored:
        views = np.concatenate([stored["pool_last"], stored["new_last"]], 1).astype(np.float32)
        labels = np.concatenate([stored["pool_labels"], stored["new_labels"]])
        size = len(stored["pool_labels"])
    rows, lines = draw(labels[:size], each, split), []
    known = torch.full((size,), -1)
    known[torch.from_numpy(rows)] = torch.from_numpy(labels[rows])
    unseen = np.setdiff1d(np.arange(len(labels)), rows)
    truth = torch.from_numpy(labels[unseen])
    for row, key in todo.items():
        settings = dict(ROWS[row])
        x = torch.from_numpy(views[: settings.pop("views", 1)].mean(0))
        asked = (settings.pop("method"), settings.pop("penalty"), None, split, x.shape[1])
        config = crossval.head_config(*asked).replace(**settings)
        frozen = crossval.freeze_vectors(config, x[:size], known, int(labels.max()) + 1)
        weight, bias = frozen.train()
        logits = x[unseen].double() @ weight.T + bias
        probs = logits.softmax(1)
        best = min(
            float(metrics.debiased_ece((logits / t).softmax(1), truth))
            for t in np.exp(np.linspace(-1.5, 2, 36))
        )
        line = {"key": key, "set": path.stem, "labels": each, "split": split, "row": row}
        line |= {"error": round(float(metrics.error(probs, truth)), 5)}
        line |= {"ece": round(float(metrics.debiased_ece(probs, truth)), 5)}
        line |= {"sure": round(float(probs.amax(1).mean()), 5), "oracle": round(best, 5)}
        lines.append(line)
    return lines


def write_page(lines: list[dict[str, Any]]) -> None:
    """research/losses.md, and its table in docs/results.md."""
    sets = sorted({line["set"] for line in lines})
    numbers = " and ".join(map(str, LABELS))
    splits = len({line["split"] for line in lines})
    text = [
        "# Which loss when\n",
        f"Written by `python research/losses.py`: {len(lines):,} heads on features of "
        f"EfficientNet-Lite0 (224 px), {len(sets)} sets, {splits} label splits with {numbers} "
        "labels a class; on every picture whose label was not seen, without any temperature. "
        "Differences are paired by set and split; intervals are 95 % of a model in which every set "
        "has its own true difference (normal, the spread between sets unknown), so they speak of "
        "sets like these, not of these sets.\n",
    ]
    table = ["| row | error, % | ECE, % | with the best temperature | confidence less accuracy |"]
    table += ["|---|---:|---:|---:|---:|"]
    for row in ROWS:
        own = [line for line in lines if line["row"] == row]
        values = [100 * mean_of_sets(own, name) for name in ("error", "ece", "oracle")]
        values.append(100 * (mean_of_sets(own, "sure") - 1) + values[0])
        table.append(f"| {row} | {' | '.join(f'{v:.1f}' for v in values[:3])} | {values[3]:+.1f} |")
    text += ["## Every row\n", "Mean over sets, splits and both numbers of labels.\n", *table, ""]
    changes = list(render_changes(lines))
    text += ["## What each changes\n", *changes, ""]
    text += ["## The default, by the rule in the script\n", *choose(lines), ""]
    PAGE.write_text("\n".join(text))
    print("\n".join(text))
    place = PAGE.parents[1] / "docs" / "results.md"
    before, mark, rest = place.read_text().partition("<!-- losses -->\n")
    assert mark, "docs/results.md has no place for the table"
    end = rest.index("<!-- /losses -->")
    short = [line for line in changes if not line.startswith("| simmatch") or "cap" not in line]
    place.write_text(before + mark + "\n".join(short) + "\n" + rest[end:])


def mean_of_sets(lines: list[dict[str, Any]], name: str) -> float:
    by_set: dict[str, list[float]] = {}
    for line in lines:
        by_set.setdefault(line["set"], []).append(line[name])
    return float(np.mean([np.mean(values) for values in by_set.values()]))


def render_changes(lines: list[dict[str, Any]]) -> Iterator[str]:
    """A line each: how error and ECE differ from the same method without it."""
    yield "| against the same without it, points | error | ECE | sets with lower ECE |"
    yield "|---|---:|---:|---:|"
    several = {f"the {name}, five methods": [f"{m} + {name}" for m in METHODS] for name in MARGINS}
    pairs = {row: [row] for row in ROWS if " + " in row or ", " in row}
    for name, rows in {**several, **pairs}.items():
        cells = [hierarchical(differences(lines, rows, metric)) for metric in ("error", "ece")]
        lower = [np.mean(own) < 0 for own in differences(lines, rows, "ece").values()]
        shown = [f"{mid:+.1f} ({low:+.1f} to {high:+.1f})" for mid, low, high in cells]
        yield f"| {name} | {' | '.join(shown)} | {sum(lower)} of {len(lower)} |"


def differences(
    lines: list[dict[str, Any]], rows: list[str], metric: str, base: str = ""
) -> dict[str, list[float]]:
    """By set, points: a number for each split, the mean over rows; less the method itself."""
    known = {line["key"]: line[metric] for line in lines}
    by_set: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        if line["row"] not in rows:
            continue
        plain = base or line["row"].replace(",", " +").partition(" + ")[0]
        split = line["key"].removesuffix(line["row"])
        away = 100 * (line[metric] - known[split + plain])
        by_set.setdefault(line["set"], {}).setdefault(split, []).append(away)
    return {name: [float(np.mean(v)) for v in own.values()] for name, own in by_set.items()}


def hierarchical(by_set: dict[str, list[float]]) -> tuple[float, float, float]:
    """Mean and 95 % interval of the mean difference, every set with its own.

    Splits of a set scatter about its difference, differences of sets about the mean, both normal;
    the spread between sets has a flat prior, as in meta-analysis, and is integrated out.
    """
    means = np.array([np.mean(own) for own in by_set.values()])
    noise = np.array([np.var(own, ddof=1) / len(own) for own in by_set.values()])
    spreads = np.linspace(0, 4 * means.std() + 0.1, 200)
    grid = np.linspace(-1, 1, 2001) * (abs(means).max() + 3 * means.std() + 0.1)
    total = np.zeros(len(grid))
    for spread in spreads:
        variance = noise + spread**2 + 1e-6
        away = (means[:, None] - grid) ** 2 / variance[:, None]
        total += np.exp(-0.5 * (away + np.log(variance)[:, None]).sum(0))
    share = total.cumsum() / total.sum()
    low, middle, high = (float(grid[np.searchsorted(share, end)]) for end in (0.025, 0.5, 0.975))
    return middle, low, high


def choose(lines: list[dict[str, Any]]) -> list[str]:
    """The rule of the docstring, step by step."""
    first = [line for line in lines if line["set"] not in LAST]
    last = [line for line in lines if line["set"] in LAST]
    now = f"freematch + {next(name for name, own in MARGINS.items() if own == plan.PENALTY)}"
    numbers = {}
    for row in CHOICE:
        own = [line for line in first if line["row"] == row]
        numbers[row] = (100 * mean_of_sets(own, "error"), 100 * mean_of_sets(own, "ece"))
    least = min(error for error, _ in numbers.values())
    good = {row: ece for row, (error, ece) in numbers.items() if error <= least + 0.5}
    best = min(good, key=lambda row: good[row])
    out = [f"- {row}: error {error:.2f}, ECE {ece:.2f}" for row, (error, ece) in numbers.items()]
    out = [
        "Seven sets:",
        "",
        *out,
        "",
        f"Least ECE within half a point of the least error: {best}.",
    ]
    if best == now:
        return [*out, "It is the default already."]
    middle, low, high = hierarchical(differences(first, [best], "ece", now))
    out.append(f"Against {now}: {middle:+.2f} ({low:+.2f} to {high:+.2f}) points of ECE.")
    if last:
        there = hierarchical(differences(last, [best], "ece", now))
        out.append(f"On the last three sets: {there[0]:+.2f} ({there[1]:+.2f} to {there[2]:+.2f}).")
        verdict = "It replaces it." if high < 0 and there[0] <= 0 else "So the default stays."
        out.append(verdict)
    return out


if __name__ == "__main__":
    main()
