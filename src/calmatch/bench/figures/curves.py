"""Figures over time, of entropies and of reliability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from calmatch.bench.figures.style import COLUMN, PAGE, PALETTE, Looks, below, check_panels
from calmatch.bench.groups import Found, Group
from calmatch.report import charts
from calmatch.results import Run

POINTS = 100  # a curve shows at most so many


def prepare_reliability(found: Found) -> dict[str, Any]:
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
    runs = [_lines(run, kind, fields) for run in group.runs.values()]
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


def _lines(run: Run, kind: str, fields: Sequence[str]) -> dict[int, dict[str, float]]:
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


def prepare_agreement(found: Found) -> dict[str, Any]:
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
    _draw(axes, found["curves"], "agree", 100.0)
    axes.axhline(80, color="0.5", lw=0.8, ls=":")
    axes.set(xlabel="step", ylabel="agreeing, % of accepted", ylim=(None, 101))


def prepare_convergence(found: Found) -> dict[str, Any]:
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
    _draw(left, turned, "accuracy", 100.0)
    _draw(right, turned, "ece", 100.0)
    left.set(xlabel="step", ylabel="accuracy, % of the test set")
    right.set(xlabel="step", ylabel="ECE, %", ylim=(0, None))
    below(figure, left, 4)


def _named(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    several = len({curve["column"] for curve in curves}) > 1
    for curve in curves:
        curve["name"] = f"{curve['row']}, {curve['column']}" if several else curve["row"]
    return curves


def _draw(axes: Axes, curves: Sequence[Mapping[str, Any]], field: str, scale: float) -> None:
    looks = Looks([curve["name"] for curve in curves])
    for curve in curves:
        ends = {end: [scale * v for v in curve[field][end]] for end in ("mean", "low", "high")}
        look = looks[curve["name"]]
        axes.plot(curve["step"], ends["mean"], label=curve["name"], **look)
        if curve["seeds"] > 1:
            axes.fill_between(
                curve["step"], ends["low"], ends["high"], color=look["color"], alpha=0.12, lw=0
            )


def prepare_entropy(found: Found | None = None) -> dict[str, Any]:
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
