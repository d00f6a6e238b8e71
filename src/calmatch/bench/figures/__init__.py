"""The paper's figures from run folders: `prepare_x` computes, `draw_x` draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from calmatch.bench.figures import curves, densities, ranks
from calmatch.bench.figures.densities import prepare_logits
from calmatch.bench.figures.style import FORMATS, LOOK, encode
from calmatch.bench.groups import Found

__all__ = ["FIGURES", "FORMATS", "Drawing", "drawn", "each", "encode", "prepare_logits"]


class Drawing(NamedTuple):
    """How a figure is computed and drawn; some can be drawn from the paper's own numbers."""

    prepare: Callable[..., dict[str, Any]]  # (Found) -> plain numbers
    draw: Callable[[Figure, Mapping[str, Any]], None]
    published: Callable[[], dict[str, Any]] | None = None

    @property
    def line(self) -> str:
        return (self.prepare.__doc__ or "").splitlines()[0]


FIGURES: Mapping[str, Drawing] = {
    "reliability": Drawing(curves.prepare_reliability, curves.draw_reliability),
    "entropy": Drawing(curves.prepare_entropy, curves.draw_entropy),
    "agreement": Drawing(curves.prepare_agreement, curves.draw_agreement),
    "logits": Drawing(densities.prepare_logits, densities.draw_logits),
    "logits_all": Drawing(densities.prepare_logits_all, densities.draw_logits_all),
    "penalty": Drawing(densities.prepare_penalty, densities.draw_penalty),
    "radar": Drawing(ranks.prepare_radar, ranks.draw_radar, ranks.published_radar),
    "convergence": Drawing(curves.prepare_convergence, curves.draw_convergence),
    "ranks": Drawing(ranks.prepare_ranks, ranks.draw_ranks, ranks.published_ranks),
    "critical": Drawing(ranks.prepare_ranks, ranks.draw_critical, ranks.published_ranks),
}


WHOLE = ("radar", "ranks", "critical")  # the others show one column at a time


def each(found: Found) -> Iterator[tuple[str, str, Found]]:
    """Every figure with a file's stem and its runs; with several columns, one for each."""
    for name in FIGURES:
        if name in WHOLE or len(found.columns) == 1:
            yield name, name, found
        else:
            for column in found.columns:
                yield name, f"{name}_{column}", found.only(column)


def drawn(name: str, content: Mapping[str, Any]) -> Figure:
    """A figure from what its `prepare` gave."""
    with mpl.rc_context(LOOK):
        figure = Figure(layout="constrained")
        FIGURES[name].draw(figure, content)
        return figure
