"""All layers learn: by a method from pictures, or after the student, as one more candidate."""

import copy
import dataclasses
import functools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from calmatch import augment, console, files, nets, ops, spec
from calmatch.data.folder import ImageFolder, arrange_rows, decode_folder, fitting_size
from calmatch.data.images import Images, take_images
from calmatch.fit import crossval, portfolio, text
from calmatch.fit.plan import (
    FitJob,
    FitPlan,
    choose_views,
    is_grey,
    make_plan,
    network_config,
    read_plan,
)
from calmatch.model import load_model
from calmatch.options import FitOptions
from calmatch.runs import load_run
from calmatch.training.checkpoint import copy_to_host, read_checkpoint, write_checkpoint
from calmatch.training.loop import train

REFINE_FROM = 100  # labels; from fewer nothing could tell that a refined network is better
FEW_STEPS, MOST_STEPS = 60, 200  # of one refinement
LABELLED, UNLABELLED = 32, 64  # images a step
RESIDENT = 4 * 2**30  # bytes of images that a GPU holds
BODY_RATE, HEAD_RATE, MOMENTUM = 2e-4, 1e-3, 0.98
State = dict[str, Tensor]


def fit_whole(job: FitJob, size: int | None) -> crossval.Outcome:
    """The whole network learns, on labelled and unlabelled images, or on the labels alone."""
    options, folder, listed = job.options, job.folder, job.listed
    quiet, options = options.quiet, dataclasses.replace(options, net=job.net)
    fitting, side = fitting_size(listed)
    size = size or fitting
    with console.ProgressBar("decoding", len(listed.names), 0, quiet, unit="pictures") as bar:
        images, own = decode_folder(listed, size, options.strict, bar)
    console.message(text.describe_folder(own, side), quiet)
    if not options.hold:
        crossval.count_folds(own.known, 0)  # before anything is trained
    text.show_stage(2, quiet)
    if job.earlier:
        plan = read_plan(job.earlier, options, folder)
    else:
        plan = make_plan(options, own, images, size, job.seconds_left())
        plan = dataclasses.replace(plan, notes=(*job.notes, *plan.notes))
        job.save(dataclasses.asdict(plan))
    console.message((f"  {note}" for note in (*own.notes, *plan.notes)), quiet)
    text.show_stage(3, quiet)
    supervised = options.method is not None and spec.parse(options.method).name == "supervised"
    ways = {"labels-alone": True} if supervised else {"all-pictures": False, "labels-alone": True}

    def train_ways() -> dict[str, crossval.HeldOut]:
        return {k: _train_way(options, plan, own, folder, k, v) for k, v in ways.items()}

    while (tried := console.unless_out_of_memory(train_ways)) is None:
        plan = _halve_batch(job, plan)
    scores = {name: crossval.log_loss(held) for name, held in tried.items()}
    best = min(tried, key=scores.__getitem__)
    text.show_stage(4, quiet)
    for name, held in tried.items():
        wrong = float((held.log_probs.argmax(1) != held.labels).double().mean())
        kept = ", kept" if name == best and len(tried) > 1 else ""
        console.message(f"  {name}: {wrong:.1%} wrong, log-loss {scores[name]:.3f}{kept}", quiet)
    text.show_stage(5, quiet)
    trained = folder / "work" / best / "all"
    ignored = shutil.ignore_patterns("result.json", ".lock", "checkpoint")
    shutil.copytree(trained, folder, dirs_exist_ok=True, ignore=ignored)
    files.write(folder / "result.json", files.read_bytes(trained / "result.json"))  # comes last
    base = load_run(folder).result
    notes = (*(n for n in base.notes if not n.startswith("Weights")), *own.notes, *plan.notes)
    # the labels that were learned from stood in for a test set
    base = dataclasses.replace(base, best_on_test=None, temperature_scaled={}, notes=notes)
    held = tried[best]
    note = "Each evaluated label was predicted by a fold model that had not seen it."
    if not held.folds:
        note = "The evaluated labels were held out: the model has not seen them."
    return crossval.Outcome(own, images, base, held, crossval.calibrate(held), best, scores, note)


