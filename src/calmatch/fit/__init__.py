"""Own images, one command: read, plan, learn, evaluate out-of-fold, calibrate, say it plainly."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from calmatch import augment, console, files, methods, nets, ops, posthoc, spec
from calmatch.data.folder import ImageFolder, arrange_rows, decode_folder, fitting_size, read_folder
from calmatch.data.images import LARGEST_FILE, ImageFiles, Images, take_images
from calmatch.fit import portfolio, text
from calmatch.fit.crossval import (
    Calibration,
    HeldOut,
    calibrate,
    cautious_temperature,
    count_folds,
    cross_validate,
    freeze_vectors,
    head_weights,
    log_loss,
    train_fold_models,
)
from calmatch.fit.plan import (
    FitPlan,
    check_options,
    choose_network,
    choose_penalty,
    dataset_spec,
    is_grey,
    make_plan,
    plan_features,
    read_plan,
    whole_network_config,
)
from calmatch.model import are_tta, load_model, save_calibration, write_model
from calmatch.options import FitOptions
from calmatch.runs import (
    Predicted,
    Result,
    Run,
    load_run,
    read_result,
    sample_rows,
    write_examples,
)
from calmatch.training.config import Config, check_config
from calmatch.training.loop import train, train_in_memory
from calmatch.training.setup import describe_environment

STAGES = ("reading pictures", "planning", "learning", "evaluating", "calibrating and writing")


def fit(options: FitOptions) -> Run:
    """Train a classifier on a person's images into a folder; the same call again continues."""
    check_options(options)
    folder = options.out or Path(f"fit-{options.pictures.resolve().name}")
    if folder.resolve().is_relative_to(options.pictures.resolve()):
        raise ValueError(f"{folder} lies among the pictures; choose another --out.")
    before = _read_earlier(folder, options)
    if before and _is_finished(folder):
        console.message(f"{folder} is finished already.", options.quiet)
        return load_run(folder)
    with files.lock(folder / "work"):  # the trainer locks the folder itself
        return _fit(options, folder, before)


def _read_earlier(folder: Path, options: FitOptions) -> dict[str, Any]:
    """What an interrupted fit with the same options had decided."""
    path = folder / "fit.json"
    if not path.exists():
        if (folder / "config.json").exists():
            raise ValueError(f"{folder} holds a run that `fit` did not make; choose another --out.")
        files.refuse_foreign(folder)
        return {}
    try:
        earlier = files.read_json(path)
        held: Mapping[str, Any] = earlier["options"]
        other = [k for k, v in options.dump().items() if held.get(k) != v and k != "device"]
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged; choose another --out.") from error
    if other:
        key = "pictures" if other[0] == "pictures" else f"--{other[0]}"
        raise ValueError(
            f"{folder} was made with {key} {held.get(other[0])}; choose another --out."
        )
    return earlier


def _is_finished(folder: Path) -> bool:
    """Whether a fit is done; the trainer's own result.json is only a part of it."""
    path = folder / "result.json"
    return path.exists() and read_result(path).evaluated_on != "test"


def _fit(options: FitOptions, folder: Path, before: Mapping[str, Any]) -> Run:
    quiet = options.quiet
    _stage(1, quiet)
    listed = read_folder(options.pictures, options.labels, options.strict)
    device = ops.pick_device(options.device)
    net, ready, notes = choose_network(options, device)
    digest = _digest(listed)
    if before and before.get("digest") != digest:
        raise ValueError(
            f"The pictures or labels have changed since {folder} was begun; choose another --out."
        )
    frozen = ready if options.freeze is None else options.freeze
    work = _fit_frozen if frozen else _fit_whole
    return work(options, folder, listed, net, notes, before.get("plan"), digest)


