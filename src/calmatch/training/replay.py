"""A run or a fault repeated from its folder, and how far its numbers are from the ones there."""

import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calmatch import console, files, spec
from calmatch.options import ReplayOptions
from calmatch.training import checkpoint
from calmatch.training.config import Config, load_config
from calmatch.training.loop import train, train_first_steps
from calmatch.training.setup import deterministic
from calmatch.training.step import new_training

MOST_THREADS = 4096  # more are not believed
LoggedLine = tuple[int, bytes, dict[str, Any]]  # step, bytes and content of a line
Furthest = tuple[float, str]  # largest difference of two numbers (relative where over 1), where


def replay_command(options: ReplayOptions) -> None:
    """What `calmatch replay` does: a fault where that is meant or all there is, else the run."""
    path = options.run
    if (path / "fault" / "fault.json").is_file() and not (path / "result.json").exists():
        path = path / "fault"
    if (path / "fault.json").is_file():
        replay_fault(path, options)
    else:
        replay_run(options)


def replay_run(options: ReplayOptions) -> None:
    """Train a run again, all of it or the first steps, and compare; Failed if too far away."""
    folder, steps, quiet = options.run, options.steps, options.quiet
    files.refuse_links(folder)
    config = _replay_config(folder, options)
    lines = _read_log(folder, config.steps)
    if steps is None and not (folder / "result.json").exists():
        steps = lines[-1][0] if lines else 0
    if steps is not None:
        lines = [line for line in lines if line[0] <= steps]
    if not lines or (steps is not None and steps > config.steps):
        due = f"its first is due at step {config.log_every}, its last at {config.steps}"
        raise ValueError(f"{folder} has no line to compare up to step {steps}; {due}.")
    if any(line["kind"] == "rollback" for _, _, line in lines):
        config = config.replace(on_nan="rollback")
    before = files.read_json(folder / "environment.json")
    with tempfile.TemporaryDirectory(prefix="calmatch-replay-") as room, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        threads = before.get("threads")  # sums on a CPU are divided among them
        if type(threads) is int and 0 < threads <= MOST_THREADS:
            torch.set_num_threads(threads)
        again = Path(room) / folder.resolve().name
        if steps is None:
            train(config, again, quiet=quiet)
        else:
            train_first_steps(config, again, steps, quiet=quiet)
        now = files.read_json(again / "environment.json")
        logged = _read_log(again, config.steps)
        same = [line for _, line, _ in lines] == [line for _, line, _ in logged]
        what, furthest = f"{len(lines):,} lines of metrics.jsonl", _compare_logs(lines, logged)
        if steps is None:
            equal, words, other = _compare_predictions(folder, again)
            same, what = same and equal, f"{what}, {words}"
            furthest = max(furthest, other, key=lambda each: each[0])
    print(f"{'The same, byte for byte' if same else 'Not the same bytes'}: {what}.")
    if not same:
        print(f"Largest difference {furthest[0]:.2g}: {furthest[1] or 'none in numbers'}.")
    differ = _compare_environments(before, now)
    if differ or not same:
        words = "; ".join(differ) or "nothing that is recorded"
        print(f"What differs between then and now: {console.visible(words)}.")
    if furthest[0] > options.tolerance:
        far = "The replay is further away than the tolerance of"
        raise console.Failed(f"{far} {options.tolerance:g}.")
    if not same:
        print(f"Within the tolerance of {options.tolerance:g}.")


def _replay_config(folder: Path, options: ReplayOptions) -> Config:
    config = load_config(folder / "config.json", Config(), options.trust)
    return config.replace(device=options.device, engine="auto") if options.device else config


def _read_log(folder: Path, most: int) -> list[LoggedLine]:
    try:
        raw = files.read_bytes(folder / "metrics.jsonl").splitlines(keepends=True)
        lines = [(line, json.loads(line)) for line in raw if line.endswith(b"\n")]
        logged = [(int(entry["step"]), line, entry) for line, entry in lines if entry["kind"]]
        return [each for each in logged if each[0] <= most]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no metrics.jsonl that can be read.") from error


