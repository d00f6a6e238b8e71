"""Own images, one command: read, plan, train, evaluate out-of-fold, calibrate, and say it plainly."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from calmatch import console, files, nets, spec
from calmatch.data.folder import ImageFolder, arrange_rows, decode_folder, fitting_size, read_folder
from calmatch.data.images import Images, take_images
from calmatch.fit.crossval import (
    Calibration,
    HeldOut,
    calibrate,
    count_folds,
    cross_validate,
    log_loss,
    train_fold_models,
)
from calmatch.fit.plan import (
    SMALLEST_PRETRAINED,
    FitPlan,
    check_options,
    head_config,
    make_plan,
    whole_network_config,
)
from calmatch.model import load_model, read_model_json, save_calibration
from calmatch.nets import read_state
from calmatch.options import FitOptions
from calmatch.runs import (
    Predicted,
    Run,
    load_run,
    most_informative,
    probabilities,
    sample_rows,
    write_examples,
)
from calmatch.training.config import Config
from calmatch.training.frozen import FrozenRun, freeze_network
from calmatch.training.loop import train, train_in_memory
from calmatch.training.setup import build_parts
from calmatch.training.step import predict_source

STAGES = (
    "reading pictures",
    "planning",
    "learning",
    "judging",
    "learning from all labels",
    "calibrating and writing",
)


def fit(options: FitOptions) -> Run:
    """Train a classifier on a person's images into a folder; the same call again continues."""
    check_options(options)
    quiet = options.quiet
    folder = options.out or Path(f"fit-{options.pictures.resolve().name}")
    if folder.resolve().is_relative_to(options.pictures.resolve()):
        raise ValueError(f"{folder} lies among the pictures; choose another --out.")
    before = _read_earlier(folder, options)
    if before and is_finished(folder):
        console.message(f"{folder} is finished already.", quiet)
        return load_run(folder)
    with files.lock(folder / "work"):  # the trainer locks the folder itself
        return _run_stages(options, folder, before, quiet)


def _read_earlier(folder: Path, options: FitOptions) -> dict[str, Any]:
    """What an interrupted run of the same options had decided."""
    path = folder / "fit.json"
    if not path.exists():
        if (folder / "config.json").exists():
            raise ValueError(f"{folder} holds a run that `fit` did not make; choose another --out.")
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        other = [
            k for k, v in options.dump().items() if found["options"].get(k) != v and k != "device"
        ]
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged; choose another --out.") from error
    if other:
        key = "pictures" if other[0] == "pictures" else f"--{other[0]}"
        raise ValueError(
            f"{folder} was made with {key} {found['options'].get(other[0])}; choose another --out."
        )
    return found


def _run_stages(options: FitOptions, folder: Path, before: Mapping[str, Any], quiet: bool) -> Run:
    stage = _stage_printer(quiet)
    stage(1)
    listed = read_folder(options.pictures, options.labels, options.strict)
    options, size, side = _choose_size(options, listed, folder)
    with console.ProgressBar("decoding", len(listed.names), 0, quiet, unit="pictures") as bar:
        images, found = decode_folder(listed, size, options.strict, bar.update)
    console.message(describe_folder(found, side), quiet)
    stage(2)
    if before:
        plan = _read_plan(folder, before["plan"])
    else:
        plan = make_plan(options, found, images, side, size)
        _save_plan(folder, options, plan)
    for note in (*found.notes, *plan.notes):
        console.message(note, quiet)
    stage(3)
    while True:
        try:
            make = functools.partial(_make_candidate, options, plan, found, folder, stage, quiet)
            tried = [make(alone) for alone in _ways_to_learn(options)]
            best = min(tried, key=lambda one: log_loss(one.judged))
            _print_candidates(tried, best, quiet)
            stage(5)
            if not best.config.frozen:  # the whole network has learned from all labels already
                _adopt_run(folder / "work" / best.name / "all", folder)
            with console.silence():
                train(best.config, folder, quiet=quiet)
            break
        except (RuntimeError, MemoryError) as error:
            if not console.is_out_of_memory(error):
                raise
        plan = _halve_batch(options, plan, folder, quiet)  # the error, which held tensors, is gone
    stage(6)
    return write_fit(options, plan, folder, found, images, best, tried, quiet)


def _adopt_run(trained: Path, folder: Path) -> None:
    """Make a finished run the fit's own; its result comes last, whole."""
    done = "result.json"
    left = shutil.ignore_patterns(done, ".lock", "checkpoint")
    shutil.copytree(trained, folder, dirs_exist_ok=True, ignore=left)
    files.write(folder / done, (trained / done).read_bytes())


