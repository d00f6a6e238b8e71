"""The documentation: every command and every Python block of a page runs, and the site builds."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from calmatch import cli
from calmatch.bench.figures import FIGURES
from conftest import ALONE, calmatch
from hub_server import serve_hub
from pictures import blobs
from test_hub import LITE, finished

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = {"RECIPE": "digits_40", "SUITE": "digits", "NAME": "reliability", "N": "1"}
LEFT_OUT = {"--flags", "--config", "FILE", "..."}


def commands(page: Path) -> list[list[str]]:
    """The words of every line in a block of a page that begins with `calmatch`, or `$ calmatch`."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ )?calmatch +(\S.*)$", text, re.MULTILINE)
    return [words(line) for line in lines]


def words(line: str) -> list[str]:
    """Without the remark behind it; what is optional is taken, of alternatives the first."""
    line = re.sub(r" \| [^\]]+", "", re.split(r"\s{2,}|\s#", line)[0])
    split = shlex.split(line.replace("[", " ").replace("]", " "))
    return [EXAMPLES.get(word, word) for word in split if word not in LEFT_OUT]


def test_pages_have_commands():
    assert sum(len(commands(page)) for page in PAGES) > 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_is_understood(page, capsys, tmp_path, monkeypatch):
    own = re.search(r"`mine.py`:\n\n```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    if own:  # a method that the page shows is what its commands use
        (tmp_path / "mine.py").write_text(own[1])
        monkeypatch.syspath_prepend(tmp_path)
    for command, *rest in commands(page):
        _, options = cli.COMMANDS[command]
        try:
            if options:
                cli._parse(options, rest, command)
            elif command == "train":
                cli._train_options(rest)
            elif command == "figure" and rest:
                assert rest[0] in FIGURES
                cli._parse("FigureOptions", rest[1:], "figure")
            elif command == "bench" and rest:
                cli._parse("BenchOptions", rest, "bench")
            elif command == "datasets" and rest:
                cli._parse("CheckOptions", rest[1:], "datasets check")
            else:
                assert not rest
        except SystemExit as end:
            raise AssertionError(f"{command} {rest}: {capsys.readouterr()}") from end


# What a line holds: why no test types it.
CANNOT = {
    "pip install": "the environment of the tests is not theirs to change; tools/wheel.py installs",
    "make ": "makes environments; `calmatch demo` and the tour have tests of their own",
    "hf auth login": "asks for a person's token; the hub of the tests takes any",
    "label-studio start": "the server of another program",
    "ray start": "leaves a cluster behind: make test-ray",
    "--engine ray": "needs a cluster: make test-ray",
    "torchrun": "test_torchrun_with_two_ranks_writes_the_run_of_one_process",
    "python benchmarks/": "measures for minutes: make bench",
    "import fiftyone": "brings a database server: tests/data/test_labelfiles.py has its format",
    "replay RUN/fault": "needs a run that went wrong: tests/training/test_nonfinite.py",
}
FRAGMENTS = {  # in a sentence, where no whole command is meant
    "fit",
    "fit --labels",
    "train",
    "replay",
    "bench SUITE --seeds",
}
INSTEAD = {  # what a reader puts in; the sets of `main` cannot be had here, and / is not ours
    "main": "digits",
    "SUITE": "digits",
    "RECIPE": "digits_40",
    "RUNS": "runs",
    "RUNS...": "runs",
    "N": "3",
    "F": "truth.csv",
    "FILE": "RUN/predictions.npz",
    "/shared/runs": "runs",
    "/data": "data",
}
OF_PAGE = {"bench": {"NAME": "reliability"}, "data": {"NAME": "digits"}}
SMALL = {  # the same in seconds
    r"calmatch fit ": " --net tiny --steps 3 --size 16",
    r"calmatch train (?!.*--help)": " --steps 3",
    r"calmatch bench \w": " --steps 2 --only supervised",
    r"calmatch demo": " --pairs 1",
    r"calmatch label ": " --net tiny --no-browser",
}
PROGRAMS = "calmatch|python|pip|make|curl|hf|ray|torchrun|[A-Z_]+=\\S+"
NAMES = """
import json, numpy as np, onnxruntime, sklearn.datasets, torch, calmatch
from calmatch import posthoc
whole = calmatch.recipes.digits_40
calmatch.recipes.digits_40 = lambda *words, **named: whole(*words, **named).replace(steps=3)
X, labels = sklearn.datasets.load_digits(return_X_y=True)
X, X_new, y = X[:200] / 16, X[200:220] / 16, np.where(np.arange(200) < 60, labels[:200], -1)
images = np.random.default_rng(0).integers(0, 256, (4, 3, 16, 16), dtype=np.uint8)
free, held = (torch.randn(n, 10).double().log_softmax(1) for n in (300, 40))
probs, labels = held.exp(), torch.arange(40) % 10
"""


def typed_on(page: Path) -> list[str]:
    """What a reader types, in the page's order: lines of the shell, whole scripts, Python blocks.

    Python begins with a line break, so that it can be told from the rest.
    """
    text, lines = page.read_text("utf-8"), []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if kind == "python":
            lines.append("\n" + block)
        elif block.startswith("#!"):
            lines.append(block)
        elif kind in ("", "bash"):
            rows = [row.removeprefix("$ ") for row in block.replace("\\\n", " ").splitlines()]
            typed = [row for row in rows if re.match(rf"(?:{PROGRAMS})(?: |$)", row)]
            assert typed == rows or kind == "", block  # nothing is overlooked
            lines += typed
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    inside = [" ".join(code.split()) for code in re.findall(r"`calmatch ([^`]+)`", prose)]
    return lines + [f"calmatch {code}" for code in inside if code not in FRAGMENTS]


def put_in(line: str, page: Path, number: int) -> str:
    """A line as a reader with little data would type it."""
    if "\n" in line:
        return "\n".join(put_in(row, page, number) for row in line.splitlines())
    if line.startswith("calmatch "):  # without the remark behind it, with what is optional
        line = re.sub(r" \| [^\]]+", "", re.split(r"\s{2,}(?!\[)|\s#", line)[0])
        line = re.sub(r"[\[\]]|--flags|--config FILE| \.\.\.", "", line)
    for word, other in {**INSTEAD, **OF_PAGE.get(page.stem, {})}.items():
        line = re.sub(rf"(?<![^ ]){re.escape(word)}(?![^ \n])", other, line)
    for command, flags in SMALL.items():
        if re.search(command, line):
            line = re.sub(r" --(steps|minutes) \S+", "", line.rstrip()) + flags
    return line if "calmatch fit" not in line or "--out" in line else f"{line} --out fit-{number}"


def readers(page: Path) -> list[str]:
    return [line for line in typed_on(page) if not any(part in line for part in CANNOT)]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """What the pages' commands speak of: pictures, labels of several programs, finished runs."""
    place = tmp_path_factory.mktemp("home")
    blobs(place / "PICTURES", each=6, spare=9)
    shutil.copytree(place / "PICTURES", place / "photos")
    paths = sorted((place / "photos").rglob("*.png"))
    rows = [(f"{path.parent.name}/{path.name}", path.parent.name) for path in paths]
    rows = [row for row in rows if row[1] != "unlabelled"]
    for name in ("labels.csv", "truth.csv"):
        with (place / name).open("w", newline="") as table:
            csv.writer(table).writerows([("file", "label"), *rows])
    tasks = [
        {"data": {"image": f"/data/upload/1/{Path(file).name}"}, "annotations": [{"result": [
            {"type": "choices", "value": {"choices": [label]}}]}]}
        for file, label in rows
    ]  # fmt: skip
    (place / "project-1-at-2026-11-16.json").write_text(json.dumps(tasks))
    for name in ("x.jpg", "photo.jpg", "picture.jpg"):
        shutil.copy(paths[0], place / name)
    quick = ("--net", "tiny", "--steps", "3", "--size", "16", "--quiet")
    for words in (("fit", place / "photos", *quick[:-3]), ("train", "digits_40", *quick[2:4])):
        done = calmatch(*words, "--out", place / words[0], "--quiet")
        assert done.returncode == 0, done.stderr
    for name in ("RUN", "MODEL", "my_run", "fit-photos-1"):
        shutil.copytree(place / "fit", place / name)
    finished(place / "run", LITE, 64)  # timm's, for the Hub
    programs = place / "bin"
    programs.mkdir()
    words = f"{shlex.quote(sys.executable)} -m calmatch"
    for name, does in (("calmatch", f'{words} "$@"'), ("srun", '"$@"'), ("scontrol", "true")):
        (programs / name).write_text(f"#!/bin/sh\nexec {does}\n")
        (programs / name).chmod(0o755)
    return place


@dataclass
class Reader:
    """A reader's shell, in a folder of their own."""

    folder: Path
    place: dict[str, str]
    servers: ExitStack  # one at most
    python: str = ""
    address: str = ""

    def shell(self, line: str) -> None:
        if re.match(r"calmatch (serve|label) ", line):
            self.servers.close()
            self.address = self.servers.enter_context(self.serving(line))
        elif line.startswith("curl "):
            line = re.sub(r"http://127.0.0.1:\d+/", self.address, line)
            answer = json.loads(self.run(["bash", "-c", line]))
            assert {"label", "set", "sure", "model"} <= {*answer}
        else:
            self.run(["bash", "-c", line])

    def run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.place, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (command[-1][-3000:], done.stdout[-500:], done.stderr[-2000:])
        return done.stdout

    @contextmanager
    def serving(self, line: str) -> Iterator[str]:
        """A server until the page ends; it answers, and ends when it is told to."""
        command, out = ["bash", "-c", f"exec {line}"], subprocess.PIPE
        with subprocess.Popen(
            command, cwd=self.folder, env=self.place, stdout=out, text=True
        ) as server:
            try:
                said = next(text for text in server.stdout if "http://" in text)
                address = re.search(r"http://\S+", said)[0]
                with urllib.request.urlopen(address, timeout=60) as answer:
                    assert b"<html" in answer.read()
                yield address.partition("?")[0]
            finally:
                server.terminate()
        assert server.returncode in (0, 143)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if readers(page)], ids=lambda p: p.stem)
