"""The examples, run as a person runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from calmatch.export import export
from calmatch.model import load_model
from conftest import ALONE, write_random_model

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


@pytest.fixture
def exported(tmp_path) -> tuple[Path, list[Path]]:
    """A model with random weights as ONNX, and photographs of odd sizes."""
    pytest.importorskip("onnxruntime")
    write_random_model(tmp_path, "tiny", 4, 32)
    export(load_model(tmp_path), tmp_path / "model.onnx")
    files = [tmp_path / f"{k}.jpg" for k in range(3)]
    for k, file in enumerate(files):
        draw = np.random.default_rng(k).integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(draw).resize((200 + 31 * k, 120)).save(file, quality=92)
    return tmp_path, files


def agree(folder: Path, files: list[Path], said: str) -> None:
    model = load_model(folder)
    for file, line in zip(files, said.splitlines(), strict=True):
        answer, other = model.predict(file), json.loads(line)
        assert other["label"] == answer.label
        assert abs(other["confidence"] - answer.confidence) < 0.02
        assert (other["set"], other["sure"]) == (list(answer.set), answer.sure)


@pytest.mark.slow
def test_the_plain_onnx_example_says_what_predict_says(exported):
    folder, files = exported
    agree(folder, files, run_example("onnx_plain.py", folder / "model.onnx", *files))


@pytest.mark.slow
def test_the_javascript_example_says_what_predict_says(exported, tmp_path):
    folder, files = exported
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not here")
    place = tmp_path / "web"
    place.mkdir()
    packages = [
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "onnxruntime-web",
        "jpeg-js",
    ]
    if subprocess.run(packages, cwd=place, capture_output=True, timeout=300).returncode:
        pytest.skip("npm has no packages here")
    shutil.copy(EXAMPLES / "onnx_web.mjs", place)
    (place / "classes.json").write_text(json.dumps(load_model(folder).classes))
    command = ["node", "onnx_web.mjs", folder / "model.onnx", "classes.json", *files]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    agree(folder, files, done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_show_reliability(path, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # made anew, not remembered
    code = (  # in a process of its own: the kernel is a child of whoever runs it
        "import sys, nbclient, nbformat; book = nbformat.read(sys.argv[1], as_version=4); "
        "nbclient.NotebookClient(book, timeout=600, kernel_name='python3').execute(); "
        "nbformat.write(book, 'done.ipynb')"
    )
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, cwd=tmp_path, env=ALONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    notebook = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    shown = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert any("<svg" in str(out.get("data", {}).get("text/html", "")) for out in shown)
