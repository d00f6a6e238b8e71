"""Numbers that stop being finite: find the step, keep its state, then stop or roll back."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calmatch import console, files, ops
from calmatch.training import checkpoint
from calmatch.training.config import Config
from calmatch.training.step import Training, new_training

MOST_ROLLBACKS = 3  # rollbacks in a run before it gives up
FRESH_NOTE = {"step": 0, "lines": 0, "sums": 0, "best": None, "best_step": None}


class Fault(NamedTuple):
    """Numbers of one of the runs that train together were not finite when the host looked."""

    run: int
    noticed: int


def find_nonfinite(runs: Sequence[Training]) -> Fault | None:
    """The first run whose numbers are not finite; one wait for the device a run."""
    return next((Fault(k, run.step) for k, run in enumerate(runs) if not is_finite(run)), None)


def is_finite(run: Training) -> bool:
    """Whether losses since the last log line, weights, averages and moments are all finite.

    The method's memory may hold infinities of its own choice, but no NaN.
    """
    named = {k: v for k, v in run.tensors().items() if v.is_floating_point() and v.numel()}
    memory = [v for k, v in named.items() if k.startswith("method/")]
    others = [v for k, v in named.items() if not k.startswith(("method/", "best/"))]
    # the largest magnitude of each, in which NaN wins
    largest, remembered = (
        torch.nn.utils.get_total_norm(tensors, math.inf) if tensors else torch.zeros(())
        for tensors in (others, memory)
    )
    bad = ~largest.isfinite() | remembered.isnan()
    return float(ops.average(bad.float().to(run.parts.device))) == 0


def handle_nonfinite(
    fault: Fault, config: Config, folder: Path, signals: Sequence[int], quiet: bool
) -> None:
    """Find the step, keep it in `fault/`, then go back, or stop with a sentence.

    A signal that comes meanwhile ends the search, and nothing is changed.
    """
    console.free_device_memory()  # the failed attempt may hold much of the device
    ops.wait_for_ranks()  # the first rank has written what it had begun
    line = f"Numbers are not finite at step {fault.noticed:,}; looking for the step."
    console.message(line, quiet)
    run = new_training(config.replace(compile=False))
    tensors, note = _newest_good(folder / "checkpoint", config.saves)
    if tensors:
        run.restore(tensors, note)
    else:
        tensors = checkpoint.copy_to_host(run.tensors())
    before = trace_nonfinite(run, fault.noticed, signals)
    if signals:
        return
    facts = {"noticed": fault.noticed, "checkpoint": note["step"], "rollbacks": run.rollbacks}
    facts |= _describe_step(run, before, note)
    if ops.rank() == 0:
        state = note if before is None else {**note, "step": facts["step"]}
        path = folder / "fault" / "state.safetensors"
        checkpoint.write_checkpoint(path, before or tensors, state)
        files.write_json(folder / "fault" / "fault.json", facts)
    if config.on_nan == "stop" or run.rollbacks >= MOST_ROLLBACKS:
        raise ValueError(_fault_sentence(config, folder, facts))
    _roll_back(folder, config.saves, tensors, note, facts)
    line = f"Back to step {note['step']:,}, from there on with half the learning rate; "
    console.message(f"{line}{folder / 'fault'} holds what went wrong.", quiet)


def _newest_good(folder: Path, every: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The newest checkpoint that was due and is whole; nothing, and step 0, where there is none.

    All of them are good: nothing is saved before it was looked at.
    """
    for path in reversed(checkpoint.scheduled_checkpoints(folder, every)):
        try:
            return checkpoint.read_checkpoint(path)
        except ValueError:
            continue
    return {}, dict(FRESH_NOTE)


def trace_nonfinite(
    run: Training, until: int, signals: Sequence[int] = ()
) -> dict[str, Tensor] | None:
    """Step until numbers are not finite; the state before that step. None: they stay finite."""
    while run.step < until and not signals:
        before = checkpoint.copy_to_host(run.tensors())
        run.advance()
        if not is_finite(run):
            return before
    return None


