"""The lowest versions that pyproject.toml admits, as pip constraints: for `make test-floor`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("onnx", "parquet", "tensorboard", "offline")  # ray is tested apart, by `make test-ray`


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    for line in wanted:
        name, floor = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", line).groups()  # type: ignore[union-attr]
        print(f"{name}=={floor}")


if __name__ == "__main__":
    main()
