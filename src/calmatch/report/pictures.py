"""Example pictures of a report as data URIs, with what was guessed and what is true."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from calmatch.evaluate import probabilities
from calmatch.examples import Examples, worst
from calmatch.report.summary import Judged


def uri(picture: Tensor) -> str:
    """uint8 [3, H, W] as a data URI, PNG or JPEG, whichever is smaller."""
    image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
    kinds: tuple[tuple[str, dict[str, Any]], ...]
    kinds = (("png", {"optimize": True}), ("jpeg", {"quality": 88, "subsampling": 0}))
    packed = []
    for kind, settings in kinds:
        data = io.BytesIO()
        image.save(data, kind, **settings)
        packed.append((len(data.getvalue()), kind, data.getvalue()))
    _, kind, raw = min(packed)
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def judged(found: Judged, kept: Examples, files: Sequence[str] | None) -> dict[str, Any]:
    """Pictures by row, and the rows of the most confidently wrong ones, worst first."""
    shown = {}
    for row, picture in zip(kept.rows, kept.pictures, strict=True):
        truth, guess = int(found.labels[row]), int(found.guess[row])
        shown[str(row)] = {
            "src": uri(picture),
            "name": files[row] if files else f"picture {row}",
            "truth": truth,
            "guess": guess,
            "confidence": float(found.confidence[row]),
            "truth_probability": float(found.probs[row, truth]),
        }
    wrong = worst(found.confidence, found.right > 0).tolist()
    side = max(kept.pictures.shape[-2:], default=0)
    return {"shown": shown, "wrong": [k for k in wrong if str(k) in shown], "side": side}


def in_bin(found: Judged, rows: Sequence[int], left: float, right: float) -> list[int]:
    """The kept rows of a bin (left, right]; wrong ones first, for they are what one looks for."""
    own = [k for k in rows if left < float(found.confidence[k]) <= right]
    wrong = [k for k in own if not found.right[k]]
    right_ones = [k for k in own if found.right[k]]
    return [*wrong[:3], *right_ones[:3]]


def asked(kept: Examples) -> list[dict[str, Any]]:
    """Unlabelled pictures worth a label, with the model's first three guesses."""
    entries = []
    probs = probabilities(kept.asked_log_probs)
    for place, row in enumerate(kept.asked_rows):
        chances, ids = probs[place].topk(min(3, probs.shape[1]))
        entries.append(
            {
                "src": uri(kept.asked_pictures[place]),
                "name": kept.asked_files[place] if kept.asked_files else f"row {row}",
                "guesses": list(zip(ids.tolist(), chances.tolist(), strict=True)),
            }
        )
    return entries
