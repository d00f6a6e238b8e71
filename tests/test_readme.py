import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_tree_in_the_readme_is_true():
    command = [sys.executable, str(ROOT / "tools" / "readme.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "run make readme"


def test_every_make_target_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_picture_in_the_readme_exists():
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path


def test_ci_calls_only_what_the_readme_names():
    script = (ROOT / ".ci" / "run").read_text()
    for target in re.findall(r"^make (.+)$", script, re.MULTILINE)[0].split():
        assert f"make {target}" in README
