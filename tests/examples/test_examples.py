"""The examples, run as a person runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ALONE

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *words: str | Path, timeout: float = 900) -> str:
    command = [sys.executable, EXAMPLES / name, *map(str, words)]
    place = str(EXAMPLES) + os.pathsep + os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ALONE | {"PYTHONPATH": place},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["research_run.py", "own_method.py"])
def test_the_small_examples_run(tmp_path, name):
    assert "ECE" in run_example(name, tmp_path / "runs", "--steps", "3")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 80


@pytest.mark.slow
def test_the_tour_ends_with_few_errors(tmp_path):
    said = run_example("own_pictures.py", tmp_path / "tour")
    wrong = float(said.rpartition("In truth ")[2].partition("%")[0])
    assert wrong < 20
    assert (tmp_path / "tour" / "run" / "report.html").is_file()
    assert (tmp_path / "tour" / "run" / "model.onnx").is_file()


@pytest.mark.slow
def test_the_tour_on_eurosat(tmp_path):
    archive = Path(os.environ.get("CALMATCH_DATA", "/nowhere")) / "EuroSAT.zip"
    if not archive.is_file():
        pytest.skip("CALMATCH_DATA has no EuroSAT.zip")
    said = run_example("own_pictures.py", tmp_path / "tour", "--eurosat", archive, "--minutes", "3")
    assert float(said.rpartition("In truth ")[2].partition("%")[0]) < 30
