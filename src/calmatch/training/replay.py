"""What each command takes, as typed dataclasses that tyro turns into flags."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from calmatch import files
from calmatch.options import ReplayOptions
from calmatch.training import nonfinite
from calmatch.training.config import Config, load_config
from calmatch.training.loop import new_training, train, train_first_steps
from calmatch.training.setup import deterministic, environment_differences

THREADS = 4096  # more are not believed


class Different(Exception):
    """The replay is not the run: a result, told by the exit code."""

    exit_code = 1


class Comparison(NamedTuple):
    """How a replay compares with its run."""

    same: bool  # byte for byte
    lines: int  # of metrics.jsonl compared
    largest: float  # difference of two numbers, relative to the first where that is over 1
    where: str  # it is
    predictions: str  # what became of them, in words; empty for a part of a run
    differ: list[str]  # versions, hardware and settings


def replay_command(options: ReplayOptions) -> None:
    """What `calmatch replay` does: a fault where that is meant or all there is, else the run."""
    path = options.run
    if (path / "fault" / "fault.json").is_file() and not (path / "result.json").exists():
        path = path / "fault"
    if (path / "fault.json").is_file():
        replay_fault(path, device=options.device, trust=options.trust)
        return
    replay(
        path,
        options.steps,
        tolerance=options.tolerance,
        device=options.device,
        trust=options.trust,
        quiet=options.quiet,
    )


def replay(
    folder: Path,
    steps: int | None = None,
    *,
    tolerance: float = 1e-3,
    device: str | None = None,
    trust: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Train a run's config again, all or the first steps, and compare; Different if too far away.

    Args:
        folder: the run folder; it is only read.
        steps: how many; by default all, of an unfinished run as many as it has logged.
        tolerance: the largest difference that counts as the same.
        device: another one than the config names.
        trust: import code that the config names.
        quiet: no progress bar and no lines.
    """
    files.refuse_links(folder)
    config = _replay_config(folder, device, trust)
    told = _read_log(folder, config.steps)
    if steps is None and not (folder / "result.json").exists():
        steps = told[-1][0] if told else 0
    if steps is not None:
        told = [line for line in told if line[0] <= steps]
    if not told or (steps is not None and steps > config.steps):
        raise ValueError(
            f"{folder} has no line to compare up to step {steps}; its first is due at step "
            f"{config.log_every}, its last at {config.steps}."
        )
    if any(line["kind"] == "rollback" for _, _, line in told):
        config = config.replace(on_nan="rollback")
    before = files.read_json(folder / "environment.json")
    with tempfile.TemporaryDirectory(prefix="calmatch-replay-") as room, _same_threads(before):
        again = Path(room) / folder.resolve().name
        if steps is None:
            train(config, again, quiet=quiet)
        else:
            train_first_steps(config, again, steps, quiet=quiet)
        now = files.read_json(again / "environment.json")
        verdict = _compare_logs(told, _read_log(again, config.steps), folder, again, steps is None)
    verdict = verdict._replace(differ=environment_differences(before, now))
    _print_comparison(verdict, tolerance)
    return verdict


def _replay_config(folder: Path, device: str | None, trust: bool) -> Config:
    config = load_config(folder / "config.json", Config(), trust)
    return config.replace(device=device, engine="auto") if device else config


LoggedLine = tuple[int, bytes, dict[str, Any]]  # step, bytes and content of a line


def _read_log(folder: Path, most: int) -> list[LoggedLine]:
    try:
        raw = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        lines = [(line, json.loads(line)) for line in raw if line.endswith(b"\n")]
        steps = [(int(found["step"]), str(found["kind"])) for _, found in lines]
        pairs = zip(steps, lines, strict=True)
        return [(step, line, found) for (step, _), (line, found) in pairs if step <= most]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no metrics.jsonl that can be read.") from error


@contextmanager
def _same_threads(before: Mapping[str, Any]) -> Iterator[None]:
    """As many threads as the run had: sums on a CPU are divided among them."""
    held = torch.get_num_threads()
    wanted = before.get("threads")
    torch.set_num_threads(wanted if type(wanted) is int and 0 < wanted <= THREADS else held)
    try:
        yield
    finally:
        torch.set_num_threads(held)


def _compare_logs(
    one: Sequence[LoggedLine], two: Sequence[LoggedLine], folder: Path, again: Path, whole: bool
) -> Comparison:
    same = [line for _, line, _ in one] == [line for _, line, _ in two]
    largest, where = 0.0, ""
    for (step, _, first), (_, _, second) in zip(one, two, strict=False):
        for key in first | second:
            far = _distance(first.get(key), second.get(key))
            if far > largest:
                largest, where = far, f"{key} of the {first['kind']} line at step {step:,}"
    if len(one) != len(two):
        largest, where = math.inf, f"{len(one)} lines became {len(two)}"
    words = ""
    if whole:
        equal, far, words = _compare_predictions(folder, again)
        same = same and equal
        if far > largest:
            largest, where = far, "probabilities of the test set"
    return Comparison(same, len(one), largest, where, words, [])


