"""The documentation: every command on a page is understood, the short ones run, the site builds."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from calmatch import cli
from calmatch.bench.figures import FIGURES
from conftest import ALONE, calmatch
from pictures import blobs

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


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """What the pages' commands speak of: pictures, labels of several programs, a finished run."""
    place = tmp_path_factory.mktemp("home")
    blobs(place / "classes", each=6, spare=9)
    (place / "photos").mkdir()
    rows = []
    for path in sorted((place / "classes").rglob("*.png")):
        shutil.copy(path, place / "photos")
        if path.parent.name != "unlabelled":
            rows.append((path.name, path.parent.name))
    shutil.copytree(place / "classes", place / "PICTURES")
    for path in (place / "photos").iterdir():
        shutil.copy(path, place / "PICTURES")
    with (place / "labels.csv").open("w", newline="") as table:
        csv.writer(table).writerows([("file", "label"), *rows])
    tasks = [
        {"data": {"image": f"/data/upload/1/{file}"}, "annotations": [{"result": [
            {"type": "choices", "value": {"choices": [label]}}]}]}
        for file, label in rows
    ]  # fmt: skip
    (place / "project-1-at-2026-11-16.json").write_text(json.dumps(tasks))
    quick = ("--net", "tiny", "--steps", "3", "--size", "16", "--quiet")
    assert calmatch("fit", place / "classes", "--out", place / "run", *quick).returncode == 0
    for name in ("RUN", "MODEL", "runs/mine", "my_run"):
        shutil.copytree(place / "run", place / name)
    return place


def runnable(page: Path) -> list[list[str]]:
    short = [line for line in commands(page) if line[0] in ("fit", "predict", "report", "export")]
    return [line for line in short if not {"ray"} & {*line} and "hf:" not in " ".join(line)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda p: p.stem)
def test_short_commands_of_a_page_run_as_they_are_typed(page, home):
    for number, line in enumerate(runnable(page)):
        if line[0] == "fit":  # into a folder of its own, and in seconds
            if "--out" in line:
                del line[line.index("--out") : line.index("--out") + 2]
            line += ["--out", f"{page.stem}-{number}", "--net", "tiny", "--steps", "3", "--size"]
            line += ["16"]
            if "--labels" not in line:
                line[1] = "classes"
        if "--wandb" in line:
            pytest.importorskip("wandb")
        command = [sys.executable, "-m", "calmatch", *line]
        place = {**ALONE, "WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, cwd=home, env=place, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr[-2000:])


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
