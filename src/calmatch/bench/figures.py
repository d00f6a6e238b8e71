"""The paper's figures from run folders: `prepare_x` computes plain numbers, `draw_x` draws them."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from calmatch.bench import stats, tables
from calmatch.bench.paper import PUBLISHED_TABLES
from calmatch.bench.tables import Group, RunTable
from calmatch.report import charts
from calmatch.report.charts import COLUMN, PAGE, PALETTE, check_panels, draw_legend
from calmatch.runs import Run

Content = Mapping[str, Any]  # what a figure shows, as plain numbers and texts


def prepare_reliability(table: RunTable) -> Content:
    """Reliability plots of the first seed (Observation 1, supplement)."""
    check_panels(len(table.groups))
    several = len(table.columns) > 1
    levels: Counter[str] = Counter()  # panels of each method where there is one column
    panels = []
    for group in sorted(table.groups, key=lambda g: table.base(g) is not None):
        method = (table.base(group) or group).row
        levels[method] += 1
        deep, across = levels[method] - 1, list(levels).index(method)
        if several:  # columns of the table downward, its rows across
            deep, across = table.columns.index(group.column), table.rows.index(group.row)
        title = f"{group.column}, {group.row}" if several else group.row
        place = {"title": title.replace(" + ", "\n+ "), "place": [deep, across]}
        seeds, run = next(iter(group.runs.items()))
        panels.append({**place, "seed": seeds[0], **charts.reliability_numbers(*run.predictions())})
    return {"panels": panels}


def draw_reliability(figure: Figure, content: Content) -> None:
    """A grid of datasets and rows, or of methods with what is added to them below."""
    places = [panel["place"] for panel in content["panels"]]
    deep, wide = (1 + max(place[k] for place in places) for k in (0, 1))
    each = min(1.75, max(1.3, PAGE / wide))
    figure.set_size_inches(max(COLUMN, each * wide), (each + 0.35) * deep + 0.3)
    for panel, (level, across) in zip(content["panels"], places, strict=True):
        axes = figure.add_subplot(deep, wide, level * wide + across + 1)
        charts.draw_reliability_panel(axes, dict(panel), panel["title"], size=6)
    charts.draw_reliability_legend(figure)


def prepare_agreement(table: RunTable) -> Content:
    """Share of agreeing pictures among the accepted over time (Observation 2)."""
    curves = [c for c in (series(g, "train", ["agree"]) for g in table.groups) if c["step"]]
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
    axes.axhline(80, color="0.5", lw=0.8, ls=":", label="80 %, as the paper says")
    axes.set(xlabel="step", ylabel="agreeing, % of accepted", ylim=(None, 101))


def prepare_convergence(table: RunTable) -> Content:
    """Accuracy and ECE on the test set over time (supplement)."""
    return {"curves": _name_curves([series(g, "test", METRICS) for g in table.groups])}


def draw_convergence(figure: Figure, content: Content) -> None:
    figure.set_size_inches(PAGE, 2.9)
    left, right = figure.subplots(1, 2)
    _draw_series(left, content["curves"], "error", lambda error: 100 * (1 - error))
    _draw_series(right, content["curves"], "ece", lambda ece: 100 * ece)
    left.set(xlabel="step", ylabel="accuracy, % of the test set")
    right.set(xlabel="step", ylabel="ECE, %", ylim=(0, None))
    draw_legend(figure, left, 4)


MOST_CURVES = 22  # that a legend can tell apart


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
    every = max(1, -(-len(lines) // 100)) if kind == "train" else 1
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
    if len(curves) > MOST_CURVES:
        raise ValueError(f"{len(curves)} curves are too many; choose runs with --column.")
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
    if any(curve["seeds"] > 1 for curve in curves):
        axes.fill_between([], [], color="0.5", alpha=0.3, lw=0, label="range over seeds")


def prepare_entropy(table: RunTable | None = None) -> Content:
    """Shannon and min-entropy with their slopes; with runs, who agrees (Observation 2)."""
    p = np.linspace(0.001, 0.999, 1000)  # 0.5, where the min-entropy has no slope, lies between
    q = np.maximum(p, 1 - p)
    return {
        "p": p.tolist(),
        "shannon": (-p * np.log(p) - (1 - p) * np.log(1 - p)).tolist(),
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


TRUE_CLASS = "true class (shaded)"
SHOWN_CLASSES = 10  # in one panel


def prepare_logits(table: RunTable, target: int = 5) -> Content:
    """Densities of every class's logit on pictures of one class (Observation 3)."""
    check_panels(len(table.groups))
    panels = [_logit_panel(group, target) for group in table.groups]
    return {"panels": panels, "wide": min(4, len(panels)), "high": 1.65}


