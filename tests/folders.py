"""Run folders made without training, for tests of what is made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calmatch.files import write, write_json, write_npz
from calmatch.runs import Predicted, Run, load_run, write_examples
from calmatch.training.config import Config
from calmatch.training.step import measure

EVIL = "<script>alert(1)</script>"
NASTY = ['</script><!--"', "a\u2028b'&amp;", EVIL, "ein recht langer Klassenname", "{{ 7 * 7 }}"]


def made(
    folder: Path,
    *,
    pictures: int = 600,
    classes: list[str] | None = None,
    title: str = "fixmatch + margin(m=10)",
    size: int = 16,
    seed: int = 0,
    examples_too: bool = True,
    files: bool = False,
    steps: int = 5,
    **result: Any,
) -> Run:
    """A finished run of a model that is right most of the time and too sure of it."""
    names = classes or [str(k) for k in range(5)]
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(names), (pictures,), generator=draw)
    logits = torch.randn(pictures, len(names), generator=draw)
    logits[torch.arange(pictures), labels] += 2.0
    log_probs = (2.5 * logits).log_softmax(-1)
    folder.mkdir(parents=True)
    _predictions(folder, log_probs, labels, files)
    if examples_too:
        images = torch.randint(256, (97, 3, size, size), generator=draw, dtype=torch.uint8)
        unsure = (0.4 * logits).log_softmax(-1)
        named = [f"new/{k} {EVIL}.png" for k in range(pictures)] if files else None
        seen = Predicted(log_probs, lambda rows: images[rows % len(images)])
        write_examples(folder, seen, labels, seen._replace(log_probs=unsure, files=named))
    measured = measure(log_probs, labels, resamples=20 if pictures < 2000 else 0)
    entries = {
        "title": title,
        "classes": names,
        "steps": 100 * steps,
        "step": 100 * steps,
        "selected": "last",
        "weights": "plain",
        "images": {"labelled": 40, "unlabelled": pictures, "validation": 0, "test": pictures},
        "metrics": {name: item._asdict() for name, item in measured.items()},
        "notes": [],
    }
    write_json(folder / "config.json", Config(dataset="synthetic", seed=seed).dump())
    write_json(folder / "result.json", entries | result)
    _lines(folder, steps)
    return load_run(folder)


def _predictions(folder: Path, log_probs: torch.Tensor, labels: torch.Tensor, files: bool) -> None:
    arrays: dict[str, Any] = {"log_probs": log_probs.numpy(), "labels": labels.numpy()}
    if files:
        arrays["files"] = np.array([f"photos/{k} {EVIL}.jpg" for k in range(len(labels))])
    write_npz(folder / "predictions.npz", **arrays)


def _lines(folder: Path, steps: int) -> None:
    lines = []
    for k in range(1, steps + 1):
        shares = {"accepted": 0.9, "agree": 0.5 + 0.4 * k / steps, "pseudo_accuracy": 0.8}
        lines.append({"step": 100 * k, "kind": "train", "loss": 1 / k, "lr": 0.1, **shares})
        lines.append({"step": 100 * k, "kind": "test", "error": 0.5 / k, "ece": 0.1, "nll": 1 / k})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write(folder / "metrics.jsonl", text)
