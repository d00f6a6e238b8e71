"""What is done to running processes, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
from forks import Forks, Process, Watch
from PIL import Image

from calmatch.training import checkpoint
from calmatch.training.config import Config

PATIENCE = 10.0  # seconds within which a stop signal must be answered
ROOM = 64 << 20  # bytes of the small disk that is filled: two copies of a model and more
SAME = (
    "config.json",
    "split.json",
    "metrics.jsonl",
    "model.safetensors",
    "model.json",
    "predictions.npz",
    "examples.npz",
    "result.json",
    "report.html",
    "fit.json",
)
# What appears while a run goes on: a hit right after one of these meets a write under way.
SIGNS = (
    "split.json",
    "checkpoint/.*.part",
    "checkpoint/*.safetensors",
    ".model.safetensors.*.part",
    "model.json",
    ".predictions.npz.*.part",
    ".result.json.*.part",
    "result.json",
    ".report.html.*.part",
)


class Case(NamedTuple):
    """A command that makes run folders below a folder, and the folders that it makes."""

    name: str
    words: tuple[str, ...]  # {out} and {here} stand for paths
    runs: tuple[str, ...]
    config: Config | None = None
    kinds: tuple[str, ...] = ()  # hits that this case alone can take, or all it can


def _config(**changes: object) -> Config:
    settings: dict[str, object] = {
        "dataset": "synthetic",
        "labels": 16,
        "method": "freematch",
        "penalty": "margin(m=4)",
        "net": "tiny",
        "weak": "crop(1)",
        "strong": "crop(2)|cutout(0.5)",
        "batch": 8,
        "ratio": 2,
        "steps": 60,
        "lr": 1e-2,
        "log_every": 5,
        "eval_every": 20,
        "checkpoint_every": 6,
        "chunk": 4,
        "device": "cpu",
    }
    return Config(**{**settings, **changes})  # type: ignore[arg-type]


OUT = ("--out", "{out}")
TRAIN = ("train", "{here}/config.json", *OUT)
SIGNALS = ("kill", "term", "int")
CASES = {
    case.name: case
    for case in (
        Case("freematch", TRAIN, (".",), _config()),
        Case(
            "best of meanteacher",
            TRAIN,
            (".",),
            _config(method="meanteacher", penalty="", select="best(error)", validation=0.2),
        ),
        Case("flexmatch", TRAIN, (".",), _config(method="flexmatch", optimizer="sgd")),
        Case("two seeds", (*TRAIN, "--together", "2"), ("seed0", "seed1"), _config(steps=40)),
        Case(
            "files",
            TRAIN,
            (".",),
            _config(
                dataset="folder(path='{data}', size=8, cached=False)",
                source="stream",
                workers=1,
                steps=40,
                checkpoint_every=4,
            ),
            ("vanish", *SIGNALS, "damage", "double"),
        ),
        Case(
            "fit",
            ("fit", "{data}", "--size", "8", "--device", "cpu", *OUT),
            (".", "work/both", "work/alone"),
            None,
            (*SIGNALS, "full", "limit", "readonly", "damage", "double", "clock", "vanish"),
        ),
        Case(
            "bench",
            ("bench", "digits", "--only", "freematch", "--steps", "40", "--seeds", "0", *OUT),
            (),
            None,
            (*SIGNALS, "double"),
        ),
    )
}


class Missed(Exception):
    """The process had ended before it was hit."""


class Stage:
    """A place where commands run, with the undisturbed results to compare with."""

    def __init__(self, work: Path, seed: int, forks: Forks | None = None) -> None:
        self.work, self.chance = work, random.Random(seed)
        self.forks = forks or Forks()
        self.starts = 0
        self.spans: dict[str, float] = {}
        self.whole: dict[tuple[str, bool], dict[str, bytes]] = {}
        self.data = work / "data" / "pictures"
        self.mounted = _small_disk(work / "disk")
        _pictures(self.data)

    def close(self) -> None:
        self.forks.close()
        if self.mounted:
            # lazily: a worker that outlives its parent for a moment keeps it busy
            subprocess.run(["umount", "--lazy", str(self.work / "disk")], check=True)

    def folder(self, name: str) -> Path:
        """A place for a run and its config, on the small disk if there is one."""
        place = self.work / "disk" / name
        place.mkdir(parents=True)
        return place / "out"

    def words(self, case: Case, out: Path) -> list[str]:
        if case.config is not None:
            dataset = case.config.dataset.replace("{data}", str(self.data))
            config = case.config.replace(dataset=dataset)
            (out.parent / "config.json").write_text(json.dumps(config.dump()))
        return [word.format(out=out, here=out.parent, data=self.data) for word in case.words]

    def start(self, case: Case, out: Path, **how: object) -> Process:
        self.starts += 1
        output = self.work / f"output-{self.starts}.txt"
        return self.forks.start(self.words(case, out), output, **how)

    def finish(self, case: Case, out: Path, *, plain: bool = False) -> Process:
        began = time.monotonic()
        process = self.start(case, out, plain=plain)
        code = self.forks.wait(process)
        assert code == 0, f"a last start ended with {code}: {process.text()[-800:]}"
        if not plain:
            span = time.monotonic() - began
            self.spans[case.name] = min(span, self.spans.get(case.name, span))
        return process

    def undisturbed(self, case: Case, plain: bool = False) -> dict[str, bytes]:
        """What the case writes when nobody disturbs it, by name; forked starts resample less."""
        key = (case.name, plain)
        if key not in self.whole:
            out = self.folder(f"whole-{case.name.replace(' ', '-')}")
            self.finish(case, out, plain=plain)
            self.whole[key] = written(out)
            shutil.rmtree(out.parent)
        return self.whole[key]

    def moment(self, case: Case, out: Path, process: Process) -> None:
        """Wait for a moment of chance: any, or one at which something is being written."""
        span = self.spans[case.name] * _left(case, out)
        share = self.chance.choice((0.2, 0.3, 0.5, 1.0))
        end = time.monotonic() + self.chance.uniform(0, share * span)
        sign = self.chance.choice(SIGNS) if case.runs and self.chance.random() < 0.5 else None
        runs = [out / run for run in case.runs]
        if sign:
            seen = {path for run in runs for path in run.glob(sign)}
        while time.monotonic() < end:
            if self.forks.poll(process) is not None:
                break
            if sign and {path for run in runs for path in run.glob(sign)} - seen:
                time.sleep(self.chance.choice((0, 0, 0.001, 0.01)))
                break
            time.sleep(0.002)
        if self.forks.poll(process) is not None:
            assert process.code == 0, f"ended with {process.code}: {process.text()[-800:]}"
            raise Missed


def _left(case: Case, out: Path) -> float:
    """About which share of the command is still to do, or most hits would come too late."""
    if case.config is None:
        return 1.0
    saved = [int(path.stem) for path in out.rglob("checkpoint/*.safetensors")]
    return max(0.2, 1 - max(saved, default=0) / case.config.steps)


def _pictures(folder: Path) -> None:
    chance = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for k in range(30):
            base = 60 if name == "cat" else 180
            pixels = chance.normal(base, 30, (8, 8, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{k:02d}.png")


def _small_disk(folder: Path) -> bool:
    folder.mkdir(parents=True)
    if os.geteuid() != 0:
        return False
    words = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)]
    return subprocess.run(words, capture_output=True).returncode == 0


# What must hold -----------------------------------------------------------------------------


def written(out: Path) -> dict[str, bytes]:
    """The files of finished runs that must not depend on what happened, by path."""
    contents = {}
    for result in sorted(out.rglob("result.json")):
        for name in SAME:
            path = result.parent / name
            if path.exists():
                data = path.read_bytes()
                if path.suffix in (".json", ".html"):  # some name the folder they are in
                    data = data.replace(str(out).encode(), b"OUT")
                contents[str(path.relative_to(out))] = data
    return contents


def sound(out: Path) -> None:
    """No file under its final name is corrupt."""
    for path in sorted(out.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(out).parts)
        if path.is_dir() or hidden:
            continue
        if path.suffix == ".json":
            json.loads(path.read_text("utf-8"))
        elif path.suffix == ".jsonl":
            text = path.read_text("utf-8")
            assert not text or text.endswith("\n"), f"{path} ends in half a line"
            for line in text.splitlines():
                json.loads(line)
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                assert all(arrays[name] is not None for name in arrays.files)
        elif path.parent.name == "checkpoint":
            if path.suffix != ".damaged":  # set aside, no longer under its name
                checkpoint.read_checkpoint(path)
        elif path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="np") as file:
                assert all(file.get_tensor(name) is not None for name in file.keys())  # noqa: SIM118
        elif path.suffix == ".html":
            assert path.read_text("utf-8").rstrip().endswith("</html>")
        else:
            assert path.suffix in (".log", ".md", ".csv", ".svg", ".tex"), f"unknown file {path}"


def same(stage: Stage, case: Case, out: Path) -> None:
    """The finished runs equal the undisturbed ones, byte for byte."""
    wanted, got = stage.undisturbed(case), written(out)
    assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
    other = [name for name in wanted if wanted[name] != got[name]]
    if {Path(name).name for name in other} <= {"result.json", "report.html"} and other:
        wanted = stage.undisturbed(case, plain=True)  # a plain start finished some run
        other = [name for name in other if wanted[name] != got[name]]
    assert not other, f"differs from the undisturbed run: {', '.join(other)}"
    litter = [str(path) for path in out.rglob(".*.part")]
    assert not litter, f"left behind: {litter}"


# The hits -----------------------------------------------------------------------------------


DONE = ("Report: ", "calmatch report ", "digits: ")  # the last words of each command


def _stopped(stage: Stage, case: Case, out: Path, number: int, codes: tuple[int, ...]) -> None:
    before = _files(out)
    process = stage.start(case, out, plain=stage.chance.random() < 0.02)
    stage.moment(case, out, process)
    process.send(number)
    code = stage.forks.wait(process)
    took, text = process.took, process.text()
    python = "<frozen" in text and "edge.py" not in text  # nobody of ours was asked yet
    early = (not text or python) and _files(out) == before
    after = any(words in text for words in DONE)  # all is done, Python is ending
    fine = code in (*codes, 0) or (code == -number and (early or after)) or (code == 1 and python)
    assert fine, (code, text[-800:])
    if number != signal.SIGKILL:
        assert took < PATIENCE, f"answered {code} after {took:.1f} s"
        for path, facts in _files(out).items():
            if path.name == "metrics.jsonl" and facts[0] and facts != before.get(path):
                saved = list(path.parent.glob("checkpoint/*.safetensors"))
                assert saved, "stopped without checkpoint"


def _files(out: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of change of every file."""
    facts_of = {}
    for path in out.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            facts = path.stat()
            facts_of[path] = (facts.st_size if path.is_file() else 0, facts.st_mtime_ns)
    return facts_of


