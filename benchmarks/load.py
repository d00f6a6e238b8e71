"""Load: predict and fit on 200,000 pictures, 1,000 run folders in one table and one report.

    python benchmarks/load.py predict table report     # any of these, and fit

Peak memory is that of the whole process, as the kernel reports it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import calmatch
from calmatch.config import Config

SIZES = (20_000, 200_000)
RUNS = 1_000
SMALL = Config(
    dataset="synthetic",
    labels=16,
    method="fixmatch",
    net="tiny",
    weak="crop(1)",
    strong="crop(2)",
    steps=30,
    eval_every=10,
    log_every=5,
    device="cpu",
)


def measured(words: list[str]) -> dict[str, float]:
    """Seconds and peak MiB of a command."""
    began = time.monotonic()
    command = [sys.executable, "-m", "calmatch", *words]
    with Path(os.devnull).open("w") as null:
        process = subprocess.Popen(command, stdout=null)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    seconds = time.monotonic() - began
    return {"seconds": round(seconds, 1), "peak_mib": round(usage.ru_maxrss / 1024)}


def pictures(folder: Path, number: int) -> None:
    """BMP files of 16 px, two classes by colour, a thousand in a folder."""
    head = bytearray(
        b"BM" + (54 + 768).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    )
    head += (40).to_bytes(4, "little") + (16).to_bytes(4, "little") * 2
    head += (1).to_bytes(2, "little") + (24).to_bytes(2, "little") + bytes(24)
    for start in range(0, number, 1000):
        below = folder / f"{start // 1000:04d}"
        below.mkdir(parents=True)
        for k in range(start, start + 1000):
            colour = bytes([40 + k % 50, 90, 200]) if k % 2 else bytes([200, 60, 40 + k % 50])
            body = k.to_bytes(4, "little") + colour * 255 + b"\0" * 2
            (below / f"{k:06d}.bmp").write_bytes(head + body[:768])


def predict(work: Path) -> dict[str, Any]:
    calmatch.train(SMALL, work / "model", quiet=True)
    found = {}
    for number in SIZES:
        pictures(work / "pictures", number)
        words = ["predict", str(work / "model"), str(work / "pictures"), "-o", str(work / "o.csv")]
        found[f"{number}"] = measured([*words, "--quiet"])
        with (work / "o.csv").open() as file:
            assert sum(1 for _ in file) == number + 1
        shutil.rmtree(work / "pictures")
    return found


def fit(work: Path) -> dict[str, Any]:
    os.environ["CALMATCH_CACHE"] = str(work / "cache")
    found = {}
    for number in SIZES:
        pictures(work / "pictures", number)
        rows = [f"{k // 1000:04d}/{k:06d}.bmp,{'red' if k % 2 else 'blue'}" for k in range(60)]
        (work / "labels.csv").write_text("\n".join(["file,label", *rows, ""]))
        words = ["fit", str(work / "pictures"), "--labels", str(work / "labels.csv")]
        out = work / f"fit-{number}"
        words += ["--out", str(out), "--steps", "60", "--device", "cpu", "--quiet"]
        found[f"{number}"] = measured(words)
        shutil.rmtree(work / "pictures")
    return found


def folders(work: Path) -> list[str]:
    """A thousand finished runs: ten methods of a hundred seeds, copies of a real one."""
    place = work / "runs"
    if place.exists():
        return sorted(str(path) for path in place.iterdir())
    whole = calmatch.train(SMALL, work / "whole", quiet=True)
    shutil.rmtree(whole.folder / "checkpoint")
    config = SMALL.dump()
    for k in range(RUNS):
        folder = place / f"{k:04d}"
        shutil.copytree(whole.folder, folder)
        changed = {**config, "method": f"fixmatch(threshold=0.9{k % 10})", "seed": k // 10}
        (folder / "config.json").write_text(json.dumps(changed))
    return sorted(str(path) for path in place.iterdir())


def table(work: Path) -> dict[str, Any]:
    return {f"{RUNS}": measured(["table", *folders(work)])}


def report(work: Path) -> dict[str, Any]:
    page = work / "report.html"
    found = measured(["report", *folders(work), "--out", str(page)])
    return {f"{RUNS}": {**found, "page_mib": round(page.stat().st_size / 2**20, 1)}}


PARTS = {"predict": predict, "fit": fit, "table": table, "report": report}


def main() -> None:
    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(os.getloadavg()[0], 1),
    }
    work = Path(tempfile.mkdtemp(prefix="calmatch-load-"))
    try:
        for name in sys.argv[1:] or PARTS:
            found[name] = PARTS[name](work)
            print(name, json.dumps(found[name]), flush=True)
    finally:
        shutil.rmtree(work)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