def _compare_logs(one: Sequence[LoggedLine], two: Sequence[LoggedLine]) -> Furthest:
    largest, where = 0.0, ""
    for (step, _, first), (_, _, second) in zip(one, two, strict=False):
        for key in first | second:
            far = _distance(first.get(key), second.get(key))
            if far > largest:
                largest, where = far, f"{key} of the {first['kind']} line at step {step:,}"
    if len(one) != len(two):
        return math.inf, f"{len(one)} lines became {len(two)}"
    return largest, where


def _distance(one: Any, two: Any) -> float:
    """The largest difference of two numbers or lists of numbers."""
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return max(map(_distance, one, two), default=0.0)
    if isinstance(one, int | float) and isinstance(two, int | float):
        return abs(one - two) / max(1.0, abs(one))
    return 0.0 if one == two else math.inf


def _compare_predictions(folder: Path, again: Path) -> tuple[bool, str, Furthest]:
    """Whether predictions of the test set have the same bytes, words on them, and how far apart."""
    paths = [place / "predictions.npz" for place in (folder, again)]
    probs = []
    for path in paths:
        arrays = files.read_arrays(path)
        if "log_probs" not in arrays or arrays["log_probs"].dtype.kind != "f":
            raise ValueError(f"{path} must hold `log_probs`.")
        probs.append(np.exp(arrays["log_probs"].astype(np.float64)))
    one, two = probs
    far, words = math.inf, f"{one.shape} predictions became {two.shape}"
    if one.shape == two.shape:
        far, words = float(np.abs(one - two).max()), f"{len(one):,} predictions"
        other = int((one.argmax(1) != two.argmax(1)).sum())
        words += f", {other:,} of them of another class" if far else ""
    same = files.read_bytes(paths[0]) == files.read_bytes(paths[1])
    return same, words, (far, "probabilities of the test set")


def _compare_environments(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Versions, hardware and settings that are not as they were."""
    for facts in (then, now):
        versions = facts.pop("versions", None)
        facts |= versions if isinstance(versions, dict) else {}
    shared = [name for name in then if name in now]
    return [f"{k} {then[k]} -> {now[k]}" for k in shared if then[k] != now[k]]


def replay_fault(folder: Path, options: ReplayOptions) -> None:
    """Make the step of a fault again, and show each loss with its gradient."""
    home = folder.resolve().parent
    files.refuse_links(home)
    tensors, note, facts = checkpoint.read_fault(folder)
    config = _replay_config(home, options)
    until = facts.get("noticed") if facts.get("step") is None else facts["step"] + 1
    if type(until) is not int or not 0 <= until <= config.steps:
        raise ValueError(f"{folder} holds no fault that can be read.")
    with torch.random.fork_rng(), deterministic(config.deterministic):
        run = new_training(config.replace(compile=False))
        run.restore(tensors, note)
        before = checkpoint.trace_nonfinite(run, until)
        if before is None:
            steps = f"Steps {note['step']:,} to {until - 1:,}"
            raise console.Failed(f"{steps} stay finite here; on the device of then they did not.")
        again = checkpoint.describe_step(run, before, note)
    title = console.visible(run.parts.title)
    print(f"Step {again['step']:,} of {title} goes wrong here too, from the state before it:\n")
    width = max(len("loss"), *map(len, again["losses"]))
    print(f"{'loss':<{width}}  {'value':>10}  {'gradient':>10}  weights without a finite one")
    for name, probe in again["losses"].items():
        value, gradient = float(probe["value"]), float(probe["gradient"])
        words = spec.first_names(probe["broken"], 4)
        print(f"{name:<{width}}  {value:>10.4g}  {gradient:>10.4g}  {words}".rstrip())
    print(f"\nNot finite after it: {spec.first_names(again['after'], 4)}")
    for side in ("labelled", "unlabelled"):
        rows = ", ".join(map(str, again[side]))
        print(f"\n{side.capitalize()} pictures, as rows of the training set: {rows}")
