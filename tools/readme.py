"""Regenerates what the README shows: the tree, the demo's and the tour's output and pictures.

`python tools/readme.py` rewrites it; `--tree` only the tree, `--tour` only the tour, `--check` says
whether the tree is true.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
ASSETS = ROOT / "docs" / "assets"


def tree() -> str:
    """Every file of the package with the first line of its docstring."""
    lines = ["src/calmatch/"]
    package = ROOT / "src" / "calmatch"
    for path in sorted(package.rglob("*.py"), key=lambda p: (len(p.relative_to(package).parts), p)):
        name = path.relative_to(package).as_posix()
        said = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        lines.append(f"  {name:<24} {said}")
    return "\n".join(lines)


def between(text: str, name: str, content: str) -> str:
    """Replace what stands between two markers."""
    pattern = rf"(<!-- {name} -->\n```\w*\n).*?(\n```\n<!-- /{name} -->)"
    return re.sub(pattern, lambda found: found[1] + content + found[2], text, flags=re.DOTALL)


def demo() -> str:
    """The demo's table; its picture is copied."""
    shutil.rmtree(ROOT / "demo", ignore_errors=True)
    command = [sys.executable, "-m", "calmatch", "demo", "--quiet"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    shutil.copy(ROOT / "demo" / "reliability.png", ASSETS / "demo.png")
    return "\n".join(line.rstrip() for line in shown.splitlines()).strip()


def tour() -> str:
    """What `fit` says at the end of the tour, and how right it was; its page is photographed."""
    import screenshots

    shutil.rmtree(ROOT / "tour", ignore_errors=True)
    command = [sys.executable, "examples/own_pictures.py", "tour"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    shown = subprocess.run(command, cwd=ROOT, text=True, check=True, **both).stdout
    driver = screenshots.opened()
    try:
        shot = screenshots.take(driver, ROOT / "tour/run/report.html", 1120, "light", None)
    finally:
        driver.quit()
    (ASSETS / "tour.png").write_bytes(screenshots.small(shot))
    said = shown[shown.index("Of 100 new pictures") : shown.index("\nNext:")]
    truth = shown[shown.index("In truth") :].split(", after")[0] + "."
    paragraphs = [*said.strip().splitlines(), "", truth]
    return "\n".join(textwrap.fill(line, 96, subsequent_indent="  ") for line in paragraphs)


def main() -> int:
    text = README.read_text()
    if "--check" in sys.argv:
        return int(between(text, "tree", tree()) != text)
    if "--tour" not in sys.argv:
        text = between(text, "tree", tree())
    if not {"--tree", "--tour"} & set(sys.argv):
        text = between(text, "demo", demo())
    if "--tree" not in sys.argv:
        text = between(text, "tour", tour())
    README.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
