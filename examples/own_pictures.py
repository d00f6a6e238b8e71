"""The tour: 1,797 pictures, 40 labels in a CSV; python examples/own_pictures.py FOLDER

The pictures are scikit-learn's digits as PNG files, or with `--eurosat EuroSAT.zip` 3,000 satellite
pictures. What follows after `label_a_few` is what you would type yourself.
"""

from __future__ import annotations

import argparse
import csv
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits


def make_pictures(folder: Path, archive: Path | None) -> dict[str, str]:
    """Write pictures into a folder; the true class of each, which a person would not know."""
    folder.mkdir(parents=True)
    if archive is None:
        digits = load_digits()
        for k, grey in enumerate(digits.images):
            picture = Image.fromarray((grey * (255 / 16)).astype("uint8")).resize((16, 16))
            picture.save(folder / f"{k:04d}.png")
        return {f"{k:04d}.png": str(truth) for k, truth in enumerate(digits.target)}
    truth = {}
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.endswith(".jpg"))
        for k, name in enumerate(random.Random(0).sample(names, 3000)):
            (folder / f"{k:04d}.jpg").write_bytes(file.read(name))
            truth[f"{k:04d}.jpg"] = Path(name).parent.name
    return truth


def label_a_few(truth: dict[str, str], path: Path, each: int = 4, draw: int = 1) -> None:
    """What a person does by hand: look at a few pictures and write down what is on them."""
    files = sorted(truth)
    random.Random(draw).shuffle(files)
    with path.open("w", newline="") as table:
        writer = csv.writer(table)
        writer.writerow(["file", "label"])
        for name in sorted(set(truth.values())):
            writer.writerows([f, name] for f in [f for f in files if truth[f] == name][:each])


def calmatch(*words: str | Path) -> None:
    """One command, as it is typed."""
    print("\n$ calmatch", *words, flush=True)
    subprocess.run([sys.executable, "-m", "calmatch", *map(str, words)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--eurosat", type=Path, help="EuroSAT.zip, for pictures of a real problem")
    parser.add_argument("--minutes", default="1")
    options = parser.parse_args()
    place, began = options.folder, time.monotonic()
    truth = make_pictures(place / "pictures", options.eurosat)
    label_a_few(truth, place / "labels.csv")
    run = place / "run"
    calmatch("fit", place / "pictures", "--labels", place / "labels.csv", "--out", run,
             "--minutes", options.minutes)  # fmt: skip
    calmatch("predict", run, place / "pictures", "-o", place / "out.csv")
    calmatch("report", run)
    calmatch("export", run, "--to", "onnx")
    with (place / "out.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    wrong = sum(row["label"] != truth[row["file"]] for row in rows) / len(rows)
    print(f"\nIn truth {wrong:.1%} of {len(rows):,} answers are wrong, after "
          f"{time.monotonic() - began:.0f} seconds.")  # fmt: skip


if __name__ == "__main__":
    main()
