"""What a margin changes: mean and interval a line, at the last step and at the test set's best."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.figure import Figure

from calmatch.bench.chosen import CHOICES, SHOWN, Change
from calmatch.bench.figures.style import PAGE, PALETTE, below
from calmatch.bench.measures import QUANTITIES

STYLES = ({"color": PALETTE[0], "marker": "o"}, {"color": PALETTE[1], "marker": "D"})
WORDS = ("last step", "best step on the test set (leaky)")


def draw_forest(figure: Figure, some: Sequence[Change]) -> None:
    """A panel a quantity; left of zero it is lower with a margin than without."""
    figure.set_size_inches(PAGE, 0.9 + 0.24 * len(some))
    axes = figure.subplots(1, len(SHOWN), sharey=True, squeeze=False)[0]
    for panel, metric in zip(axes, SHOWN, strict=True):
        panel.axvline(0, color="0.6", lw=0.8, ls=":")
        for place, (choice, style, word) in enumerate(zip(CHOICES, STYLES, WORDS, strict=True)):
            told = [change.found[metric, choice] for change in some]
            heights = [number + 0.32 * (place - 0.5) for number in range(len(some))]
            spans = [[t.value - t.low for t in told], [t.high - t.value for t in told]]
            means = [t.value for t in told]
            panel.errorbar(means, heights, xerr=spans, ls="", ms=3.5, lw=1, label=word, **style)
        panel.set_xlabel(f"change of {QUANTITIES[metric].head}, points")
        for number, (before, change) in enumerate(itertools.pairwise(some), 1):
            if before.row != change.row:
                panel.axhline(number - 0.5, color="0.85", lw=0.7)
    axes[0].set_yticks(range(len(some)), [f"{c.row}: {c.column}" for c in some])
    axes[0].set_ylim(len(some) - 0.5, -0.5)  # the first on top
    below(figure, axes[0], 2)
