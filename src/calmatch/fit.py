"""Own pictures, one command: read, plan, train, judge, calibrate, and say it in plain words."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from calmatch import (
    checkpoint,
    evaluate,
    features,
    heads,
    judge,
    log,
    memory,
    nets,
    outcome,
    planning,
    spec,
    trainer,
)
from calmatch import plan as plans
from calmatch.config import Config
from calmatch.data import pictures
from calmatch.modelfile import read_note
from calmatch.nets.pretrained import state_of
from calmatch.outcome import Candidate
from calmatch.plan import Plan, Wish
from calmatch.report.build import build
from calmatch.results import Run, load
from calmatch.setup import prepare
from calmatch.words import opening, told_so_far

STAGES = (
    "reading pictures",
    "planning",
    "learning",
    "judging",
    "learning from all labels",
    "calibrating and writing",
)


def fit(wish: Wish, out: Path | str | None = None, *, quiet: bool = False) -> Run:
    """Train a classifier on a person's pictures into a folder; the same call again continues.

    Args:
        wish: the pictures, their labels, and anything that should not be chosen automatically.
        out: the run folder; by default `fit-` and the name of the folder of pictures.
        quiet: no progress bars and no lines.
    """
    plans.check_wish(wish)
    folder = Path(out) if out else Path(f"fit-{wish.pictures.resolve().name}")
    if folder.resolve().is_relative_to(wish.pictures.resolve()):
        raise ValueError(f"{folder} lies among the pictures; choose another --out.")
    before = _before(folder, wish)
    if before and outcome.finished(folder):
        log.tell(f"{folder} is finished already.", quiet)
        run = load(folder)
        if not (folder / "report.html").exists():  # a kill after the result, before the page
            build([run], folder / "report.html")
        return run
    with checkpoint.lock(folder / "work"):  # the trainer locks the folder itself
        return _fit(wish, folder, before, quiet)


def _before(folder: Path, wish: Wish) -> dict[str, Any]:
    """What an interrupted run of the same wish had decided."""
    path = folder / "fit.json"
    if not path.exists():
        if (folder / "config.json").exists():
            raise ValueError(f"{folder} holds a run that `fit` did not make; choose another --out.")
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        other = [k for k, v in wish.dump().items() if found["wish"].get(k) != v and k != "device"]
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged; choose another --out.") from error
    if other:
        key = "pictures" if other[0] == "pictures" else f"--{other[0]}"
        raise ValueError(
            f"{folder} was made with {key} {found['wish'].get(other[0])}; choose another --out."
        )
    return found


def _fit(wish: Wish, folder: Path, before: Mapping[str, Any], quiet: bool) -> Run:
    stage = _stages(quiet)
    stage(1)
    listed = pictures.read(wish.pictures, wish.labels, wish.strict)
    wish, size, side = _sized(wish, listed, folder)
    with log.Bar("decoding", len(listed.names), 0, quiet, unit="pictures") as bar:
        images, found = pictures.decoded(listed, size, wish.strict, bar.update)
    log.tell(opening(found, side), quiet)
    stage(2)
    if before:
        plan = _again(folder, before["plan"])
    else:
        plan = planning.choose(wish, found, images, side, size)
        _save(folder, wish, plan)
    for note in (*found.notes, *plan.notes):
        log.tell(note, quiet)
    stage(3)
    while True:
        try:
            make = functools.partial(_candidate, wish, plan, found, folder, stage, quiet)
            tried = [make(alone) for alone in _both(wish)]
            best = min(tried, key=lambda one: judge.score(one.judged))
            _compare(tried, best, quiet)
            stage(5)
            if not best.config.frozen:  # the whole network has learned from all labels already
                _adopt(folder / "work" / best.name / "all", folder)
            with log.hush():
                trainer.train(best.config, folder, quiet=quiet)
            break
        except (RuntimeError, MemoryError) as error:
            if not memory.full(error):
                raise
        plan = _smaller(wish, plan, folder, quiet)  # the error, which held tensors, is gone
    stage(6)
    return outcome.write(wish, plan, folder, found, images, best, tried, quiet)


def _adopt(trained: Path, folder: Path) -> None:
    """Make a finished run the fit's own; its result comes last, whole."""
    done = "result.json"
    left = shutil.ignore_patterns(done, ".lock", "checkpoint")
    shutil.copytree(trained, folder, dirs_exist_ok=True, ignore=left)
    checkpoint.write(folder / done, (trained / done).read_bytes())


