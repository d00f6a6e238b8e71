"""What `fit` says to a person: what it was given and tried, how good it is, what to do next."""

from collections.abc import Sequence

from torch import Tensor

from calmatch import console, runs
from calmatch.data.folder import ImageFolder
from calmatch.fit.crossval import Calibration, HeldOut
from calmatch.fit.portfolio import Candidate
from calmatch.metrics import FEW
from calmatch.runs import Predicted, Run, describe_guessing, label_command, probabilities

STAGES = ("reading pictures", "planning", "learning", "evaluating", "calibrating and writing")
SHOWN = 5


def show_stage(number: int, quiet: bool) -> None:
    """Where a fit is."""
    console.message(f"{number}/{len(STAGES)} {STAGES[number - 1]}", quiet)


def describe_candidates(candidates: Sequence[Candidate], best: Candidate) -> list[str]:
    """A small table: what was tried, and what labels it had not seen say of it."""
    lines = [f"  {'candidate':<22} {'wrong, %':>9} {'log-loss':>9}   of held-out labels"]
    for one in candidates:
        wrong = 100 * float((one.log_probs.argmax(1) != one.labels).mean())
        kept = "   kept" if one is best else ""
        lines.append(f"  {one.name:<22} {wrong:>9.1f} {float(one.losses.mean()):>9.3f}{kept}")
    return lines


def describe_folder(own: ImageFolder, side: int) -> str:
    """The pictures in two sentences, and what was skipped."""
    labels = len(own.known)
    low, high = min(own.counts), max(own.counts)
    each = f"{low} each" if low == high else f"{low} to {high} each"
    start = f"  {len(own.names):,} pictures, about {side} pixels; {labels:,} labels in "
    start += f"{len(own.classes)} classes ({each}); {own.labels.count(-1):,} unlabelled."
    return "\n".join([start, *describe_skipped(own)])


def describe_skipped(own: ImageFolder) -> list[str]:
    """Files that were left out, the first few by name."""
    if not own.skipped:
        return []
    lines = [f"  {len(own.skipped)} files skipped (--strict refuses them instead):"]
    lines += [f"    {item.file}: {item.reason}" for item in own.skipped[:SHOWN]]
    if len(own.skipped) > SHOWN:
        lines.append(f"    and {len(own.skipped) - SHOWN} more, all in result.json")
    return lines


def describe_calibration(calibration: Calibration, before: Tensor, labels: Tensor) -> str:
    """How far confidence can be believed, as far as the labels show it."""
    n = len(labels)
    was, now = (float(probabilities(z).amax(1).mean()) for z in (before, calibration.log_probs))
    right = float((calibration.log_probs.argmax(1) == labels).double().mean())
    text = f"On these labels it was {now:.0%} confident and {right:.0%} right on average "
    text += f"({was:.0%} confident before calibration)."
    ece = calibration.after["ece"]
    if n < FEW:
        return f"{text} {n} labels are too few to measure calibration more closely."
    text += f" Its confidence is off by {100 * ece.value:.1f} points (ECE; 95 % interval "
    return f"{text}{100 * ece.low:.1f} to {100 * ece.high:.1f})."


def describe_result(
    run: Run, held: HeldOut, calibration: Calibration, own: ImageFolder, asked: Predicted | None
) -> str:
    """The result in plain words, and the next commands."""
    error = calibration.after["error"]
    number = run.result.images["test"]
    few = [name for k, name in enumerate(own.classes) if own.labels.count(k) == 1][:SHOWN]
    lines = [
        "",
        *describe_guessing(error.value, own.known, own.classes),
        f"Of 100 new pictures about {100 * error.value:.0f} will be classified wrongly "
        f"(95 % interval {100 * error.low:.0f} to {100 * error.high:.0f}; evaluated on {number} "
        f"labels that the evaluated models had not seen).",
        *([f"That says nothing of {', '.join(few)}: one label is not enough."] if few else []),
        describe_calibration(calibration, held.log_probs, held.labels),
        calibration.selective.describe(),
        *describe_skipped(own),
    ]
    if asked is not None and len(asked.log_probs):
        best = asked.teaching(SHOWN).tolist()
        names = [asked.files[k] for k in best] if asked.files is not None else []
        lines += ["", "These labels would teach it most:", *(f"  {name}" for name in names)]
        lines += [f"  {command}   asks for them" for command in [label_command(run)] if command]
    folder = runs.command_line(str(run.folder))
    lines += [
        "",
        "Next:",
        f"  calmatch predict {folder} PICTURES -o out.csv   class and confidence of any pictures",
        f"  calmatch export {folder} --to onnx              the model for other programs",
        f"  calmatch report {folder}                        a page: what it is good and bad at",
    ]
    return "\n".join(lines)
