"""A run from beginning to end: steps, log lines, evaluations, checkpoints, and what it leaves behind."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from calmatch import augment, console, files, metrics, ops
from calmatch.console import SignalQueue, Stopped, catch_signals
from calmatch.data.batches import AugmentedSource, stream_seed
from calmatch.ops import pick_device
from calmatch.runs import (
    Predicted,
    Run,
    TakeImages,
    best_on_test,
    find_finished,
    load_run,
    logit_gap,
    probabilities,
    read_lines,
    run_name,
    sample_rows,
    write_examples,
)
from calmatch.training import checkpoint, nonfinite
from calmatch.training.config import Config, check_config, selection_metric, without_seeds
from calmatch.training.cuda_graph import CapturedStep
from calmatch.training.frozen import freeze_network
from calmatch.training.setup import (
    allow_recompiles,
    build_parts,
    describe_environment,
    deterministic,
)
from calmatch.training.step import (
    Predictor,
    Training,
    build_optimizer,
    measure,
    parameter_groups,
    predict_source,
)

if TYPE_CHECKING:
    from calmatch.data.batches import Source
    from calmatch.training.setup import Parts


def train(config: Config, out: Path | str | None = None, *, quiet: bool = False) -> Run:
    """Train one run into its folder, or continue or return the one that is there."""
    return train_together([config], [out], quiet=quiet)[0]


def train_together(
    settings: Sequence[Config], outs: Sequence[Path | str | None], *, quiet: bool = False
) -> list[Run]:
    """Train runs that differ in their seeds only side by side on one device, each as if alone."""
    for config in settings:
        check_config(config)
    if len({without_seeds(config) for config in settings}) > 1:
        raise ValueError("Runs that are trained together may differ in their seeds and fold only.")
    folders = [
        Path(out) if out is not None else Path("runs") / run_name(config)
        for config, out in zip(settings, outs, strict=True)
    ]
    if len(set(folders)) < len(folders):
        raise ValueError("Runs that are trained together need a folder each.")
    with _training_context(settings[0], folders) as asked:
        left = []
        for config, folder in zip(settings, folders, strict=True):
            if find_finished(folder, config):
                console.message(f"{folder} is finished already.", quiet)
            else:
                left.append((config, folder))
        if left:
            _train_to_end(left, quiet, asked)
        return [load_run(folder) for folder in folders]


def train_first_steps(config: Config, folder: Path, steps: int, *, quiet: bool = False) -> None:
    """Only the first steps of a run, for their lines."""
    with _training_context(config, [folder]) as asked:
        _train_to_end([(config, folder)], quiet, asked, steps)


@contextmanager
def _training_context(config: Config, folders: Sequence[Path]) -> Iterator[SignalQueue]:
    """What holds while runs train; the signals that come meanwhile."""
    with ExitStack() as stack:
        stack.enter_context(deterministic(config.deterministic))
        stack.enter_context(ops.join_ranks(pick_device(config.device)))
        for folder in folders:
            stack.enter_context(hold_folder(folder))
        stack.enter_context(torch.random.fork_rng())
        yield stack.enter_context(catch_signals())


def _train_to_end(
    left: Sequence[tuple[Config, Path]], quiet: bool, asked: SignalQueue, until: int | None = None
) -> None:
    """To the end; where numbers stop being finite, back to a checkpoint, or out with a sentence."""
    while fault := _train_from_checkpoint(left, quiet, asked, until):
        nonfinite.handle_nonfinite(fault, *left[fault.run], new_training, asked, quiet)


def _train_from_checkpoint(
    left: Sequence[tuple[Config, Path]], quiet: bool, asked: SignalQueue, until: int | None
) -> nonfinite.Fault | None:
    """Train from the newest checkpoints on, to the end or to a step in between."""
    runs = [_begin_training(config, folder, quiet) for config, folder in left]
    folders = [folder for _, folder in left]
    config, parts = runs[0].config, runs[0].parts
    kept = _resume(runs, folders, quiet)
    advance = _choose_engine(runs, quiet)
    title = parts.title + (f" x {len(runs)}" if len(runs) > 1 else "")
    with ExitStack() as stack:
        stack.enter_context(asked.patience())
        lines = [
            stack.enter_context(checkpoint.Lines(*each)) for each in zip(folders, kept, strict=True)
        ]
        writers = [
            stack.enter_context(checkpoint.CheckpointWriter(f / "checkpoint", config.saves))
            for f in folders
        ]
        bar = stack.enter_context(console.ProgressBar(title, config.steps, runs[0].step, quiet))
        while (step := runs[0].step) < (until or config.steps):
            advance()
            step += 1
            bar.update(step)
            stop = bool(asked)
            logs = due(step, config.log_every, config.steps)
            measures = due(step, config.eval_every, config.steps)
            saves = due(step, config.saves, config.steps) or stop
            if (logs or measures or saves) and (fault := nonfinite.find_nonfinite(runs)):
                return fault
            for run, book, writer in zip(runs, lines, writers, strict=True):
                if logs:
                    _log(run, book, bar)
                if measures:
                    _evaluate(run, book, bar)
                if saves:
                    _save(run, writer, book)
            if stop:
                raise Stopped(asked[0])
    if until is not None:
        return None
    for run, folder in zip(runs, folders, strict=True):
        finish_run(folder, run.config, run.parts, run.best, run.best_step, quiet)
    return None


def _begin_training(config: Config, folder: Path, quiet: bool) -> Training:
    run = new_training(config, quiet)
    begin_run(folder, config, run.parts)
    for line in run.parts.notes:
        console.message(line, quiet)
    return run


def _resume(runs: Sequence[Training], folders: Sequence[Path], quiet: bool) -> list[int]:
    """Take up checkpoints of the same step; how much of each metrics.jsonl they cover."""
    limit = None
    said: list[str] = []
    while True:
        read = [checkpoint.newest_checkpoint(folder / "checkpoint", limit) for folder in folders]
        said += [line for _, complaints in read for line in complaints]
        steps = [int(found[1]["step"]) if found else 0 for found, _ in read]
        if len(set(steps)) == 1:
            break
        limit = min(steps)  # a kill between two saves: the slower one decides
    kept = []
    for line in said:
        console.warn(line)
    for run, folder, (found, _) in zip(runs, folders, read, strict=True):
        if found:
            run.restore(*found)
            console.message(f"Continuing {folder} at step {run.step:,}.", quiet)
        kept.append(int(found[1]["lines"]) if found else 0)
    return kept


def _choose_engine(runs: Sequence[Training], quiet: bool) -> Callable[[], None]:
    """How a step is made: replayed from one captured graph on a CUDA device, else step by step."""
    wanted = runs[0].config.engine
    able = runs[0].parts.device.type == "cuda" and ops.world_size() == 1
    if wanted == "captured" and not able:
        raise ValueError("engine=captured needs one CUDA device; use --engine auto.")
    if able and wanted != "eager":
        return CapturedStep(runs, quiet).advance

    def advance() -> None:
        for run in runs:
            run.advance(run.parts.batches[run.step])

    return advance


def due(step: int, every: int, total: int) -> bool:
    """Whether something done every so many steps, and at the end, is due."""
    return step == total or (every > 0 and step % every == 0)


def new_training(config: Config, quiet: bool = True) -> Training:
    """A run before its first step."""
    parts = build_parts(config)
    if config.frozen:
        parts = freeze_network(config, parts, quiet).parts(parts.split)
    return _make_training(config, parts)


def _make_training(config: Config, parts: Parts) -> Training:
    objective: nn.Module = parts.objective(parts.net)
    compiled = parts.device.type == "cuda" if config.compile is None else config.compile
    if compiled:
        allow_recompiles()
    if compiled is True:  # the net alone is compiled by the captured step
        objective.compile(fullgraph=True)
    if ops.world_size() > 1:
        objective = nn.parallel.DistributedDataParallel(objective, static_graph=True)
    groups = parameter_groups(
        parts.net, config.lr, config.weight_decay, config.layer_decay, parts.method.optim
    )
    optimizer = build_optimizer(config.optimizer, groups, config.momentum, parts.device)
    return Training(config, parts, objective, optimizer, make_predictor(config, parts))


def _log(run: Training, lines: checkpoint.Lines, bar: console.ProgressBar) -> None:
    rate = float(run.optimizer.param_groups[0]["lr"])
    line = {"step": run.step, "kind": "train", "lr": rate, **run.sums.read()}
    lines.write(line)
    bar.note(line)


def _evaluate(run: Training, lines: checkpoint.Lines, bar: console.ProgressBar) -> None:
    """Measure the weights of now; keep them if they are the best so far where that is asked."""
    measured = evaluate_sets(run.parts, run.predict)
    for split, values in measured.items():
        lines.write({"step": run.step, "kind": split, **values})
        bar.note(values)
    if (metric := selection_metric(run.config)) is None:
        return
    value = measured["test" if run.config.protocol == "paper" else "validation"][metric]
    if run.best_value is None or value < run.best_value:
        run.best_value, run.best_step = value, run.step
        run.best = copy.deepcopy(dict(run.parts.judged.state_dict()))


def _save(run: Training, writer: checkpoint.CheckpointWriter, lines: checkpoint.Lines) -> None:
    if ops.rank() == 0:
        note: dict[str, Any] = {"lines": lines.size(), "sums": run.sums.steps}
        note |= {"best": run.best_value, "best_step": run.best_step}
        note["rollbacks"] = run.rollbacks
        writer.save(run.step, run.tensors(), note)


def train_in_memory(config: Config, parts: Parts, seen: Callable[[int], object] = bool) -> Training:
    """Train parts in memory, without a folder; `seen` is told each step that is done."""
    with torch.random.fork_rng():
        run = _make_training(config, parts)
        while run.step < config.steps:
            run.advance(parts.batches[run.step])
            seen(run.step)
    return run


RESAMPLES = 500  # of the bootstrap behind every interval
OFTEN = 20  # evaluations in a run from which compiling them pays


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """The lock of a run folder, held by the first rank."""
    with files.lock(folder) if ops.rank() == 0 else nullcontext():
        yield


def begin_run(folder: Path, config: Config, parts: Parts) -> None:
    """Write what is known before the first step."""
    if ops.rank() > 0 or (folder / "split.json").exists():
        return
    files.write_json(folder / "config.json", config.dump())
    files.write_json(folder / "environment.json", describe_environment(parts.device))
    rule = {"rule": "usb", "seed": config.split_seed, "dataset": config.dataset}
    files.write(folder / "split.json", json.dumps({**rule, **parts.split._asdict()}))


def make_predictor(config: Config, parts: Parts) -> Predictor:
    """For the evaluations of a run that goes on: as fast as it trains, compiled where it pays."""
    cuda = parts.device.type == "cuda"
    often = config.eval_every > 0 and config.steps / config.eval_every >= OFTEN
    return Predictor(
        parts.judged,
        parts.method,
        parts.statistics,
        config.eval_batch,
        bf16=config.precision == "bf16",
        compiled=cuda and often and config.compile is not False,
    )


def evaluate_sets(parts: Parts, predict: Predictor) -> dict[str, dict[str, float]]:
    """Metrics of the weights of now on each set."""
    values = {}
    for split, (pictures, labels) in parts.sets.items():
        found = measure(predict(pictures), labels)
        values[split] = {metric: item.value for metric, item in found.items()}
    return values


def finish_run(
    folder: Path,
    config: Config,
    parts: Parts,
    best: Mapping[str, Tensor],
    best_step: int | None,
    quiet: bool,
) -> Run:
    """Predict the test set with the chosen weights and write everything that outlives the run."""
    net = parts.judged
    if best:
        net.load_state_dict(best)
    pictures, labels = parts.sets["test"]
    log_probs = _predict_all(config, parts, pictures, net)
    unlabelled = _predict_unlabelled(config, parts)
    averaged = parts.momentum > 0 and not best and not parts.method.ema
    plain = _predict_all(config, parts, pictures, parts.net) if averaged else None
    held_out, truth = parts.sets.get("validation", (None, labels))
    held = None
    if config.fold and held_out:
        held = [_predict_all(config, parts, held_out, one) for one in (net, parts.net)]
    if ops.rank() == 0:
        console.message("Measuring, with bootstrap intervals ...", quiet)
        _write_model(folder, config, parts)
        packed = io.BytesIO()
        more: dict[str, Any] = {} if plain is None else {"plain_log_probs": plain.numpy()}
        if held is not None:
            more |= {"held_labels": truth.numpy(), "held_log_probs": held[0].numpy()}
            more |= {"plain_held_log_probs": held[1].numpy()} if averaged else {}
        np.savez_compressed(packed, log_probs=log_probs.numpy(), labels=labels.numpy(), **more)
        files.write(folder / "predictions.npz", packed.getvalue())
        seen = Predicted(log_probs, _take_images(pictures))
        write_examples(folder, seen, labels, unlabelled[0] if unlabelled else None)
        result = _make_result(folder, config, parts, log_probs, labels)
        if unlabelled:
            write_views(folder, unlabelled[1])
            result["temperature_scaled"]["views"] = scale_without_labels(
                unlabelled[1], log_probs, labels
            )
        if plain is not None:  # what the run would have been without averaged weights
            found = measure(plain, labels)
            result["plain"] = {"metrics": {k: v._asdict() for k, v in found.items()}}
            result["plain"]["temperature_scaled"] = scale_with_labels(plain, labels)
        result["step"] = best_step or config.steps
        files.write_json(folder / "result.json", result)
    ops.wait_for_ranks()
    return load_run(folder)


def _predict_all(
    config: Config, parts: Parts, pictures: Source | AugmentedSource, net: nn.Module
) -> Tensor:
    return predict_source(net, parts.method, pictures, parts.statistics, config.eval_batch)


def _predict_unlabelled(config: Config, parts: Parts) -> tuple[Predicted, Views] | None:
    """Predictions of unlabelled pictures, or of a sample; labelled ones among them are left out."""
    pool = torch.tensor(parts.split.unlabelled, dtype=torch.long)
    new = (~torch.isin(pool, torch.tensor(parts.split.labelled))).nonzero()[:, 0]
    if not len(new):
        return None
    some = sample_rows(new, stream_seed(config.seed, 7))
    pictures = parts.batches.sources["u"].some(some)
    found = {"plain": _predict_all(config, parts, pictures, parts.judged)}
    for name, transform in parts.batches.views.items():
        changed = AugmentedSource(pictures, transform, config.seed)
        found[name] = _predict_all(config, parts, changed, parts.judged)
    seen = Predicted(found["plain"], _take_images(pictures), rows=pool[some], whole=len(new))
    return seen, Views(found, parts.truth[some.to(parts.truth.device)].cpu())


def _take_images(pictures: Source) -> TakeImages:
    shown: Source = getattr(pictures, "pictures", pictures)  # a frozen network's are features
    return lambda rows: torch.cat([some.cpu() for some in shown.some(rows).batches(256)])


def _make_result(
    folder: Path, config: Config, parts: Parts, log_probs: Tensor, labels: Tensor
) -> dict[str, Any]:
    gaps = logit_gap(log_probs.double())
    spread = 1.96 * float(gaps.std()) / len(gaps) ** 0.5
    # a fold's run is there for the labels it held out
    found = measure(log_probs, labels, resamples=0 if config.fold else RESAMPLES)
    measured = {name: item._asdict() for name, item in found.items()}
    mean = float(gaps.mean())
    measured["gap"] = {"value": mean, "low": mean - spread, "high": mean + spread}
    lines = read_lines(folder / "metrics.jsonl")
    last = [line for line in lines if line["kind"] == "train"][-1]
    if last.get("agree") is not None:
        measured["agree"] = _agreement_interval(last, config, parts)
    return {
        "title": parts.title,
        "classes": list(parts.classes),
        "steps": config.steps,
        "selected": "best error on the TEST set (leaky)"
        if config.protocol == "paper"
        else config.select,
        "leaky": config.protocol == "paper",
        "weights": "ema" if parts.momentum else "plain",
        "pictures": {
            "labelled": len(parts.split.labelled),
            "unlabelled": len(parts.split.unlabelled),
            "validation": len(parts.split.validation),
            "test": len(labels),
        },
        "metrics": measured,
        "best_on_test": best_on_test(lines),
        "temperature_scaled": scale_with_labels(log_probs, labels),
        "interval": "95 % bootstrap over test pictures, one seed",
        "notes": [*parts.notes, *_rollback_notes(lines)],
    }


def _rollback_notes(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"Numbers stopped being finite; from step {line['step']:,} on the learning rate was "
        f"{line['rate']:g} of what the config says."
        for line in lines
        if line["kind"] == "rollback"
    ]


def _agreement_interval(last: Mapping[str, Any], config: Config, parts: Parts) -> dict[str, float]:
    """Share of agreeing samples among accepted ones in the last log interval, Wilson interval."""
    steps = (config.steps - 1) % config.log_every + 1
    n = max(1.0, last["accepted"] * steps * parts.batches.orders["u"].batch)
    p, z = last["agree"], 1.96
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    spread = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return {"value": p, "low": middle - spread, "high": middle + spread}


def _write_model(folder: Path, config: Config, parts: Parts) -> None:
    from calmatch.model import write_model  # brings networks, seconds that readers of results spare

    found = parts.whole() if parts.whole else (parts.judged, parts.statistics)
    if found is None:
        return
    net, statistics = found
    at = augment.tta_views(config.looks, config.weak)
    write_model(
        folder,
        net,
        parts.method,
        net=config.net,
        method=config.method,
        classes=list(parts.classes),
        size=parts.size,
        mean=list(statistics[0]),
        std=list(statistics[1]),
        **({"looks": at} if len(at) > 1 else {}),
        versions=describe_environment(parts.device)["versions"],
        provenance={
            "data": config.dataset,
            "labels": len(parts.split.labelled),
            "steps": config.steps,
            "seed": config.seed,
            "command": f"calmatch train {folder.name}/config.json --out FOLDER",
        },
    )


def scale_with_labels(log_probs: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    """ECE and NLL of the test set after temperature scaling.

    `crossfit`: each half scaled by the temperature of the other half's labels. `oracle`: by the
    temperature of the same labels, a bound that no honest temperature reaches in NLL.
    """
    from calmatch import posthoc

    ways = {"crossfit": posthoc.temperature_scaled, "oracle": posthoc.oracle_scaled}
    return {way: measure_scaled(scale(log_probs, labels), labels) for way, scale in ways.items()}


def scale_without_labels(seen: Views, log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """The test set scaled by what the agreement of unlabelled pictures' views says, and that."""
    from calmatch import posthoc

    pair = [seen.log_probs[name] for name in VIEW_PAIR]
    scale = posthoc.agreement_temperature(*pair)
    return {
        **measure_scaled(scale(log_probs.double()), labels),
        "temperature": scale.values["temperature"],
        "agree": posthoc.agreement(*pair).agree,
    }


