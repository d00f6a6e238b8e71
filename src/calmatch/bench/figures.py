"""The paper's figures from run folders: `prepare_x` computes, `draw_x` draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from calmatch import losses, spec
from calmatch.bench import stats
from calmatch.bench.paper import PUBLISHED_TABLES
from calmatch.bench.tables import RANKED, Group, RunTable, rank_scores, seed_values
from calmatch.report import charts
from calmatch.report.charts import COLUMN, LOOK, PAGE, PALETTE, Looks, below, check_panels
from calmatch.runs import Run

POINTS = 100  # a curve shows at most so many


def prepare_reliability(found: RunTable) -> dict[str, Any]:
    """Reliability plots; methods above, the same with penalty below (Observation 1, supplement)."""
    check_panels(len(found.groups))
    panels = []
    for group in found.groups:
        seeds, run = next(iter(group.runs.items()))
        base = found.base(group)
        several = f"\n{group.column}" if len(found.columns) > 1 else ""
        panels.append(
            {
                "title": f"{group.row}{several}",
                "method": base.row if base else group.row,
                "column": group.column,
                "penalised": base is not None,
                "seed": seeds[0],
                **charts.prepare_reliability(*run.predictions()),
            }
        )
    return {"panels": panels}


def draw_reliability(figure: Figure, found: Mapping[str, Any]) -> None:
    """One panel a run; a penalised run stands below its own method."""
    lines: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for panel in found["panels"]:
        lines.setdefault((panel["column"], panel["penalised"]), []).append(panel)
    wide = max(len({p["method"] for p in line}) for line in lines.values())
    places: dict[tuple[str, str], int] = {}
    rows: list[tuple[int, int, dict[str, Any]]] = []
    deep = 0
    for (column, penalised), line in lines.items():
        used: dict[int, int] = {}
        for panel in line:
            place = places.setdefault((column, panel["method"]), len(used) if penalised else -1)
            if not penalised or place < 0:
                place = places[column, panel["method"]] = len(used)
            level = used.get(place, 0)
            used[place] = level + 1
            rows.append((deep + level, place, panel))
        deep += max(used.values())
    wide = max(wide, 1 + max(place for _, place, _ in rows))
    each = min(1.75, max(1.3, PAGE / wide))
    figure.set_size_inches(max(COLUMN, each * wide), (each + 0.2) * deep)
    for level, place, panel in rows:
        axes = figure.add_subplot(deep, wide, level * wide + place + 1)
        charts.draw_reliability(axes, panel, panel["title"])
        axes.set_title(panel["title"], fontsize=7)
        if place:
            axes.set_ylabel("")


def series(group: Group, kind: str, fields: Sequence[str]) -> dict[str, Any]:
    """Curves of a group: mean, lowest and highest over its seeds at every logged step."""
    runs = [_lines_by_step(run, kind, fields) for run in group.runs.values()]
    steps = [step for step in runs[0] if all(step in run for run in runs)]
    curve: dict[str, Any] = {"row": group.row, "column": group.column, "seeds": len(runs)}
    curve["step"] = steps
    for field in fields:
        values = np.array([[run[step][field] for step in steps] for run in runs])
        curve[field] = {
            "mean": values.mean(0).tolist(),
            "low": values.min(0).tolist(),
            "high": values.max(0).tolist(),
        }
    return curve


def _lines_by_step(run: Run, kind: str, fields: Sequence[str]) -> dict[int, dict[str, float]]:
    found = [line for line in run.lines(kind) if all(line.get(f) is not None for f in fields)]
    every = max(1, -(-len(found) // POINTS)) if kind == "train" else 1
    kept = {}
    for start in range(0, len(found), every):
        some = found[start : start + every]
        shares = [line.get("accepted", 1.0) for line in some]  # the agreeing are a share of these
        weights = shares if sum(shares) > 0 else None
        kept[some[-1]["step"]] = {
            f: float(np.average([line[f] for line in some], weights=weights)) for f in fields
        }
    return kept


def prepare_agreement(found: RunTable) -> dict[str, Any]:
    """Share of agreeing pictures among the accepted over time (Observation 2)."""
    curves = [series(group, "train", ["agree"]) for group in found.groups]
    curves = [curve for curve in curves if curve["step"]]
    if not curves:
        raise ValueError("None of these runs accepted unlabelled pictures; nothing can agree.")
    return {"curves": _named(curves)}


def draw_agreement(figure: Figure, found: Mapping[str, Any]) -> None:
    """One line a row, the range over seeds shaded."""
    figure.set_size_inches(COLUMN, 2.9)
    axes = figure.subplots()
    _agreement(axes, found)
    below(figure, axes, 2)


def _agreement(axes: Axes, found: Mapping[str, Any]) -> None:
    _draw_series(axes, found["curves"], "agree", 100.0)
    axes.axhline(80, color="0.5", lw=0.8, ls=":")
    axes.set(xlabel="step", ylabel="agreeing, % of accepted", ylim=(None, 101))


def prepare_convergence(found: RunTable) -> dict[str, Any]:
    """Accuracy and ECE on the test set over time (supplement)."""
    return {"curves": _named([series(group, "test", ["error", "ece"]) for group in found.groups])}


def draw_convergence(figure: Figure, found: Mapping[str, Any]) -> None:
    """Accuracy left, ECE right."""
    figure.set_size_inches(PAGE, 2.9)
    left, right = figure.subplots(1, 2)
    turned = [
        {
            **c,
            "accuracy": {end: [1 - v for v in c["error"][end]] for end in ("mean", "low", "high")},
        }
        for c in found["curves"]
    ]
    _draw_series(left, turned, "accuracy", 100.0)
    _draw_series(right, turned, "ece", 100.0)
    left.set(xlabel="step", ylabel="accuracy, % of the test set")
    right.set(xlabel="step", ylabel="ECE, %", ylim=(0, None))
    below(figure, left, 4)


def _named(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    several = len({curve["column"] for curve in curves}) > 1
    for curve in curves:
        curve["name"] = f"{curve['row']}, {curve['column']}" if several else curve["row"]
    return curves


def _draw_series(axes: Axes, curves: Sequence[Mapping[str, Any]], field: str, scale: float) -> None:
    looks = Looks([curve["name"] for curve in curves])
    for curve in curves:
        ends = {end: [scale * v for v in curve[field][end]] for end in ("mean", "low", "high")}
        look = looks[curve["name"]]
        axes.plot(curve["step"], ends["mean"], label=curve["name"], **look)
        if curve["seeds"] > 1:
            axes.fill_between(
                curve["step"], ends["low"], ends["high"], color=look["color"], alpha=0.12, lw=0
            )


def prepare_entropy(found: RunTable | None = None) -> dict[str, Any]:
    """Shannon and min-entropy with their slopes; with runs, who agrees (Observation 2)."""
    p = np.linspace(0.001, 0.999, 1000)  # 0.5, where the min-entropy has no slope, lies between
    q = np.maximum(p, 1 - p)
    shannon = -p * np.log(p) - (1 - p) * np.log(1 - p)
    return {
        "p": p.tolist(),
        "shannon": shannon.tolist(),
        "min": (-np.log(q)).tolist(),
        "shannon_slope": np.log((1 - p) / p).tolist(),
        "min_slope": (np.sign(0.5 - p) / q).tolist(),
        "agreement": prepare_agreement(found) if found else None,
    }


def draw_entropy(figure: Figure, found: Mapping[str, Any]) -> None:
    """Entropies, their slopes, and the agreement curves where there are runs."""
    panels = 3 if found["agreement"] else 2
    figure.set_size_inches(PAGE if panels == 3 else 4.7, 2.6 if panels == 3 else 2.1)
    axes = figure.subplots(1, panels)
    half = len(found["p"]) // 2  # drawn apart: the min-entropy's slope jumps in the middle
    for place, (ending, label) in enumerate((("", "nats"), ("_slope", "slope, nats"))):
        for name, colour, dash in (("shannon", PALETTE[0], "-"), ("min", PALETTE[1], "--")):
            title = "Shannon entropy" if name == "shannon" else "min-entropy"
            x, y = found["p"], found[name + ending]
            axes[place].plot(x[:half], y[:half], color=colour, ls=dash, label=title)
            axes[place].plot(x[half:], y[half:], color=colour, ls=dash)
        axes[place].set(xlabel="p of (p, 1 − p)", ylabel=label, xlim=(0, 1))
    axes[0].legend(loc="lower center")
    axes[1].set_ylim(-4, 4)
    if panels == 3:
        _agreement(axes[2], found["agreement"])
        below(figure, axes[2], 4)


SHOWN = 10  # classes in one panel
GRID = 200


def centred(group: Group) -> tuple[NDArray[np.float64], NDArray[np.int64], tuple[str, ...]]:
    """Logits less their mean [N, C], labels and class names of a group's first seed."""
    run = next(iter(group.runs.values()))
    log_probs, labels = run.predictions()
    logits = log_probs.double().numpy()
    return logits - logits.mean(1, keepdims=True), labels.numpy(), tuple(run.result["classes"])