def start_from(options: FitOptions, listed: ImageFolder, folder: Path) -> tuple[FitOptions, bool]:
    """With --from: the network that starts with a model's weights, and whether it stays frozen.

    A model that `fit` made on a frozen network goes on with that network's own weights.
    """
    assert options.start is not None
    model = load_model(options.start, trust=options.trust)
    gone = [name for name in model.classes if name not in listed.classes]
    if gone:
        raise ValueError(
            f"{options.start} also knows {', '.join(map(repr, gone[:5]))}, which no label here "
            f"names; add a few labelled pictures of it, or the new model would forget it."
        )
    target = folder / "work" / "start.safetensors"
    item = spec.parse(model.note["net"])
    body: Any = model.network.net.body
    joined, size = item.name == "embedded", model.size
    frozen = (joined or model.squash) and options.freeze is not False
    if frozen and joined:
        size, item = item.kwargs.get("size", 224), spec.parse(item.kwargs["on"])
        body = body.body
    elif frozen:
        size = model.network.views.views[0].size
    write_checkpoint(target, copy_to_host(body.state_dict()), {})
    settings = {k: v for k, v in item.kwargs.items() if k != "pretrained"}
    net = spec.write(item._replace(kwargs={**settings, "pretrained": str(target.resolve())}))
    return dataclasses.replace(options, net=net, size=options.size or size), frozen


def _train_way(
    options: FitOptions, plan: FitPlan, own: ImageFolder, folder: Path, name: str, alone: bool
) -> crossval.HeldOut:
    """Train the network on all labels (or all but those held out), and evaluate it."""
    under, quiet = folder / "work" / name, options.quiet
    config = network_config(options, plan, alone)
    console.message(f"  {name}", quiet)
    learned, kept = arrange_rows(own, plan.hold, plan.most, options.seed)
    with console.silence():
        run = train(config, under / "all", quiet=quiet)
        if plan.hold:
            log_probs, labels = run.predictions()
            return crossval.HeldOut(log_probs, labels, kept, 0)
        number = crossval.count_folds(own.known, config.split_seed)
        held = crossval.train_fold_models(config, under, number, quiet=quiet)
    return held._replace(rows=[learned[row] for row in held.rows])


