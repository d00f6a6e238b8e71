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
from torch import Tensor

from calmatch import fit, metrics, model, plan, posthoc
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
    images, found = pictures.decoded(pictures.read(place / "pictures", table, False), loaded.size)
    rest = torch.tensor([k for k, own in enumerate(found.labels) if own < 0])
    logits = torch.cat([loaded.logits(taken(images, some)) for some in rest.split(512)])
    right = [loaded.classes.index(truth[found.names[k]]) for k in rest.tolist()]
    with np.load(folder / "predictions.npz") as held:
        z, y = torch.from_numpy(held["raw_log_probs"]), torch.from_numpy(held["labels"])
    likely = posthoc.crossfit_temperature(z, y)
    labels = torch.tensor(right)
    error = float((logits.argmax(1) != labels).double().mean())
    told = [_ece(scale(logits), labels) for scale in (_as_it_is, loaded.calibration, likely)]
    return [100 * error, 100 * run.result["metrics"]["error"]["value"], *(100 * e for e in told)]


def _as_it_is(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


def _ece(log_probs: Tensor, labels: Tensor) -> float:
    return float(metrics.summary(log_probs.double().exp(), labels)["ece"].value)


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
    before, rest = PAGE.read_text("utf-8").split("<!-- draws -->")
    after = rest.split("<!-- /draws -->")[1]
    made = "\n".join(["<!-- draws -->", *lines, "<!-- /draws -->"])
    PAGE.write_text(before + made + after, "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
