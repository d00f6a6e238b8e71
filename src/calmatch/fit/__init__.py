"""Own images, one command: read, plan, learn, evaluate out-of-fold, calibrate, say it plainly."""

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calmatch import augment, console, files, nets, ops, posthoc, runs
from calmatch.data import folder as listing
from calmatch.data.images import LARGEST_FILE, ImageFiles, take_images, valid_text
from calmatch.fit import ask, crossval, features, plan, portfolio, text
from calmatch.fit.whole import Refinement, can_refine, fit_whole, start_from
from calmatch.model import are_tta, load_model, save_calibration, write_model
from calmatch.options import FitOptions
from calmatch.predict import join_ray
from calmatch.training.config import Config
from calmatch.training.setup import describe_environment

DARK = 32  # of 255: if no pixel is brighter, the pictures were read on a wrong scale


def fit(options: FitOptions, began: float | None = None) -> runs.Run:
    """Train a classifier on a person's images into a folder; the same call again continues.

    `began` is when its minutes begin, by time.monotonic; by default now.
    """
    began = time.monotonic() if began is None else began
    plan.check_options(options)
    folder = options.out or Path(f"fit-{options.pictures.resolve().name}")
    if folder.resolve().is_relative_to(options.pictures.resolve()):
        raise ValueError(f"{folder} lies among the pictures; choose another --out.")
    before = _read_earlier(folder, options)
    with files.lock(folder / "work"):  # the trainer locks the folder itself
        return _fit(options, folder, before, began)


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
        odd = [k for k, v in options.dump().items() if held.get(k) != v and k != "device"]
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged; choose another --out.") from error
    if odd:
        key, value = _option(odd[0]), held.get(odd[0])
        how = f"with {key}" if value is True else f"with {key} {value}"
        how = f"without {key}" if value in (None, False) else how
        raise ValueError(f"{folder} was made {how}; choose another --out.")
    return earlier


def _fit(options: FitOptions, folder: Path, before: Mapping[str, Any], began: float) -> runs.Run:
    text.show_stage(1, options.quiet)
    listed = listing.read_folder(options.pictures, options.labels, options.strict)
    digest = _digest(listed)
    if before and before.get("digest") != digest:
        raise ValueError(
            f"The pictures or labels have changed since {folder} was begun; choose another --out."
        )
    done = folder / "result.json"  # the trainer's own is only a part of a fit
    if before and done.exists() and runs.read_result(done).evaluated_on != "test":
        console.message(f"{folder} is finished already.", options.quiet)
        return runs.load_run(folder)
    frozen, notes = options.freeze, list[str]()
    if options.start is not None:
        asked, ready = start_from(options, listed, folder)
    else:
        net, ready, notes = plan.choose_network(options, ops.pick_device(options.device))
        asked = dataclasses.replace(options, net=net)
    frozen = ready if frozen is None else frozen
    plan.refuse_idle_options(options, frozen)
    earlier = before.get("plan")
    job = plan.FitJob(options, folder, listed, str(asked.net), tuple(notes), earlier, digest, began)
    outcome = fit_frozen(job, asked.size) if frozen else fit_whole(job, asked.size)
    return _finish(job, outcome)


def _digest(folder: listing.ImageFolder) -> str:
    """Of names, sizes, labels and what is labelled: a resumed fit must not mix pictures."""
    total = hashlib.blake2b(digest_size=16)
    for name, label in zip(folder.names, folder.labels, strict=True):
        with suppress(OSError):  # it has vanished since it was listed
            data = files.read_bytes(folder.root / name, LARGEST_FILE) if label >= 0 else b""
            size = (folder.root / name).stat().st_size
            total.update(f"{name!r} {size} {label} ".encode() + hashlib.blake2b(data).digest())
    return total.hexdigest()


