"""Builds wheel and sdist into dist/, and tries the wheel as a person would who has nothing else.

In an empty environment, away from the checkout: `calmatch demo`, `fit` and `predict`. `--borrow`
takes the dependencies from the environment that runs this, `--no-extras` leaves the weights out,
and `--out` says where the files go.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_BYTES = 2_000_000
PICTURES = """
from pathlib import Path
from PIL import Image
from sklearn.datasets import load_digits
digits = load_digits()
for n, (pixels, digit) in enumerate(zip(digits.images, digits.target)):
    if digit < 3 and n < 300:
        folder = Path("pictures") / (f"digit {digit}" if n < 100 else "unlabelled")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).resize((64, 64)).save(folder / f"{n}.png")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--borrow", action="store_true")
    parser.add_argument("--no-extras", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    wheel = build(options.out)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        python = install(home / "environment", wheel, options.borrow, options.no_extras)
        run(python, "-c", PICTURES, home=home)
        calmatch = (python, "-m", "calmatch")
        run(*calmatch, "demo", "--quiet", home=home)
        run(*calmatch, "fit", "pictures", "--minutes", "0.3", home=home)
        run(*calmatch, "predict", "fit-pictures", "pictures", home=home)
        rows = (home / "predictions.csv").read_text("utf-8").splitlines()
        assert rows[0] == "file,label,confidence,set,sure"
        assert len(rows) > 80
        assert (home / "demo" / "report.html").is_file()
        assert (home / "fit-pictures" / "report.html").is_file()
    print("The wheel works.")


def build(out: Path) -> Path:
    """The wheel; it and the sdist are small, and PyPI can show their page."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, home=ROOT)
    made = sorted(out.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *made, home=ROOT)
    for path in made:
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
        assert path.stat().st_size < MOST_BYTES
    return made[0]


def install(folder: Path, wheel: Path, borrow: bool, plain: bool) -> Path:
    """The Python of a new environment that holds the wheel."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if borrow:  # behind the environment's own packages, so that this calmatch is not seen
        place = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.check_output([python, "-c", place], text=True).strip()
        (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    words = ["--no-deps", str(wheel)] if borrow else [str(wheel) + ("" if plain else "[offline]")]
    run(python, "-m", "pip", "install", "--quiet", *words, home=folder)
    where = "import calmatch; print(calmatch.__file__)"
    place = subprocess.check_output([python, "-c", where], text=True, env=clean(), cwd=folder)
    assert Path(place.strip()).is_relative_to(folder), place
    return python


def run(*words: str | Path, home: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(words, cwd=home, env=clean(), stdout=subprocess.PIPE, text=True)
    shown = " ".join(Path(word).name if Path(word).is_absolute() else str(word) for word in words)
    print(f"{time.monotonic() - began:5.0f} s  {shown.splitlines()[0][:90]}", flush=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit code {done.returncode}")


def clean() -> dict[str, str]:
    """Without a path that leads back to the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    main()
