"""Every promise in the docs names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "promises.md").read_text("utf-8")


def test_every_promise_names_a_test_that_exists():
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {item.name for tree in trees for item in tree.body if isinstance(item, ast.FunctionDef)}
    written = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", PAGE, flags=re.DOTALL)
    named = re.findall(r"^\| .*\| `(test_\w+)` \|$", written, re.MULTILINE)
    assert len(named) > 30
    assert set(named) <= tests, set(named) - tests
    for line in written.splitlines():  # by hand, not by a tool
        if line.startswith("| "):
            assert "kept by" in line or "| `test_" in line, line


@pytest.mark.parametrize(("name", "least"), [("hits", 500), ("fuzz", 100_000)])
def test_what_was_done_is_recorded_and_enough(name, least):
    table = PAGE.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
    done, other = re.search(r"\| all \| ([\d,]+) \| ([\d,]+) \|", table).groups()
    assert int(done.replace(",", "")) >= least
    assert other == (done if name == "hits" else "0")  # survived; findings
