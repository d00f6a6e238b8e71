"""The paper's figures from run folders: `prepare_x` computes plain numbers, `draw_x` draws them."""

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
from calmatch.bench import stats, tables
from calmatch.bench.paper import PUBLISHED_TABLES
from calmatch.bench.tables import Group, RunTable
from calmatch.report import charts
from calmatch.report.charts import COLUMN, PAGE, PALETTE, check_panels, draw_legend
from calmatch.runs import Run

Content = Mapping[str, Any]  # what a figure shows, as plain numbers and texts


def prepare_reliability(table: RunTable) -> Content:
    """Reliability plots; methods above, the same with penalty below (Observation 1, supplement)."""
    check_panels(len(table.groups))
    panels = []
    for group in table.groups:
        seeds, run = next(iter(group.runs.items()))
        base = table.base(group)
        panel = {
            "title": f"{group.row}\n{group.column}" if len(table.columns) > 1 else group.row,
            "method": base.row if base else group.row,
            "column": group.column,
            "penalised": base is not None,
            "seed": seeds[0],
        }
        panels.append(panel | charts.prepare_reliability(*run.predictions()))
    return {"panels": panels}


def draw_reliability(figure: Figure, content: Content) -> None:
    """One panel a run; a penalised run stands below its own method."""
    columns: dict[str, list[Content]] = {}
    for panel in sorted(content["panels"], key=lambda panel: bool(panel["penalised"])):
        columns.setdefault(panel["column"], []).append(panel)
    placed: list[tuple[int, int, Content]] = []
    deep = 0
    for panels in columns.values():
        levels: dict[str, int] = {}  # how many panels of each method there are, side by side
        for panel in panels:
            level = levels.get(panel["method"], 0)
            levels[panel["method"]] = level + 1
            placed.append((deep + level, list(levels).index(panel["method"]), panel))
        deep += max(levels.values())
    wide = 1 + max(place for _, place, _ in placed)
    each = min(1.75, max(1.3, PAGE / wide))
    figure.set_size_inches(max(COLUMN, each * wide), (each + 0.2) * deep)
    for level, place, panel in placed:
        axes = figure.add_subplot(deep, wide, level * wide + place + 1)
        charts.draw_reliability(axes, dict(panel), panel["title"])
        axes.set_title(panel["title"], fontsize=7)
        if place:
            axes.set_ylabel("")


def prepare_agreement(table: RunTable) -> Content:
    """Share of agreeing pictures among the accepted over time (Observation 2)."""
    curves = [series(group, "train", ["agree"]) for group in table.groups]
    curves = [curve for curve in curves if curve["step"]]
    if not curves:
        raise ValueError("None of these runs accepted unlabelled pictures; nothing can agree.")
    return {"curves": _name_curves(curves)}


def draw_agreement(figure: Figure, content: Content) -> None:
    """One line a row, the range over seeds shaded."""
    figure.set_size_inches(COLUMN, 2.9)
    axes = figure.subplots()
    _draw_agreement(axes, content)
    draw_legend(figure, axes, 2)


def _draw_agreement(axes: Axes, content: Content) -> None:
    _draw_series(axes, content["curves"], "agree", lambda share: 100 * share)
    axes.axhline(80, color="0.5", lw=0.8, ls=":")
    axes.set(xlabel="step", ylabel="agreeing, % of accepted", ylim=(None, 101))


def prepare_convergence(table: RunTable) -> Content:
    """Accuracy and ECE on the test set over time (supplement)."""
    curves = [series(group, "test", ["error", "ece"]) for group in table.groups]
    return {"curves": _name_curves(curves)}


def draw_convergence(figure: Figure, content: Content) -> None:
    """Accuracy left, ECE right."""
    figure.set_size_inches(PAGE, 2.9)
    left, right = figure.subplots(1, 2)
    _draw_series(left, content["curves"], "error", lambda error: 100 * (1 - error))
    _draw_series(right, content["curves"], "ece", lambda ece: 100 * ece)
    left.set(xlabel="step", ylabel="accuracy, % of the test set")
    right.set(xlabel="step", ylabel="ECE, %", ylim=(0, None))
    draw_legend(figure, left, 4)