def fit_frozen(job: plan.FitJob, size: int | None) -> crossval.Outcome:
    """A portfolio of classifiers on the features of a network that stays as it is."""
    options, quiet = job.options, job.options.quiet
    extractor = portfolio.load_extractor(job.net, size, ops.pick_device(options.device))
    text.show_stage(2, quiet)
    with join_ray(options.address) if options.engine == "ray" else nullcontext() as ray:
        extractor, images, own, pool, notes = _see_images(job, extractor, ray)
    labels, classes = np.array(own.labels), len(own.classes)
    rows = _pool_rows(labels, len(own.known) + portfolio.MOST, options.seed)
    labelled = np.flatnonzero(labels[rows] >= 0)
    y, seen = labels[rows][labelled], pool.some(rows)
    with console.ProgressBar("candidates", portfolio.FITS, 0, quiet, unit="fits") as bar:
        embedding = portfolio.Embedding.fit(seen, portfolio.components_of(classes))
        bar.advance(1)
        teachers = portfolio.Teachers(embedding.spaces(seen), classes)
        bar.advance(1)
        parts = portfolio.parts_agreement(seen, labelled, y, classes, bar)
        candidates = [
            portfolio.fit_transductive(teachers, labelled, y, bar, parts),
            portfolio.fit_logistic(seen, labelled, y, classes, bar),
        ]
    if options.method is not None:
        candidates.append(_fit_method_head(options, seen, labelled, y, candidates[0]))
    student, refinement = candidates[0], None
    if can_refine(job, extractor.device, len(labelled)):
        some: Any = images.some(rows)
        refinement = Refinement(job, extractor, embedding, teachers, some, labelled, y, student)
        line = "  The whole network does not fit into the device's memory."
        if (refined := console.unless_out_of_memory(refinement.candidate, line)) is not None:
            candidates.append(refined)
    text.show_stage(4, quiet)
    best = portfolio.choose(candidates) if options.method is None else candidates[-1]
    console.message(text.describe_candidates(candidates, best), quiet)
    text.show_stage(5, quiet)
    known = torch.from_numpy(best.log_probs), torch.from_numpy(best.labels)
    held = crossval.HeldOut(*known, rows[best.rows].tolist(), portfolio.FOLDS)
    _write_head(job, extractor, embedding, best, own)
    numbers = {"labelled": len(own.known), "unlabelled": own.labels.count(-1)}
    base = runs.Result("", own.classes, {}, images=numbers, notes=(*own.notes, *notes))
    calibration = crossval.calibrate(held, best.fitted.temperature, best.error)
    if best.network is not None and refinement is not None:
        logits = torch.from_numpy(refinement.predict(best.network, images))
    else:
        logits = _head_logits(pool, embedding, best)
    if (free := torch.from_numpy(labels < 0)).any():  # they steady what few labels promise
        probs, shown = calibration.log_probs.exp(), calibration.scaling(logits[free]).exp()
        sets = posthoc.semi_conformal(probs, held.labels, shown)
        sure = posthoc.few_label_promise(best.fitted, logits[free])
        calibration = calibration._replace(conformal=sets, selective=sure)
    if lone := int((np.bincount(y, minlength=classes) < 2).sum()):  # classes nothing evaluates
        sure = calibration.selective
        sure = sure._replace(threshold=None, coverage=0.0, bound=0.0, missing=lone)
        calibration = calibration._replace(selective=sure)
    scores = {one.name: float(one.losses.mean()) for one in candidates}
    note = "Each evaluated label was predicted by models that had not seen it."
    if best.signs:
        note = f"{note[:-1]}; the error also rests on how often models of disjoint labels agree on "
        note += "unlabelled pictures."
    chances = portfolio.softmax(logits.numpy()[rows])
    teaching = ask.ask(teachers.spaces, labelled, chances, runs.ASKED, seed=options.seed)
    return crossval.Outcome(
        own, images, base, held, calibration, best.name, scores, note, logits, rows[teaching]
    )


