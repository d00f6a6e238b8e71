"""How figures look: colours that colour-blind readers tell apart, sizes of a printed column."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
