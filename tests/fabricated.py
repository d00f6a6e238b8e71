"""Finished run folders made by hand: chosen numbers, no training."""

import io
import json

import numpy as np

from calmatch.training.config import Config

METRICS = ("error", "ece", "adaptive_ece", "classwise_ece", "nll")


def run(folder, config: Config, *, best=None, **values):
    """A run folder with these metrics; `best` is the evaluation that the test set would choose."""
    folder.mkdir(parents=True)
    values = dict.fromkeys(METRICS, 0.5) | {"error": 0.1, "ece": 0.05} | values
    result = {
        "title": config.method,
        "classes": [str(k) for k in range(10)],
        "test_selected": False,
        "metrics": {k: {"value": v, "low": v, "high": v} for k, v in values.items()},
        "best_on_test": {"evaluations": 5, "step": 3, "error": 0.08, "ece": 0.04, "nll": 0.4}
        | {"classwise_ece": 0.02, "adaptive_ece": 0.03}
        | (best or {}),
        "temperature_scaled": {
            "crossfit": {"ece": 0.02, "nll": 0.3},
            "oracle": {"ece": 0.01, "nll": 0.2},
        },
        "pictures": {"labelled": 40, "unlabelled": 100, "test": 200},
        "notes": [],
    }
    (folder / "config.json").write_text(json.dumps(config.dump()))
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def history(folder, *, seed=0, classes=10, sharp=3.0, raw=True):
    """Predictions and a log for a fabricated run, for figures; `raw`: with its mean logits."""
    random = np.random.default_rng(seed)
    drift = 1 - sharp  # as AdamW's weight decay leaves one
    labels = np.repeat(np.arange(classes), 20)
    logits = random.normal(size=(len(labels), classes))
    logits[np.arange(len(labels)), labels] += 2
    logits = sharp * logits + drift
    top = logits.max(1, keepdims=True)
    log_probs = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    data = io.BytesIO()
    arrays = {"log_probs": log_probs.astype(np.float32), "labels": labels}
    if raw:
        arrays["mean_logit"] = logits.mean(1).astype(np.float32)
    np.savez_compressed(data, **arrays)
    (folder / "predictions.npz").write_bytes(data.getvalue())
    lines = []
    for step in range(10, 110, 10):
        share = {"accepted": step / 110, "agree": 0.6 + step / 400 + 0.01 * seed}
        lines.append({"step": step, "kind": "train", **share})
        error, ece = 0.5 - step / 300 + 0.01 * seed, 0.3 - step / 500
        lines.append({"step": step, "kind": "test", "error": error, "ece": ece, "nll": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