def density(values: NDArray[np.float64], grid: NDArray[np.float64]) -> list[float]:
    """A Gaussian kernel estimate (Scott's width); nothing where the values do not vary."""
    if len(values) < 3 or float(np.std(values)) < 1e-9:
        return [0.0] * len(grid)
    found: list[float] = gaussian_kde(values)(grid).tolist()
    return found


def _panel(group: Group, target: int) -> dict[str, Any]:
    logits, labels, names = centred(group)
    if target >= len(names):
        raise ValueError(f"There is no class {target}: {group.column} has {len(names)}, from 0.")
    some = logits[labels == target]
    if len(some) < 3:
        raise ValueError(f"Class {target} has only {len(some)} test pictures.")
    # with many classes the target and its strongest rivals
    order = np.argsort(-some.mean(0), kind="stable")
    kept = sorted({target, *[int(k) for k in order if k != target][: SHOWN - 1]})
    reach = 0.1 * float(np.ptp(some))
    grid = np.linspace(some.min() - reach, some.max() + reach, GRID)
    return {
        "title": group.row,
        "column": group.column,
        "target": target,
        "pictures": len(some),
        "x": grid.tolist(),
        "density": {str(k): density(some[:, k], grid) for k in kept},
        "names": {str(k): names[k] for k in kept},
        "range": [float(some.min()), float(some.max())],
        "rival": float(np.delete(some, target, 1).max()),
    }


