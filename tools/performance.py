"""The tables of docs/performance.md, from the newest JSON of benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DEVICES = ("cpu", "cuda")


def newest(name: str, device: str) -> dict[str, Any] | None:
    """What `make bench` wrote last on such a machine."""
    dated = re.compile(rf"{name}-{device}-\d{{4}}-\d\d-\d\d\.json")
    paths = sorted(path for path in RESULTS.iterdir() if dated.fullmatch(path.name))
    return json.loads(paths[-1].read_text()) if paths else None


def machine(record: dict[str, Any]) -> str:
    facts = record["environment"]
    name = facts["cpu"] if facts["device"] == "cpu" else facts["device"]
    cores = f", {record['cores']} cores" if "cores" in record else ""
    load = f", load {record['load']:.1f}" if "load" in record else ""
    return f"{name}{cores}, torch {facts['versions']['torch']}, {record['date']}{load}"


def people() -> str:
    """Start, predict, fit: each beside what took turns with it."""
    lines: list[str] = []
    for device in DEVICES:
        records = [newest(name, device) for name in ("predict", "augment")]
        for record in filter(None, records):
            lines += ["", f"{machine(record)}:", ""]
            lines += ["| what | | beside it, in the same run | aim |", "|---|---:|---|---|"]
            lines += [wait(row) for row in record["rows"]]
    return "\n".join([*lines, ""])


def wait(row: dict[str, Any]) -> str:
    unit = row["unit"]
    others = [f"{name} {number(value)} {unit}" for name, value in row["beside"].items()]
    beside = "; ".join(others)
    if "times" in row:
        best = " the best" if len(others) > 1 else ""
        beside += f": {row['times']:.2f} times{best}"
    return f"| {row['what']} | {number(row['value'])} {unit} | {beside} | {row.get('aim', '')} |"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def steps() -> str:
    """Milliseconds of a step, beside the plain loop of the same run where there is one."""
    usb = float(
        re.search(r"^USB_MS = ([\d.]+)", (ROOT / "benchmarks/step.py").read_text(), re.M)[1]
    )
    lines: list[str] = []
    for device in DEVICES[::-1]:
        if record := newest("step", device):
            lines += ["", f"{machine(record)}:", "", "| what | ms | beside |", "|---|---:|---|"]
            for row in record["rows"]:
                ms, beside = row["ms"], ""
                if "plain" in row:
                    beside = (
                        f"plain eager step {row['plain']:.1f} ms: {row['plain'] / ms:.1f} times"
                    )
                elif "share" in row:
                    beside = f"{row['share']:.1%} of it is the loop's own"
                elif "end to end" in row["what"]:
                    beside = f"USB's own run {usb} ms: {usb / ms:.1f} times"
                lines.append(f"| {row['what']} | {ms:.2f} | {beside} |")
    return "\n".join([*lines, ""])
