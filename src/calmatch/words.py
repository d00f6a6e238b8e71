"""What `fit` tells a person: what was found, how good the model is, what to do next."""

from __future__ import annotations

from torch import Tensor

from calmatch import examples
from calmatch.data.pictures import Pictures
from calmatch.evaluate import probabilities
from calmatch.judge import Judged, Verdict
from calmatch.results import Run

SHOWN = 5
FEW = 200  # labels: with fewer, binned calibration errors are mostly noise


def opening(found: Pictures, side: int) -> str:
    """The pictures in two sentences, and what was skipped."""
    labels = len(found.known)
    low, high = min(found.counts), max(found.counts)
    each = f"{low} each" if low == high else f"{low} to {high} each"
    lines = [
        f"  {len(found.names):,} pictures, about {side} pixels; {labels:,} labels in "
        f"{len(found.classes)} classes ({each}); {found.labels.count(-1):,} unlabelled."
    ]
    return "\n".join(lines + skipped(found))


def skipped(found: Pictures) -> list[str]:
    """Files that were left out, the first few by name."""
    if not found.skipped:
        return []
    lines = [f"  {len(found.skipped)} files skipped (--strict refuses them instead):"]
    lines += [f"    {item.file}: {item.why}" for item in found.skipped[:SHOWN]]
    if len(found.skipped) > SHOWN:
        lines.append(f"    and {len(found.skipped) - SHOWN} more, all in result.json")
    return lines


def told_so_far(log_probs: Tensor, labels: Tensor) -> str:
    """The estimate while judging goes on."""
    n = len(labels)
    sure, guess = probabilities(log_probs).max(1)
    wrong = int((guess != labels).sum())
    return (
        f"{wrong} of {n} judged labels wrong; it was {float(sure.mean()):.0%} confident and "
        f"{1 - wrong / n:.0%} right, before calibration"
    )


def calibration(verdict: Verdict, before: Tensor, labels: Tensor) -> str:
    """How far confidence can be believed, as far as the labels show it."""
    n = len(labels)
    was, now = (float(probabilities(z).amax(1).mean()) for z in (before, verdict.log_probs))
    right = 1 - verdict.after["error"].value
    text = (
        f"On these labels it was {now:.0%} confident and {right:.0%} right on average "
        f"({was:.0%} confident before calibration)."
    )
    ece = verdict.after["ece"]
    if n < FEW:
        return f"{text} {n} labels are too few to measure calibration more closely."
    return (
        f"{text} Its confidence is off by {100 * ece.value:.1f} points (ECE; 95 % interval "
        f"{100 * ece.low:.1f} to {100 * ece.high:.1f})."
    )


def closing(
    run: Run, judged: Judged, verdict: Verdict, found: Pictures, asked: examples.Seen | None
) -> str:
    """The result in plain words, and the next commands."""
    error = verdict.after["error"]
    number = run.result["pictures"]["test"]
    lines = [
        "",
        f"Of 100 new pictures about {100 * error.value:.0f} will be classified wrongly "
        f"(95 % interval {100 * error.low:.0f} to {100 * error.high:.0f}; judged on {number} "
        f"labels that the judged models had not seen).",
        calibration(verdict, judged.log_probs, judged.labels),
        promise(verdict),
        *skipped(found),
    ]
    if asked is not None and len(asked.log_probs):
        best = examples.worth_a_label(asked.log_probs, SHOWN).tolist()
        names = [asked.files[k] for k in best] if asked.files is not None else []
        lines += ["", "These labels would teach it most:", *(f"  {name}" for name in names)]
    folder = run.folder
    lines += [
        "",
        "Next:",
        f"  calmatch predict {folder} PICTURES -o out.csv   class and confidence of any pictures",
        f"  calmatch export {folder} --to onnx              the model for other programs",
        f"  calmatch report {folder}                        a page: what it is good and bad at",
    ]
    return "\n".join(lines)


def promise(verdict: Verdict) -> str:
    """When it answers, or what is missing before it may promise."""
    chosen = verdict.selective
    if chosen.threshold is not None:
        return (
            f"Where its confidence is {chosen.threshold:.2f} or more ({chosen.coverage:.0%} of the "
            f"judged labels), it is right at least {chosen.accuracy:.0%} of the time, with "
            f"{chosen.certainty:.0%} certainty; below, it says: not sure."
        )
    wanted = f"{chosen.accuracy:.0%} accuracy with {chosen.certainty:.0%} certainty"
    if chosen.missing:
        return (
            f"It cannot promise {wanted} at any confidence yet: that needs at least "
            f"{chosen.missing} more judged labels. Until then every answer is marked not sure."
        )
    return (
        f"It cannot promise {wanted} at any confidence: even its surest answers are wrong too "
        f"often. More labels help. Until then every answer is marked not sure."
    )