def _distance(one: Any, two: Any) -> float:
    """The largest difference of two numbers or lists of numbers."""
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return max(map(_distance, one, two), default=0.0)
    if isinstance(one, int | float) and isinstance(two, int | float):
        return abs(one - two) / max(1.0, abs(one))
    return 0.0 if one == two else math.inf


def _compare_predictions(folder: Path, again: Path) -> tuple[bool, float, str]:
    """Whether the files are equal, the largest difference of a probability, and words on it."""
    paths = [place / "predictions.npz" for place in (folder, again)]
    found = []
    for path in paths:
        arrays = files.read_arrays(path)
        if "log_probs" not in arrays or arrays["log_probs"].dtype.kind != "f":
            raise ValueError(f"{path} must hold `log_probs`.")
        found.append(np.exp(arrays["log_probs"].astype(np.float64)))
    one, two = found
    if one.shape != two.shape:
        return False, math.inf, f"{one.shape} predictions became {two.shape}"
    far = float(np.abs(one - two).max())
    other = int((one.argmax(1) != two.argmax(1)).sum())
    words = f"{len(one):,} predictions"
    if far:
        words += f", {other:,} of them of another class"
    return paths[0].read_bytes() == paths[1].read_bytes(), far, words


def _print_comparison(verdict: Comparison, tolerance: float) -> None:
    what = f"{verdict.lines:,} lines of metrics.jsonl"
    what += f", {verdict.predictions}" if verdict.predictions else ""
    if verdict.same:
        print(f"The same, byte for byte: {what}.")
    else:
        print(f"Not the same bytes: {what}.")
        print(f"Largest difference {verdict.largest:.2g}: {verdict.where or 'none in numbers'}.")
    differ = "; ".join(verdict.differ) or "nothing that is recorded"
    if verdict.differ or not verdict.same:
        print(f"What differs between then and now: {differ}.")
    if verdict.largest > tolerance:
        raise Different(f"The replay is further away than the tolerance of {tolerance:g}.")
    if not verdict.same:
        print(f"Within the tolerance of {tolerance:g}.")


def replay_fault(
    folder: Path, *, device: str | None = None, trust: bool = False
) -> dict[str, nonfinite.LossProbe]:
    """Make the step of a fault again, and show each loss with its gradient.

    Args:
        folder: `fault/` of a run folder.
        device: another one than the config names.
        trust: import code that the config names.
    """
    files.refuse_links(folder.resolve().parent)
    tensors, note, told = nonfinite.read_fault(folder)
    config = _replay_config(folder.resolve().parent, device, trust)
    last = told.get("noticed") if told.get("step") is None else told["step"] + 1
    if type(last) is not int or not 0 <= last <= config.steps:
        raise ValueError(f"{folder} holds no fault that can be read.")
    until = last
    with torch.random.fork_rng(), deterministic(config.deterministic):
        run = new_training(config.replace(compile=False))
        run.restore(tensors, note)
        before = nonfinite.trace_nonfinite(run, until)
        if before is None:
            raise Different(
                f"Steps {note['step']:,} to {until - 1:,} stay finite here; on the device of then "
                f"they did not."
            )
        step, after = run.step - 1, nonfinite.nonfinite_names(run)
        run.restore(before, {**note, "step": step})
        parts = nonfinite.probe_losses(run)
    print(f"Step {step:,} of {run.parts.title} goes wrong here too, from the state before it:\n")
    print(_probe_table(parts))
    print(f"\nNot finite after it: {_first_names(after)}")
    for side in ("labelled", "unlabelled"):
        if side in told:
            rows = ", ".join(map(str, told[side]))
            print(f"\n{side.capitalize()} pictures, as rows of the training set: {rows}")
    return parts


def _probe_table(parts: Mapping[str, nonfinite.LossProbe]) -> str:
    """Each loss, the norm of its gradient, and where that is not finite."""
    width = max(len("loss"), *map(len, parts))
    lines = [f"{'loss':<{width}}  {'value':>10}  {'gradient':>10}  weights without a finite one"]
    for name, part in parts.items():
        numbers = f"{part.value:>10.4g}  {part.gradient:>10.4g}"
        lines.append(f"{name:<{width}}  {numbers}  {_first_names(part.broken)}")
    return "\n".join(line.rstrip() for line in lines)


def _first_names(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
