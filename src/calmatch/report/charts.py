"""How pictures drawn by matplotlib look, and the reliability diagram."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from calmatch import metrics
from calmatch.files import write
from calmatch.runs import Run, probabilities

COLUMN, PAGE = 3.4, 7.0  # inches: one column of two, and both
# Okabe and Ito's palette, darkest first, yellow (too light on white) last as brown
PALETTE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#000000",
    "#999999",
    "#7a4a00",
)
DASHES: Sequence[Any] = ("--", "-", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "legend.frameon": False,
    "svg.hashsalt": "calmatch",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}
MOST = 250  # panels in one figure
FORMATS = {".svg": "svg", ".pdf": "pdf", ".png": "png"}


def check_panels(number: int) -> None:
    """Refuse a figure nobody could read."""
    if number > MOST:
        raise ValueError(f"{number} panels do not fit into a figure; choose runs with --column.")


def encode(figure: Figure, ending: str) -> bytes:
    """A figure as a file's bytes, the same bytes each time."""
    undated: dict[str, Any] = {
        ".svg": {"Date": None},
        ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        ".png": {"Software": None},
    }
    packed = io.BytesIO()
    with mpl.rc_context(LOOK):
        figure.savefig(packed, format=FORMATS[ending], dpi=200, metadata=undated[ending])
    return packed.getvalue()


class Looks:
    """A colour for each method, a full line with penalty, a dashed one without."""

    def __init__(self, rows: Sequence[str]) -> None:
        methods = list(dict.fromkeys(row.partition(" + ")[0] for row in rows))
        several = {m: [row for row in rows if row.partition(" + ")[0] == m] for m in methods}
        self.of: dict[str, dict[str, Any]] = {}
        single = len(methods) == 1
        for place, method in enumerate(methods):
            for number, row in enumerate(several[method]):
                colour = PALETTE[(number if single else place) % len(PALETTE)]
                # the plain method is dashed, unless it stands alone
                dash = "-" if len(several[method]) == 1 else DASHES[number % len(DASHES)]
                self.of[row] = {"color": colour, "linestyle": dash}

    def __getitem__(self, row: str) -> dict[str, Any]:
        return self.of[row]


def below(figure: Figure, axes: Axes, columns: int) -> None:
    """The legend of one panel under all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


BLUE, ORANGE = "#0072b2", "#d55e00"  # told apart by colour-blind readers too
FONT: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def prepare_reliability(log_probs: Tensor, labels: Tensor, bins: int = 15) -> dict[str, Any]:
    """Bins of confidence with their accuracy, and the headline numbers."""
    probs = probabilities(log_probs)
    found = metrics.reliability(probs, labels, bins)
    filled = found.number > 0
    return {
        "left": [k / bins for k in range(bins)],
        "width": 1 / bins,
        "count": found.number.tolist(),
        "confidence": found.confidence[filled].tolist(),
        "accuracy": found.accuracy.nan_to_num(0.0).tolist(),
        "filled": filled.tolist(),
        "error": float(metrics.error(probs, labels)),
        "ece": float(metrics.ece(probs, labels, bins=bins)),
    }


def draw_reliability(axes: Axes, found: dict[str, Any], title: str) -> None:
    """Accuracy against confidence; bar strength shows how many pictures a bin has."""
    most = max(found["count"])
    axes.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", zorder=3)
    accuracy = [a for a, full in zip(found["accuracy"], found["filled"], strict=True) if full]
    for left, height, count in zip(found["left"], found["accuracy"], found["count"], strict=True):
        strength = 0.2 + 0.8 * (count / most) ** 0.5
        axes.bar(left, height, found["width"], align="edge", color=BLUE, alpha=strength, lw=0)
    axes.plot(found["confidence"], accuracy, "o", color=ORANGE, ms=3.5, zorder=4)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    axes.set_aspect("equal")
    axes.set_title(title, fontsize=9)
    numbers = f"error {found['error']:.1%}\nECE {found['ece']:.1%}"
    axes.text(0.04, 0.96, numbers, transform=axes.transAxes, va="top", fontsize=8)


def reliability_figure(runs: Sequence[Run]) -> Figure:
    """A reliability diagram of each run, side by side."""
    with mpl.rc_context(FONT):
        figure = Figure(figsize=(2.5 * len(runs), 2.9), layout="constrained")
        for place, run in enumerate(runs):
            axes = figure.add_subplot(1, len(runs), place + 1)
            draw_reliability(axes, prepare_reliability(*run.predictions()), _wrapped(run.title))
            if place:
                axes.set_ylabel("")
        return figure


def _wrapped(title: str) -> str:
    return title.replace(" + ", "\n+ ") if " + " in title else f"{title}\n"


def save_figure(figure: Figure, path: Path) -> Path:
    """A figure as a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    write(path, data.getvalue())
    return path
