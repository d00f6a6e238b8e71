"""Figures that compare rows: Friedman ranks, critical differences, radar plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from calmatch.bench import comparisons, measures, published, stats
from calmatch.bench.figures.style import COLUMN, PAGE, PALETTE
from calmatch.bench.groups import Found


def prepare_ranks(found: Found) -> dict[str, Any]:
    """Friedman ranks for error, ECE and both."""
    blocks = comparisons.scores(found)
    if blocks is None:
        raise ValueError("Ranks need two rows at least that are there in every column.")
    return _ranked(*blocks)


def published_ranks() -> dict[str, Any]:
    """The same from the paper's Tables 1 and 2."""
    table = published.TABLES["main"]
    rows = list(dict.fromkeys(row for row, _, _ in table))
    columns = list(dict.fromkeys(column for _, column, _ in table))
    scores = {
        row: {metric: [table[row, c, metric].value for c in columns] for metric in ("error", "ece")}
        for row in rows
    }
    return _ranked(scores, f"{len(columns)} columns, as published")


def _ranked(scores: Mapping[str, Mapping[str, Sequence[float]]], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind, "tests": {}}
    for name, metrics in comparisons.RANKED.items():
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


def prepare_radar(found: Found) -> dict[str, Any]:
    """Accuracy and ECE of each loss as radar plots, a plot a column."""
    plots = []
    for column in found.columns:
        groups = [group for group in found.groups if group.column == column]
        values = {
            group.row: [
                stats.mean(list(measures.values(group, metric).values())).value
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
    table = published.TABLES["losses"]
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
