"""Does `calmatch fit` keep its word? Six draws of labels on EuroSAT, judged by all other labels.

`python tools/draws.py EuroSAT.zip FOLDER` fits in FOLDER and rewrites the table of
docs/own_pictures.md; what is finished there is not repeated. A quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import numpy as np
import torch
from record import put

from calmatch import evaluate, fit, model, plan, posthoc
from calmatch.data import pictures
from calmatch.data.files import taken

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "own_pictures.md"
DRAWS = range(1, 7)
ROWS = (
    "true error, %",
    "estimated from 40 labels, %",
    "true ECE before calibration, %",
    "after",
    "after the most likely temperature instead",
)


def judged(truth: dict[str, str], place: Path, draw: int, minutes: float) -> list[float]:
    """The numbers of one draw whose labels are there, in the order of `ROWS`."""
    table, folder = place / f"labels{draw}.csv", place / f"run{draw}"
    run = fit.fit(plan.Wish(place / "pictures", table, minutes=minutes, device="cpu"), folder)
    loaded = model.load(folder)
    images, seen = pictures.decoded(pictures.read(place / "pictures", table), loaded.size)
    rest = torch.tensor([k for k, own in enumerate(seen.labels) if own < 0])
    logits = torch.cat([loaded.logits(taken(images, some)) for some in rest.split(512)])
    right = [loaded.classes.index(truth[seen.names[k]]) for k in rest.tolist()]
    with np.load(folder / "predictions.npz") as held:
        z, y = torch.from_numpy(held["raw_log_probs"]), torch.from_numpy(held["labels"])
    likely = posthoc.crossfit_temperature(z, y)
    labels = torch.tensor(right)
    scales = (posthoc.Scaling("identity"), loaded.calibration, likely)
    true = [evaluate.measure(scale(logits).float(), labels) for scale in scales]
    estimated = run.result["metrics"]["error"]["value"]
    found = [true[0]["error"].value, estimated, *(one["ece"].value for one in true)]
    return [100 * value for value in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, help="EuroSAT.zip")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    options = parser.parse_args()
    example = runpy.run_path(str(ROOT / "examples" / "own_pictures.py"))
    kept, place = options.folder / "truth.csv", options.folder
    if not kept.exists():
        truth = example["make_pictures"](place / "pictures", options.archive)
        kept.write_text("".join(f"{name},{kind}\n" for name, kind in truth.items()))
    truth = dict(line.split(",") for line in kept.read_text().splitlines())
    for draw in DRAWS:
        example["label_a_few"](truth, place / f"labels{draw}.csv", draw=draw)
    found = np.array([judged(truth, place, draw, options.minutes) for draw in DRAWS])
    lines = [f"| draw of labels | {' | '.join(map(str, DRAWS))} | mean |", "|---" * 8 + "|"]
    for name, numbers in zip(ROWS, found.T, strict=True):
        shown = " | ".join(f"{value:.1f}" for value in (*numbers, numbers.mean()))
        lines.append(f"| {name} | {shown} |")
    put(PAGE, "draws", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