def _see_images(job: plan.FitJob, extractor: portfolio.Extractor, ray: Any) -> tuple[Any, ...]:
    """The plan's views; images and folder without broken files; features; what to say of it."""
    options, listed, settled, quiet = job.options, job.listed, job.earlier, job.options.quiet
    if settled is None:
        crossval.count_folds(listed.known, 0)  # before anything is kept
        names = listed.names[:: max(1, len(listed.names) // 100)]
        some = plan.decode_some(listed.root, names, 32)
        grey = bool(some) and plan.is_grey(torch.from_numpy(np.stack(some)))
        settled = plan.plan_features(job, extractor, grey, ray)
        if some and (brightest := max(int(pixels.max()) for pixels in some)) < DARK:
            settled["note"] += (
                f" They are almost black, {brightest} of 255 at most: pictures of 12 "
            )
            settled["note"] += "bits, perhaps? Convert them to 8 bits."
    known = are_tta(settled.get("views")) and isinstance(settled.get("note"), str)
    net = settled.get("net")
    if not known or net not in (job.net, plan.ONE) or type(settled.get("images")) is not int:
        raise ValueError(f"Another version planned {job.folder}; choose another --out.")
    if net == plan.ONE != job.net:
        extractor = portfolio.load_extractor(net, options.size, extractor.device)
    notes = (*job.notes, settled["note"])
    own = listed.some(_pool_rows(np.array(listed.labels), settled["images"], options.seed))
    extractor = extractor.showing([augment.View(*view) for view in settled["views"]])
    console.message((f"  {note}" for note in notes), quiet)
    source, images = extractor.views.source, None
    if ray is None and 3 * source**2 * len(own.names) <= listing.LARGEST:
        with console.ProgressBar("decoding", len(own.names), 0, quiet, unit="pictures") as bar:
            images, own = listing.decode_folder(own, source, options.strict, bar, squash=True)
    listing.refuse_unseen_classes(own)
    job.save(settled)  # not before: who mends a picture that was refused begins anew
    console.message(text.describe_folder(own, listing.fitting_size(own)[1]), quiet)
    console.message((f"  {note}" for note in own.notes), quiet)
    text.show_stage(3, quiet)
    crossval.count_folds(own.known, 0)
    if images is not None:
        return extractor, images, own, features.compute_blocks(extractor, images, quiet), notes
    files_own = ImageFiles(own.root, own.names, source, True)
    pool = features.compute_blocks(extractor, files_own, quiet, ray)
    images, own = listing.leave_out_broken(files_own, own, pool.rows.tolist(), options.strict)
    listing.refuse_unseen_classes(own)
    console.message(text.describe_skipped(own), quiet)
    return extractor, images, own, pool, notes


def _head_logits(
    pool: features.FeatureBlocks, embedding: portfolio.Embedding, best: portfolio.Candidate
) -> Tensor:
    """What the model says of the pool, by the features that are there."""
    logits = []
    for start in range(0, len(pool.rows), features.BLOCK):
        part = pool.some(slice(start, start + features.BLOCK))
        last = np.mean(part.last, 0)
        inputs = portfolio.student_input(embedding.spaces(part)) if best.embedded else last
        logits.append(inputs @ best.weights[:-1] + best.weights[-1])
    return torch.from_numpy(np.concatenate(logits))


def _pool_rows(labels: Any, most: int, seed: int) -> Any:
    """All labelled rows and a sample of the others, so many at most, in order."""
    known, free = np.flatnonzero(labels >= 0), np.flatnonzero(labels < 0)
    if len(labels) > most:
        free = np.random.default_rng(seed).choice(free, max(0, most - len(known)), replace=False)
    return np.sort(np.concatenate([known, free]))


def _fit_method_head(
    options: FitOptions, seen: portfolio.Features, rows: Any, y: Any, student: portfolio.Candidate
) -> portfolio.Candidate:
    """A linear layer that learns by the method asked for; whitened, few labels would mislead it.

    How right it is the labels say, and what unlabelled images say of the student: on the zoo that
    is nearer than the labels alone.
    """
    plain = np.mean(seen.last, 0)
    x = torch.from_numpy(plain)
    labels = torch.full((len(x),), -1)
    labels[torch.from_numpy(rows)] = torch.from_numpy(y)
    asked = (str(options.method), options.penalty, options.steps, options.seed)
    config = crossval.head_config(*asked, x.shape[1], options.batch or 64)
    vectors = crossval.freeze_vectors(config, x, labels, student.log_probs.shape[1])
    held = crossval.cross_validate(vectors, quiet=options.quiet)
    weight, bias = vectors.train()
    weights = torch.cat([weight.T, bias[None]]).float().numpy()
    free = np.setdiff1d(np.arange(len(x)), rows)
    pool = portfolio.softmax(plain[free] @ weights[:-1] + weights[-1]) if len(free) else None
    probs, place = held.log_probs.exp().float().numpy(), np.searchsorted(rows, held.rows)
    facts = (probs, place, rows, y, pool, student.signs)
    return portfolio.evaluated(str(options.method), weights, False, *facts)


def _write_head(
    job: plan.FitJob,
    extractor: portfolio.Extractor,
    embedding: portfolio.Embedding,
    best: portfolio.Candidate,
    own: listing.ImageFolder,
) -> None:
    """The network with its new last layer, and what a run folder holds besides."""
    folder, seed, size = job.folder, job.options.seed, extractor.views.source
    parts = (best.weights, best.embedded, len(own.classes))
    net, body = portfolio.join_head(extractor, embedding, *parts)
    data = plan.dataset_spec(job.options, size, 0.0, extractor.mean, extractor.std)
    config = Config(data, labels=0, net=net, seed=seed, device=job.options.device)
    config = config.replace(method=job.options.method or "supervised")
    environment = describe_environment(extractor.device)
    entries: dict[str, Any] = {"net": net, "method": "supervised", "classes": list(own.classes)}
    entries |= {"size": size, "squash": True, "tta": extractor.views.views}
    entries |= {"mean": list(extractor.mean), "std": list(extractor.std)}
    entries |= {"versions": environment["versions"]}
    entries["provenance"] = {"data": data, "labels": len(own.known), "seed": seed}
    write_model(folder, nets.Net(body if best.network is None else best.network, {}), **entries)
    files.write_json(folder / "config.json", config.dump())
    files.write_json(folder / "environment.json", environment)


def _finish(job: plan.FitJob, outcome: crossval.Outcome) -> runs.Run:
    """Calibrate, and write everything that outlives the fit; result.json says that it is done."""
    options, folder = job.options, job.folder
    own, base, held, calibration = outcome.own, outcome.base, outcome.held, outcome.calibration
    command = _command(options, files.read_json(folder / "fit.json")["plan"])
    origin = {"command": command, "learned_by": outcome.kept}
    save_calibration(folder, *calibration[:3], origin)
    names = [own.names[row] for row in held.rows]
    kept = {"log_probs": calibration.log_probs, "raw_log_probs": held.log_probs}
    arrays = {name: part.numpy() for name, part in {**kept, "labels": held.labels}.items()}
    known = {n for n, label in zip(own.names, own.labels, strict=True) if label >= 0}
    learned = np.array(sorted(known if held.folds else known - {*names}))
    files.write_npz(folder / "predictions.npz", **arrays, files=np.array(names), learned=learned)
    asked = _predict_unlabelled(job, outcome)
    rows = torch.tensor(held.rows)
    evaluated = runs.Predicted(
        calibration.log_probs, lambda some: take_images(outcome.images, rows[some]), files=names
    )
    runs.write_examples(folder, evaluated, held.labels, asked)
    result = dataclasses.replace(
        base,
        title=f"{len(own.classes)} classes from {len(own.known)} labels: "
        f"{options.pictures.resolve().name}",
        metrics={**calibration.after, **{k: v for k, v in base.metrics.items() if k == "agree"}},
        before_calibration={k: v.value for k, v in calibration.before.items()},
        calibration=calibration.scaling.dump(),
        interval="95 %; of all but the error by bootstrap over held-out labels",
        evaluated_on="crossfit" if held.folds else "holdout",
        evaluation_note=outcome.note,
        kept=outcome.kept,
        scores=outcome.scores,
        skipped=tuple((valid_text(file), valid_text(why)) for file, why in own.skipped),
        images={**base.images, "test": len(held.labels)},
        commands=(command,),
    )
    files.write_json(folder / "result.json", result.dump())
    run = runs.load_run(folder)
    if not options.quiet:
        print(console.visible(text.describe_result(run, held, calibration, own, asked)))
    return run


def _command(options: FitOptions, settled: Mapping[str, Any]) -> str:
    """The command line that repeats the fit, with what was planned by measuring."""
    kept = ("net", "size", "batch") if options.start is None else ("size", "batch")
    exact = {k: settled[k] for k in kept if k in settled}
    if views := settled.get("views"):
        exact |= {"size": views[0][0], "tta": len(views)}
    elif settled.get("steps") == settled.get("alone_steps"):
        exact["steps"] = settled["steps"]
    options = dataclasses.replace(options, **exact)
    words = ["calmatch", "fit", str(options.pictures)]
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        if item.name in ("pictures", "out", "quiet") or value == item.default:
            continue
        words += [_option(item.name)] if value is True else [_option(item.name), str(value)]
    return runs.command_line(*words, "--out", "NEW_FOLDER")


def _option(field: str) -> str:
    """As it is typed."""
    names = {"pictures": "pictures", "start": "--from"}
    return names.get(field, f"--{field.replace('_', '-')}")


def _predict_unlabelled(job: plan.FitJob, outcome: crossval.Outcome) -> runs.Predicted | None:
    """Calibrated predictions of unlabelled images (a sample of many), kept with their names."""
    options, own, images, logits = job.options, outcome.own, outcome.images, outcome.logits
    free = torch.tensor([k for k, label in enumerate(own.labels) if label < 0], dtype=torch.long)
    if not len(free):
        return None
    best = torch.as_tensor(outcome.teaching, dtype=torch.long)
    rows = torch.cat([runs.sample_rows(free, options.seed), best]).unique()  # in order
    model, parts = load_model(job.folder), [] if logits is None else [logits[rows]]
    if logits is None:
        with console.ProgressBar("predicting", len(rows), 0, options.quiet, unit="pictures") as bar:
            for some in rows.split(128):
                parts.append(model.logits(take_images(images, some)))
                bar.advance(len(some))
    joined = model.calibration(torch.cat(parts)).float()
    names = [own.names[row] for row in rows.tolist()]
    files.write_npz(job.folder / "unlabelled.npz", log_probs=joined.numpy(), files=np.array(names))
    taught = torch.searchsorted(rows, best) if len(best) else None
    shown = (joined, lambda ids: take_images(images, rows[ids]), rows, names, len(free), taught)
    return runs.Predicted(*shown)