def prepare_logits_all(table: RunTable) -> Content:
    """The same for every class, a line of panels each (supplement)."""
    _, labels, names, _ = logits_of(table.groups[0])
    classes = [k for k in range(len(names)) if int((labels == k).sum()) > 2][:SHOWN_CLASSES]
    check_panels(len(classes) * len(table.groups))
    panels = [_logit_panel(group, k) for k in classes for group in table.groups]
    return {"panels": panels, "wide": len(table.groups), "high": 1.4}


def _logit_panel(group: Group, target: int) -> Content:
    logits, labels, names, kind = logits_of(group)
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
    grid = np.linspace(low - pad, high + pad, 200)
    return {
        "title": group.row,
        "target": target,
        "kind": kind,
        "x": grid.tolist(),
        "density": {str(k): density(some[:, k], grid) for k in classes},
        "names": {str(k): names[k] for k in classes},
        "range": [low, high],
        "rival": float(np.delete(some, target, 1).max()),
    }


def logits_of(group: Group) -> tuple[NDArray[np.float64], NDArray[np.int64], tuple[str, ...], str]:
    """Logits [N, C], labels and class names of a group's first seed, and what logits they are.

    Softmax does not see their mean over classes, so a run that did not keep it has none.
    """
    run = next(iter(group.runs.values()))
    log_probs, labels = run.predictions()
    logits, means = log_probs.double().numpy(), run.mean_logits()
    logits -= logits.mean(1, keepdims=True)
    if means is None:
        return logits, labels.numpy(), run.result.classes, "logit less the picture's mean"
    return logits + means[:, None], labels.numpy(), run.result.classes, "logit"


def density(values: NDArray[np.float64], grid: NDArray[np.float64]) -> list[float]:
    """A Gaussian kernel estimate (Scott's width); nothing where the values do not vary."""
    if len(values) < 3 or float(np.std(values)) < 1e-9:
        return [0.0] * len(grid)
    return list(map(float, gaussian_kde(values)(grid)))


