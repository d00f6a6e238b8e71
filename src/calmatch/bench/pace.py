"""How long runs take: measured from run folders, or by a few real steps."""

from __future__ import annotations

import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from calmatch.bench import job as jobs
from calmatch.bench.engines import Slot
from calmatch.bench.job import Job
from calmatch.config import Config

LONGEST = 120.0  # seconds that one measurement may take


class Pace(NamedTuple):
    """Seconds a step, and seconds around the steps (start, last measurement)."""

    step: float
    around: float


Key = tuple[object, ...]


def keys(config: Config) -> list[Key]:
    """What decides the speed of a run: exactly, then roughly."""
    rough = (config.net, config.batch, config.ratio, config.precision)
    return [(config.dataset, config.method, *rough), rough]


def of(folder: Path, steps: int) -> Pace | None:
    """The pace of a run from its times; None where there are too few.

    A gap of more than twenty usual intervals is a night in which the run was stopped.
    """
    moments = {int(line["step"]): line["unix"] for line in jobs.times(folder)}
    spans = [(b - a, moments[b] - moments[a]) for a, b in pairwise(sorted(moments))]
    rates = [seconds / n for n, seconds in spans if seconds > 0]
    if not rates:
        return None
    usual = statistics.median(rates)
    kept = [(n, s) for n, s in spans if 0 < s / n <= 20 * usual]
    step = sum(s for _, s in kept) / sum(n for n, _ in kept)
    whole = took(folder)
    return Pace(step, max(0.0, whole - step * steps) if whole else 0.0)


def took(folder: Path) -> float | None:
    """Wall time of a run that was finished in one go by an engine."""
    try:
        text = (folder / jobs.LOG).read_text("utf-8", errors="replace")
    except OSError:
        return None
    starts = re.findall(r"^# \d{4}-", text, re.MULTILINE)
    ends = re.findall(r"^# exit code 0 after ([\d.]+) s$", text, re.MULTILINE)
    return float(ends[0]) if len(starts) == len(ends) == 1 else None


def known(todo: Sequence[Job]) -> dict[Key, Pace]:
    """What the folders of these runs tell, the exact keys and the rough ones."""
    found: dict[Key, list[Pace]] = {}
    for job in todo:
        if pace := of(job.folder, job.config.steps):
            for key in keys(job.config):
                found.setdefault(key, []).append(pace)
    return {key: _middle(paces) for key, paces in found.items()}


def _middle(paces: Sequence[Pace]) -> Pace:
    around = [pace.around for pace in paces if pace.around] or [0.0]
    return Pace(statistics.median(pace.step for pace in paces), statistics.median(around))


def find(config: Config, paces: Mapping[Key, Pace]) -> Pace | None:
    return next((paces[key] for key in keys(config) if key in paces), None)


def measure(config: Config, slot: Slot) -> Pace | None:
    """The pace of a few real steps in a process of its own; None where they cannot be made."""
    chunk = config.chunk if "CUDA_VISIBLE_DEVICES" in slot.env else 4
    short = config.replace(steps=4 * chunk, chunk=chunk, log_every=chunk, eval_every=0, warmup=0)
    with tempfile.TemporaryDirectory(prefix="calmatch-pace-") as name:
        job = Job("pace", short, Path(name))
        began = time.monotonic()
        process = jobs.start(job, env=slot.env)
        try:
            process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            pass  # its first lines may do
        finally:
            process.kill()
            process.wait()
        whole = time.monotonic() - began
        pace = of(job.folder, short.steps)
        return Pace(pace.step, max(0.0, whole - short.steps * pace.step)) if pace else None


def estimate(todo: Sequence[Job], paces: Mapping[Key, Pace]) -> tuple[float, int]:
    """Seconds that these runs take one after the other, and how many are unknown."""
    total, unknown = 0.0, 0
    for job in todo:
        pace = find(job.config, paces)
        unknown += pace is None
        if pace:
            total += pace.around + pace.step * (job.config.steps - jobs.saved(job.folder))
    return total, unknown
