"""Every promise in the docs names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_every_promise_names_a_test_that_exists():
    text = (ROOT / "docs" / "promises.md").read_text("utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 30
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert name in {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}, name
    written = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    for line in written.splitlines():  # by hand, not by a tool
        if line.startswith("| "):
            assert "kept by" in line or "`tests/" in line, line


@pytest.mark.parametrize(("name", "least"), [("hits", 500), ("fuzz", 100_000)])
def test_what_was_done_is_recorded_and_enough(name, least):
    text = (ROOT / "docs" / "promises.md").read_text("utf-8")
    table = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
    done, other = re.search(r"\| all \| ([\d,]+) \| ([\d,]+) \|", table).groups()
    assert int(done.replace(",", "")) >= least
    assert other == (done if name == "hits" else "0")  # survived; findings