def _halve_batch(job: FitJob, plan: FitPlan) -> FitPlan:
    """After the device ran out of memory: half the batch, and what was trained is dropped."""
    if plan.batch < 2:
        raise ValueError("The device has too little memory even for one picture; use --device cpu.")
    plan = dataclasses.replace(plan, batch=plan.batch // 2)
    line = f"The device's memory is full; trying again with batches of {plan.batch}."
    console.message(line, job.options.quiet)
    job.save(dataclasses.asdict(plan))
    for name in ("work/all-pictures", "work/labels-alone"):
        shutil.rmtree(job.folder / name, ignore_errors=True)
    return plan


def can_refine(job: FitJob, device: torch.device, labels: int) -> bool:
    """Whether the whole network is tried after the student: only a GPU is quick enough."""
    free = job.options.freeze is None and job.options.method is None
    return device.type == "cuda" and free and labels >= REFINE_FROM


@dataclasses.dataclass
class Refinement:
    """Fine-tuning from the student's head: its predictions of unlabelled images are the targets.

    BatchNorm keeps its statistics: with a batch's own the head would see other features than it
    was made for. Every fold starts from a student that did not see that fold's labels either.
    """

    job: FitJob
    extractor: portfolio.Extractor
    embedding: portfolio.Embedding
    teachers: portfolio.Teachers
    images: Images  # those that the teachers saw
    labelled: Any  # [n] their rows
    labels: Any  # [n]
    student: portfolio.Candidate
    steps: int = 0  # 0: as many as time allows

    def candidate(self) -> portfolio.Candidate | None:
        """The refined network, evaluated by folds; None where time is too short."""
        if math.prod(self.images.shape) <= RESIDENT and self.extractor.device.type == "cuda":
            self.images = take_images(self.images, torch.arange(len(self.images))).cuda()
        steps = self.steps or self._affordable_steps()
        if steps < min(FEW_STEPS, self.steps or FEW_STEPS):
            return None
        probs, places, quiet = [], [], self.job.options.quiet
        total = (portfolio.FOLDS + 1) * steps
        with console.ProgressBar("whole network", total, 0, quiet) as bar:
            for number, (out, rest) in enumerate(portfolio.folds_of(self.labels, 0)):
                if len(out):
                    fold = functools.partial(self._predict_fold, out, rest, steps, bar)
                    probs.append(self._once(f"fold{number}", fold)["probs"].numpy())
                    places.append(out)
                    bar.update(len(places) * steps)
            weights, network = self.student.weights, self._network(self.student.weights)
            whole = functools.partial(self._train, network, weights, self.labels, steps, bar)
            network.load_state_dict(self._once("all", whole))
        logits = self.predict(network, self.images)
        free = np.setdiff1d(np.arange(len(self.images)), self.labelled)
        pool = portfolio.softmax(logits[free]) if len(free) else None
        held = (np.concatenate(probs), np.concatenate(places), self.labelled, self.labels)
        facts = (weights, True, *held, pool, self.student.signs)
        evaluated = portfolio.evaluated("whole network", *facts)
        return evaluated._replace(network=network)

    def _affordable_steps(self) -> int:
        """By the time of a few steps; half of what is left is for everything else."""
        weights = self.student.weights
        facts = (self._network(weights), weights, self.labels)
        self._train(*facts, 2, None)  # the first time is slower
        seconds = portfolio.time_call(lambda: self._train(*facts, 6, None)) / 6
        steps = 0.5 * self.job.seconds_left() / (portfolio.FOLDS + 1) / seconds
        return int(min(MOST_STEPS, steps))

    def _once(self, name: str, compute: Callable[[], State]) -> State:
        """What it computes; from its file where an interrupted fit has done so."""
        path = self.job.folder / "work" / "refined" / f"{name}.safetensors"
        if not path.exists():
            write_checkpoint(path, copy_to_host(compute()), {})
        return read_checkpoint(path)[0]

    def _predict_fold(self, out: Any, rest: Any, steps: int, bar: Any) -> State:
        weights = self.teachers.student(self.labelled[rest], self.labels[rest])
        network = self._network(weights)
        self._train(network, weights, np.where(rest, self.labels, -1), steps, bar)
        logits = self.predict(network, self._some(self.labelled[out]))
        return {"probs": torch.from_numpy(portfolio.softmax(logits))}

    def _network(self, weights: Any) -> nn.Module:
        classes = self.teachers.classes
        _, network = portfolio.join_head(self.extractor, self.embedding, weights, True, classes)
        place: Any = {"device": self.extractor.device, "memory_format": torch.channels_last}
        return network.to(**place).eval()

    def _train(self, network: Any, weights: Any, known: Any, steps: int, bar: Any) -> State:
        """AdamW on labels and on the student's predictions; averaged weights are left in it."""
        device, inputs = self.extractor.device, self.teachers.inputs
        logits = inputs @ weights[:-1] + weights[-1]
        targets = portfolio.softmax(logits / self.student.fitted.temperature)
        own, y = self.labelled[known >= 0], known[known >= 0]
        targets[own] = np.eye(targets.shape[1], dtype=np.float32)[y]
        free = np.setdiff1d(np.arange(len(inputs)), own)
        random = np.random.default_rng(self.job.options.seed)
        chance = Generator(device).manual_seed(self.job.options.seed)
        kind = (self.extractor.views.views[0].size, is_grey(self.images))
        views = [*map(augment.pipeline, choose_views(self.job.options, *kind)[:2])]
        network.requires_grad_(True)
        groups = [{"params": part.parameters()} for part in (network.body, network.head)]
        optimizer = torch.optim.AdamW(groups, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [BODY_RATE, HEAD_RATE], total_steps=steps + 1, pct_start=0.1
        )
        average = copy.deepcopy(network).requires_grad_(False)
        for _ in range(steps):
            rows = [random.choice(own, min(LABELLED, len(own)), replace=False)]
            if len(free):
                rows.append(random.choice(free, min(UNLABELLED, len(free)), replace=False))
            shown = zip(views, rows, strict=False)  # there may be no unlabelled ones
            pixels = torch.cat([view(self._pixels(some), chance) for view, some in shown])
            target = torch.from_numpy(targets[np.concatenate(rows)]).to(device)
            weight = torch.cat([torch.full((len(some),), 1 / len(some)) for some in rows])
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                pooled = nets.pooled_features(network.body, self.extractor.normalise(pixels))
            answers = network.head(network.embed([(pooled[0].float(), pooled[1].float())]))
            loss = -(target * answers.log_softmax(1)).sum(1) @ weight.to(device)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            pairs = zip(average.parameters(), network.parameters(), strict=True)
            ops.update_average(list(pairs), MOMENTUM)
            if bar is not None:
                bar.advance(1)
        network.load_state_dict(average.state_dict())
        network.requires_grad_(False)
        return dict(network.state_dict())

    @functools.cached_property
    def _plain(self) -> augment.Views:
        views = self.extractor.views
        return augment.Views(views.views[:1], views.source).to(self.extractor.device)

    def _pixels(self, rows: Any) -> Tensor:
        """The plain view of some images, as bytes on the device."""
        shown: Tensor = self._plain(self._some(rows).to(self.extractor.device))[0]
        return shown.round().byte()

    def _some(self, rows: Any) -> Tensor:
        return take_images(self.images, torch.from_numpy(rows))

    @torch.inference_mode()
    def predict(self, network: Any, images: Images) -> Any:
        """Logits of images, by the mean features of all views."""
        parts = []
        for rows in torch.arange(len(images)).split(64):
            pixels = take_images(images, rows).to(self.extractor.device)
            shown = [self.extractor.normalise(view) for view in self.extractor.views(pixels)]
            parts.append(network.forward_views(shown).logits.float().cpu())
        return torch.cat(parts).numpy()