def kill(stage: Stage, case: Case, out: Path) -> None:
    """SIGKILL."""
    _stopped(stage, case, out, signal.SIGKILL, (-signal.SIGKILL,))


def term(stage: Stage, case: Case, out: Path) -> None:
    """SIGTERM: a checkpoint and exit code 143 within ten seconds."""
    _stopped(stage, case, out, signal.SIGTERM, (143,))


def interrupt(stage: Stage, case: Case, out: Path) -> None:
    """SIGINT: a checkpoint and exit code 130 within ten seconds."""
    _stopped(stage, case, out, signal.SIGINT, (130,))


def _refused(stage: Stage, process: Process, *words: str) -> None:
    """It ended well, or with one sentence."""
    code = stage.forks.wait(process)
    text = process.text()
    assert code in (0, 2), (code, text[-1500:])
    if code:
        assert "Traceback" not in text, text[-1500:]
        last = text.strip().splitlines()[-1]
        assert any(word in text for word in words), last


def full(stage: Stage, case: Case, out: Path) -> None:
    """A disk that is full: one sentence, and nothing half-written."""
    if not stage.mounted:
        limit(stage, case, out)
        return
    process = stage.start(case, out)
    ballast = stage.work / "disk" / "ballast"
    try:
        stage.moment(case, out, process)
        room = os.statvfs(ballast.parent)
        left = stage.chance.choice((0, 4, 16, 64, 256)) << 10
        with ballast.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - left))
        _refused(stage, process, "No space left")
    finally:
        ballast.unlink(missing_ok=True)