def measure_scaled(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """ECE and NLL, what a temperature changes."""
    probs = probabilities(log_probs)
    found = metrics.summary(probs, labels, ("ece", "nll"), resamples=0)
    return {metric: item.value for metric, item in found.items()}


VIEWS_FILE = "views.npz"
VIEW_PAIR = ("plain", "strong")  # whose agreement stands for accuracy


class Views(NamedTuple):
    """What a network says of pictures in each view."""

    log_probs: Mapping[str, Tensor]  # [n, C] under plain, weak and strong
    truth: Tensor  # [n] class ids, -1 unknown: only to judge estimates by


def write_views(folder: Path, views: Views) -> None:
    """Keep the views in a run folder."""
    packed = io.BytesIO()
    arrays: dict[str, Any] = {
        name: found.float().numpy() for name, found in views.log_probs.items()
    }
    np.savez_compressed(packed, truth=views.truth.numpy(), **arrays)
    files.write(folder / VIEWS_FILE, packed.getvalue())


def load_views(folder: Path) -> Views | None:
    """The views of a run folder; None where there are none."""
    path = folder / VIEWS_FILE
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as found:
        held = {name: torch.from_numpy(found[name]) for name in found.files}
    return Views({k: v for k, v in held.items() if k != "truth"}, held["truth"])
