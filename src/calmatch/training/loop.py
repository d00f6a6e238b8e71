"""A run from beginning to end: steps, log lines, evaluations, checkpoints, what it leaves."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calmatch import console, files, metrics, ops, posthoc, runs
from calmatch.console import SignalQueue, Stopped
from calmatch.core import Method, RandomStream
from calmatch.data.batches import Source, stream_seed
from calmatch.model import write_model
from calmatch.runs import Predicted, Result, Run, Scaled
from calmatch.training import checkpoint
from calmatch.training.config import Config, check_config, selection_metric, without_seeds
from calmatch.training.setup import Parts, describe_environment, deterministic
from calmatch.training.step import Predictor, Training, make_training, measure, new_training

RESAMPLES = 500  # of the bootstrap behind every interval


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
    pairs = list(zip(settings, outs, strict=True))
    folders = [Path(out or Path("runs") / runs.run_name(config)) for config, out in pairs]
    if len(set(folders)) < len(folders):
        raise ValueError("Runs that are trained together need a folder each.")
    with _training_context(settings[0], folders) as signals:
        left = []
        for config, folder in zip(settings, folders, strict=True):
            if runs.find_finished(folder, config):
                console.message(f"{folder} is finished already.", quiet)
            else:
                left.append((config, folder))
        if left:
            _train_to_end(left, quiet, signals)
        return [runs.load_run(folder) for folder in folders]


def train_first_steps(config: Config, folder: Path, steps: int, *, quiet: bool = False) -> None:
    """Only the first steps of a run, for their lines."""
    with _training_context(config, [folder]) as signals:
        _train_to_end([(config, folder)], quiet, signals, steps)


def train_in_memory(config: Config, parts: Parts) -> None:
    """Train small parts in memory, without a folder."""
    with torch.random.fork_rng(), ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # as fast as two, which beside other programs wait in turns
        run = make_training(config, parts)
        while run.step < config.steps:
            run.advance()


@contextmanager
def _training_context(config: Config, folders: Sequence[Path]) -> Iterator[SignalQueue]:
    """What holds while runs train; the signals that come meanwhile."""
    with ExitStack() as stack:
        stack.enter_context(deterministic(config.deterministic))
        stack.enter_context(ops.join_ranks(ops.pick_device(config.device)))
        for folder in folders:  # the first rank holds the folder's lock
            stack.enter_context(files.lock(folder) if ops.rank() == 0 else nullcontext())
        stack.enter_context(torch.random.fork_rng())
        yield stack.enter_context(console.catch_signals())


def _train_to_end(
    left: Sequence[tuple[Config, Path]], quiet: bool, signals: SignalQueue, until: int | None = None
) -> None:
    """To the end; where numbers stop being finite, back to a checkpoint, or out with a sentence."""
    while fault := _train_from_checkpoint(left, quiet, signals, until):
        place, noticed = fault
        checkpoint.handle_nonfinite(noticed, *left[place], signals, quiet)


def _train_from_checkpoint(
    left: Sequence[tuple[Config, Path]], quiet: bool, signals: SignalQueue, until: int | None
) -> tuple[int, int] | None:
    """Train from the newest checkpoints on, to the end or a step in between; or to a fault."""
    trainings = [_begin_training(config, folder, quiet) for config, folder in left]
    folders = [folder for _, folder in left]
    first, config = trainings[0], trainings[0].config
    sizes = _resume(trainings, folders, quiet)
    advance = _choose_engine(trainings, quiet)
    title = first.parts.title + (f" x {len(trainings)}" if len(trainings) > 1 else "")
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(signals.patience())
        logs = [enter(checkpoint.Lines(*each)) for each in zip(folders, sizes, strict=True)]
        places = [folder / "checkpoint" for folder in folders]
        writers = [enter(checkpoint.CheckpointWriter(place, config.saves)) for place in places]
        bar = enter(console.ProgressBar(title, config.steps, first.step, quiet))
        while (step := first.step) < (until or config.steps):
            advance()
            step += 1
            bar.update(step)
            stop = bool(signals)
            log_due = due(step, config.log_every, config.steps)
            evaluation_due = due(step, config.eval_every, config.steps)
            save_due = due(step, config.saves, config.steps) or stop
            if log_due or evaluation_due or save_due:
                for place, run in enumerate(trainings):  # one wait a run
                    if not checkpoint.is_finite(run):
                        return place, step
            for run, lines, writer in zip(trainings, logs, writers, strict=True):
                if log_due:
                    rate = float(run.optimizer.param_groups[0]["lr"])
                    line = {"step": step, "kind": "train", "lr": rate, **run.sums.read()}
                    lines.write(line)
                    bar.note(line)
                if evaluation_due:
                    _evaluate(run, lines, bar)
                if save_due:
                    _save(run, writer, lines)
            if stop:
                raise Stopped(signals[0])
    if until is None:
        for run, folder in zip(trainings, folders, strict=True):
            _finish_run(folder, run, quiet)
    return None


def _begin_training(config: Config, folder: Path, quiet: bool) -> Training:
    """A run before its first step; what is known by then is written."""
    run = new_training(config)
    if ops.rank() == 0 and not (folder / "split.json").exists():
        files.write_json(folder / "config.json", config.dump())
        files.write_json(folder / "environment.json", describe_environment(run.parts.device))
        rule = {"rule": "usb", "seed": config.split_seed, "dataset": config.dataset}
        rule |= {"pictures": _digest_images(run.parts)}
        files.write(folder / "split.json", json.dumps({**rule, **run.parts.split._asdict()}))
    elif ops.rank() == 0:
        then = files.read_json(folder / "split.json").get("pictures")
        if then not in (None, _digest_images(run.parts)):
            line = f"The pictures or labels have changed since {folder} was begun; "
            raise ValueError(f"{line}choose another --out.")
    for line in run.parts.notes:
        console.message(line, quiet)
    return run


def _digest_images(parts: Parts, most: int = 64) -> str:
    """Of labels and some images: a continued run must not mix pictures."""
    labels = parts.labels[torch.tensor(parts.split.labelled, dtype=torch.long)]
    rows = torch.arange(0, len(labels), max(1, len(labels) // most))
    pixels = _image_taker(parts.labelled)(rows)
    data = labels.cpu().numpy().tobytes() + pixels.numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _resume(trainings: Sequence[Training], folders: Sequence[Path], quiet: bool) -> list[int]:
    """Take up checkpoints of the same step; how much of each metrics.jsonl they cover."""
    limit = None
    complaints: list[str] = []
    while True:
        read = [checkpoint.newest_checkpoint(folder / "checkpoint", limit) for folder in folders]
        complaints += [line for _, lines in read for line in lines]
        steps = [int(state[1]["step"]) if state else 0 for state, _ in read]
        if len(set(steps)) == 1:
            break
        limit = min(steps)  # a kill between two saves: the slower one decides
    for line in complaints:
        console.warn(line)
    for run, folder, (state, _) in zip(trainings, folders, read, strict=True):
        if state:
            run.restore(*state)
            console.message(f"Continuing {folder} at step {run.step:,}.", quiet)
    return [int(state[1]["lines"]) if state else 0 for state, _ in read]


def _choose_engine(trainings: Sequence[Training], quiet: bool) -> Callable[[], None]:
    """How a step is made: replayed from one captured graph on a CUDA device, else step by step."""
    wanted = trainings[0].config.engine
    able = trainings[0].parts.device.type == "cuda" and ops.world_size() == 1
    if wanted == "captured" and not able:
        raise ValueError("engine=captured needs one CUDA device; use --engine auto.")
    if able and wanted != "eager":
        from calmatch.training.cuda_graph import CapturedStep

        return CapturedStep(trainings, quiet).advance

    def advance() -> None:
        for run in trainings:
            run.advance()

    return advance


def due(step: int, every: int, total: int) -> bool:
    """Whether something done every so many steps, and at the end, is due."""
    return step == total or (every > 0 and step % every == 0)


def _evaluate(run: Training, lines: checkpoint.Lines, bar: console.ProgressBar) -> None:
    """Measure the weights of now; keep them if they are the best so far where that is asked."""
    measured = {}
    for split, (source, labels) in run.parts.sets.items():
        values = {name: item.value for name, item in measure(run.predict(source), labels).items()}
        lines.write({"step": run.step, "kind": split, **values})
        bar.note(values)
        measured[split] = values
    if (metric := selection_metric(run.config)) is None:
        return
    value = measured["test" if run.config.protocol == "paper" else "validation"][metric]
    if run.best_value is None or value < run.best_value:
        run.best_value, run.best_step = value, run.step
        run.best = copy.deepcopy(dict(run.parts.evaluated.state_dict()))


def _save(run: Training, writer: checkpoint.CheckpointWriter, lines: checkpoint.Lines) -> None:
    if ops.rank() == 0:
        note: dict[str, Any] = {"lines": lines.size(), "sums": run.sums.steps}
        note |= {"best": run.best_value, "best_step": run.best_step, "rollbacks": run.rollbacks}
        writer.save(run.step, run.tensors(), note)


def _finish_run(folder: Path, run: Training, quiet: bool) -> None:
    """Predict the test set with the chosen weights and write everything that outlives the run."""
    config, parts = run.config, run.parts
    if run.best:
        parts.evaluated.load_state_dict(run.best)
    source, labels = parts.sets["test"]
    predict = Predictor(parts, config.eval_batch)
    by_logits = type(parts.method).predict is Method.predict
    outputs = predict(source, logits=by_logits)
    log_probs = outputs.log_softmax(1) if by_logits else outputs
    arrays = {"log_probs": log_probs.numpy(), "labels": labels.numpy()}
    if by_logits:
        arrays["mean_logit"] = outputs.mean(1).numpy()  # what log-probabilities lose
    if config.fold:
        held, truth = parts.sets["validation"]
        arrays |= {"held_labels": truth.numpy(), "held_log_probs": predict(held).numpy()}
    unlabelled = _predict_unlabelled(config, parts, predict)
    if ops.rank() == 0:
        console.message("Measuring, with bootstrap intervals ...", quiet)
        _write_model(folder, config, parts)
        files.write_npz(folder / "predictions.npz", **arrays)
        runs.write_examples(folder, Predicted(log_probs, _image_taker(source)), labels, unlabelled)
        result = _make_result(folder, run, log_probs, labels)
        files.write_json(folder / "result.json", result.dump())
    ops.wait_for_ranks()


def _predict_unlabelled(config: Config, parts: Parts, predict: Predictor) -> Predicted | None:
    """Predictions of unlabelled images, or of a sample; labelled ones among them are left out."""
    pool = torch.tensor(parts.split.unlabelled, dtype=torch.long)
    new = (~torch.isin(pool, torch.tensor(parts.split.labelled))).nonzero()[:, 0]
    if not len(new):
        return None
    some = runs.sample_rows(new, stream_seed(config.seed, RandomStream.FEATURES))
    source = parts.batches.sources["u"].some(some)
    return Predicted(predict(source), _image_taker(source), rows=pool[some], whole=len(new))


def _image_taker(source: Source) -> runs.TakeImages:
    return lambda rows: torch.cat([some.cpu() for some in source.some(rows).batches(256)])


def _write_model(folder: Path, config: Config, parts: Parts) -> None:
    mean, std = map(list, parts.statistics)
    entries: dict[str, Any] = {"net": config.net, "method": config.method}
    entries |= {"classes": list(parts.classes), "size": parts.size, "mean": mean, "std": std}
    provenance = {"data": config.dataset, "labels": len(parts.split.labelled)}
    provenance |= {"steps": config.steps, "seed": config.seed}
    provenance["command"] = f"calmatch train {folder.name}/config.json --out FOLDER"
    versions = describe_environment(parts.device)["versions"]
    entries |= {"versions": versions, "provenance": provenance}
    write_model(folder, parts.evaluated, parts.method, **entries)


def _make_result(folder: Path, run: Training, log_probs: Tensor, labels: Tensor) -> Result:
    config, parts = run.config, run.parts
    # a fold's run is there for the labels it held out
    measured = measure(log_probs, labels, resamples=0 if config.fold else RESAMPLES)
    gaps = runs.logit_gap(log_probs.double())
    mean, spread = float(gaps.mean()), 1.96 * float(gaps.std()) / len(gaps) ** 0.5
    measured["gap"] = metrics.Interval(mean, mean - spread, mean + spread)
    lines = runs.read_lines(folder / "metrics.jsonl")
    last = [line for line in lines if line["kind"] == "train"][-1]
    if last.get("agree") is not None:  # among accepted samples of the last log interval
        steps = (config.steps - 1) % config.log_every + 1
        number = max(1.0, last["accepted"] * steps * parts.batches.orders["u"].batch)
        low, high = metrics.wilson(last["agree"], number)
        measured["agree"] = metrics.Interval(last["agree"], float(low), float(high))
    paper = config.protocol == "paper"
    rollbacks = [
        f"Numbers stopped being finite; from step {line['step']:,} on the learning rate was "
        f"{line['rate']:g} of what the config says."
        for line in lines
        if line["kind"] == "rollback"
    ]
    counts = {name: len(ids) for name, ids in parts.split._asdict().items()}
    return Result(
        title=parts.title,
        classes=parts.classes,
        metrics=measured,
        steps=config.steps,
        step=run.best_step or config.steps,
        selected="best error on the TEST set" if paper else config.select,
        test_selected=paper,
        weights="ema" if parts.momentum else "plain",
        images={**counts, "test": len(labels)},
        best_on_test=runs.BestOnTest.of(lines),
        temperature_scaled=_scale_temperature(log_probs, labels),
        interval="95 % bootstrap over test pictures, one seed",
        notes=(*parts.notes, *rollbacks),
    )


def _scale_temperature(log_probs: Tensor, labels: Tensor) -> dict[str, Scaled]:
    """ECE and NLL of the test set, each half scaled by the other's temperature, or by the same."""
    scaled, ways = {}, {"crossfit": posthoc.temperature_scaled, "oracle": posthoc.oracle_scaled}
    for way, scale in ways.items():
        probs = runs.probabilities(scale(log_probs, labels))
        values = metrics.summary(probs, labels, ("ece", "nll"), resamples=0)
        scaled[way] = Scaled(values["ece"].value, values["nll"].value)
    return scaled
