"""Regenerates what the README shows: the tree, the demo's table, the demo's picture.

`python tools/readme.py` rewrites it; `--tree` only the tree, `--check` says whether that is true.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


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


def main() -> int:
    text = README.read_text()
    if "--check" in sys.argv:
        return int(between(text, "tree", tree()) != text)
    if "--tree" in sys.argv:
        README.write_text(between(text, "tree", tree()))
        return 0
    shutil.rmtree(ROOT / "demo", ignore_errors=True)
    command = [sys.executable, "-m", "calmatch", "demo", "--quiet"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    table = "\n".join(line.rstrip() for line in shown.splitlines()).strip()
    README.write_text(between(between(text, "tree", tree()), "demo", table))
    shutil.copy(ROOT / "demo" / "reliability.png", ROOT / "docs" / "assets" / "demo.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