def limit(stage: Stage, case: Case, out: Path) -> None:
    """A limit on the size of files, as a quota sets it."""
    process = stage.start(case, out)
    stage.moment(case, out, process)
    most = stage.chance.choice((2000, 4000, 8000))  # what it says must still fit
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
    _refused(stage, process, "File too large")


def readonly(stage: Stage, case: Case, out: Path) -> None:
    """A run folder that becomes read-only."""
    process = stage.start(case, out, meek=True)
    changed: list[Path] = []
    try:
        stage.moment(case, out, process)
        changed = [path for path in (out, *out.glob("**/")) if path.is_dir()]
        for path in changed:
            path.chmod(0o555)
        _refused(stage, process, "Permission denied", "cannot be written")
        if out.exists() and stage.chance.random() < 0.3:
            again = stage.start(case, out, meek=True)
            _refused(stage, again, "Permission denied", "cannot be written")
    finally:
        for path in changed:
            path.chmod(0o755)


def vanish(stage: Stage, case: Case, out: Path) -> None:
    """The folder of pictures goes away and comes back."""
    process = stage.start(case, out)
    away = stage.data.with_name("away")
    stage.moment(case, out, process)
    stage.data.rename(away)
    try:
        _refused(stage, process, "cannot be", "There is no", "No such file")
        if stage.chance.random() < 0.3 and process.code:
            _refused(stage, stage.start(case, out), "There is no")
    finally:
        away.rename(stage.data)


