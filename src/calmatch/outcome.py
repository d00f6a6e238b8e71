"""What a fit leaves behind: model, predictions with file names, pictures to look at, result."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calmatch import checkpoint, examples, judge, model
from calmatch.config import Config
from calmatch.data.files import Images, taken
from calmatch.data.pictures import Pictures
from calmatch.plan import Plan, Wish
from calmatch.report.build import build
from calmatch.results import Run, load
from calmatch.words import closing


class Candidate(NamedTuple):
    """One of the two ways to learn, judged."""

    name: str
    config: Config  # of the final run
    judged: judge.Judged


def finished(folder: Path) -> bool:
    """Whether a fit is done; the trainer's own result.json is only a part of it."""
    path = folder / "result.json"
    return path.exists() and "judged_on" in json.loads(path.read_text("utf-8"))


def write(
    wish: Wish,
    plan: Plan,
    folder: Path,
    found: Pictures,
    images: Images,
    best: Candidate,
    tried: list[Candidate],
    quiet: bool,
) -> Run:
    """Calibrate, and write everything that outlives the run; result.json says that it is done."""
    verdict = judge.verdict(best.judged)
    model.save_calibration(
        folder,
        verdict.scaling,
        verdict.conformal,
        verdict.selective,
        {"command": "calmatch fit, with what fit.json says", "learned_from": best.name},
    )
    names = [found.names[row] for row in best.judged.rows]
    _pack(
        folder / "predictions.npz",
        log_probs=verdict.log_probs.numpy(),
        raw_log_probs=best.judged.log_probs.numpy(),
        labels=best.judged.labels.numpy(),
        files=np.array(names),
    )
    spare = torch.tensor([k for k, label in enumerate(found.labels) if label < 0], dtype=torch.long)
    asked = _unlabelled(folder, images, found, spare, wish.seed)
    rows = torch.tensor(best.judged.rows)
    take = lambda some: taken(images, rows[some])  # noqa: E731
    seen = examples.Seen(verdict.log_probs, take, files=names)
    examples.write(folder, seen, best.judged.labels, asked)
    checkpoint.write_json(
        folder / "result.json", _result(folder, plan, best, tried, verdict, found)
    )
    run = load(folder)
    build([run], folder / "report.html")
    if not quiet:
        print(closing(run, best.judged, verdict, found, asked))
    return run


def _pack(path: Path, **arrays: Any) -> None:
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    checkpoint.write(path, packed.getvalue())


def _unlabelled(
    folder: Path, images: Images, found: Pictures, spare: Tensor, seed: int
) -> examples.Seen | None:
    """Calibrated predictions of unlabelled pictures (a sample of many), kept with their names."""
    if not len(spare):
        return None
    rows = examples.sample(spare, seed)
    made = model.load(folder)
    log_probs = torch.cat(
        [made.calibration(made.logits(taken(images, some))) for some in rows.split(512)]
    ).float()
    names = [found.names[row] for row in rows.tolist()]
    _pack(folder / "unlabelled.npz", log_probs=log_probs.numpy(), files=np.array(names))
    take = lambda ids: taken(images, rows[ids])  # noqa: E731
    return examples.Seen(log_probs, take, rows=rows, files=names, whole=len(spare))


def _result(
    folder: Path,
    plan: Plan,
    best: Candidate,
    tried: list[Candidate],
    verdict: judge.Verdict,
    found: Pictures,
) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text("utf-8"))
    kind = "crossfit" if best.judged.crossfit else "holdout"
    notes = {
        "crossfit": "Each judged label was predicted by a sister model that had not seen it"
        + (", on features of a network that had not seen it either." if plan.hold else "."),
        "holdout": "The judged labels were held out: the model has not seen them.",
    }
    result |= {
        "metrics": {k: v._asdict() for k, v in verdict.after.items()}
        | {k: v for k, v in result["metrics"].items() if k in ("gap", "agree")},
        "before_calibration": {k: v.value for k, v in verdict.before.items()},
        "calibration": verdict.scaling.dump(),
        "interval": "95 %: exact binomial for error, bootstrap over judged labels for the rest",
        "judged_on": kind,
        "judged_note": notes[kind],
        "kept": best.name,
        "scores": {one.name: judge.score(one.judged) for one in tried},
        "skipped": [list(item) for item in found.skipped],
        # where the head's start came from is no news to the person
        "notes": [n for n in result["notes"] if not n.startswith("Weights from")]
        + [*found.notes, *plan.notes],
    }
    result["pictures"]["test"] = len(best.judged.labels)
    return result
