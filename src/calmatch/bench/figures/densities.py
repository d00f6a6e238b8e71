"""Figures of logits: densities for one class and for all, before and after the penalty.

Run folders hold log-probabilities, so logits are shown less their mean over the classes of each
picture. Softmax and the margin see no difference, and cross-entropy never moves that mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from calmatch import losses, spec
from calmatch.bench.figures.style import COLUMN, PAGE, PALETTE, Looks, below, check_panels
from calmatch.bench.groups import Found, Group

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


def prepare_logits(found: Found, target: int = 5) -> dict[str, Any]:
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
        _draw(axes, panels[place])
        axes.set_title(panels[place]["title"], fontsize=7)
    for axes in grid[-1]:
        axes.set_xlabel("logit (centred)")
    for axes in grid[:, 0]:
        axes.set_ylabel("density")
    below(figure, grid[0, 0], 5)


def _draw(axes: Axes, panel: Mapping[str, Any]) -> None:
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


def prepare_logits_all(found: Found) -> dict[str, Any]:
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
            _draw(axes, panel)
            if level == 0:
                axes.set_title(panel["title"], fontsize=7)
            axes.tick_params(labelleft=False, left=False)
            if level == deep - 1:
                axes.set_xlabel("logit (centred)")
        grid[level, 0].set_ylabel(f"class {line[0]['names'][str(line[0]['target'])]}", fontsize=7)


def prepare_penalty(found: Found) -> dict[str, Any]:
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
