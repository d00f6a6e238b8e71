"""The house: its floors import downward only, and its budgets hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import calmatch
from conftest import write_random_model

ROOT = Path(calmatch.__file__).parent
FLOORS = [
    ("tensors, files, the console", "core ops spec files console"),
    ("what a method, a loss, a metric is", "augment losses methods metrics nets posthoc"),
    ("images, and a trained model", "data model"),
    ("a run: trained, and read back", "training runs options"),
    ("what people do with it", "fit predict export estimator"),
    ("what people look at", "report bench hub web"),
    ("the command line", "cli demo __main__ __init__"),
]
LEVEL = {room: level for level, (_, rooms) in enumerate(FLOORS) for room in rooms.split()}
FILES = sorted(ROOT.rglob("*.py"))
MOST_FILES, MOST_LINES, LONGEST = 85, 18_500, 600
# packages, where a process or a command starts, and engines that only some machines can use
ALONE_ALLOWED = {
    "__main__",
    "__init__",
    "cli",
    "demo",
    "data",
    "training",
    "bench",
    "estimator",
    "export",
}
ALONE_ALLOWED |= {"hub", "web", "training.replay", "training.cuda_graph", "bench.ray", "fit.whole"}
ALONE_ALLOWED |= {"web.label", "web.serve", "bench.figures"}  # web servers, matplotlib


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"


MODULES = {module(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The calmatch modules that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "calmatch":
            base = node.module.partition(".")[2]
            for alias in node.names:
                full = f"{base}.{alias.name}".strip(".")
                names.add(full if full in MODULES else base or "__init__")
    return names


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__"])
def test_a_file_imports_its_own_floor_or_lower(name):
    room = name.partition(".")[0]
    for other in {each.partition(".")[0] for each in imports(MODULES[name])} - {"__init__"}:
        assert LEVEL[other] <= LEVEL[room], f"{name} imports {other}"
        assert {room, other} != {"methods", "losses"}
        assert not (room == "report" and other == "training")


def test_the_house_keeps_its_budgets():
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert len(FILES) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES
    assert not [path for path, number in lines.items() if number > LONGEST]


def test_a_module_with_a_single_importer_is_a_plug_in():
    importers: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, path in MODULES.items():
        for other in imports(path):
            importers[other].add(name)
    looked_up = {"methods", "nets", "augment"}  # by name, through a table
    lonely = [
        name
        for name, others in importers.items()
        if len(others - {name}) < 2
        and name not in ALONE_ALLOWED
        and name.partition(".")[0] not in looked_up
    ]
    assert not lonely


LOADED = """
import sys
from calmatch.cli import main
code = main(sys.argv[1:])
names = [name for name in sys.modules if name.partition(".")[0] == "calmatch"]
heavy = ("torch", "numpy", "tyro", "matplotlib", "sklearn")
print(code, len(names), any(name in sys.modules for name in heavy))
"""


def loaded(*words: str | Path) -> tuple[int, int, bool]:
    """A command's exit code, the calmatch modules it has loaded, and whether heavy packages too."""
    command = [sys.executable, "-c", LOADED, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, number, heavy = done.stdout.splitlines()[-1].split()
    return int(code), int(number), heavy == "True"


def test_every_public_name_exists_and_the_package_and_its_help_are_light():
    assert all(hasattr(calmatch, name) for name in calmatch.__all__)
    code = "import sys, calmatch; print(sum(name.startswith('calmatch') for name in sys.modules))"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(alone.stdout) <= 4
    code, _, heavy = loaded("--help")  # under 0.3 s, which a loaded machine cannot measure
    assert (code, heavy) == (0, False)


def test_a_first_answer_needs_no_heavy_package(tmp_path):
    write_random_model(tmp_path, "efficientnet_lite0(pretrained=False)", 3, 32)
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    forbidden = ("timm", "torchvision", "scipy", "sklearn", "pandas", "matplotlib", "onnx")
    code = (
        "import sys, calmatch; from pathlib import Path; place = Path(sys.argv[1]); "
        "calmatch.load(place).predict(place / 'red.png'); "
        f"print([name for name in {forbidden} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    words = ("predict", tmp_path, tmp_path / "red.png", "-o", tmp_path / "answers.csv", "--quiet")
    code = LOADED.replace("sys.modules for name in heavy", f"sys.modules for name in {forbidden}")
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


@pytest.mark.slow
def test_a_command_loads_few_rooms(tmp_path):
    run = tmp_path / "run"
    words = ("train", "digits_40", "--steps", "3", "--device", "cpu", "--quiet", "--out", run)
    code, number, _ = loaded(*words)
    assert code == 0
    assert number <= 38
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    table = tmp_path / "answers.csv"
    code, number, _ = loaded("predict", run, tmp_path / "red.png", "-o", table, "--quiet")
    assert code == 0
    assert number <= 16


def test_the_table_of_floors_in_contributing_is_true():
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    for level, (subject, rooms) in enumerate(FLOORS):
        assert f"| {level} | `{rooms}` | {subject} |" in page