def _looks_grey(folder: ImageFolder, sample: int = 100) -> bool:
    """Whether the images have no colour, by some of those that can be decoded."""
    names = folder.names[:: max(1, len(folder.names) // sample)]
    small, pixels = ImageFiles(folder.root, names, 32, squash=True), []
    for place in range(len(names)):
        with contextlib.suppress(ValueError):
            pixels.append(small.image(place))
    return bool(pixels) and is_grey(torch.from_numpy(np.stack(pixels)))


def _stage(number: int, quiet: bool) -> None:
    console.message(f"{number}/{len(STAGES)} {STAGES[number - 1]}", quiet)


def _digest(folder: ImageFolder) -> str:
    """Of names, sizes, labels and what is labelled: a resumed fit must not mix pictures."""
    total = hashlib.blake2b(digest_size=16)
    for name, label in zip(folder.names, folder.labels, strict=True):
        with suppress(OSError):  # it has vanished since it was listed
            data = files.read_bytes(folder.root / name, LARGEST_FILE) if label >= 0 else b""
            size = (folder.root / name).stat().st_size
            total.update(f"{name!r} {size} {label} ".encode() + hashlib.blake2b(data).digest())
    return total.hexdigest()


def _save_plan(folder: Path, options: FitOptions, plan: Any, digest: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"options": options.dump(), "plan": plan, "digest": digest}
    files.write_json(folder / "fit.json", content)


def _fit_frozen(
    options: FitOptions,
    folder: Path,
    listed: ImageFolder,
    net: str,
    notes: list[str],
    plan: Mapping[str, Any] | None,
    digest: str,
) -> Run:
    """A portfolio of classifiers on the features of a network that stays as it is."""
    quiet = options.quiet
    extractor = portfolio.load_extractor(net, options.size, ops.pick_device(options.device))
    _stage(2, quiet)
    if plan is None:
        plan = plan_features(options, extractor, len(listed.names), _looks_grey(listed))
        _save_plan(folder, options, plan, digest)
    if not are_tta(plan.get("views")) or not isinstance(plan.get("note"), str):
        raise ValueError(f"Another version planned {folder}; choose another --out.")
    extractor = extractor.showing(augment.read_tta(plan["views"]))
    source = extractor.views.source
    with console.ProgressBar("decoding", len(listed.names), 0, quiet, unit="pictures") as bar:
        images, own = decode_folder(listed, source, options.strict, bar, squash=True)
    console.message(text.describe_folder(own, fitting_size(own)[1]), quiet)
    for note in (*own.notes, *notes, plan["note"]):
        console.message(f"  {note}", quiet)
    pool = portfolio.compute_features(extractor, images, quiet)
    _stage(3, quiet)
    labels = np.array(own.labels)
    rows = _pool_rows(labels, options.seed)
    labelled = np.flatnonzero(labels[rows] >= 0)
    classes = len(own.classes)
    count_folds(labels[labels >= 0].tolist(), 0)
    embedding = portfolio.Embedding.fit(pool.some(rows))
    teachers = portfolio.Teachers(embedding.spaces(pool.some(rows)), classes)
    y = labels[rows][labelled]
    total = 1 + portfolio.FOLDS * (portfolio.REPEATS + 1) + 2 * portfolio.HALVINGS
    with console.ProgressBar("candidates", total, 0, quiet, unit="fits") as bar:
        candidates = [
            portfolio.fit_transductive(teachers, labelled, y, bar),
            portfolio.fit_logistic(pool.some(rows), labelled, y, classes, bar),
        ]
    _stage(4, quiet)
    best = portfolio.choose(candidates)
    if options.method is not None:
        best = _fit_method_head(options, teachers, labelled, y)
        candidates.append(best)
    for line in text.describe_candidates(candidates, best):
        console.message(line, quiet)
    _stage(5, quiet)
    held = HeldOut(
        torch.from_numpy(best.log_probs),
        torch.from_numpy(best.labels),
        [int(rows[k]) for k in best.rows],
        portfolio.FOLDS,
    )
    config = Config(
        dataset=dataset_spec(options, source, 0.0, extractor.mean, extractor.std),
        labels=0,
        method=options.method or "supervised",
        net=net,
        seed=options.seed,
        device=options.device,
    )
    _write_head(folder, config, extractor, embedding, best, own)
    base = Result(
        title="",
        classes=own.classes,
        metrics={},
        images={"labelled": len(own.known), "unlabelled": own.labels.count(-1)},
        notes=(*own.notes, *notes, plan["note"]),
        weights="plain",
    )
    calibration = calibrate(held, best.temperature, best.error)
    logits = _head_logits(pool, embedding, best)
    if (free := torch.from_numpy(labels < 0)).any():  # they steady what few labels promise
        probs, shown = calibration.log_probs.exp(), calibration.scaling(logits[free]).exp()
        calibration = calibration._replace(
            conformal=posthoc.semi_conformal(probs, held.labels, shown),
            selective=posthoc.few_label_promise(best.fitted, logits[free]),
        )
    scores = {one.name: float(one.losses.mean()) for one in candidates}
    note = "Each evaluated label was predicted by fold models that had not seen it."
    if best.name == "transductive":
        note = f"{note[:-1]}; the error also rests on how often models of disjoint labels agree on "
        note += "unlabelled pictures."
    return _finish(
        options, folder, own, images, base, held, calibration, best.name, scores, note, logits
    )


def _head_logits(
    pool: portfolio.Features, embedding: portfolio.Embedding, best: portfolio.Candidate
) -> Tensor:
    """What the model says of the pool, by the features that are there."""
    if best.embedded:
        inputs = portfolio.student_input(embedding.spaces(pool))
    else:
        inputs = np.mean(pool.last, 0)
    return torch.from_numpy(inputs @ best.weights[:-1] + best.weights[-1])


def _pool_rows(labels: Any, seed: int) -> Any:
    """All labelled rows and a sample of the others, in order."""
    free = np.flatnonzero(labels < 0)
    if len(free) > portfolio.MOST:
        free = np.random.default_rng(seed).choice(free, portfolio.MOST, replace=False)
    return np.sort(np.concatenate([np.flatnonzero(labels >= 0), free]))


def _fit_method_head(
    options: FitOptions, teachers: portfolio.Teachers, rows: Any, y: Any
) -> portfolio.Candidate:
    """A linear layer that learns by the method asked for, on the embedding's vectors."""
    method, steps = str(options.method), options.steps or 300
    semi = bool(methods.find(method).u_views)
    config = Config(
        method=methods.paced(method, steps),
        penalty=choose_penalty(options.penalty) if semi else "",
        steps=steps,
        batch=options.batch or 64,
        ratio=3,
        lr=3e-3,
        ema=0.9,
        seed=options.seed,
        compile=False,
        device="cpu",
    )
    check_config(config)
    labels = torch.full((len(teachers.inputs),), -1)
    labels[torch.from_numpy(rows)] = torch.from_numpy(y)
    vectors = freeze_vectors(config, torch.from_numpy(teachers.inputs), labels, teachers.classes)
    held = cross_validate(vectors, quiet=options.quiet)
    parts = vectors.parts(vectors.split)
    train_in_memory(config, parts)
    weight, bias = head_weights(parts)
    scaling = cautious_temperature(held.log_probs, held.labels, held.folds)
    error = calibrate(held).after["error"]
    return portfolio.Candidate(
        method,
        torch.cat([weight.T, bias[None]]).float().numpy(),
        True,
        held.log_probs.float().numpy(),
        held.labels.numpy(),
        np.array(held.rows),
        posthoc.FewLabelTemperature(
            float(scaling.values["temperature"]), posthoc.read_prior()["blind_sd"], len(held.labels)
        ),
        posthoc.Estimate(error.value, error.low, error.high),
    )


def _write_head(
    folder: Path,
    config: Config,
    extractor: portfolio.Extractor,
    embedding: portfolio.Embedding,
    best: portfolio.Candidate,
    own: ImageFolder,
) -> None:
    """The network with its new last layer, and what a run folder holds besides."""
    classes, net = len(own.classes), config.net
    weights = torch.from_numpy(best.weights)
    if best.embedded:
        width = embedding.components[-1]
        settings = {"on": net, "size": extractor.size, "width": width}
        net = spec.write(spec.Spec("embedded", (), settings))
        body: Any = nets.build(net, classes, extractor.size)
        _copy_weights(extractor.body, body.body)
        state = {
            "stage_mean": embedding.stage_mean,
            "stage_scale": embedding.stage_scale,
            "stage_weight": np.float32(embedding.stage_weight),
            "mean": embedding.mean,
            "axes": embedding.axes[:, :width],
            "scale": embedding.scale(width),
        }
        for name, value in state.items():
            body.get_buffer(name).copy_(torch.as_tensor(np.asarray(value)))
        last = body.head
    else:
        body = nets.build(net, classes, extractor.size)
        _copy_weights(extractor.body, body)
        last = nets.classifier(body, len(weights) - 1, classes)
    with torch.no_grad():
        last.weight.copy_(weights[:-1].T)
        last.bias.copy_(weights[-1])
    environment = describe_environment(extractor.device)
    write_model(
        folder,
        nets.Net(body, {}),
        net=net,
        method="supervised",
        classes=list(own.classes),
        size=extractor.views.source,
        squash=True,
        tta=extractor.views.views,
        mean=list(extractor.mean),
        std=list(extractor.std),
        versions=environment["versions"],
        provenance={"data": config.dataset, "labels": len(own.known), "seed": config.seed},
    )
    files.write_json(folder / "config.json", config.replace(net=net).dump())
    files.write_json(folder / "environment.json", environment)


def _copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """All but the classifier, which is for other classes."""
    own = target.state_dict()
    state = source.state_dict().items()
    target.load_state_dict({k: v for k, v in state if own[k].shape == v.shape}, strict=False)


class Trained(NamedTuple):
    """A whole network that learned in one of two ways, and what held-out labels say of it."""

    name: str
    config: Config  # of the final run
    held: HeldOut


def _fit_whole(
    options: FitOptions,
    folder: Path,
    listed: ImageFolder,
    net: str,
    notes: list[str],
    earlier: Mapping[str, Any] | None,
    digest: str,
) -> Run:
    """The whole network learns, on labelled and unlabelled images, or on the labels alone."""
    quiet = options.quiet
    options = dataclasses.replace(options, net=net)
    size, side = fitting_size(listed)
    if options.start is not None:
        options, size = _start_from(options, listed, folder)
    size = options.size or size
    with console.ProgressBar("decoding", len(listed.names), 0, quiet, unit="pictures") as bar:
        images, own = decode_folder(listed, size, options.strict, bar)
    console.message(text.describe_folder(own, side), quiet)
    _stage(2, quiet)
    if earlier:
        plan = read_plan(earlier, options, folder)
    else:
        plan = make_plan(options, own, images, size)
        plan = dataclasses.replace(plan, notes=(*notes, *plan.notes))
        _save_plan(folder, options, dataclasses.asdict(plan), digest)
    for note in (*own.notes, *plan.notes):
        console.message(f"  {note}", quiet)
    _stage(3, quiet)
    supervised = options.method is not None and spec.parse(options.method).name == "supervised"
    ways = (True,) if supervised else (False, True)
    while True:
        try:
            tried = [_train_way(options, plan, own, folder, alone) for alone in ways]
            best = min(tried, key=lambda one: log_loss(one.held))
            _stage(4, quiet)
            for one in tried:
                wrong = float((one.held.log_probs.argmax(1) != one.held.labels).double().mean())
                kept = ", kept" if one is best and len(tried) > 1 else ""
                loss = log_loss(one.held)
                line = f"  {one.name}: {wrong:.1%} wrong, log-loss {loss:.3f}{kept}"
                console.message(line, quiet)
            _adopt_run(folder / "work" / best.name / "all", folder)
            break
        except (RuntimeError, MemoryError) as error:
            if not console.is_out_of_memory(error):
                raise
        plan = _halve_batch(options, plan, folder, digest)  # the error, which held tensors, is gone
    _stage(5, quiet)
    base = load_run(folder).result
    base = dataclasses.replace(
        base,
        best_on_test=None,  # the labels that were learned from stood in for a test set
        temperature_scaled={},
        notes=(*(n for n in base.notes if not n.startswith("Weights")), *own.notes, *plan.notes),
    )
    scores = {one.name: log_loss(one.held) for one in tried}
    note = "Each evaluated label was predicted by a fold model that had not seen it."
    if not best.held.crossfit:
        note = "The evaluated labels were held out: the model has not seen them."
    calibration = calibrate(best.held)
    return _finish(
        options, folder, own, images, base, best.held, calibration, best.name, scores, note
    )


def _start_from(options: FitOptions, listed: ImageFolder, folder: Path) -> tuple[FitOptions, int]:
    """With --from: the network that starts with a model's weights, and its size."""
    assert options.start is not None
    model = load_model(options.start, trust=options.trust)
    gone = [name for name in model.classes if name not in listed.classes]
    if gone:
        raise ValueError(
            f"{options.start} also knows {', '.join(map(repr, gone[:5]))}, which no label here "
            f"names; add a few labelled pictures of it, or the new model would forget it."
        )
    target = folder / "work" / "start.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    state = {k: v.contiguous() for k, v in model.network.net.body.state_dict().items()}
    files.write(target, safetensors.torch.save(state))
    item = spec.parse(model.note["net"])
    settings = {k: v for k, v in item.kwargs.items() if k != "pretrained"}
    net = spec.write(item._replace(kwargs={**settings, "pretrained": str(target.resolve())}))
    return dataclasses.replace(options, net=net), model.size


def _train_way(
    options: FitOptions, plan: FitPlan, own: ImageFolder, folder: Path, alone: bool
) -> Trained:
    """Train the network on all labels (or all but those held out), and evaluate it."""
    name, quiet = "labels-alone" if alone else "all-pictures", options.quiet
    under, config = folder / "work" / name, whole_network_config(options, plan, alone)
    console.message(f"  {name}", quiet)
    rows = arrange_rows(own, plan.hold, plan.most, options.seed)
    with console.silence():
        run = train(config, under / "all", quiet=quiet)
        if plan.hold:
            log_probs, labels = run.predictions()
            return Trained(name, config, HeldOut(log_probs, labels, rows.held, 0))
        number = count_folds(own.known, config.split_seed)
        held = train_fold_models(config, under, number, quiet=quiet)
    return Trained(name, config, held._replace(rows=[rows.train[row] for row in held.rows]))


def _adopt_run(trained: Path, folder: Path) -> None:
    """Make a finished run the fit's own; its result comes last, whole."""
    done = "result.json"
    left = shutil.ignore_patterns(done, ".lock", "checkpoint")
    shutil.copytree(trained, folder, dirs_exist_ok=True, ignore=left)
    files.write(folder / done, files.read_bytes(trained / done))


def _halve_batch(options: FitOptions, plan: FitPlan, folder: Path, digest: str) -> FitPlan:
    """After the device ran out of memory: half the batch, and what was trained is dropped."""
    if plan.batch < 2:
        raise ValueError("The device has too little memory even for one picture; use --device cpu.")
    console.free_device_memory()
    plan = dataclasses.replace(plan, batch=plan.batch // 2)
    console.message(
        f"The device's memory is full; trying again with batches of {plan.batch}.", options.quiet
    )
    _save_plan(folder, options, dataclasses.asdict(plan), digest)
    for name in ("work/all-pictures", "work/labels-alone"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return plan


def _finish(
    options: FitOptions,
    folder: Path,
    own: ImageFolder,
    images: Images,
    base: Result,
    held: HeldOut,
    calibration: Calibration,
    kept: str,
    scores: Mapping[str, float],
    note: str,
    logits: Tensor | None = None,  # of all images, where they are known
) -> Run:
    """Calibrate, and write everything that outlives the fit; result.json says that it is done."""
    save_calibration(
        folder,
        calibration.scaling,
        calibration.conformal,
        calibration.selective,
        {"command": _command(options), "learned_by": kept},
    )
    names = [own.names[row] for row in held.rows]
    files.write_npz(
        folder / "predictions.npz",
        log_probs=calibration.log_probs.numpy(),
        raw_log_probs=held.log_probs.numpy(),
        labels=held.labels.numpy(),
        files=np.array(names),
    )
    asked = _predict_unlabelled(folder, images, own, options, logits)
    rows = torch.tensor(held.rows)
    evaluated = Predicted(
        calibration.log_probs, lambda some: take_images(images, rows[some]), files=names
    )
    write_examples(folder, evaluated, held.labels, asked)
    result = dataclasses.replace(
        base,
        title=f"{len(own.classes)} classes from {len(own.known)} labels: "
        f"{options.pictures.resolve().name}",
        metrics={**calibration.after, **{k: v for k, v in base.metrics.items() if k == "agree"}},
        before_calibration={k: v.value for k, v in calibration.before.items()},
        calibration=calibration.scaling.dump(),
        interval="95 %; of all but the error by bootstrap over held-out labels",
        evaluated_on="crossfit" if held.crossfit else "holdout",
        evaluation_note=note,
        kept=kept,
        scores=scores,
        skipped=tuple(tuple(item) for item in own.skipped),
        images={**base.images, "test": len(held.labels)},
        commands=(_command(options),),
    )
    files.write_json(folder / "result.json", result.dump())
    run = load_run(folder)
    if not options.quiet:
        print(console.visible(text.describe_result(run, held, calibration, own, asked)))
    return run


def _command(options: FitOptions) -> str:
    """The command line that repeats the fit."""
    words = ["calmatch", "fit", str(options.pictures)]
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        if item.name in ("pictures", "out", "quiet") or value == item.default:
            continue
        name = "from" if item.name == "start" else item.name.replace("_", "-")
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join([*words, "--out", "NEW_FOLDER"])


def _predict_unlabelled(
    folder: Path, images: Images, own: ImageFolder, options: FitOptions, logits: Tensor | None
) -> Predicted | None:
    """Calibrated predictions of unlabelled images (a sample of many), kept with their names."""
    free = torch.tensor([k for k, label in enumerate(own.labels) if label < 0], dtype=torch.long)
    if not len(free):
        return None
    rows = sample_rows(free, options.seed)
    model = load_model(folder)
    if logits is None:
        parts = []
        with console.ProgressBar("predicting", len(rows), 0, options.quiet, unit="pictures") as bar:
            for some in rows.split(128):
                parts.append(model.logits(take_images(images, some)))
                bar.advance(len(some))
        logits = torch.cat(parts)
    else:
        logits = logits[rows]
    joined = model.calibration(logits).float()
    names = [own.names[row] for row in rows.tolist()]
    files.write_npz(folder / "unlabelled.npz", log_probs=joined.numpy(), files=np.array(names))
    return Predicted(
        joined,
        lambda ids: take_images(images, rows[ids]),
        rows=rows,
        files=names,
        whole=len(free),
    )
