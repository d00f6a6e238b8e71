"""Renews the plotting library that report pages carry, from npm: `python tools/vendor.py`.

Newest versions by default; `d3@7.9.2` and the like ask for others. Writes the minified files,
their licences and vendor.json (name, version, file, SHA-256); a test holds the files to it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "src" / "calmatch" / "report" / "vendor"
FILES = {"d3": "dist/d3.min.js", "@observablehq/plot": "dist/plot.umd.min.js"}  # in this order
INSIDE = ("interval-tree-1d", "binary-search-bounds", "isoformat")  # bundled into Plot's file


def fetch(package: str, folder: Path) -> tarfile.TarFile:
    """A package as npm serves it; npm checks its integrity."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    return tarfile.open(folder / name)


def content(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(f"package/{name}")
    assert member is not None
    return member.read()


def main() -> None:
    asked = {word.rpartition("@")[0]: word for word in sys.argv[1:]}
    notes, licences = [], []
    with tempfile.TemporaryDirectory() as folder:
        for package in (*FILES, *INSIDE):
            archive = fetch(asked.get(package, package), Path(folder))
            about = json.loads(content(archive, "package.json"))
            text = content(archive, "LICENSE").decode().strip()
            licences.append(f"{package} {about['version']}\n\n{text}\n")
            if package not in FILES:
                continue
            data = content(archive, FILES[package])
            file = Path(FILES[package]).name
            (VENDOR / file).write_bytes(data)
            note = {"name": package, "version": about["version"], "licence": about["license"]}
            notes.append({**note, "file": file, "sha256": hashlib.sha256(data).hexdigest()})
    (VENDOR / "LICENSES.txt").write_text(f"\n{'-' * 72}\n\n".join(licences))
    (VENDOR / "vendor.json").write_text(json.dumps(notes, indent=2) + "\n")


if __name__ == "__main__":
    main()
