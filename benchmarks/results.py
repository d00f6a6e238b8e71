"""Rows of a benchmark with the machine they were measured on, as dated JSON in results/."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch

from calmatch.training.setup import describe_environment

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def row(what: str, value: float, unit: str, beside: dict[str, float] | None = None, **more: Any):
    """What was measured, beside opponents that took turns with it; `aim` puts it on the page.

    `times` is how much faster it is than the best of them, the median over rounds where known.
    """
    rounded = {name: round(number, 4) for name, number in (beside or {}).items()}
    more = {key: round(each, 4) if isinstance(each, float) else each for key, each in more.items()}
    return {"what": what, "value": round(value, 4), "unit": unit, "beside": rounded, **more}


def show(rows: list[Row]) -> None:
    for each in rows:
        print(f"{each['what']:<64} {each['value']:10.2f} {each['unit']}")
        for name, value in each["beside"].items():
            print(f"  beside {name:<55} {value:10.2f} {each['unit']}")
        if "times" in each:
            print(f"  {'times the best of them':<62} {each['times']:10.2f}", flush=True)


def write(name: str, rows: list[Row], path: Path | None = None, **facts: Any) -> None:
    """The load is that of the last minute, which the benchmark itself makes about its threads."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    environment = describe_environment(torch.device(kind))
    environment["processor"] = platform.processor() or platform.machine()
    record = {"date": str(date.today()), "environment": environment, "rows": rows, **facts}
    record |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    path = path or RESULTS / f"{name}-{kind}-{date.today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"Written: {path}")