def prepare_logits(found: RunTable, target: int = 5) -> dict[str, Any]:
    """Densities of every class's logit on pictures of one class (Observation 3)."""
    check_panels(len(found.groups))
    return {"panels": [_panel(group, target) for group in found.groups]}


def draw_logits(figure: Figure, found: Mapping[str, Any]) -> None:
    """A panel a run, all on the same axes; the target class is the filled one."""
    panels = found["panels"]
    wide = min(4, len(panels))
    deep = -(-len(panels) // wide)
    figure.set_size_inches(max(COLUMN, PAGE * wide / 4 if wide > 2 else PAGE / 2), 1.5 * deep + 0.7)
    grid = figure.subplots(deep, wide, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        _draw_densities(axes, panels[place])
        axes.set_title(panels[place]["title"], fontsize=7)
    for axes in grid[-1]:
        axes.set_xlabel("logit (centred)")
    for axes in grid[:, 0]:
        axes.set_ylabel("density")
    below(figure, grid[0, 0], 5)


def _draw_densities(axes: Axes, panel: Mapping[str, Any]) -> None:
    for place, (k, heights) in enumerate(panel["density"].items()):
        target = int(k) == panel["target"]
        colour = "black" if target else PALETTE[place % 6]
        dash = "-" if target or place < 6 else "--"
        label = f"{panel['names'][k]}{' (true class)' if target else ''}"
        axes.plot(
            panel["x"], heights, color=colour, ls=dash, lw=1.4 if target else 0.9, label=label
        )
        if target:
            axes.fill_between(panel["x"], heights, color="0.5", alpha=0.25, lw=0)
    low, high = panel["range"]
    axes.text(
        1,
        1,
        f"{low:.0f} to {high:.0f}\nwrong ≤ {panel['rival']:.1f}",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=6,
    )


def prepare_logits_all(found: RunTable) -> dict[str, Any]:
    """The same for every class, a line of panels each (supplement)."""
    _, labels, names = centred(found.groups[0])
    kept = [k for k in range(len(names)) if int((labels == k).sum()) > 2][:SHOWN]
    check_panels(len(kept) * len(found.groups))
    return {"lines": [[_panel(group, k) for group in found.groups] for k in kept]}


def draw_logits_all(figure: Figure, found: Mapping[str, Any]) -> None:
    """Classes downward, runs across, the same axes everywhere."""
    lines = found["lines"]
    wide, deep = len(lines[0]), len(lines)
    width, height = max(COLUMN, 1.75 * wide), 0.85 * deep + 0.8
    figure.set_size_inches(width, height)
    figure.set_layout_engine("none")  # so many panels would take it half a minute
    edges = {"left": 0.55 / width, "right": 1 - 0.1 / width}
    edges |= {"bottom": 0.4 / height, "top": 1 - 0.25 / height, "hspace": 0.35, "wspace": 0.1}
    grid = figure.subplots(deep, wide, sharex=True, sharey="row", squeeze=False, gridspec_kw=edges)
    for level, line in enumerate(lines):
        for place, panel in enumerate(line):
            axes = grid[level, place]
            _draw_densities(axes, panel)
            if level == 0:
                axes.set_title(panel["title"], fontsize=7)
            axes.tick_params(labelleft=False, left=False)
            if level == deep - 1:
                axes.set_xlabel("logit (centred)")
        grid[level, 0].set_ylabel(f"class {line[0]['names'][str(line[0]['target'])]}", fontsize=7)


def prepare_penalty(found: RunTable) -> dict[str, Any]:
    """Logit distances and wrong confidence with and without the penalty (before and after)."""
    curves: list[dict[str, Any]] = []
    pairs = [(found.base(group), group) for group in found.groups if group.config.penalty]
    for base, group in pairs:
        if base is None:
            continue
        for member in (base, group):
            if any(c["row"] == member.row and c["column"] == member.column for c in curves):
                continue
            curves.append(_distances(member))
    if not curves:
        raise ValueError("This figure needs a run with a penalty and the same run without it.")
    return {"curves": curves}


def _distances(group: Group) -> dict[str, Any]:
    logits, labels, names = centred(group)
    gap = np.ptp(logits, axis=1)
    wrong = logits.argmax(1) != labels
    probs = np.exp(logits - logits.max(1, keepdims=True))
    confidence = 1 / probs.sum(1)
    gaps = np.linspace(0, float(gap.max()) * 1.1, GRID)
    shares = np.linspace(0, 1, 101)
    beyond = [
        float((confidence[wrong] >= share).mean()) if wrong.any() else 0.0 for share in shares
    ]
    penalties = spec.added(group.config.penalty) if group.config.penalty else []
    m = next((_margin(part, len(names)) for part in penalties if part.name == "margin"), None)
    return {
        "row": group.row,
        "column": group.column,
        "margin": m,
        "gap": gaps.tolist(),
        "gap_density": density(gap, gaps),
        "confidence": shares.tolist(),
        "wrong_beyond": beyond,
        "wrong": int(wrong.sum()),
    }


def _margin(part: spec.Spec, classes: int) -> float:
    cap = part.kwargs.get("cap")
    return float(part.kwargs.get("m", 10.0)) if cap is None else losses.cap_margin(cap, classes)


def draw_penalty(figure: Figure, found: Mapping[str, Any]) -> None:
    """Left the largest logit distance with the margin as a line, right how sure errors are."""
    figure.set_size_inches(PAGE, 2.8)
    left, right = figure.subplots(1, 2)
    several = len({curve["column"] for curve in found["curves"]}) > 1
    names = [f"{c['row']}, {c['column']}" if several else c["row"] for c in found["curves"]]
    looks = Looks(names)
    for name, curve in zip(names, found["curves"], strict=True):
        left.plot(curve["gap"], curve["gap_density"], label=name, **looks[name])
        right.plot(curve["confidence"], [100 * v for v in curve["wrong_beyond"]], **looks[name])
    for m in sorted({c["margin"] for c in found["curves"] if c["margin"] is not None}):
        left.axvline(m, color="0.4", lw=0.8, ls=":")
        left.annotate(
            f"m = {m:g}", (m, 1), xycoords=("data", "axes fraction"), fontsize=6, va="top"
        )
    left.set(xlabel="largest logit distance", ylabel="density over test pictures", ylim=(0, None))
    right.set(
        xlabel="confidence", ylabel="errors at least that sure, %", ylim=(0, 101), xlim=(0, 1)
    )
    below(figure, left, 4)


def prepare_ranks(found: RunTable) -> dict[str, Any]:
    """Friedman ranks for error, ECE and both."""
    blocks = rank_scores(found)
    if blocks is None:
        raise ValueError("Ranks need two rows at least that are there in every column.")
    return _ranked(*blocks)


def published_ranks() -> dict[str, Any]:
    """The same from the paper's Tables 1 and 2."""
    table = PUBLISHED_TABLES["main"]
    rows = list(dict.fromkeys(row for row, _, _ in table))
    columns = list(dict.fromkeys(column for _, column, _ in table))
    scores = {
        row: {metric: [table[row, c, metric].value for c in columns] for metric in ("error", "ece")}
        for row in rows
    }
    return _ranked(scores, f"{len(columns)} columns, as published")


def _ranked(scores: Mapping[str, Mapping[str, Sequence[float]]], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind, "tests": {}}
    for name, metrics in RANKED.items():
        test = stats.friedman({r: [s for m in metrics for s in by[m]] for r, by in scores.items()})
        cliques = stats.cliques(test.rank, test.distance)
        found["tests"][name] = {**test._asdict(), "cliques": [list(c) for c in cliques]}
    return found


def draw_ranks(figure: Figure, found: Mapping[str, Any]) -> None:
    """A line a row, best above, a mark for each quantity."""
    tests = found["tests"]
    order = sorted(tests["all"]["rank"], key=lambda row: -tests["all"]["rank"][row])
    figure.set_size_inches(COLUMN, 0.24 * len(order) + 1.0)
    axes = figure.subplots()
    looks = zip(tests.items(), PALETTE, "os|", (4, 4, 9), strict=False)
    for level, row in enumerate(order):
        ends = [test["rank"][row] for test in tests.values()]
        axes.plot([min(ends), max(ends)], [level, level], color="0.8", lw=1, zorder=1)
    for (name, test), colour, marker, size in looks:
        places = [test["rank"][row] for row in order]
        colour = "black" if name == "all" else colour
        axes.plot(
            places,
            range(len(order)),
            marker,
            color=colour,
            ms=size,
            mew=2 if marker == "|" else 0,
            label=name,
        )
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel(f"mean rank, 1 best\n({found['kind']})")
    axes.set_xlim(0.8, len(order) + 0.2)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)


def draw_critical(figure: Figure, found: Mapping[str, Any]) -> None:
    """Critical-difference diagrams: bars join rows that cannot be told apart."""
    tests = found["tests"]
    rows = len(next(iter(tests.values()))["rank"])
    height = (
        0.75 + 0.15 * math.ceil(rows / 2) + 0.09 * max(len(t["cliques"]) for t in tests.values())
    )
    figure.set_size_inches(PAGE * 0.72, height * len(tests))
    for axes, (name, test) in zip(figure.subplots(len(tests), 1), tests.items(), strict=True):
        _critical(axes, name, test)


def _critical(axes: Axes, name: str, test: Mapping[str, Any]) -> None:
    ranks = test["rank"]
    order = sorted(ranks, key=lambda row: ranks[row])
    rows, half = len(order), math.ceil(len(order) / 2)
    first = 1.2 + 0.7 * len(test["cliques"])  # below the bars
    axes.set(xlim=(1 - 0.45 * rows, rows + 0.45 * rows), ylim=(first + 1.1 * half, -2.6))
    axes.axis("off")
    axes.plot([1, rows], [0, 0], color="black", lw=0.9)
    for rank in range(1, rows + 1):
        axes.plot([rank, rank], [0, -0.25], color="black", lw=0.9)
        axes.text(rank, -0.4, str(rank), ha="center", va="bottom", fontsize=7)
    for place, row in enumerate(order):
        left = place < half
        level = first + 1.1 * (place if left else rows - 1 - place)
        edge = 0.9 if left else rows + 0.1
        axes.plot([ranks[row], ranks[row], edge], [0, level, level], color="0.45", lw=0.7)
        text = f"{row}  {ranks[row]:.2f}" if left else f"{ranks[row]:.2f}  {row}"
        axes.text(
            edge - 0.1 if left else edge + 0.1,
            level,
            text,
            ha="right" if left else "left",
            va="center",
            fontsize=7,
        )
    for level, clique in enumerate(test["cliques"]):
        ends = [ranks[clique[0]] - 0.06, ranks[clique[-1]] + 0.06]
        axes.plot(ends, [0.6 + 0.7 * level] * 2, color=PALETTE[1], lw=3, solid_capstyle="butt")
    wide = min(test["distance"], rows - 1)
    axes.plot([1, 1 + wide], [-1.5, -1.5], color="black", lw=1.5, marker="|", ms=5)
    p = "" if test["p"] is None else f"; Friedman's p {test['p']:.1g}"
    words = f"{name}: critical difference {test['distance']:.2f} ({test['settings']} settings{p})"
    axes.text(1, -1.8, words, ha="left", va="bottom", fontsize=7)


def prepare_radar(found: RunTable) -> dict[str, Any]:
    """Accuracy and ECE of each loss as radar plots, a plot a column."""
    plots = []
    for column in found.columns:
        groups = [group for group in found.groups if group.column == column]
        values = {
            group.row: [
                stats.mean(list(seed_values(group, metric).values())).value
                for metric in ("error", "ece")
            ]
            for group in groups
        }
        plots.append(_radar(column, values))
    if max(len(plot["rows"]) for plot in plots) < 3:
        raise ValueError("A radar plot needs three rows at least.")
    return {"plots": plots}


def published_radar() -> dict[str, Any]:
    """The same from the supplement's table of the radar plots."""
    table = PUBLISHED_TABLES["losses"]
    rows = list(dict.fromkeys(row for row, _, _ in table))
    columns = list(dict.fromkeys(column for _, column, _ in table))
    plots = [
        _radar(c, {row: [table[row, c, m].value for m in ("error", "ece")] for row in rows})
        for c in columns
    ]
    return {"plots": plots}


def _radar(column: str, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    worst = max(ece for _, ece in values.values())
    rim = next(r for r in (5, 10, 20, 50, 100) if r >= min(100, 1.5 * worst))
    return {
        "column": column,
        "rows": list(values),
        "accuracy": [100 - error for error, _ in values.values()],
        "ece": [ece for _, ece in values.values()],
        "rim": rim,
    }


def draw_radar(figure: Figure, found: Mapping[str, Any]) -> None:
    """Spokes are rows; the further accuracy lies outside ECE the better."""
    plots = found["plots"]
    wide = min(3, len(plots))
    deep = -(-len(plots) // wide)
    figure.set_size_inches(max(COLUMN, PAGE * wide / 3), 2.0 * deep + 0.3)
    for place, plot in enumerate(plots):
        axes: Any = figure.add_subplot(deep, wide, place + 1, projection="polar")
        angles = [2 * math.pi * k / len(plot["rows"]) for k in range(len(plot["rows"]))]
        shapes = (
            ("accuracy", plot["accuracy"], PALETTE[0], "-"),
            ("ECE", [100 * v / plot["rim"] for v in plot["ece"]], PALETTE[1], "--"),
        )
        for name, values, colour, dash in shapes:
            axes.plot([*angles, angles[0]], [*values, values[0]], color=colour, ls=dash, label=name)
            axes.fill([*angles, angles[0]], [*values, values[0]], color=colour, alpha=0.15, lw=0)
        names = plot["rows"]
        if len({row.partition(" + ")[0] for row in names}) == 1:  # the method goes without saying
            names = [row.partition(" + ")[2] or row for row in names]
        numbers = zip(names, plot["accuracy"], plot["ece"], strict=True)
        axes.set_xticks(angles, [f"{n}\n{a:.1f} | {e:.1f}" for n, a, e in numbers], fontsize=6)
        for label, angle in zip(axes.get_xticklabels(), angles, strict=True):
            side = round(math.cos(angle), 6)
            label.set_ha("left" if side > 0 else "right" if side < 0 else "center")
        axes.tick_params(axis="x", pad=-2)
        axes.set_ylim(0, 100)
        axes.set_yticks([25, 50, 75], [])
        axes.spines["polar"].set_color("0.7")
        axes.grid(color="0.85", lw=0.6)
        axes.set_title(f"{plot['column']}\nrim: accuracy 100, ECE {plot['rim']}", fontsize=7)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


class Drawing(NamedTuple):
    """How a figure is computed and drawn; some can be drawn from the paper's own numbers."""

    prepare: Callable[..., dict[str, Any]]  # (Found) -> plain numbers
    draw: Callable[[Figure, Mapping[str, Any]], None]
    published: Callable[[], dict[str, Any]] | None = None

    @property
    def line(self) -> str:
        return (self.prepare.__doc__ or "").splitlines()[0]


FIGURES: Mapping[str, Drawing] = {
    "reliability": Drawing(prepare_reliability, draw_reliability),
    "entropy": Drawing(prepare_entropy, draw_entropy),
    "agreement": Drawing(prepare_agreement, draw_agreement),
    "logits": Drawing(prepare_logits, draw_logits),
    "logits_all": Drawing(prepare_logits_all, draw_logits_all),
    "penalty": Drawing(prepare_penalty, draw_penalty),
    "radar": Drawing(prepare_radar, draw_radar, published_radar),
    "convergence": Drawing(prepare_convergence, draw_convergence),
    "ranks": Drawing(prepare_ranks, draw_ranks, published_ranks),
    "critical": Drawing(prepare_ranks, draw_critical, published_ranks),
}


WHOLE = ("radar", "ranks", "critical")  # the others show one column at a time


def figures_of(found: RunTable) -> Iterator[tuple[str, str, RunTable]]:
    """Every figure with a file's stem and its runs; with several columns, one for each."""
    for name in FIGURES:
        if name in WHOLE or len(found.columns) == 1:
            yield name, name, found
        else:
            for column in found.columns:
                yield name, f"{name}_{column}", found.only(column)


def draw_figure(name: str, content: Mapping[str, Any]) -> Figure:
    """A figure from what its `prepare` gave."""
    with mpl.rc_context(LOOK):
        figure = Figure(layout="constrained")
        FIGURES[name].draw(figure, content)
        return figure
