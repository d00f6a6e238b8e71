"""What a person may believe: of predictions made with some confidence, the share that is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from calmatch.bench.evidence import judged
from calmatch.bench.figures.style import PAGE, PALETTE, below
from calmatch.bench.groups import Found

LEAST = 20  # pictures that a point stands for


def prepare_trust(found: Found, shown: Sequence[tuple[str, Sequence[str], str]]) -> dict[str, Any]:
    """Confidence and the share that is right, bin by bin over all seeds; a panel a column.

    Args:
        found: runs read from compact results.
        shown: rows as (row, how it is judged, first choice first, its name in the figure).
    """
    panels = []
    for column in found.columns:
        curves = []
        for row, names, name in shown:
            one = judged(found.at(row, column), names)
            if one is None:
                continue
            points = []
            for lines in zip(*(trust["bins"] for trust in one.trust.values()), strict=True):
                number = sum(line[0] for line in lines)
                if number >= LEAST:
                    told, right = (sum(line[0] * line[k] for line in lines) for k in (1, 2))
                    points.append([number, told / number, right / number])
            curves.append({"name": name, "points": points, "seeds": len(one.trust)})
        if curves:
            panels.append({"title": column, "curves": curves})
    return {"panels": panels}


def draw_trust(figure: Figure, found: Mapping[str, Any]) -> None:
    """A curve a row; the larger a dot, the more predictions it stands for."""
    panels = found["panels"]
    figure.set_size_inches(PAGE, 2.75)
    first = None
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        axes.plot([0, 100], [0, 100], color="0.6", lw=0.8, ls=":")
        for curve, colour in zip(panel["curves"], (PALETTE[1], PALETTE[0]), strict=False):
            numbers, told, right = zip(*curve["points"], strict=True)
            x, y = ([100 * v for v in values] for values in (told, right))
            sizes = [4 + 160 * n / sum(numbers) for n in numbers]
            axes.plot(x, y, color=colour, lw=1)
            axes.scatter(x, y, s=sizes, color=colour, clip_on=False, label=curve["name"])
        axes.set(title=panel["title"], xlim=(0, 101), ylim=(0, 101), aspect="equal")
        axes.set_xlabel("confidence, %")
        if place == 0:
            axes.set_ylabel("right, %")
        first = first or axes
    assert first is not None
    below(figure, first, 2)