def damage(stage: Stage, case: Case, out: Path) -> None:
    """A checkpoint that is cut off or has a flipped bit: noticed, said, and the one before used."""
    if not list(out.rglob("checkpoint/*.safetensors")):
        process = stage.start(case, out)
        while not list(out.rglob("checkpoint/*.safetensors")):
            if stage.forks.poll(process) is not None:
                raise Missed
            time.sleep(0.002)
        process.send(signal.SIGKILL)
        stage.forks.wait(process)
    if any((path.parent.parent / "result.json").exists() for path in out.rglob("checkpoint/*")):
        raise Missed  # a finished run reads no checkpoint
    every = [sorted(folder.glob("*.safetensors")) for folder in out.rglob("checkpoint")]
    newest = stage.chance.choice([paths[-1] for paths in every if paths])
    data = bytearray(newest.read_bytes())
    if stage.chance.random() < 0.4:
        data = data[: stage.chance.randrange(len(data))]
    else:
        data[stage.chance.randrange(len(data))] ^= 1 << stage.chance.randrange(8)
    newest.write_bytes(data)
    process = stage.start(case, out)
    watch = Watch()
    while "Going back" not in process.text():
        done = stage.forks.poll(process) is not None or watch.seconds() > 60
        assert not done or "Going back" in process.text(), "a damaged checkpoint went unnoticed"
        time.sleep(0.005)
    if stage.chance.random() < 0.8:
        time.sleep(stage.chance.uniform(0, stage.spans[case.name] / 3))
        with contextlib.suppress(ProcessLookupError):
            process.send(signal.SIGKILL)
        assert stage.forks.wait(process) in (0, -signal.SIGKILL)
    else:
        assert stage.forks.wait(process) == 0, process.text()[-800:]


def double(stage: Stage, case: Case, out: Path) -> None:
    """A second process on the same run folder refuses, and the first goes on."""
    first = stage.start(case, out)
    stage.moment(case, out, first)
    second = stage.start(case, out)
    code = stage.forks.wait(second)
    if case.name == "bench":  # a second suite waits for the runs that the first holds
        assert code == 0, (code, second.text()[-800:])
    else:
        assert code in (0, 2), (code, second.text()[-800:])
        assert code == 0 or "Another process" in second.text(), second.text()[-800:]
    if code and stage.chance.random() < 0.9:
        with contextlib.suppress(ProcessLookupError):
            first.send(signal.SIGKILL)
        assert stage.forks.wait(first) in (0, -signal.SIGKILL), first.text()[-800:]
        return
    first_code = stage.forks.wait(first)
    text = first.text()[-800:]
    refused = first_code == 2 and "Another process" in text  # the second was faster
    assert first_code == 0 or (refused and code == 0), (first_code, text)


def clock(stage: Stage, case: Case, out: Path) -> None:
    """A wall clock that jumps by years."""
    process = stage.start(case, out, clock=stage.chance.randrange(1 << 30))
    if stage.chance.random() < 0.9:
        stage.moment(case, out, process)
        process.send(signal.SIGKILL)
        assert stage.forks.wait(process) in (0, -signal.SIGKILL), process.text()[-800:]
    else:
        assert stage.forks.wait(process) == 0, process.text()[-800:]


HITS: dict[str, Callable[[Stage, Case, Path], None]] = {
    "kill": kill,
    "term": term,
    "int": interrupt,
    "full": full,
    "limit": limit,
    "readonly": readonly,
    "vanish": vanish,
    "damage": damage,
    "double": double,
    "clock": clock,
}


def kinds(case: Case) -> list[str]:
    """The hits that a case can take."""
    return list(case.kinds) or [name for name in HITS if name != "vanish"]


def story(stage: Stage, case: Case, wanted: list[str], name: str) -> Iterator[tuple[str, bool]]:
    """Hit one run folder again and again, then let it finish and compare.

    Yields each kind with whether it was in time; raises AssertionError for what does not hold.
    """
    stage.undisturbed(case)
    out = stage.folder(name)
    for kind in wanted:
        try:
            HITS[kind](stage, case, out)
        except Missed:
            yield kind, False
        else:
            yield kind, True
        if out.exists():
            sound(out)
        if len(written(out)) == len(stage.undisturbed(case)):
            break  # nothing is left to be hit
    stage.finish(case, out, plain=stage.chance.random() < 0.02)
    sound(out)
    same(stage, case, out)
    shutil.rmtree(out.parent)