def _describe_step(
    run: Training, before: Mapping[str, Tensor] | None, note: Mapping[str, Any]
) -> dict[str, Any]:
    """What is known of the step that the run has just made, from the state before it."""
    if before is None:
        return {"step": None, "what": "a number"}
    step, after = run.step - 1, nonfinite_names(run)
    run.restore(before, {**note, "step": step})
    probes, split, orders = probe_losses(run), run.parts.split, run.parts.batches.orders
    what = "a weight or a moment"
    if not all(math.isfinite(probe.value) for probe in probes.values()):
        what = "the loss"
    elif any(probe.broken for probe in probes.values()):
        what = "a gradient"
    return {
        "step": step,
        "what": what,
        "losses": {name: _probe_json(probe) for name, probe in probes.items()},
        "after": after,
        "labelled": [split.labelled[k] for k in orders["x"][step].tolist()],
        "unlabelled": [split.unlabelled[k] for k in orders["u"][step].tolist()],
    }


def nonfinite_names(run: Training) -> list[str]:
    """Names of what is not finite in the state of now."""
    return [name for name, value in run.tensors().items() if not value.isfinite().all()]


class LossProbe(NamedTuple):
    """One loss of a step: its value, the norm of its gradient, weights where that is not finite."""

    value: float
    gradient: float
    broken: list[str]


def probe_losses(run: Training) -> dict[str, LossProbe]:
    """Each loss of the step that is due, with its gradient."""
    named = {k: p for k, p in run.parts.net.named_parameters() if p.requires_grad}
    batch, weights = run.parts.batches[run.step], list(named.values())
    run.seed_dropout()
    losses, _ = run.parts.objective(run.parts.net).parts(batch)
    probes = {}
    for name, loss in losses.items():
        grads: Sequence[Tensor | None] = [None] * len(named)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        exact = {k: g.double() for k, g in zip(named, grads, strict=True) if g is not None}
        norm = torch.nn.utils.get_total_norm(list(exact.values()))
        broken = [k for k, g in exact.items() if not g.isfinite().all()]
        probes[name] = LossProbe(float(loss.detach()), float(norm), broken)
    return probes


def _probe_json(probe: LossProbe) -> dict[str, Any]:
    """For JSON, which knows no NaN."""
    numbers = {"value": probe.value, "gradient": probe.gradient}
    safe = {k: v if math.isfinite(v) else str(v) for k, v in numbers.items()}
    return {**safe, "broken": probe.broken[:10]}


def _fault_sentence(config: Config, folder: Path, facts: Mapping[str, Any]) -> str:
    when = f"between steps {facts['checkpoint']:,} and {facts['noticed']:,}, not so when repeated"
    if facts["step"] is not None:
        when = f"in step {facts['step']:,}"
    more = " or add --on-nan rollback" if config.on_nan == "stop" else ""
    after = f", after {facts['rollbacks']} rollbacks" if facts["rollbacks"] else ""
    return (
        f"{str(facts['what']).capitalize()} became infinite or NaN {when}{after}; "
        f"calmatch replay {folder / 'fault'} shows how. Lower --lr, set --clip 1{more}."
    )


def _roll_back(
    folder: Path, every: int, tensors: Mapping[str, Tensor], note: Mapping[str, Any], facts: Any
) -> None:
    """Make the checkpoint the newest, with one rollback more in its note and in the log."""
    if ops.rank() == 0:
        step, count = int(note["step"]), int(note.get("rollbacks", 0)) + 1
        for later in checkpoint.scheduled_checkpoints(folder / "checkpoint", 1):
            if int(later.stem) > step:  # a signal's: its steps will be made again, otherwise
                later.unlink()
        line = {"step": step, "kind": "rollback", "fault": facts["step"], "rate": 0.5**count}
        with checkpoint.Lines(folder, int(note["lines"])) as lines:
            lines.write(line)
            fresh = {**note, "lines": lines.size(), "rollbacks": count}
        checkpoint.save_checkpoint(folder / "checkpoint", step, tensors, fresh, every)
    ops.wait_for_ranks()


def read_fault(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """State, its note, and the facts of a fault, from its folder."""
    try:
        facts = files.read_json(folder / "fault.json")
    except ValueError as error:
        raise ValueError(f"{folder} holds no fault that can be read.") from error
    return *checkpoint.read_checkpoint(folder / "state.safetensors"), facts
