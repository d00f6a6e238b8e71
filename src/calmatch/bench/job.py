"""A run as an engine sees it: one config, one folder, one command, one exit code."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from calmatch import checkpoint, results
from calmatch.config import Config

LOG = "run.log"


class Job(NamedTuple):
    """One run of a suite."""

    name: str
    config: Config
    folder: Path


def state(job: Job) -> str:
    """finished, running (in another process), half done or new; ValueError for another config."""
    if results.finished(job.folder, job.config):
        return "finished"
    if held(job.folder):
        return "running"
    return "half done" if saved(job.folder) else "new"


def saved(folder: Path) -> int:
    """The step of the newest checkpoint; 0: none."""
    names = sorted((folder / "checkpoint").glob("*.safetensors"))
    return int(names[-1].stem) if names else 0


def reached(folder: Path) -> int:
    """The step of the newest line; 0: none yet."""
    try:
        with (folder / "times.jsonl").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 200))  # two lines at least
            whole = [line for line in file.readlines() if line[:1] == b"{" and line[-1:] == b"\n"]
    except OSError:
        return 0
    return int(json.loads(whole[-1])["step"]) if whole else 0


def times(folder: Path) -> list[dict[str, float]]:
    """When each line was written; a half-written last one is left out."""
    try:
        text = (folder / "times.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def held(folder: Path) -> bool:
    """Whether another process works in this folder."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def command(*jobs: Job) -> list[str]:
    """What runs them. Their configs were made by our code, not found in a file: trusted."""
    for job in jobs:
        results.finished(job.folder, job.config)  # another run's config is not overwritten
        job.folder.mkdir(parents=True, exist_ok=True)
        path = job.folder / "config.json"
        wanted = job.config.dump()
        if not path.exists() or json.loads(path.read_text("utf-8")) != wanted:
            checkpoint.write_json(path, wanted)
    if len(jobs) > 1:
        folders = [str(job.folder) for job in jobs]
        return [sys.executable, "-m", "calmatch.bench.together", *folders]
    folder = jobs[0].folder
    words = ["train", str(folder / "config.json"), "--out", str(folder), "--trust", "--quiet"]
    return [sys.executable, "-m", "calmatch", *words]


def start(
    *jobs: Job, env: Mapping[str, str], orphaned: int = signal.SIGTERM
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that a terminal's Ctrl-C reaches it once, by us.

    Args:
        jobs: the run, or runs that differ in their seeds only; the first one's folder has the log.
        env: what its environment adds to ours.
        orphaned: the signal it gets when this process dies, however that ends (Linux only).
    """
    words = command(*jobs)
    with (jobs[0].folder / LOG).open("ab") as log:
        log.write(f"# {datetime.now():%Y-%m-%d %H:%M:%S} {' '.join(words)}\n".encode())
        log.flush()
        return subprocess.Popen(
            words,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_follow(os.getpid(), orphaned),
        )


def _follow(parent: int, number: int) -> Callable[[], None] | None:
    """Called in the child: the kernel shall send it a signal when its parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before we asked
            os._exit(128 + number)

    return ask


def close(folder: Path, code: int, seconds: float) -> None:
    """The last line of an attempt in its log."""
    with (folder / LOG).open("a") as log:
        log.write(f"# {ended(code)} after {seconds:.1f} s\n")


def last_lines(folder: Path, n: int = 5) -> list[str]:
    """The end of the log of the newest attempt."""
    try:
        lines = (folder / LOG).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    starts = [k for k, line in enumerate(lines) if re.match(r"# \d{4}-", line)]
    newest = lines[starts[-1] + 1 if starts else 0 :]
    return [line for line in newest if line.strip() and not line.startswith("# ")][-n:]


def ended(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        hint = ", out of memory perhaps" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    return f"exit code {code}"