def _again(folder: Path, held: Mapping[str, Any]) -> Plan:
    try:
        return Plan(**{**held, "notes": tuple(held["notes"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"Another version planned {folder}; choose another --out.") from error


def _both(wish: Wish) -> tuple[bool, ...]:
    return (True,) if spec.parse(wish.method).name == "supervised" else (False, True)


def _stages(quiet: bool) -> Callable[[int], None]:
    """Announces a stage once."""
    told: set[int] = set()

    def stage(number: int) -> None:
        if number not in told:
            log.tell(f"{number}/{len(STAGES)} {STAGES[number - 1]}", quiet)
        told.add(number)

    return stage


def _sized(wish: Wish, found: pictures.Pictures, folder: Path) -> tuple[Wish, int, int]:
    """The size of training, the pictures' own, and with --from the network to start with."""
    size, side = pictures.fitting_size(found)
    if wish.start is None:
        pretrained = side >= planning.SMALLEST or wish.net is not None
        return wish, wish.size or (max(64, size) if pretrained else size), side
    note = read_note(wish.start / "model.json")
    gone = [name for name in note["classes"] if name not in found.classes]
    if gone:
        raise ValueError(
            f"{wish.start} also knows {', '.join(map(repr, gone[:5]))}, which no label here names; "
            f"add a few labelled pictures of it, or the new model would forget it."
        )
    target = folder / "work" / "start.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    net = started(note["net"], wish.start / "model.safetensors", target)
    return dataclasses.replace(wish, net=net), wish.size or int(note["size"]), side


def started(net: str, source: Path, target: Path) -> str:
    """The spec of a network that starts with a model's weights, copied to `target`."""
    held = {k: v for k, v in state_of(source).items() if k.startswith("net/body.")}
    if not target.exists():
        plain = {k.removeprefix("net/body."): v.contiguous() for k, v in held.items()}
        checkpoint.write(target, safetensors.torch.save(plain))
    item = spec.parse(net)
    settings = {**item.kwargs, "pretrained": str(target.resolve())}
    return spec.write(item._replace(kwargs=settings))


def _save(folder: Path, wish: Wish, plan: Plan) -> None:
    kept = {"wish": wish.dump() | {"net": None if wish.start else wish.net}}
    checkpoint.write_json(folder / "fit.json", {**kept, "plan": dataclasses.asdict(plan)})


def _smaller(wish: Wish, plan: Plan, folder: Path, quiet: bool) -> Plan:
    """After the device ran out of memory: half the batch, and what was trained is dropped."""
    if plan.batch < 2:
        raise ValueError("The device has too little memory even for one picture; use --device cpu.")
    memory.free()
    plan = dataclasses.replace(plan, batch=plan.batch // 2)
    log.tell(f"The device's memory is full; trying again with batches of {plan.batch}.", quiet)
    _save(folder, wish, plan)
    for name in ("work/both", "work/alone", "checkpoint"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("config.json", "split.json"):
        (folder / name).unlink(missing_ok=True)
    return plan


def _candidate(
    wish: Wish,
    plan: Plan,
    found: pictures.Pictures,
    folder: Path,
    stage: Callable[[int], None],
    quiet: bool,
    alone: bool,
) -> Candidate:
    """Train the network if it learns, and judge it, or heads on its features."""
    net, name = plan.net, "alone" if alone else "both"
    under = folder / "work" / name
    stage(3)
    log.tell("  on the labels alone" if alone else "  on labelled and unlabelled pictures", quiet)
    if plan.whole:
        body = plans.body(wish, plan, alone)
        if not plan.hold:
            number = judge.parted(found.known, body.split_seed)
            with log.hush():
                trainer.train(body, under / "all", quiet=quiet)
                stage(4)
                judged = judge.sisters(body, under, number, quiet=quiet)
            return Candidate(name, body, _named(judged, wish, plan, found))
        with log.hush():
            trainer.train(body, under, quiet=quiet)
        bare = read_note(under / "model.json")["net"]
        net = started(bare, under / "model.safetensors", under / "start.safetensors")
    width = nets.feature_size(nets.build(net, len(found.classes), plan.size), plan.size)
    config = plans.head(wish, plan, alone, net, width)
    frozen = features.freeze(config, prepare(config), quiet)
    stage(4)
    judged = (_holdout if plan.holdout else _crossfit)(wish, plan, found, config, frozen, quiet)
    return Candidate(name, config, judged)


def _named(judged: judge.Judged, wish: Wish, plan: Plan, found: pictures.Pictures) -> judge.Judged:
    """Rows of the dataset as rows of the pictures."""
    rows = pictures.arranged(found, 0.0, plan.most, wish.seed).train
    return judged._replace(rows=[rows[row] for row in judged.rows])


def _holdout(
    wish: Wish,
    plan: Plan,
    found: pictures.Pictures,
    config: Config,
    frozen: heads.Frozen,
    quiet: bool,
) -> judge.Judged:
    """Predictions of labels that were held out from the first picture on."""
    rows = pictures.arranged(found, plan.hold, plan.most, wish.seed).held
    if not rows:
        raise ValueError(
            f"--hold {plan.hold:g} of so few labels is none; raise it or leave it out."
        )
    cheap = config.replace(compile=False)
    parts = frozen.parts(frozen.base.split, cheap)
    trainer.learn(cheap, parts)
    pictures_, labels = parts.sets["test"]
    log_probs = evaluate.predict(
        parts.judged, parts.method, pictures_, parts.statistics, config.eval_batch
    )
    return judge.Judged(log_probs, labels, rows, 0)


def _crossfit(
    wish: Wish,
    plan: Plan,
    found: pictures.Pictures,
    config: Config,
    frozen: heads.Frozen,
    quiet: bool,
) -> judge.Judged:
    """Out-of-fold predictions of the labels that the network behind the features has not seen."""
    split, unseen = frozen.base.split, None
    if plan.whole:
        rows = pictures.arranged(found, 0.0, plan.most, wish.seed).train
        held = set(pictures.arranged(found, plan.hold, plan.most, wish.seed).held)
        unseen = {row for row in split.labelled if rows[row] in held}

    def told(number: int, log_probs: Tensor, labels: Tensor) -> None:
        log.tell(f"  part {number}: {told_so_far(log_probs, labels)}", quiet)

    judged = judge.crossfit(frozen, config, split, told, unseen)
    return _named(judged, wish, plan, found)


def _compare(tried: list[Candidate], best: Candidate, quiet: bool) -> None:
    words = {"both": "labelled and unlabelled pictures", "alone": "the labels alone"}
    for one in tried:
        wrong = float((one.judged.log_probs.argmax(1) != one.judged.labels).double().mean())
        kept = ", kept" if one is best and len(tried) > 1 else ""
        log.tell(
            f"  {words[one.name]}: {wrong:.1%} wrong, log-loss {judge.score(one.judged):.3f}{kept}",
            quiet,
        )