def test_what_a_page_says_runs_as_it_is_typed(page, home, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(home, own)
    if page.stem == "running":  # trained, so that it can be replayed
        shutil.rmtree(own / "RUN")
        shutil.copytree(home / "train", own / "RUN")
    else:
        shutil.copytree(home / "train", own / "FOLDER")
    if page.stem == "paper":
        shutil.copytree(home / "train", own / "runs" / "one")
    if page.stem != "hub":
        shutil.rmtree(own / "run")  # the page makes it
    (own / "examples").symlink_to(ROOT / "examples")
    method = re.search(r"`mine.py`:\n\n```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    (own / "mine.py").write_text(method[1] if method else "")
    with ExitStack() as stack:
        hub = stack.enter_context(serve_hub())
        programs = [own / "bin", Path(sys.executable).parent, os.environ["PATH"]]
        place = {
            **ALONE,
            "PATH": os.pathsep.join(map(str, programs)),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "WANDB_MODE": "offline",
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": "hf_test",
            "SLURM_ARRAY_TASK_ID": "0",
        }
        reader = Reader(own, place, stack.enter_context(ExitStack()))
        for number, line in enumerate(readers(page)):
            if line.startswith("\n"):
                reader.python += line
            else:
                reader.shell(put_in(line, page, number))
        if reader.python:
            reader.run([sys.executable, "-c", NAMES + reader.python])


def pages_of_site() -> list[str]:
    nav = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    return sorted(nav)


def test_every_page_is_on_the_way_through():
    pages = sorted(p.relative_to(ROOT / "docs").as_posix() for p in PAGES[1:])
    assert pages_of_site() == pages


@pytest.mark.slow
@pytest.mark.parametrize("builder", ["mkdocs", "zensical"])
def test_the_site_builds_with_mkdocs_and_its_successor(tmp_path, builder):
    pytest.importorskip(builder)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    words = ["build", "--strict"] if builder == "mkdocs" else ["build"]
    command = [sys.executable, "-m", builder, *words]
    place = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    for page in pages_of_site():
        made = site / page.removesuffix("index.md").removesuffix(".md")
        assert (made / "index.html").is_file(), page
    assert "predict_proba" in (site / "reference" / "index.html").read_text("utf-8")
