"""Load: predict and fit on 200,000 pictures, 1,000 run folders in one table and one report.

    python benchmarks/load.py predict table report     # any of these, and fit
    python benchmarks/load.py --save fit               # and keep the numbers in results/ and docs/

`peak_mib` is the largest resident set of the process, as the kernel reports it: pages of mapped
files count in it, although the system may drop them at any time. `own_mib` counts only memory of
the process's own, looked at fifty times a second. `bytes_a_picture` is what grows with the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

import calmatch
from calmatch.training.config import Config

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from record import put

ROOT = Path(__file__).parents[1]

SIZES = tuple(int(word) for word in os.environ.get("SIZES", "20000 200000").split())
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
    own = [0]
    with Path(os.devnull).open("w") as null:
        process = subprocess.Popen(command, stdout=null)
        watcher = threading.Thread(target=_watch, args=(process.pid, own))
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    watcher.join()
    return {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mib": round(usage.ru_maxrss / 1024),
        "own_mib": round(own[0] / 1024),
    }


def _watch(pid: int, most: list[int]) -> None:
    """The most KiB of a process's own memory, until it ends."""
    try:
        while True:
            text = Path(f"/proc/{pid}/status").read_text()
            lines = [line for line in text.splitlines() if line.startswith("RssAnon")]
            if not lines:  # it is a zombie
                return
            most[0] = max(most[0], int(lines[0].split()[1]))
            time.sleep(0.02)
    except (FileNotFoundError, ProcessLookupError):
        return


def growth(sizes: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The measurements, and what one more picture costs."""
    (few, less), (many, more) = sizes.items()
    grown = {
        f"{kind}_bytes_a_picture": round((more[kind] - less[kind]) * 2**20 / (int(many) - int(few)))
        for kind in ("peak_mib", "own_mib")
    }
    return {**sizes, **{name.replace("_mib", ""): value for name, value in grown.items()}}


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
    sizes = {}
    for number in SIZES:
        pictures(work / "pictures", number)
        words = ["predict", str(work / "model"), str(work / "pictures"), "-o", str(work / "o.csv")]
        sizes[f"{number}"] = measured([*words, "--quiet"])
        with (work / "o.csv").open() as file:
            assert sum(1 for _ in file) == number + 1
        shutil.rmtree(work / "pictures")
    return growth(sizes)


def fit(work: Path) -> dict[str, Any]:
    os.environ["CALMATCH_CACHE"] = str(work / "cache")
    sizes = {}
    for number in SIZES:
        pictures(work / "pictures", number)
        rows = [f"{k // 1000:04d}/{k:06d}.bmp,{'red' if k % 2 else 'blue'}" for k in range(60)]
        (work / "labels.csv").write_text("\n".join(["file,label", *rows, ""]))
        words = ["fit", str(work / "pictures"), "--labels", str(work / "labels.csv")]
        out = work / f"fit-{number}"
        words += ["--out", str(out), "--steps", "60", "--device", "cpu", "--quiet"]
        sizes[f"{number}"] = measured(words)
        shutil.rmtree(work / "pictures")
    return growth(sizes)


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
    measures = measured(["report", *folders(work), "--out", str(page)])
    return {f"{RUNS}": {**measures, "page_mib": round(page.stat().st_size / 2**20, 1)}}


PARTS = {"predict": predict, "fit": fit, "table": table, "report": report}


def table_of(measures: dict[str, Any]) -> str:
    """What was measured, for the docs."""
    lines = [
        "| command | pictures or runs | processor, s | clock, s | peak MiB | of its own |",
        "|---|---|---|---|---|---|",
    ]
    for name in PARTS:
        for number, row in measures.get(name, {}).items():
            if isinstance(row, dict):
                cells = [row["cpu_seconds"], row["seconds"], row["peak_mib"], row["own_mib"]]
                lines.append(f"| {name} | {int(number):,} | {' | '.join(map(str, cells))} |")
    grown = [
        f"`{name}` needs {measures[name]['own_bytes_a_picture']:,} bytes of its own for each "
        f"further picture, {measures[name]['peak_bytes_a_picture']:,} with mapped files."
        for name in ("fit", "predict")
        if name in measures
    ]
    size = [f"The page: {row['page_mib']} MiB." for row in measures.get("report", {}).values()]
    machine = f"On {measures['machine']}, torch {measures['torch']}."
    return "\n".join([*lines, "", *grown, *size, machine])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    options.add_argument("--save", action="store_true", help="keep the numbers")
    chosen = options.parse_args()
    if unknown := set(chosen.parts) - set(PARTS):
        options.error(f"there is no part {sorted(unknown)[0]}; there are {', '.join(PARTS)}")
    save = chosen.save
    target = ROOT / "benchmarks" / "results" / f"load-cpu-{date.today()}.json"
    measures: dict[str, Any] = json.loads(target.read_text()) if save and target.exists() else {}
    measures["machine"] = f"{platform.machine()}, {os.cpu_count()} cores shared with other programs"
    measures["torch"] = torch.__version__
    work = Path(tempfile.mkdtemp(prefix="calmatch-load-"))
    try:
        for name in chosen.parts:
            measures[name] = PARTS[name](work)
            print(name, json.dumps(measures[name]), flush=True)
    finally:
        shutil.rmtree(work)
    print(json.dumps(measures, indent=2))
    if save:
        target.write_text(json.dumps(measures, indent=2) + "\n")
        put(ROOT / "docs" / "promises.md", "load", table_of(measures))


if __name__ == "__main__":
    main()