def draw_logits(figure: Figure, content: Content) -> None:
    """A panel a run, or lines of them, all on the same axes; the target class is the filled one."""
    panels, wide = content["panels"], content["wide"]
    deep = -(-len(panels) // wide)
    width, height = max(COLUMN, 1.75 * wide), content["high"] * deep + 0.5
    figure.set_size_inches(width, height)
    figure.set_layout_engine("none")  # so many panels would take it half a minute
    edges = {"left": 0.5 / width, "right": 1 - 0.1 / width, "hspace": 0.9, "wspace": 0.4}
    edges |= {"bottom": 0.85 / height, "top": 1 - 0.35 / height}
    grid = figure.subplots(deep, wide, sharex=True, sharey=True, squeeze=False, gridspec_kw=edges)
    keys: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for place, (k, heights) in enumerate(panel["density"].items()):
            if int(k) == panel["target"]:
                axes.plot(panel["x"], heights, color="black", lw=1.4, label=TRUE_CLASS)
                axes.fill_between(panel["x"], heights, color="0.5", alpha=0.25, lw=0)
            else:
                colour, dash = PALETTE[place % 6], "-" if place < 6 else "--"
                name = panel["names"][k]
                axes.plot(panel["x"], heights, color=colour, ls=dash, lw=0.9, label=name)
        axes.tick_params(labelbottom=True, labelleft=True, labelsize=6)
        axes.set_xlabel(panel["kind"], fontsize=6, labelpad=1)
        axes.set_ylabel("density", fontsize=6, labelpad=1)
        (low, high), name = panel["range"], panel["names"][str(panel["target"])]
        words = f"all {low:.0f} to {high:.0f}, wrong ≤ {panel['rival']:.1f}"
        axes.set_title(f"{panel['title']}, class {name}\n{words}", fontsize=6, pad=3)
        handles, labels = axes.get_legend_handles_labels()
        keys |= dict(zip(labels, handles, strict=True))
    grid[0, 0].set_ylim(0, None)  # all share it
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    names = sorted(keys, key=lambda name: (name == TRUE_CLASS, keys[name].get_label()))
    figure.legend([keys[k] for k in names], names, loc="lower center", ncols=6 if wide < 5 else 11)


METRICS = ("error", "ece")
Radar = dict[str, dict[str, tuple[float, float, bool]]]  # column, row: error, ECE, doubt
DOUBTED = "? holds a doubted number: docs/paper.md"


def prepare_ranks(table: RunTable) -> Content:
    """Friedman ranks for error, ECE and both, and which rows they cannot tell apart."""
    scores, kind = tables.rank_scores(table)
    if len(scores) < 2:
        raise ValueError("Ranks need two rows at least that are there in every column.")
    tests = {name: test._asdict() for name, test in tables.friedman_tests(scores).items()}
    return {"kind": kind, "tests": tests, "doubted": []}


def published_ranks() -> Content:
    """The same from the paper's Tables 1 and 2."""
    numbers = PUBLISHED_TABLES["main"]
    rows, columns = (list(dict.fromkeys(key[k] for key in numbers)) for k in (0, 1))
    scores = {r: {m: [numbers[r, c, m].value for c in columns] for m in METRICS} for r in rows}
    tests = {name: test._asdict() for name, test in tables.friedman_tests(scores).items()}
    doubted = [r for r in rows if any(n.doubt for key, n in numbers.items() if key[0] == r)]
    return {"kind": f"{len(columns)} columns, as published", "tests": tests, "doubted": doubted}


def draw_ranks(figure: Figure, content: Content) -> None:
    """A line a row, best above, a mark for each quantity; Nemenyi's distances below."""
    tests, doubted = content["tests"], content["doubted"]
    order = sorted(tests["all"]["rank"], key=lambda row: -tests["all"]["rank"][row])
    figure.set_size_inches(COLUMN, 0.24 * len(order) + 1.6)
    axes = figure.subplots()
    for level, row in enumerate(order):
        ends = [test["rank"][row] for test in tests.values()]
        axes.plot([min(ends), max(ends)], [level, level], color="0.8", lw=1, zorder=1)
    styles = ((PALETTE[0], "o", 4, 0), (PALETTE[1], "s", 4, 0), ("black", "|", 9, 2))
    for place, (name, test) in enumerate(tests.items()):
        colour, marker, size, edge = styles[place]
        ranks, below = [test["rank"][row] for row in order], -1.0 - 0.6 * place
        axes.plot(ranks, range(len(order)), marker, color=colour, ms=size, mew=edge, label=name)
        best = min(ranks)
        axes.plot([best, best + test["distance"]], [below] * 2, color=colour, marker="|", lw=1.5)
    axes.set_yticks(range(len(order)), [row + "?" * (row in doubted) for row in order])
    words = [f"mean rank, 1 best ({content['kind']})", "bars: so near, none is told from the best"]
    axes.set_xlabel("\n".join(words + [DOUBTED] * bool(doubted)), fontsize=7)
    axes.set_xlim(0.8, len(order) + 0.2)
    draw_legend(figure, axes, 3, above=True)


def prepare_radar(table: RunTable) -> Content:
    """Accuracy and ECE of each loss as radar plots, a plot a column."""
    plots: Radar = {}
    for group in table.groups:
        values = (tables.seed_values(group, metric).values() for metric in METRICS)
        error, ece = (stats.mean(list(numbers)).value for numbers in values)
        plots.setdefault(group.column, {})[group.row] = (error, ece, False)
    if not 3 <= max(map(len, plots.values())) <= 8:
        raise ValueError("A radar plot needs 3 to 8 rows.")
    return _radar_content(plots)


def published_radar() -> Content:
    """The same from the supplement's table of the radar plots."""
    plots, numbers = Radar(), PUBLISHED_TABLES["losses"]
    for row, column, _ in numbers:
        error, ece = (numbers[row, column, metric] for metric in METRICS)
        plots.setdefault(column, {})[row] = (error.value, ece.value, bool(error.doubt or ece.doubt))
    return _radar_content(plots)


def _radar_content(plots: Radar) -> Content:
    """Of each column the rows with accuracy, ECE and doubt; a dataset's columns share a rim."""
    content = []
    for column, rows in plots.items():
        same = [p for c, p in plots.items() if c.rpartition("_")[0] == column.rpartition("_")[0]]
        most = max(ece for plot in same for _, ece, _ in plot.values())
        rim = next(r for r in (5, 10, 20, 30, 50, 100) if r >= min(100, 1.2 * most))
        names = [row + "?" * doubted for row, (_, _, doubted) in rows.items()]
        numbers = {"accuracy": [100 - e for e, *_ in rows.values()]}
        numbers["ece"] = [ece for _, ece, _ in rows.values()]
        content.append({"column": column, "rows": names, "rim": rim, **numbers})
    return {"plots": content}


def draw_radar(figure: Figure, content: Content) -> None:
    """Spokes are rows; the further accuracy lies outside ECE the better."""
    plots = content["plots"]
    longest = max(len(part) for plot in plots for row in plot["rows"] for part in row.split(" + "))
    most = 3 if longest < 12 else 2
    wide, deep = min(most, len(plots)), math.ceil(len(plots) / most)
    figure.set_size_inches(max(COLUMN, PAGE * wide / most), 6 / most * deep + 0.3)
    for place, plot in enumerate(plots):
        axes: Any = figure.add_subplot(deep, wide, place + 1, projection="polar")
        _draw_radar_plot(axes, plot)
    if any(row.endswith("?") for plot in plots for row in plot["rows"]):
        axes.plot([], [], " ", label=DOUBTED)
    draw_legend(figure, axes, 3)


def _draw_radar_plot(axes: Any, plot: Content) -> None:
    angles = [2 * math.pi * k / len(plot["rows"]) for k in range(len(plot["rows"]))]
    eces = [100 * ece / plot["rim"] for ece in plot["ece"]]
    shapes = (("accuracy", plot["accuracy"], PALETTE[0], "-"), ("ECE", eces, PALETTE[1], "--"))
    for name, values, colour, dash in shapes:
        outline = [*angles, angles[0]], [*values, values[0]]
        axes.plot(*outline, color=colour, ls=dash, marker="o", ms=2.5, label=name, clip_on=False)
    names = plot["rows"]
    if len({row.rstrip("?").partition(" + ")[0] for row in names}) == 1:
        names = [row.partition(" + ")[2] or row for row in names]  # the method goes without saying
    numbers = zip(names, plot["accuracy"], plot["ece"], strict=True)
    texts = [f"{n}\n{a:.1f} | {e:.1f}".replace(" + ", "\n+ ") for n, a, e in numbers]
    axes.set_xticks(angles, texts, fontsize=6)
    sides = [round(math.cos(angle), 6) for angle in angles]
    for label, side in zip(axes.get_xticklabels(), sides, strict=True):
        label.set_ha("left" if side > 0 else "right" if side < 0 else "center")
    axes.tick_params(axis="x", pad=-2)
    axes.set_ylim(0, 100)
    axes.set_yticks([25, 50, 75], [])
    axes.spines["polar"].set_color("0.7")
    axes.grid(color="0.85", lw=0.6)
    axes.set_title(f"{plot['column']}\nrim: accuracy 100 %, ECE {plot['rim']} %", fontsize=7)


class Drawing(NamedTuple):
    """How a figure is computed and drawn; some can be drawn from the paper's own numbers."""

    prepare: Callable[..., Content]  # of a RunTable
    draw: Callable[[Figure, Content], None]
    published: Callable[[], Content] | None = None
    whole: bool = False  # shows all columns; the others show one at a time


FIGURES: Mapping[str, Drawing] = {
    "reliability": Drawing(prepare_reliability, draw_reliability),
    "entropy": Drawing(prepare_entropy, draw_entropy),
    "agreement": Drawing(prepare_agreement, draw_agreement),
    "logits": Drawing(prepare_logits, draw_logits),
    "logits_all": Drawing(prepare_logits_all, draw_logits),
    "radar": Drawing(prepare_radar, draw_radar, published_radar, whole=True),
    "convergence": Drawing(prepare_convergence, draw_convergence),
    "ranks": Drawing(prepare_ranks, draw_ranks, published_ranks, whole=True),
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
