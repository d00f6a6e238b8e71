"""Every promise in the docs names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_promise_names_a_test_that_exists():
    text = (ROOT / "docs" / "promises.md").read_text("utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 30
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert name in {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}, name
    for line in text.splitlines():
        if line.startswith("| ") and "`tests/" not in line:
            assert "kept by" in line or "inputs" in line or re.search(r"(\d|survived) \|$", line), (
                line
            )