POINTS = 100  # a curve shows at most so many


def series(group: Group, kind: str, fields: Sequence[str]) -> dict[str, Any]:
    """Curves of a group: mean, lowest and highest over its seeds at every logged step."""
    runs = [_lines_by_step(run, kind, fields) for run in group.runs.values()]
    steps = [step for step in runs[0] if all(step in run for run in runs)]
    curve = {"row": group.row, "column": group.column, "seeds": len(runs), "step": steps}
    for field in fields:
        values = np.array([[run[step][field] for step in steps] for run in runs])
        ends = {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
        curve[field] = {end: numbers.tolist() for end, numbers in ends.items()}
    return curve


def _lines_by_step(run: Run, kind: str, fields: Sequence[str]) -> dict[int, dict[str, float]]:
    lines = [line for line in run.lines(kind) if all(line.get(f) is not None for f in fields)]
    every = max(1, -(-len(lines) // POINTS)) if kind == "train" else 1
    points = {}
    for start in range(0, len(lines), every):
        some = lines[start : start + every]
        shares = [line.get("accepted", 1.0) for line in some]  # the agreeing are a share of these
        weights = shares if sum(shares) > 0 else None
        points[some[-1]["step"]] = {
            f: float(np.average([line[f] for line in some], weights=weights)) for f in fields
        }
    return points


def _name_curves(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    several = len({curve["column"] for curve in curves}) > 1
    for curve in curves:
        curve["name"] = f"{curve['row']}, {curve['column']}" if several else curve["row"]
    return curves


def _draw_series(
    axes: Axes, curves: Sequence[Content], field: str, scale: Callable[[float], float]
) -> None:
    styles = charts.line_styles([curve["name"] for curve in curves])
    for curve in curves:
        mean, low, high = ([*map(scale, curve[field][end])] for end in ("mean", "low", "high"))
        style = styles[curve["name"]]
        axes.plot(curve["step"], mean, label=curve["name"], **style)
        if curve["seeds"] > 1:
            axes.fill_between(curve["step"], low, high, color=style["color"], alpha=0.12, lw=0)


def prepare_entropy(table: RunTable | None = None) -> Content:
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
        "agreement": prepare_agreement(table) if table else None,
    }


def draw_entropy(figure: Figure, content: Content) -> None:
    """Entropies, their slopes, and the agreement curves where there are runs."""
    agreement = content["agreement"]
    figure.set_size_inches(*((PAGE, 2.6) if agreement else (4.7, 2.1)))
    axes = figure.subplots(1, 3 if agreement else 2)
    half = len(content["p"]) // 2  # drawn apart: the min-entropy's slope jumps in the middle
    for place, (ending, label) in enumerate((("", "nats"), ("_slope", "slope, nats"))):
        for name, colour, dash in (("shannon", PALETTE[0], "-"), ("min", PALETTE[1], "--")):
            title = "Shannon entropy" if name == "shannon" else "min-entropy"
            x, y = content["p"], content[name + ending]
            axes[place].plot(x[:half], y[:half], color=colour, ls=dash, label=title)
            axes[place].plot(x[half:], y[half:], color=colour, ls=dash)
        axes[place].set(xlabel="p of (p, 1 − p)", ylabel=label, xlim=(0, 1))
    axes[0].legend(loc="lower center")
    axes[1].set_ylim(-4, 4)
    if agreement:
        _draw_agreement(axes[2], agreement)
        draw_legend(figure, axes[2], 4)


SHOWN_CLASSES = 10  # in one panel
GRID = 200


def prepare_logits(table: RunTable, target: int = 5) -> Content:
    """Densities of every class's logit on pictures of one class (Observation 3)."""
    check_panels(len(table.groups))
    return {"panels": [_logit_panel(group, target) for group in table.groups]}


def prepare_logits_all(table: RunTable) -> Content:
    """The same for every class, a line of panels each (supplement)."""
    _, labels, names = centred(table.groups[0])
    classes = [k for k in range(len(names)) if int((labels == k).sum()) > 2][:SHOWN_CLASSES]
    check_panels(len(classes) * len(table.groups))
    return {"lines": [[_logit_panel(group, k) for group in table.groups] for k in classes]}


def _logit_panel(group: Group, target: int) -> Content:
    logits, labels, names = centred(group)
    if target >= len(names):
        raise ValueError(f"There is no class {target}: {group.column} has {len(names)}, from 0.")
    some = logits[labels == target]
    if len(some) < 3:
        raise ValueError(f"Class {target} has only {len(some)} test pictures.")
    # with many classes the target and its strongest rivals
    order = np.argsort(-some.mean(0), kind="stable")
    classes = sorted({target, *[int(k) for k in order if k != target][: SHOWN_CLASSES - 1]})
    low, high = float(some.min()), float(some.max())
    pad = 0.1 * float(np.ptp(some))
    grid = np.linspace(low - pad, high + pad, GRID)
    return {
        "title": group.row,
        "target": target,
        "x": grid.tolist(),
        "density": {str(k): density(some[:, k], grid) for k in classes},
        "names": {str(k): names[k] for k in classes},
        "range": [low, high],
        "rival": float(np.delete(some, target, 1).max()),
    }


def centred(group: Group) -> tuple[NDArray[np.float64], NDArray[np.int64], tuple[str, ...]]:
    """Logits less their mean [N, C], labels and class names of a group's first seed."""
    run = next(iter(group.runs.values()))
    log_probs, labels = run.predictions()
    logits = log_probs.double().numpy()
    return logits - logits.mean(1, keepdims=True), labels.numpy(), run.result.classes


def density(values: NDArray[np.float64], grid: NDArray[np.float64]) -> list[float]:
    """A Gaussian kernel estimate (Scott's width); nothing where the values do not vary."""
    if len(values) < 3 or float(np.std(values)) < 1e-9:
        return [0.0] * len(grid)
    heights: list[float] = gaussian_kde(values)(grid).tolist()
    return heights


def draw_logits(figure: Figure, content: Content) -> None:
    """A panel a run, all on the same axes; the target class is the filled one."""
    panels = content["panels"]
    wide = min(4, len(panels))
    deep = -(-len(panels) // wide)
    figure.set_size_inches(max(COLUMN, PAGE * wide / 4 if wide > 2 else PAGE / 2), 1.5 * deep + 0.7)
    grid = figure.subplots(deep, wide, sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_densities(axes, panel)
        axes.set_title(panel["title"], fontsize=7)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("logit (centred)")
    for axes in grid[:, 0]:
        axes.set_ylabel("density")
    draw_legend(figure, grid[0, 0], 5)


def draw_logits_all(figure: Figure, content: Content) -> None:
    """Classes downward, runs across, the same axes everywhere."""
    lines = content["lines"]
    wide, deep = len(lines[0]), len(lines)
    width, height = max(COLUMN, 1.75 * wide), 0.85 * deep + 0.8
    figure.set_size_inches(width, height)
    figure.set_layout_engine("none")  # so many panels would take it half a minute
    edges = {"left": 0.55 / width, "right": 1 - 0.1 / width}
    edges |= {"bottom": 0.4 / height, "top": 1 - 0.25 / height, "hspace": 0.35, "wspace": 0.1}
    grid = figure.subplots(deep, wide, sharex=True, sharey="row", squeeze=False, gridspec_kw=edges)
    for row, line in zip(grid, lines, strict=True):
        for axes, panel in zip(row, line, strict=True):
            _draw_densities(axes, panel)
            axes.tick_params(labelleft=False, left=False)
        row[0].set_ylabel(f"class {line[0]['names'][str(line[0]['target'])]}", fontsize=7)
    for above, under, panel in zip(grid[0], grid[-1], lines[0], strict=True):
        above.set_title(panel["title"], fontsize=7)
        under.set_xlabel("logit (centred)")


def _draw_densities(axes: Axes, panel: Content) -> None:
    for place, (k, heights) in enumerate(panel["density"].items()):
        name = panel["names"][k]
        if int(k) == panel["target"]:
            axes.plot(panel["x"], heights, color="black", lw=1.4, label=f"{name} (true class)")
            axes.fill_between(panel["x"], heights, color="0.5", alpha=0.25, lw=0)
        else:
            colour, dash = PALETTE[place % 6], "-" if place < 6 else "--"
            axes.plot(panel["x"], heights, color=colour, ls=dash, lw=0.9, label=name)
    low, high = panel["range"]
    words = f"{low:.0f} to {high:.0f}\nwrong ≤ {panel['rival']:.1f}"
    axes.text(1, 1, words, transform=axes.transAxes, ha="right", va="top", fontsize=6)


def prepare_penalty(table: RunTable) -> Content:
    """Logit distances and wrong confidence with and without the penalty (before and after)."""
    pairs = [(table.base(group), group) for group in table.groups if group.config.penalty]
    members = {(g.row, g.column): g for base, group in pairs if base for g in (base, group)}
    if not members:
        raise ValueError("This figure needs a run with a penalty and the same run without it.")
    return {"curves": _name_curves([_distances(group) for group in members.values()])}


def _distances(group: Group) -> dict[str, Any]:
    logits, labels, names = centred(group)
    gap = np.ptp(logits, axis=1)
    wrong = logits.argmax(1) != labels
    confidence = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    gaps = np.linspace(0, float(gap.max()) * 1.1, GRID)
    shares = np.linspace(0, 1, 101)
    beyond = [float((confidence[wrong] >= s).mean()) if wrong.any() else 0.0 for s in shares]
    parts = spec.added(group.config.penalty) if group.config.penalty else []
    settings = next((part.kwargs for part in parts if part.name == "margin"), None)
    margin = None if settings is None else float(settings.get("m", 10.0))
    if settings and settings.get("cap") is not None:
        margin = losses.cap_margin(settings["cap"], len(names))
    return {
        "row": group.row,
        "column": group.column,
        "margin": margin,
        "gap": gaps.tolist(),
        "gap_density": density(gap, gaps),
        "confidence": shares.tolist(),
        "wrong_beyond": beyond,
    }


def draw_penalty(figure: Figure, content: Content) -> None:
    """Left the largest logit distance with the margin as a line, right how sure errors are."""
    figure.set_size_inches(PAGE, 2.8)
    left, right = figure.subplots(1, 2)
    styles = charts.line_styles([curve["name"] for curve in content["curves"]])
    for curve in content["curves"]:
        name = curve["name"]
        left.plot(curve["gap"], curve["gap_density"], label=name, **styles[name])
        right.plot(curve["confidence"], [100 * v for v in curve["wrong_beyond"]], **styles[name])
    for m in sorted({c["margin"] for c in content["curves"] if c["margin"] is not None}):
        left.axvline(m, color="0.4", lw=0.8, ls=":")
        where: Any = ("data", "axes fraction")
        left.annotate(f"m = {m:g}", (m, 1), xycoords=where, fontsize=6, va="top")
    left.set(xlabel="largest logit distance", ylabel="density over test pictures", ylim=(0, None))
    right.set(xlabel="confidence", ylabel="errors at least that sure, %")
    right.set(ylim=(0, 101), xlim=(0, 1))
    draw_legend(figure, left, 4)


def prepare_ranks(table: RunTable) -> Content:
    """Friedman ranks for error, ECE and both."""
    scores, kind = tables.rank_scores(table)
    if len(scores) < 2:
        raise ValueError("Ranks need two rows at least that are there in every column.")
    return _rank_content(scores, kind)


def published_ranks() -> Content:
    """The same from the paper's Tables 1 and 2."""
    numbers, rows, columns = _published_numbers("main")
    scores = {row: {m: [numbers[row, c, m] for c in columns] for m in METRICS} for row in rows}
    return _rank_content(scores, f"{len(columns)} columns, as published")


METRICS = ("error", "ece")


def _published_numbers(name: str) -> tuple[dict[tuple[str, str, str], float], list[str], list[str]]:
    """The values of a published table, its rows and its columns."""
    numbers = {key: number.value for key, number in PUBLISHED_TABLES[name].items()}
    rows, columns = (list(dict.fromkeys(key[k] for key in numbers)) for k in (0, 1))
    return numbers, rows, columns


def _rank_content(scores: tables.Scores, kind: str) -> Content:
    tests = {}
    for name, test in tables.friedman_tests(scores).items():
        cliques = stats.cliques(test.rank, test.distance)
        tests[name] = {**test._asdict(), "cliques": [list(clique) for clique in cliques]}
    return {"kind": kind, "tests": tests}


def draw_ranks(figure: Figure, content: Content) -> None:
    """A line a row, best above, a mark for each quantity."""
    tests = content["tests"]
    order = sorted(tests["all"]["rank"], key=lambda row: -tests["all"]["rank"][row])
    figure.set_size_inches(COLUMN, 0.24 * len(order) + 1.0)
    axes = figure.subplots()
    for level, row in enumerate(order):
        ends = [test["rank"][row] for test in tests.values()]
        axes.plot([min(ends), max(ends)], [level, level], color="0.8", lw=1, zorder=1)
    styles = ((PALETTE[0], "o", 4, 0), (PALETTE[1], "s", 4, 0), ("black", "|", 9, 2))
    for (name, test), (colour, marker, size, edge) in zip(tests.items(), styles, strict=True):
        ranks = [test["rank"][row] for row in order]
        levels = range(len(order))
        axes.plot(ranks, levels, marker, color=colour, ms=size, mew=edge, label=name)
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel(f"mean rank, 1 best\n({content['kind']})")
    axes.set_xlim(0.8, len(order) + 0.2)
    draw_legend(figure, axes, 3, above=True)


def draw_critical(figure: Figure, content: Content) -> None:
    """Critical-difference diagrams: bars join rows that cannot be told apart."""
    tests = content["tests"]
    rows, most = len(tests["all"]["rank"]), max(len(test["cliques"]) for test in tests.values())
    height = 0.75 + 0.15 * math.ceil(rows / 2) + 0.09 * most
    figure.set_size_inches(PAGE * 0.72, height * len(tests))
    for axes, (name, test) in zip(figure.subplots(len(tests), 1), tests.items(), strict=True):
        _draw_critical(axes, name, test)


def _draw_critical(axes: Axes, name: str, test: Content) -> None:
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
        if place < half:
            level, edge, side, text = place, 0.9, "right", f"{row}  {ranks[row]:.2f}"
        else:
            level, edge, side, text = (
                rows - 1 - place,
                rows + 0.1,
                "left",
                f"{ranks[row]:.2f}  {row}",
            )
        y = first + 1.1 * level
        axes.plot([ranks[row], ranks[row], edge], [0, y, y], color="0.45", lw=0.7)
        x = edge - 0.1 if side == "right" else edge + 0.1
        axes.text(x, y, text, ha=side, va="center", fontsize=7)
    for level, clique in enumerate(test["cliques"]):
        ends = [ranks[clique[0]] - 0.06, ranks[clique[-1]] + 0.06]
        axes.plot(ends, [0.6 + 0.7 * level] * 2, color=PALETTE[1], lw=3, solid_capstyle="butt")
    wide = min(test["distance"], rows - 1)
    axes.plot([1, 1 + wide], [-1.5, -1.5], color="black", lw=1.5, marker="|", ms=5)
    p = "" if test["p"] is None else f"; Friedman's p {test['p']:.1g}"
    words = f"{name}: critical difference {test['distance']:.2f} ({test['settings']} settings{p})"
    axes.text(1, -1.8, words, ha="left", va="bottom", fontsize=7)


def prepare_radar(table: RunTable) -> Content:
    """Accuracy and ECE of each loss as radar plots, a plot a column."""
    plots = []
    for column in table.columns:
        groups = table.only(column).groups
        means = {g.row: [tables.mean_value(g, metric) for metric in METRICS] for g in groups}
        plots.append(_radar_plot(column, means))
    if max(len(plot["rows"]) for plot in plots) < 3:
        raise ValueError("A radar plot needs three rows at least.")
    return {"plots": plots}


def published_radar() -> Content:
    """The same from the supplement's table of the radar plots."""
    numbers, rows, columns = _published_numbers("losses")
    parts = {c: {row: [numbers[row, c, m] for m in METRICS] for row in rows} for c in columns}
    return {"plots": [_radar_plot(column, means) for column, means in parts.items()]}


def _radar_plot(column: str, means: Mapping[str, Sequence[float]]) -> Content:
    errors, eces = zip(*means.values(), strict=True)
    rim = next(r for r in (5, 10, 20, 50, 100) if r >= min(100, 1.5 * max(eces)))
    plot = {"column": column, "rows": list(means), "rim": rim}
    return plot | {"accuracy": [100 - error for error in errors], "ece": list(eces)}


def draw_radar(figure: Figure, content: Content) -> None:
    """Spokes are rows; the further accuracy lies outside ECE the better."""
    plots = content["plots"]
    wide = min(3, len(plots))
    deep = -(-len(plots) // wide)
    figure.set_size_inches(max(COLUMN, PAGE * wide / 3), 2.0 * deep + 0.3)
    for place, plot in enumerate(plots):
        axes: Any = figure.add_subplot(deep, wide, place + 1, projection="polar")
        _draw_radar_plot(axes, plot)
    draw_legend(figure, axes, 2)


def _draw_radar_plot(axes: Any, plot: Content) -> None:
    angles = [2 * math.pi * k / len(plot["rows"]) for k in range(len(plot["rows"]))]
    eces = [100 * ece / plot["rim"] for ece in plot["ece"]]
    shapes = (("accuracy", plot["accuracy"], PALETTE[0], "-"), ("ECE", eces, PALETTE[1], "--"))
    for name, values, colour, dash in shapes:
        outline = [*angles, angles[0]], [*values, values[0]]
        axes.plot(*outline, color=colour, ls=dash, label=name)
        axes.fill(*outline, color=colour, alpha=0.15, lw=0)
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


class Drawing(NamedTuple):
    """How a figure is computed and drawn; some can be drawn from the paper's own numbers."""

    prepare: Callable[..., Content]  # of a RunTable
    draw: Callable[[Figure, Content], None]
    published: Callable[[], Content] | None = None
    whole: bool = False  # shows all columns; the others show one at a time

    @property
    def line(self) -> str:
        return (self.prepare.__doc__ or "").partition("\n")[0]


FIGURES: Mapping[str, Drawing] = {
    "reliability": Drawing(prepare_reliability, draw_reliability),
    "entropy": Drawing(prepare_entropy, draw_entropy),
    "agreement": Drawing(prepare_agreement, draw_agreement),
    "logits": Drawing(prepare_logits, draw_logits),
    "logits_all": Drawing(prepare_logits_all, draw_logits_all),
    "penalty": Drawing(prepare_penalty, draw_penalty),
    "radar": Drawing(prepare_radar, draw_radar, published_radar, whole=True),
    "convergence": Drawing(prepare_convergence, draw_convergence),
    "ranks": Drawing(prepare_ranks, draw_ranks, published_ranks, whole=True),
    "critical": Drawing(prepare_ranks, draw_critical, published_ranks, whole=True),
}


def figures_of(table: RunTable) -> Iterator[tuple[str, str, RunTable]]:
    """Every figure with a file's stem and its runs; with several columns, one for each."""
    for name, drawing in FIGURES.items():
        if drawing.whole or len(table.columns) == 1:
            yield name, name, table
        else:
            yield from ((name, f"{name}_{c}", table.only(c)) for c in table.columns)


def draw_figure(name: str, content: Content) -> Figure:
    """A figure from what its `prepare` gave."""
    with mpl.rc_context(charts.STYLE):
        figure = Figure(layout="constrained")
        FIGURES[name].draw(figure, content)
        return figure
