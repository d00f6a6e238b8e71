import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from calmatch.methods import METHODS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_generated_tree_and_floors_are_true():
    command = [sys.executable, str(ROOT / "tools" / "readme.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "run python tools/readme.py --tree"


def test_every_make_target_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_picture_and_page_the_readme_links_to_exists():
    for path in re.findall(r"\]\(((?!https?:)[^)#]+)", README):
        assert (ROOT / path).is_file(), path


def test_ci_calls_only_what_the_readme_names():
    script = (ROOT / ".ci" / "run").read_text()
    for target in " ".join(re.findall(r"^make (.+)$", script, re.MULTILINE)).split():
        assert f"make {target}" in README


def test_pages_for_newcomers_stay_short():
    assert len(README.encode()) <= 8_000
    assert (ROOT / "docs" / "results.md").stat().st_size <= 12_000
    assert (
        len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 130
    )  # a line of it for each file


def test_the_log_is_newest_first_and_its_entries_are_short():
    entries = (ROOT / "research" / "log.md").read_text().split("\n## ")[1:]
    dates = [entry[:10] for entry in entries]
    assert dates == sorted(dates, reverse=True)
    assert all(len(entry.strip().splitlines()) - 1 <= 15 for entry in entries)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page_with_its_true_defaults(name):
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    parameters = list(inspect.signature(METHODS[name]).parameters.values())[1:]
    defaults = ", ".join(f"{p.name}={p.default!r}" for p in parameters) or "none"
    assert f"`{defaults}`" in page
    for part in ("## Equation", "## Where ours and the original differ", "## Reference"):
        assert part in page
    assert f"]({name}.md)" in (ROOT / "docs" / "methods" / "index.md").read_text()


def test_tables_of_speed_show_the_newest_measurement(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    performance = importlib.import_module("performance")
    row = {"what": "starting", "value": 2.0, "unit": "s", "beside": {"torch": 1.0}, "aim": "3 s"}
    facts = {"cpu": "a CPU", "device": "cpu", "versions": {"torch": "9"}}
    for day, value in (("2026-02-01", 0.25), ("2026-01-31", 7.0)):
        rows = [row | {"value": value, "times": 4.0}]
        record = {"date": day, "environment": facts, "rows": rows, "cores": 2, "load": 0.5}
        (tmp_path / f"predict-cpu-{day}.json").write_text(json.dumps(record))
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    assert performance.people().strip().splitlines() == [
        "a CPU, 2 cores, torch 9, 2026-02-01, load 0.5:",
        "",
        "| what | | beside it, in the same run | aim |",
        "|---|---:|---|---|",
        "| starting | 0.25 s | torch 1 s: 4.00 times | 3 s |",
    ]
    assert performance.steps() == ""


def test_every_list_says_something_of_each_entry():
    lists = json.loads((ROOT / "src" / "calmatch" / "lists.json").read_text())
    for kind, entries in lists.items():
        assert kind == "recipes" or len(set(entries.values())) == len(entries), kind