def _read_plan(folder: Path, held: Mapping[str, Any]) -> FitPlan:
    try:
        return FitPlan(**{**held, "notes": tuple(held["notes"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"Another version planned {folder}; choose another --out.") from error


def _ways_to_learn(options: FitOptions) -> tuple[bool, ...]:
    return (True,) if spec.parse(options.method).name == "supervised" else (False, True)


def _stage_printer(quiet: bool) -> Callable[[int], None]:
    """Announces a stage once."""
    told: set[int] = set()

    def stage(number: int) -> None:
        if number not in told:
            console.message(f"{number}/{len(STAGES)} {STAGES[number - 1]}", quiet)
        told.add(number)

    return stage


def _choose_size(
    options: FitOptions, found: ImageFolder, folder: Path
) -> tuple[FitOptions, int, int]:
    """The size of training, the pictures' own, and with --from the network to start with."""
    size, side = fitting_size(found)
    if options.start is None:
        pretrained = side >= SMALLEST_PRETRAINED or options.net is not None
        return options, options.size or (max(64, size) if pretrained else size), side
    note = read_model_json(options.start / "model.json")
    gone = [name for name in note["classes"] if name not in found.classes]
    if gone:
        raise ValueError(
            f"{options.start} also knows {', '.join(map(repr, gone[:5]))}, which no label here names; "
            f"add a few labelled pictures of it, or the new model would forget it."
        )
    target = folder / "work" / "start.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    net = with_weights_of(note["net"], options.start / "model.safetensors", target)
    return dataclasses.replace(options, net=net), options.size or int(note["size"]), side


def with_weights_of(net: str, source: Path, target: Path) -> str:
    """The spec of a network that starts with a model's weights, copied to `target`."""
    held = {k: v for k, v in read_state(source).items() if k.startswith("net/body.")}
    if not target.exists():
        plain = {k.removeprefix("net/body."): v.contiguous() for k, v in held.items()}
        files.write(target, safetensors.torch.save(plain))
    item = spec.parse(net)
    settings = {**item.kwargs, "pretrained": str(target.resolve())}
    return spec.write(item._replace(kwargs=settings))


def _save_plan(folder: Path, options: FitOptions, plan: FitPlan) -> None:
    kept = {"options": options.dump() | {"net": None if options.start else options.net}}
    files.write_json(folder / "fit.json", {**kept, "plan": dataclasses.asdict(plan)})


def _halve_batch(options: FitOptions, plan: FitPlan, folder: Path, quiet: bool) -> FitPlan:
    """After the device ran out of memory: half the batch, and what was trained is dropped."""
    if plan.batch < 2:
        raise ValueError("The device has too little memory even for one picture; use --device cpu.")
    console.free_device_memory()
    plan = dataclasses.replace(plan, batch=plan.batch // 2)
    console.message(
        f"The device's memory is full; trying again with batches of {plan.batch}.", quiet
    )
    _save_plan(folder, options, plan)
    for name in ("work/both", "work/alone", "checkpoint"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("config.json", "split.json"):
        (folder / name).unlink(missing_ok=True)
    return plan


def _make_candidate(
    options: FitOptions,
    plan: FitPlan,
    found: ImageFolder,
    folder: Path,
    stage: Callable[[int], None],
    quiet: bool,
    alone: bool,
) -> Candidate:
    """Train the network if it learns, and judge it, or heads on its features."""
    net, name = plan.net, "alone" if alone else "both"
    under = folder / "work" / name
    stage(3)
    console.message(
        "  on the labels alone" if alone else "  on labelled and unlabelled pictures", quiet
    )
    if plan.whole:
        body = whole_network_config(options, plan, alone)
        if not plan.hold:
            number = count_folds(found.known, body.split_seed)
            with console.silence():
                train(body, under / "all", quiet=quiet)
                stage(4)
                judged = train_fold_models(body, under, number, quiet=quiet)
            return Candidate(name, body, _as_folder_rows(judged, options, plan, found))
        with console.silence():
            train(body, under, quiet=quiet)
        bare = read_model_json(under / "model.json")["net"]
        net = with_weights_of(bare, under / "model.safetensors", under / "start.safetensors")
    width = nets.feature_size(nets.build(net, len(found.classes), plan.size), plan.size)
    config = head_config(options, plan, alone, net, width)
    frozen = freeze_network(config, build_parts(config), quiet)
    stage(4)
    judged = (_predict_holdout if plan.holdout else _predict_out_of_fold)(
        options, plan, found, config, frozen, quiet
    )
    return Candidate(name, config, judged)


def _as_folder_rows(
    judged: HeldOut, options: FitOptions, plan: FitPlan, found: ImageFolder
) -> HeldOut:
    """Rows of the dataset as rows of the pictures."""
    rows = arrange_rows(found, 0.0, plan.most, options.seed).train
    return judged._replace(rows=[rows[row] for row in judged.rows])


def _predict_holdout(
    options: FitOptions,
    plan: FitPlan,
    found: ImageFolder,
    config: Config,
    frozen: FrozenRun,
    quiet: bool,
) -> HeldOut:
    """Predictions of labels that were held out from the first picture on."""
    rows = arrange_rows(found, plan.hold, plan.most, options.seed).held
    if not rows:
        raise ValueError(
            f"--hold {plan.hold:g} of so few labels is none; raise it or leave it out."
        )
    cheap = config.replace(compile=False)
    parts = frozen.parts(frozen.base.split, cheap)
    train_in_memory(cheap, parts)
    pictures_, labels = parts.sets["test"]
    log_probs = predict_source(
        parts.judged, parts.method, pictures_, parts.statistics, config.eval_batch
    )
    return HeldOut(log_probs, labels, rows, 0)


def _predict_out_of_fold(
    options: FitOptions,
    plan: FitPlan,
    found: ImageFolder,
    config: Config,
    frozen: FrozenRun,
    quiet: bool,
) -> HeldOut:
    """Out-of-fold predictions of the labels that the network behind the features has not seen."""
    split, unseen = frozen.base.split, None
    if plan.whole:
        rows = arrange_rows(found, 0.0, plan.most, options.seed).train
        held = set(arrange_rows(found, plan.hold, plan.most, options.seed).held)
        unseen = {row for row in split.labelled if rows[row] in held}

    def told(number: int, log_probs: Tensor, labels: Tensor) -> None:
        console.message(f"  part {number}: {describe_progress(log_probs, labels)}", quiet)

    judged = cross_validate(frozen, config, split, told, unseen)
    return _as_folder_rows(judged, options, plan, found)


def _print_candidates(tried: list[Candidate], best: Candidate, quiet: bool) -> None:
    words = {"both": "labelled and unlabelled pictures", "alone": "the labels alone"}
    for one in tried:
        wrong = float((one.judged.log_probs.argmax(1) != one.judged.labels).double().mean())
        kept = ", kept" if one is best and len(tried) > 1 else ""
        console.message(
            f"  {words[one.name]}: {wrong:.1%} wrong, log-loss {log_loss(one.judged):.3f}{kept}",
            quiet,
        )


class Candidate(NamedTuple):
    """One of the two ways to learn, judged."""

    name: str
    config: Config  # of the final run
    judged: HeldOut


def is_finished(folder: Path) -> bool:
    """Whether a fit is done; the trainer's own result.json is only a part of it."""
    path = folder / "result.json"
    return path.exists() and "judged_on" in json.loads(path.read_text("utf-8"))


def write_fit(
    options: FitOptions,
    plan: FitPlan,
    folder: Path,
    found: ImageFolder,
    images: Images,
    best: Candidate,
    tried: list[Candidate],
    quiet: bool,
) -> Run:
    """Calibrate, and write everything that outlives the run; result.json says that it is done."""
    verdict = calibrate(best.judged)
    save_calibration(
        folder,
        verdict.scaling,
        verdict.conformal,
        verdict.selective,
        {"command": "calmatch fit, with what fit.json says", "learned_from": best.name},
    )
    names = [found.names[row] for row in best.judged.rows]
    _write_npz(
        folder / "predictions.npz",
        log_probs=verdict.log_probs.numpy(),
        raw_log_probs=best.judged.log_probs.numpy(),
        labels=best.judged.labels.numpy(),
        files=np.array(names),
    )
    spare = torch.tensor([k for k, label in enumerate(found.labels) if label < 0], dtype=torch.long)
    asked = _predict_unlabelled(folder, images, found, spare, options.seed)
    rows = torch.tensor(best.judged.rows)
    take = lambda some: take_images(images, rows[some])  # noqa: E731
    seen = Predicted(verdict.log_probs, take, files=names)
    write_examples(folder, seen, best.judged.labels, asked)
    files.write_json(
        folder / "result.json", _make_result(folder, plan, best, tried, verdict, found)
    )
    run = load_run(folder)
    if not quiet:
        print(describe_result(run, best.judged, verdict, found, asked))
    return run


def _write_npz(path: Path, **arrays: Any) -> None:
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    files.write(path, packed.getvalue())


def _predict_unlabelled(
    folder: Path, images: Images, found: ImageFolder, spare: Tensor, seed: int
) -> Predicted | None:
    """Calibrated predictions of unlabelled pictures (a sample of many), kept with their names."""
    if not len(spare):
        return None
    rows = sample_rows(spare, seed)
    made = load_model(folder)
    log_probs = torch.cat(
        [made.calibration(made.logits(take_images(images, some))) for some in rows.split(512)]
    ).float()
    names = [found.names[row] for row in rows.tolist()]
    _write_npz(folder / "unlabelled.npz", log_probs=log_probs.numpy(), files=np.array(names))
    take = lambda ids: take_images(images, rows[ids])  # noqa: E731
    return Predicted(log_probs, take, rows=rows, files=names, whole=len(spare))


def _make_result(
    folder: Path,
    plan: FitPlan,
    best: Candidate,
    tried: list[Candidate],
    verdict: Calibration,
    found: ImageFolder,
) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text("utf-8"))
    kind = "crossfit" if best.judged.crossfit else "holdout"
    notes = {
        "crossfit": "Each judged label was predicted by a sister model that had not seen it"
        + (", on features of a network that had not seen it either." if plan.hold else "."),
        "holdout": "The judged labels were held out: the model has not seen them.",
    }
    result |= {
        "metrics": {k: v._asdict() for k, v in verdict.after.items()}
        | {k: v for k, v in result["metrics"].items() if k in ("gap", "agree")},
        "before_calibration": {k: v.value for k, v in verdict.before.items()},
        "calibration": verdict.scaling.dump(),
        "interval": "95 %: exact binomial for error, bootstrap over judged labels for the rest",
        "judged_on": kind,
        "judged_note": notes[kind],
        "kept": best.name,
        "scores": {one.name: log_loss(one.judged) for one in tried},
        "skipped": [list(item) for item in found.skipped],
        # where the head's start came from is no news to the person
        "notes": [n for n in result["notes"] if not n.startswith("Weights from")]
        + [*found.notes, *plan.notes],
    }
    result["pictures"]["test"] = len(best.judged.labels)
    return result


SHOWN = 5
FEW = 200  # labels: with fewer, binned calibration errors are mostly noise


def describe_folder(found: ImageFolder, side: int) -> str:
    """The pictures in two sentences, and what was skipped."""
    labels = len(found.known)
    low, high = min(found.counts), max(found.counts)
    each = f"{low} each" if low == high else f"{low} to {high} each"
    lines = [
        f"  {len(found.names):,} pictures, about {side} pixels; {labels:,} labels in "
        f"{len(found.classes)} classes ({each}); {found.labels.count(-1):,} unlabelled."
    ]
    return "\n".join(lines + describe_skipped(found))


def describe_skipped(found: ImageFolder) -> list[str]:
    """Files that were left out, the first few by name."""
    if not found.skipped:
        return []
    lines = [f"  {len(found.skipped)} files skipped (--strict refuses them instead):"]
    lines += [f"    {item.file}: {item.why}" for item in found.skipped[:SHOWN]]
    if len(found.skipped) > SHOWN:
        lines.append(f"    and {len(found.skipped) - SHOWN} more, all in result.json")
    return lines


def describe_progress(log_probs: Tensor, labels: Tensor) -> str:
    """The estimate while judging goes on."""
    n = len(labels)
    sure, guess = probabilities(log_probs).max(1)
    wrong = int((guess != labels).sum())
    return (
        f"{wrong} of {n} judged labels wrong; it was {float(sure.mean()):.0%} confident and "
        f"{1 - wrong / n:.0%} right, before calibration"
    )


def describe_calibration(verdict: Calibration, before: Tensor, labels: Tensor) -> str:
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


def describe_result(
    run: Run, judged: HeldOut, verdict: Calibration, found: ImageFolder, asked: Predicted | None
) -> str:
    """The result in plain words, and the next commands."""
    error = verdict.after["error"]
    number = run.result["pictures"]["test"]
    lines = [
        "",
        f"Of 100 new pictures about {100 * error.value:.0f} will be classified wrongly "
        f"(95 % interval {100 * error.low:.0f} to {100 * error.high:.0f}; judged on {number} "
        f"labels that the judged models had not seen).",
        describe_calibration(verdict, judged.log_probs, judged.labels),
        describe_promise(verdict),
        *describe_skipped(found),
    ]
    if asked is not None and len(asked.log_probs):
        best = most_informative(asked.log_probs, SHOWN).tolist()
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


def describe_promise(verdict: Calibration) -> str:
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
