"""Figures by matplotlib: their style, their bytes, and the reliability diagram."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from calmatch import metrics
from calmatch.files import write
from calmatch.report.summary import make_predictions, reliability_bins

COLUMN, PAGE = 3.4, 7.0  # inches: one column of two, and both
# Okabe and Ito's palette for colour-blind readers too, yellow (too light on white) last as brown
PALETTE = "#0072b2 #d55e00 #009e73 #cc79a7 #56b4e9 #e69f00 #000000 #999999 #7a4a00".split()
DASHES: Sequence[Any] = ("--", "-", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
PLAIN_AXES: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 7),
    **PLAIN_AXES,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "legend.frameon": False,
    "svg.hashsalt": "calmatch",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}
MOST_PANELS = 250
FORMATS: dict[str, dict[str, Any]] = {  # what would differ from one writing to the next
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    ".png": {"Software": None},
}


def check_panels(number: int) -> None:
    """Refuse a figure nobody could read."""
    if number > MOST_PANELS:
        raise ValueError(f"{number} panels do not fit into a figure; choose runs with --column.")


def line_styles(rows: Sequence[str]) -> dict[str, dict[str, Any]]:
    """For each row a colour for its method, a full line with penalty, a dashed one without."""
    methods: dict[str, list[str]] = {}
    for row in rows:
        methods.setdefault(row.partition(" + ")[0], []).append(row)
    styles = {}
    for place, variants in enumerate(methods.values()):
        for number, row in enumerate(variants):
            colour = PALETTE[(number if len(methods) == 1 else place) % len(PALETTE)]
            # the plain method is dashed, unless it stands alone
            dash = "-" if len(variants) == 1 else DASHES[number % len(DASHES)]
            styles[row] = {"color": colour, "linestyle": dash}
    return styles


def draw_legend(figure: Figure, axes: Axes, columns: int, above: bool = False) -> None:
    """The legend of one panel, below all of them or above."""
    loc: Any = "outside upper center" if above else "outside lower center"
    figure.legend(*axes.get_legend_handles_labels(), loc=loc, ncols=columns)


def reliability_numbers(log_probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """Bins of confidence with their accuracy, and the headline numbers."""
    preds = make_predictions(log_probs, labels)
    error, ece = (float(each(preds.probs, preds.labels)) for each in (metrics.error, metrics.ece))
    return {"bins": reliability_bins(preds), "error": error, "ece": ece}


def draw_reliability_panel(axes: Axes, panel: dict[str, Any], title: str, size: float = 8) -> None:
    """Accuracy against confidence; bar strength shows how many images a bin has."""
    filled = [row for row in panel["bins"] if row["n"]]
    most = max(row["n"] for row in filled)
    axes.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", zorder=3)
    for row in filled:
        bar: Any = {"align": "edge", "color": PALETTE[0], "lw": 0}
        bar["alpha"] = 0.2 + 0.8 * (row["n"] / most) ** 0.5
        axes.bar(row["left"], row["accuracy"], row["right"] - row["left"], **bar)
    dots: dict[str, Any] = {"color": PALETTE[1], "ms": 0.4 * size, "zorder": 4, "clip_on": False}
    axes.plot(*([row[key] for row in filled] for key in ("confidence", "accuracy")), "o", **dots)
    ticks = [0, 0.5, 1]
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=ticks, yticks=ticks, aspect="equal")
    axes.tick_params(labelsize=size)
    axes.set_xlabel("confidence", fontsize=size)
    axes.set_ylabel("accuracy", fontsize=size)
    numbers = [f"error {100 * panel['error']:.1f} %", f"ECE {100 * panel['ece']:.1f} %"]
    numbers = numbers[: 1 if sum(row["n"] for row in filled) < metrics.FEW else 2]
    axes.set_title(f"{title}\n{(', ' if size > 6 else chr(10)).join(numbers)}", fontsize=size)


def draw_reliability_legend(figure: Figure) -> None:
    """What bars, dots and the line mean, below all panels."""
    bar: Any = Patch(color=PALETTE[0], label="share right (darker: more pictures)")
    dot = Line2D([], [], c=PALETTE[1], marker="o", ls="", ms=3.5, label="a bin's mean confidence")
    line = Line2D([], [], color="0.6", ls="--", label="honest (below: too sure)")
    columns = 3 if figure.get_figwidth() > 6 else 2
    figure.legend(handles=[bar, line, dot], loc="outside lower center", ncols=columns, fontsize=7)


def reliability_figure(panels: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """A reliability diagram of each title's log-probabilities and labels, side by side."""
    with mpl.rc_context({"font.size": 9, "legend.frameon": False, **PLAIN_AXES}):
        figure = Figure(figsize=(max(4.8, 2.6 * len(panels)), 3.3), layout="constrained")
        for place, (title, predictions) in enumerate(panels.items()):
            axes = figure.add_subplot(1, len(panels), place + 1)
            draw_reliability_panel(axes, reliability_numbers(*predictions), title, size=9)
        draw_reliability_legend(figure)
        return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """A figure as an .svg, .pdf or .png file, the same bytes each time."""
    data = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(data, format=path.suffix[1:], dpi=200, metadata=FORMATS[path.suffix])
    write(path, data.getvalue())
    return path
