"""Every number of the tables on a line of its own, as CSV, for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from calmatch.bench import comparisons, published, stats
from calmatch.bench.groups import Found, Group
from calmatch.bench.measures import QUANTITIES, leaky, values

FIELDS = (
    "row",
    "column",
    "kind",
    "metric",
    "unit",
    "seed",
    "split_seed",
    "step",
    "runs",
    "value",
    "sd",
    "low",
    "high",
    "p",
    "published",
    "published_sd",
    "doubt",
)


def text(found: Found, *, suite: str = "", compare: bool = False) -> str:
    """Runs, means, both protocols, paired differences and ranks."""
    packed = io.StringIO()
    writer = csv.DictWriter(packed, FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    for group in found.groups:
        for metric in QUANTITIES:
            writer.writerows(_numbers(found, group, metric, suite, compare))
    writer.writerows(_ranks(found))
    return packed.getvalue()


def _numbers(
    found: Found, group: Group, metric: str, suite: str, compare: bool
) -> Iterator[dict[str, Any]]:
    quantity = QUANTITIES[metric]
    first = {"row": group.row, "column": group.column, "metric": metric}
    first["unit"] = "nats" if quantity.scale == 1 else "%"
    own = values(group, metric)
    if not own:
        return
    for (seed, split_seed), value in own.items():
        yield {**first, "kind": "run", "seed": seed, "split_seed": split_seed, "value": _(value)}
    for (seed, split_seed), run in group.runs.items():
        best = leaky(run)
        if best and metric in best:
            line = {**first, "kind": "best on test (leaky)", "step": best["step"]}
            line |= {"seed": seed, "split_seed": split_seed}
            yield line | {"value": _(quantity.scale * best[metric])}
    total = stats.mean(list(own.values()))
    line = {**first, "kind": "mean", "runs": total.number, "value": _(total.value)}
    line["sd"] = "" if total.sd is None else _(total.sd)
    if compare and (there := published.find(group.row, group.column, metric, suite)):
        number = there[1]
        line |= {"published": number.value, "published_sd": number.sd, "doubt": number.doubt}
    yield line
    base = found.base(group)
    other = values(base, metric) if base else {}
    shared = [seeds for seeds in own if seeds in other]
    if base and shared:
        test = stats.paired([own[seeds] - other[seeds] for seeds in shared])
        line = {**first, "kind": f"paired minus {base.row}", "runs": test.number}
        line |= {"value": _(test.value), "low": _(test.low), "high": _(test.high), "p": test.p}
        yield line


def _ranks(found: Found) -> Iterator[dict[str, Any]]:
    blocks = comparisons.scores(found)
    if blocks is None:
        return
    scores, kind = blocks
    for name, metrics in comparisons.RANKED.items():
        test = stats.friedman({r: [s for m in metrics for s in by[m]] for r, by in scores.items()})
        for row, rank in test.rank.items():
            line = {"row": row, "column": kind, "kind": "mean rank", "metric": name}
            yield line | {"unit": "rank", "value": _(rank), "p": test.p}


def _(value: float) -> str:
    return f"{value:.6g}"
