"""What a person installs: the wheel, and calmatch on systems that are not this one."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest
import yaml

import calmatch
from calmatch import files
from conftest import ALONE
from pictures import blobs

ROOT = Path(__file__).parents[1]


def on_windows(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "warn_default_encoding", ROOT / "tests" / "windows.py", *words]
    return subprocess.run(command, capture_output=True, env=ALONE, timeout=300, encoding="cp1252")


@pytest.mark.slow
def test_demo_fit_and_predict_need_nothing_that_windows_lacks(tmp_path):
    pictures, run = tmp_path / "pictures", tmp_path / "run"
    blobs(pictures, each=5, spare=9)
    (pictures / "kind 0").rename(pictures / "круг")
    commands = [
        ("demo", "--pairs", "1", "--quiet", "--out", tmp_path / "demo"),
        ("fit", pictures, "--out", run, "--net", "tiny", "--steps", "3", "--size", "16"),
        ("predict", run, pictures, "-o", tmp_path / "a.csv"),
        ("report", run),
    ]
    for words in commands:
        done = on_windows(*words)
        assert done.returncode == 0, done.stderr
    assert len((tmp_path / "a.csv").read_text("utf-8").splitlines()) == 25


@pytest.mark.slow
def test_labels_are_saved_without_what_windows_lacks(tmp_path):
    pytest.importorskip("starlette")
    pictures = blobs(tmp_path / "pictures", each=1, spare=9) / "unlabelled"
    words = (
        "label",
        pictures,
        "--net",
        "tiny",
        "--labels",
        tmp_path / "labels.csv",
        "--no-browser",
    )
    command = [sys.executable, ROOT / "tests" / "windows.py", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ALONE) as server:
        try:
            said = next(line for line in server.stdout if "http://" in line)
            address, _, token = said.split()[-1].partition("?token=")
            changes = [{"row": 0, "before": None, "after": ["label", "new"]}]
            request = urllib.request.Request(
                f"{address}do/answer",
                json.dumps({"changes": changes}).encode(),
                {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["labels"] == 1
        finally:
            server.terminate()
    assert (tmp_path / "labels.csv").read_text("utf-8").count(",new\n") == 1


@pytest.mark.slow
def test_windows_collects_the_tests_and_leaves_out_those_of_what_it_has_not():
    """Nothing that a test module does when it is imported may need POSIX."""
    code = """
import filelock, os, pytest, signal, subprocess, sys, torch  # others have their own way there
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("mkfifo", "geteuid", "fork", "killpg", "posix_fallocate"):
    delattr(os, name)
del signal.SIGKILL, signal.SIGALRM, signal.SIGSTOP
sys.exit(pytest.main(["--collect-only", "-q", "tests", "-p", "no:cacheprovider"]))
"""
    place = {**ALONE, "CALMATCH_AS_ON_WINDOWS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_lock_without_fcntl_is_held_against_others_and_litter_goes_by_its_age(tmp_path):
    code = """
import os, sys, time
from pathlib import Path
import windows
windows.take_away()
from calmatch import files
old, young = (Path(sys.argv[1]) / f".{name}.json.1.part" for name in ("old", "young"))
for path in (old, young):
    path.touch()
os.utime(old, (0, 0))
with files.lock(Path(sys.argv[1])):
    assert not old.exists() and young.exists()
    try:
        with files.lock(Path(sys.argv[1])):
            raise AssertionError("held twice")
    except files.Busy:
        files.write_json(Path(sys.argv[1]) / "note.json", {})
"""
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, cwd=ROOT / "tests", env=ALONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files.read_json(tmp_path / "note.json") == {}


@pytest.mark.parametrize("words", [("label", "pictures"), ("serve", "run")], ids=lambda w: w[0])
@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_without_the_web_extra_a_sentence_names_it_before_anything_is_read(
    words, package, typed, monkeypatch
):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    done = typed(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'calmatch[web]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_one_place_knows_the_version():
    assert f"version: {calmatch.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert "version =" not in (ROOT / "pyproject.toml").read_text("utf-8").partition("[tool")[0]


@pytest.mark.slow
def test_the_wheel_holds_all_files_and_works_away_from_the_checkout(tmp_path):
    pytest.importorskip("build")
    command = [sys.executable, ROOT / "tools" / "wheel.py", "--borrow", "--out", tmp_path / "dist"]
    done = subprocess.run(command, env=ALONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = set(zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))).namelist())
    package = [path for path in (ROOT / "src" / "calmatch").rglob("*") if path.is_file()]
    wanted = {path.relative_to(ROOT / "src").as_posix() for path in package}
    assert {name for name in wanted if "__pycache__" not in name} <= names


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").iterdir()))
def test_workflows_run_what_make_runs(path):
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for line in lines:
        words = [word for word in line.split()[1:] if "=" not in word]
        known = all(f"\n{word}:" in makefile for word in words)
        assert line == ".ci/run" or line.startswith("ls dist/") or (line[:5] == "make " and known)
