"""Layers import downward only; methods know no losses, losses no methods."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import calmatch

ROOT = Path(calmatch.__file__).parent
LAYERS = [
    {"core", "ops", "parallel", "spec", "memory", "edge"},
    {"losses", "metrics", "posthoc", "augment", "nets", "methods", "optim", "config"},
    {"data", "setup"},
    {
        "trainer",
        "capture",
        "flat",
        "step",
        "guard",
        "environment",
        "evaluate",
        "examples",
        "scaled",
        "views",
        "checkpoint",
        "log",
        "results",
        "runfiles",
        "model",
        "modelfile",
        "heads",
        "features",
        "vectors",
    },
    {
        "recipes",
        "bench",
        "cli",
        "options",
        "api",
        "demo",
        "fit",
        "plan",
        "planning",
        "judge",
        "words",
        "outcome",
        "estimator",
        "predict",
        "replay",
        "table",
        "cluster",
        "export",
        "report",
        "__main__",
        "__init__",
    },
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("calmatch"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found - {"__version__"}


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_its_own_layer_or_lower(path):
    if path.name == "__init__.py" and path.parent == ROOT:
        return  # the public names
    for other in imports(path):
        assert LEVEL[other] <= LEVEL[room(path)], f"{room(path)} imports {other}"
        assert {room(path), other} != {"methods", "losses"}
        assert not (room(path) == "report" and other == "trainer")


def test_every_public_name_exists_and_importing_the_package_is_light():
    assert all(hasattr(calmatch, name) for name in calmatch.__all__)
    code = "import sys, calmatch; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 330
