"""Regenerates parts of pages: README's demo and tour, the architecture's tree, the floors, lists,
the tables of speed.

`python tools/readme.py` rewrites everything; `--tree` all that takes no time: the tree, the table
of floors, the lists that commands print, what `make bench` measured; `--tour` only the tour;
`--check` says whether what takes no time is true.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import performance

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "calmatch"
ASSETS = ROOT / "docs" / "assets"
LISTS = PACKAGE / "lists.json"
TABLES = {  # what a list of the command line is made from
    "methods": "methods.METHODS",
    "datasets": "data.DATASETS",
    "recipes": "training.recipes.RECIPES",
    "losses": "losses.LOSSES",
    "metrics": "metrics.METRICS",
    "augmentations": "augment.OPS",
    "suites": "bench.paper.SUITE_LINES",
    "figures": "bench.figures.FIGURES",
}


def main() -> int:
    quick = [("docs/architecture.md", "tree", tree), ("CONTRIBUTING.md", "floors", floor_table)]
    quick += [("docs/performance.md", "people", performance.people)]
    quick += [("docs/performance.md", "steps", performance.steps)]
    slow = [("README.md", "demo", demo), ("README.md", "tour", tour)]
    if "--check" in sys.argv:
        pages = any(renewed(page, *part) != (ROOT / page).read_text() for page, *part in quick)
        return int(pages or lists() != LISTS.read_text())
    if "--tour" in sys.argv:
        quick, slow = [], slow[1:]
    LISTS.write_text(lists())
    for page, *part in quick if "--tree" in sys.argv else quick + slow:
        (ROOT / page).write_text(renewed(page, *part))
    return 0


def renewed(page: str, name: str, make) -> str:
    """A page with what stands between `<!-- name -->` and `<!-- /name -->` made anew."""
    place = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
    content = make()
    text, number = re.subn(
        place,
        lambda match: match[1] + content + match[2],
        (ROOT / page).read_text(),
        flags=re.DOTALL,
    )
    if number != 1:
        raise SystemExit(f"{page} has no place for {name}.")
    return text


def tree() -> str:
    """Every file of the package with its floor and the first line of its docstring.

    Methods are one line together: their page lists them.
    """
    level = {room: k for k, (_, rooms) in enumerate(floors()) for room in rooms.split()}
    lines = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        room = name.partition("/")[0].removesuffix(".py")
        subject = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        if room == "methods" and path.stem != "__init__":
            name, subject = "methods/NAME.py", "One method each: supervised to BaM, 21 files."
        lines.append((level[room], name.replace("__init__.py", ""), subject))
    rows = [f"{floor}  {name or '__init__.py':<24} {what}" for floor, name, what in set(lines)]
    return "\n".join(["```text", *sorted(rows), "```"])


def floor_table() -> str:
    """The floors of the house, lowest first."""
    rows = [f"| {k} | `{rooms}` | {subject} |" for k, (subject, rooms) in enumerate(floors())]
    return "\n".join(["| level | rooms | subject |", "|---|---|---|", *rows])


def floors() -> list[tuple[str, str]]:
    """Subject and rooms of each floor, as the test that walks the imports has them."""
    sys.path.append(str(ROOT / "tests"))  # what it imports itself
    spec = importlib.util.spec_from_file_location("layers", ROOT / "tests" / "test_layers.py")
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    return layers.FLOORS


def lists() -> str:
    """Every name of each table with its line."""
    made = {}
    for kind, place in TABLES.items():
        module, _, table = place.rpartition(".")
        entries = getattr(importlib.import_module(f"calmatch.{module}"), table)
        made[kind] = {name: line_of(item) for name, item in entries.items()}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def line_of(item) -> str:
    """A line as it is, a figure's, or the first line of a docstring."""
    item = getattr(item, "prepare", getattr(item, "func", item))
    return (item if isinstance(item, str) else item.__doc__).strip().split("\n")[0]


def demo() -> str:
    """The demo's table; its image is copied."""
    shutil.rmtree(ROOT / "demo", ignore_errors=True)
    command = [sys.executable, "-m", "calmatch", "demo", "--quiet"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    shutil.copy(ROOT / "demo" / "reliability.png", ASSETS / "demo.png")
    lines = "\n".join(line.rstrip() for line in output.splitlines()).strip()
    return f"```text\n{lines}\n```"


def tour() -> str:
    """The end of `fit`'s output in the tour, and how right it was; the page is photographed."""
    shutil.rmtree(ROOT / "tour", ignore_errors=True)
    command = [sys.executable, "examples/own_pictures.py", "tour"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    output = subprocess.run(command, cwd=ROOT, text=True, check=True, **both).stdout
    if shutil.which("chromium"):
        import screenshots

        driver = screenshots.opened()
        try:
            image = screenshots.take(driver, ROOT / "tour/run/report.html", 1120, "light", None)
        finally:
            driver.quit()
        (ASSETS / "tour.png").write_bytes(screenshots.small(image))
    else:
        print("No Chromium here: docs/assets/tour.png stays as it is.")
    result = output[output.index("Of 100 new pictures") : output.index("\nNext:")]
    truth = output[output.index("In truth") :].split(", after")[0] + "."
    paragraphs = [*result.strip().splitlines(), "", truth]
    lines = [textwrap.fill(line, 96, subsequent_indent="  ") for line in paragraphs]
    return "\n".join(["```text", *lines, "```"])


if __name__ == "__main__":
    sys.exit(main())
