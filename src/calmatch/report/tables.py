"""Every chart's numbers as a table, for readers who do not see the chart, or want the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Table = dict[str, Any]
Data = Mapping[str, Any]


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """With a plus or a minus, except for what rounds to nothing."""
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return f"{'+' if value > 0 else '−'}{text}"


def made(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return {"head": list(head), "rows": [list(row) for row in rows]}


def reliability(runs: Sequence[Data]) -> Table:
    head = ["confidence, %", "pictures", "mean confidence, %", "accuracy, %", "95 % interval"]
    rows = [
        [
            *_named(runs, run),
            f"{percent(row['left'], 0)}–{percent(row['right'], 0)}",
            f"{row['n']:,}",
            percent(row["confidence"]),
            percent(row["accuracy"]),
            f"{percent(row['low'])}–{percent(row['high'])}",
        ]
        for run in runs
        for row in run["bins"]
        if row["n"]
    ]
    return made(_headed(runs, head), rows)


def smooth(runs: Sequence[Data]) -> Table:
    rows = []
    for run in runs:
        curve = run["smooth"]
        for place in range(0, len(curve["at"]), 5):
            cells = [percent(curve["at"][place], 0), percent(curve["accuracy"][place])]
            ends = [percent(curve[end][place]) for end in ("low", "high") if end in curve]
            rows.append([*_named(runs, run), *cells, "–".join(ends)])
    return made(_headed(runs, ["confidence, %", "accuracy, %", "95 % interval"]), rows)


def risk(runs: Sequence[Data]) -> Table:
    head = ["answered, %", "error, %", "95 % interval", "promised error, %", "threshold, %"]
    rows = []
    for run in runs:
        step = max(1, len(run["risk"]) // 20)
        shown = run["risk"][::step]
        if shown[-1] is not run["risk"][-1]:
            shown = [*shown, run["risk"][-1]]
        for row in shown:
            ends = f"{percent(row['low'])}–{percent(row['high'])}"
            cells = [percent(row["coverage"]), percent(row["error"]), ends]
            cells += [percent(row["promised"]), percent(row["threshold"], 2)]
            rows.append([*_named(runs, run), *cells])
    return made(_headed(runs, head), rows)


def confusion(data: Data) -> Table:
    names = data["classes"]
    rows = [[names[t], names[p], f"{n:,}"] for t, p, n in data["confusion"]["pairs"]]
    return made(["truth", "taken for", "pictures"], rows)


def logits(data: Data) -> Table:
    names = data["classes"]
    rows = [
        [
            names[truth],
            names[row["of"]] if isinstance(row["of"], int) else "all others",
            *(f"{row[key]:.1f}" for key in ("mean", "low", "high")),
        ]
        for truth, several in enumerate(data["logits"]["classes"])
        for row in several
    ]
    return made(["truth", "logit of", "mean", "5 % below", "5 % above"], rows)


def tested(runs: Sequence[Data]) -> Table:
    rows = [
        [
            *_named(runs, run),
            f"{line['step']:,}",
            line["split"],
            percent(line.get("error")),
            percent(line.get("ece")),
        ]
        for run in runs
        for line in run["tested"]
    ]
    return made(_headed(runs, ["step", "set", "error, %", "ECE, %"]), rows)


def trained(runs: Sequence[Data]) -> Table:
    rows = [
        [
            *_named(runs, run),
            f"{line['step']:,}",
            percent(line.get("accepted")),
            percent(line.get("agree")),
            percent(line.get("pseudo_accuracy")),
        ]
        for run in runs
        for line in run["trained"]
        if "accepted" in line
    ]
    head = ["step", "in use, %", "agreeing, %", "pseudo-labels right, %"]
    return made(_headed(runs, head), rows)


def _headed(runs: Sequence[Data], head: list[str]) -> list[str]:
    return head if len(runs) == 1 else ["run", *head]


def _named(runs: Sequence[Data], run: Data) -> list[str]:
    return [] if len(runs) == 1 else [run["title"]]
