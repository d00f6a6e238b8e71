"""Classifiers on features of a frozen network: logistic regression, and a transductive student.

The student is a linear layer distilled from two teachers that see all images at once: soft k-means
from the labelled means in several whitened spaces (as PT-MAP and its kin), and label propagation
over the graph of neighbours (Zhou et al., 2004). No balance of classes is assumed. Constants were
fixed over ten datasets together, none for one of them (research/zoo.md).
"""

import functools
import time
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import linalg, sparse, special
from scipy.optimize import minimize
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn

from calmatch import augment, nets, ops, posthoc, spec
from calmatch.data.images import compute_ordered
from calmatch.nets import fuse

Array = NDArray[np.float32]
Rows = NDArray[Any]  # places of images, or their labels
Cases = Sequence[tuple[Rows, Rows]]  # labelled images of each student
Signs = Mapping[str, Any]
COMPONENTS = (40, 64, 100, 160)  # principal components of ten classes: one soft k-means each
WIDEST = 2.5  # times as many, at most
SHRINKAGE = 0.1  # share of the mean variance that is added before whitening
SHARPNESS = 2.5  # times sqrt(d): the cosine of two random vectors deviates by 1 / sqrt(d)
ROUNDS, STEP, LABEL_WEIGHT = 30, 0.3, 1.5  # of soft k-means
NEIGHBOURS, DIFFUSION, DIFFUSION_ROUNDS = 10, 0.95, 120  # of label propagation
STAGES = 0.8  # length of the earlier stages' features relative to the last layer's
DECAY = 3e-2  # weight decay of the student
CACHED = 1 << 20  # probabilities that students who learn side by side have at once
MOST = 6000  # unlabelled images the teachers see: a graph of all would be quadratic
softmax: Callable[[Any], Array] = functools.partial(special.softmax, axis=1)  # of each row
BLAS = ThreadpoolController()  # on small matrices two of its threads take twice as long as one


class Features(NamedTuple):
    """What a frozen network says of images; a list entry for each view."""

    last: Sequence[Array]  # each [n, D], before the classifier; may be left out
    stages: Sequence[Array] | None = None  # each [n, M]: means and log deviations of earlier maps


@dataclass
class Embedding:
    """Power transform, mean over views, principal components of the pool, whitened unit vectors."""

    stage_mean: Array
    stage_scale: Array
    stage_weight: float
    mean: Array
    axes: Array  # [D + M, d]
    variance: Array  # [d]
    components: tuple[int, ...]

    @classmethod
    def fit(cls, pool: Features, components: Sequence[int] = COMPONENTS) -> "Embedding":
        """From all images of the pool, labelled or not."""
        none = np.zeros(0, np.float32)
        self = cls(none, none, 1.0, none, none, none, ())
        if pool.stages is not None:
            stages = np.mean(pool.stages, 0)
            self.stage_mean, self.stage_scale = stages.mean(0), stages.std(0) + 1e-6
            if pool.last:
                self.stage_weight = STAGES * float(np.sqrt(_last(pool).var(0).sum()))
        joined = self._join(pool)
        self.mean = joined.mean(0)
        centred, n = joined - self.mean, len(joined)
        most = max(1, min(max(components), n - 1, joined.shape[1]))
        wide = n <= joined.shape[1]
        square = centred @ centred.T if wide else centred.T @ centred
        with BLAS.limit(limits=1, user_api="blas"):  # a tenth of the time of all by two threads
            ends = (len(square) - most, len(square) - 1)
            values, vectors = linalg.eigh(square, subset_by_index=ends, check_finite=False)
        values, vectors = np.maximum(values[::-1], 1e-12), vectors[:, ::-1]
        self.axes = centred.T @ vectors / np.sqrt(values) if wide else vectors
        self.axes, self.variance = self.axes.astype(np.float32), (values / n).astype(np.float32)
        self.components = tuple(sorted({min(d, most) for d in components}))
        return self

    def spaces(self, features: Features) -> list[Array]:
        """Whitened unit vectors [n, d] for each number of components, the widest last."""
        projected = (self._join(features) - self.mean) @ self.axes
        return [_unit(projected[:, :d] * self.scale(d)) for d in self.components]

    def scale(self, d: int) -> Array:
        """What each of the first d components is multiplied with."""
        variance = self.variance[:d]
        return np.asarray(1 / np.sqrt(variance + SHRINKAGE * variance.mean()), np.float32)

    def _join(self, features: Features) -> Array:
        parts = [_last(features)] if features.last else []
        if features.stages is not None:
            stages = (np.mean(features.stages, 0) - self.stage_mean) / self.stage_scale
            parts.append(self.stage_weight * _unit(stages))
        return np.concatenate(parts, 1)


def components_of(classes: int) -> list[int]:
    """More classes need more components to be told apart; ten or fewer have the same."""
    wider = min(WIDEST, max(1.0, classes / 10) ** 0.5)
    return [round(wider * number) for number in COMPONENTS]


def _last(features: Features) -> Array:
    return _unit(np.mean([_unit(np.sqrt(np.maximum(view, 0))) for view in features.last], 0))


def _unit(rows: Any) -> Array:
    length = np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    return np.asarray(rows / length, np.float32)


def student_input(spaces: Sequence[Array]) -> Array:
    """The widest space, scaled to unit variance a dimension."""
    return spaces[-1] * np.float32(np.sqrt(spaces[-1].shape[1]))


class Teachers:
    """Soft k-means and label propagation over one pool; labels may be left out at will."""

    def __init__(self, spaces: Sequence[Array], classes: int) -> None:
        self.spaces, self.classes = spaces, classes
        self.graph = _neighbour_graph(spaces)
        self.inputs = student_input(spaces)

    def student(self, rows: Rows, labels: Rows, classes: int | None = None) -> Array:
        """Weights [d + 1, C] of a linear layer that learned what the teachers say of the pool."""
        return self.teach([(rows, labels)], classes)[0]

    def teach(self, cases: Cases, classes: int | None = None, bar: Any = None) -> list[Array]:
        """Students of several sets of labelled rows, side by side; each as if alone."""
        shape, students = (classes or self.classes, len(self.inputs)), list[Array]()
        together = max(1, CACHED // (shape[0] * shape[1]))
        for some in (cases[k : k + together] for k in range(0, len(cases), together)):
            known = np.zeros((len(some), *shape), np.float32)
            for own, (rows, labels) in zip(known, some, strict=True):
                own[labels, rows] = 1
            with BLAS.limit(limits=1, user_api="blas"):
                clusters = [_soft_kmeans(space, known) for space in self.spaces]
                taught = (np.mean(clusters, 0) + self._propagate(known)) / 2
                taught = np.where(known.any(1, keepdims=True), known, taught)
                students += [*fit_linear(self.inputs, taught.swapaxes(1, 2), DECAY)]
            if bar is not None:
                bar.advance(len(some))
        return students

    def _propagate(self, known: Array) -> Array:
        """(I - alpha S)^-1 Y: each class starts with the same mass; rows are normalised."""
        start = known / np.maximum(known.sum(2, keepdims=True), 1)
        mass = start = np.ascontiguousarray(start.reshape(-1, known.shape[2]).T)
        for _ in range(DIFFUSION_ROUNDS):
            mass = start + DIFFUSION * (self.graph @ mass)
        mass = np.maximum(mass.T.reshape(known.shape), 1e-9)
        return np.asarray(mass / mass.sum(1, keepdims=True), np.float32)


def _soft_kmeans(space: Array, known: Array) -> Array:
    """Probabilities [S, C, n] by prototypes: means of `known` ones, then rounds with the others."""
    sharp = np.float32(SHARPNESS * np.sqrt(space.shape[1]))
    across, free = np.ascontiguousarray(space.T), 1 - known.sum(1, keepdims=True)
    sums = LABEL_WEIGHT * _times(known, space)
    prototypes = _unit(sums)
    for _ in range(ROUNDS):
        weights = softmax(sharp * _times(prototypes, across)) * free
        means = _unit(sums + _times(weights, space))
        prototypes = _unit((1 - STEP) * prototypes + STEP * means)
    return softmax(sharp * _times(prototypes, across))


def _times(stack: Any, matrix: Array) -> Array:
    """[S, C, n] times [n, m] as one product, which numpy would make S small ones."""
    rows = stack.reshape(-1, len(matrix)).astype(np.float32, copy=False)
    return np.asarray((rows @ matrix).reshape(*stack.shape[:-1], -1))


def _neighbour_graph(spaces: Sequence[Array], block: int = 1024) -> Any:
    """Normalised graph of the nearest neighbours, weights cos³ summed over the spaces."""
    n = len(spaces[0])
    k, weight = max(1, min(NEIGHBOURS, n - 1)), sparse.csr_matrix((n, n), dtype=np.float32)
    for space in spaces:
        for start in range(0, n, block):
            near = space[start : start + block] @ space.T
            rows = np.arange(len(near))
            near[rows, start + rows] = -1
            chosen = np.argpartition(-near, k - 1, 1)[:, :k]
            value = np.maximum(np.take_along_axis(near, chosen, 1), 0) ** 3
            place = (np.repeat(start + rows, k), chosen.ravel())
            weight = weight + sparse.csr_matrix((value.ravel(), place), shape=(n, n))
    weight = weight.maximum(weight.T)
    root = sparse.diags(1 / np.sqrt(np.asarray(weight.sum(1)).ravel() + 1e-8))
    return (root @ weight @ root).tocsr().astype(np.float32)


def fit_linear(
    inputs: Array, targets: Array, decay: Any, rounds: int = 60, counted: Any = 1.0
) -> Array:
    """Multinomial regression on soft targets [n, C]: weights [d + 1, C], the bias last.

    Of targets [S, n, C] S regressions side by side, which count rows as often as `counted` [S, n]
    says: L-BFGS of their sum, whose minimum is that of each; decays of one size end soonest.
    """
    goal = targets.reshape(-1, *targets.shape[-2:]).swapaxes(1, 2)
    rows = np.pad(np.asarray(inputs, np.float32), ((0, 0), (0, 1)), constant_values=1)
    across, shape = np.ascontiguousarray(rows.T), (*goal.shape[:2], rows.shape[1])
    share = np.broadcast_to(np.float32(counted), (len(goal), len(rows)))[:, None]
    share = share / share.sum(2, keepdims=True)
    decays = np.reshape(decay, (-1, 1, 1)) * np.append(np.ones(shape[2] - 1), 0)

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = flat.reshape(shape)
        log_probs = special.log_softmax(_times(weights, across), axis=1)
        slope = _times(share * (np.exp(log_probs) - goal), rows) + decays * weights
        value = (decays * weights**2).sum() / 2 - (share * goal * log_probs).sum()
        return float(value), slope.ravel()

    start, most = np.zeros(np.prod(shape)), {"maxiter": rounds}
    with BLAS.limit(limits=1, user_api="blas"):
        best = minimize(loss, start, jac=True, method="L-BFGS-B", options=most)
    weights = best.x.reshape(shape).swapaxes(1, 2).astype(np.float32)
    return np.asarray(weights if targets.ndim > 2 else weights[0])


FOLDS, REPEATS, HALVINGS = 4, 2, 8
ECHOES, ECHO_TEMPERATURE = 8, 0.5  # of echo_agreement
FITS = 6 + FOLDS * (REPEATS + 1) + 2 * HALVINGS + ECHOES  # of all candidates
BAG_DECAY = 1e-4  # of the layer that learns the students' average
STRENGTHS = np.logspace(-4, 0, 5)  # C of logistic regression


class Candidate(NamedTuple):
    """A way to classify, and what labels it has not seen say of it."""

    name: str
    weights: Array  # [d + 1, C], the bias last
    embedded: bool  # on the embedding; False: on plain features
    log_probs: Array  # [n, C] out of fold, of the labels that were held out
    labels: NDArray[np.int64]  # [n]
    rows: NDArray[np.int64]  # [n] in the pool
    fitted: posthoc.FewLabelTemperature
    error: posthoc.Estimate  # with the ends of its 95 % interval
    signs: Signs  # that unlabelled images give of a student, for posthoc.few_label_temperature
    network: nn.Module | None = None  # whose layers all learned; None: the extractor's own

    @property
    def losses(self) -> Array:
        """Log-loss of each held-out label after calibration."""
        logits = self.log_probs / self.fitted.temperature
        logits = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return np.asarray(-logits[np.arange(len(self.labels)), self.labels], np.float32)


def fit_transductive(
    teachers: Teachers, rows: Rows, labels: Rows, bar: Any, parts: float | None = None
) -> Candidate:
    """What students of some of the labels say on average (bagging), as one linear layer.

    Each label is evaluated by those students that have not seen it. Their average is less certain
    where the draw of labels decides, at nearly the error of a student of all labels.
    """
    inputs, free = teachers.inputs, np.setdiff1d(np.arange(len(teachers.inputs)), rows)
    chosen = [rest for repeat in range(REPEATS) for _, rest in folds_of(labels, repeat)]
    chosen += [side for repeat in range(HALVINGS) for side in halves_of(labels, repeat)]
    cases = [(rows[seen], labels[seen]) for seen in (*chosen, np.ones(len(labels), bool))]
    *students, whole = teachers.teach(cases, bar=bar)
    probs = np.stack([softmax(inputs @ own[:-1] + own[-1]) for own in students])
    weights = fit_linear(inputs, probs.mean(0), BAG_DECAY)
    signs, pool = dict[str, Any](), None
    if len(free):
        halves = probs[-2 * HALVINGS :].argmax(2)[:, free]
        agreement = float((halves[::2] == halves[1::2]).mean())
        echo = echo_agreement(teachers, whole, rows, labels, bar)
        signs = {"agreement": agreement, "echo": echo, "parts": parts}
        pool = softmax(inputs[free] @ weights[:-1] + weights[-1])
    bar.advance(1)
    unseen = ~np.stack(chosen)
    place = np.flatnonzero(unseen.any(0))
    held = np.einsum("sl,slc->lc", unseen, probs[:, rows])[place] / unseen.sum(0)[place, None]
    return evaluated("transductive", weights, True, held, place, rows, labels, pool, signs)


def parts_agreement(seen: Features, rows: Rows, y: Rows, classes: int, bar: Any) -> float | None:
    """On how many unlabelled images a student of the last layer and one of the stages agree."""
    free, guesses = np.setdiff1d(np.arange(len(seen.last[0])), rows), []
    if seen.stages is None or not len(free):
        return None
    for part in (Features(seen.last), Features((), seen.stages)):
        embedding = Embedding.fit(part, components_of(classes))
        teachers = Teachers(embedding.spaces(part), classes)
        (own,) = teachers.teach([(rows, y)], bar=bar)
        guesses.append((teachers.inputs[free] @ own[:-1] + own[-1]).argmax(1))
    return float((guesses[0] == guesses[1]).mean())


def echo_agreement(
    teachers: Teachers, weights: Array, rows: Rows, y: Rows, bar: Any = None, echoes: int = ECHOES
) -> float:
    """How often students of labels that a student draws by its confidence agree with it.

    As many labels of each class, of other images: it says how much the draw of labels decides,
    where students of halves also show how lucky this one was.
    """
    random, logits = np.random.default_rng(0), teachers.inputs @ weights[:-1] + weights[-1]
    free, share = np.ones(len(logits), bool), softmax(logits / ECHO_TEMPERATURE).cumsum(1)
    free[rows], cases = False, []
    for _ in range(echoes):
        drawn = (share < random.random((len(share), 1))).sum(1).clip(max=share.shape[1] - 1)
        orders = [random.permutation(np.flatnonzero(drawn == c)) for c in range(share.shape[1])]
        counts = np.bincount(y, minlength=share.shape[1])
        some = np.concatenate([order[:k] for order, k in zip(orders, counts, strict=True)])
        cases.append((some, drawn[some]))
    others = teachers.teach(cases, share.shape[1], bar)
    guesses = np.stack([(teachers.inputs @ own[:-1] + own[-1]).argmax(1) for own in others])
    return float((guesses == logits.argmax(1))[:, free if free.any() else ~free].mean())


def evaluated(
    name: str,
    weights: Array,
    embedded: bool,
    held: Array,
    place: Rows,
    rows: Rows,
    labels: Rows,
    pool: Array | None,
    signs: Signs = types.MappingProxyType({}),
) -> Candidate:
    """Temperature and error by unlabelled images, agreement, and labels that were held out.

    `held` are probabilities of those at `place`. Where there are no unlabelled images (`pool`
    None), they stand in for these: of its own labels a model is surer than of anything.
    """
    free, known = log_clipped(held if pool is None else pool), (log_clipped(held), labels[place])
    each = len(labels) / held.shape[1]
    fitted = posthoc.few_label_temperature(free, *known, **signs, labels_a_class=each)
    error = posthoc.few_label_error(fitted, free, *known)
    return Candidate(name, weights, embedded, *known, rows[place], fitted, error, signs)


def log_clipped(probs: Array) -> Array:
    return np.log(np.clip(probs, 1e-6, 1))


def fit_logistic(seen: Features, rows: Rows, labels: Rows, classes: int, bar: Any) -> Candidate:
    """Logistic regression on standardised features, the mean over views; C by cross-validation."""
    plain = np.mean(seen.last, 0)
    mean, std = plain.mean(0), plain.std(0) + 1e-6
    inputs = (plain - mean) / std
    basis = np.linalg.qr(inputs[rows].T)[0]  # where the weights lie, whatever their decay
    inputs = inputs @ basis
    targets = np.eye(classes, dtype=np.float32)[labels]
    folds = [fold for fold in folds_of(labels, 0) if len(fold[0])]
    places, counted = [out for out, _ in folds], np.stack([rest for _, rest in folds])
    several = np.broadcast_to(targets, (len(folds), *targets.shape))
    probs: dict[float, list[Array]] = {}
    for c in map(float, STRENGTHS):
        decays = 1 / (c * counted.sum(1))
        heads = zip(places, fit_linear(inputs[rows], several, decays, counted=counted), strict=True)
        probs[c] = [softmax(inputs[rows[out]] @ own[:-1] + own[-1]) for out, own in heads]
    bar.advance(FOLDS)
    truth = labels[np.concatenate(places)]

    def loss(c: float) -> float:
        held = np.concatenate(probs[c])
        return float(-np.log(np.clip(held[np.arange(len(truth)), truth], 1e-9, 1)).mean())

    best = min(probs, key=loss)
    weights = fit_linear(inputs[rows], targets, 1 / (best * len(rows)))
    free = np.setdiff1d(np.arange(len(inputs)), rows)
    pool = softmax(inputs[free] @ weights[:-1] + weights[-1]) if len(free) else None
    folded = np.concatenate([basis @ weights[:-1] / std[:, None], weights[-1:]])
    folded[-1] -= mean @ folded[:-1]
    held, place = np.concatenate(probs[best]), np.concatenate(places)
    return evaluated("logistic regression", folded, False, held, place, rows, labels, pool)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The first, unless another's log-loss is lower by more than its noise."""
    best = candidates[0]
    for other in candidates[1:]:
        shared, mine, theirs = np.intersect1d(best.rows, other.rows, return_indices=True)
        difference = best.losses[mine] - other.losses[theirs]
        if len(shared) < 2:
            continue
        noise = 2 * float(difference.std(ddof=1)) / np.sqrt(len(shared))
        if float(difference.mean()) > noise:
            best = other
    return best


def folds_of(labels: Rows, seed: int) -> list[tuple[Rows, NDArray[np.bool_]]]:
    """Of stratified folds the places held out, and where all others are.

    A class of one label is never held out (-1), small ones start anywhere.
    """
    random, fold = np.random.default_rng(seed), np.full(len(labels), -1)
    for c in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == c))
        if len(rows) > 1:
            start = random.integers(FOLDS) if len(rows) < FOLDS else 0
            fold[rows] = (np.arange(len(rows)) + start) % FOLDS
    return [(np.flatnonzero(fold == number), fold != number) for number in range(FOLDS)]


def halves_of(labels: Rows, seed: int) -> NDArray[np.bool_]:
    """Two disjoint halves of every class's labels; a class of one label is in both."""
    random, sides = np.random.default_rng(seed), np.zeros((2, len(labels)), bool)
    for c in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == c))
        half = len(rows) // 2
        sides[0, rows[:half] if half else rows] = True
        sides[1, rows[half:]] = True
    return sides


class Extractor(NamedTuple):
    """A network with its own input, and the views of an image whose features are averaged."""

    net: str  # the spec
    body: nn.Module
    quick: nn.Module  # the same with its layers fused
    size: int  # that it was pretrained at, or as asked for
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fixed: bool  # whether it takes that size alone
    views: augment.Views
    device: torch.device

    def showing(self, views: Sequence[augment.View]) -> "Extractor":
        """The same network with other views of an image."""
        source = max(view.size for view in views)
        return self._replace(views=augment.Views(views, source).to(self.device))

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Of uint8 images [B, 3, source, source]: features beside stage features [B, views, D]."""
        shown = [self.normalise(view) for view in self.views(pixels.to(self.device))]
        return torch.stack([torch.cat(nets.pooled_features(self.quick, x), 1) for x in shown], 1)

    def normalise(self, pixels: Tensor) -> Tensor:
        """As the network was shown images when it was pretrained."""
        mean, std = (torch.tensor(v, device=self.device) for v in (self.mean, self.std))
        shown = augment.normalise(pixels, mean, std)
        return shown.contiguous(memory_format=nets.order(self.device))


def load_extractor(net: str, size: int | None, device: torch.device) -> Extractor:
    """The network in its evaluation mode, shown images as it was pretrained on."""
    ops.keep_freed_memory()
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of a network that is not pretrained
        body = nets.build(net, 2, size or 224).eval().to(device)
    body = body.to(memory_format=nets.order(device)).requires_grad_(False)
    own = nets.input_of(body)
    size = size or own.size
    views = augment.Views([augment.View(size)], size)
    quick = fuse(body, size)
    return Extractor(net, body, quick, size, own.mean, own.std, own.fixed, views, device)


def join_head(
    extractor: Extractor, embedding: Embedding, weights: Array, embedded: bool, classes: int
) -> tuple[str, nn.Module]:
    """The network with a new last layer, on the embedding or on its plain features; its spec."""
    item = spec.parse(extractor.net)
    kept = {k: v for k, v in item.kwargs.items() if not isinstance(v, str) or k != "pretrained"}
    net = spec.write(item._replace(kwargs=kept))  # without the file of --from
    if embedded:
        width = embedding.components[-1]
        settings = {"on": net, "size": extractor.size, "width": width}
        net = spec.write(spec.Spec("embedded", (), settings))
        body: Any = nets.build(net, classes, extractor.size)
        _copy_weights(extractor.body, body.body)
        own = {"axes": embedding.axes[:, :width], "scale": embedding.scale(width)}
        for name in ("stage_mean", "stage_scale", "stage_weight", "mean", *own):
            value = own[name] if name in own else getattr(embedding, name)
            body.get_buffer(name).copy_(torch.as_tensor(np.asarray(value)))
        last = body.head
    else:
        body = nets.build(net, classes, extractor.size)
        _copy_weights(extractor.body, body)
        last = nets.classifier(body, len(weights) - 1, classes)
    with torch.no_grad():
        last.weight.copy_(torch.from_numpy(weights[:-1].T))
        last.bias.copy_(torch.from_numpy(weights[-1]))
    return net, body


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    """All but the classifier, which is for other classes."""
    own = target.state_dict()
    state = source.state_dict().items()
    target.load_state_dict({k: v for k, v in state if own[k].shape == v.shape}, strict=False)


def time_image(extractor: Extractor) -> float:
    """Seconds of one plain view of one image, where each core has a batch of its own."""
    size, images = extractor.size, nets.batch_size(extractor.device)
    pixels = torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8)
    threads = torch.get_num_threads() if extractor.device.type == "cpu" else 1

    def show(batches: int) -> None:
        deque(compute_ordered([pixels] * batches, Tensor.clone, look, extractor.device), 0)

    def look(some: Tensor) -> float:
        return extractor(some).sum().item()

    show(threads)  # the first time is slower
    return time_call(lambda: show(2 * threads)) / (2 * threads * images)


def time_candidates(extractor: Extractor, images: int, classes: int, rounds: int = 4) -> float:
    """Seconds of all: students, some sixteen rounds each, and components, which go as the cube."""
    side = extractor.views.source
    width = extractor(torch.zeros(1, 3, side, side, dtype=torch.uint8)).shape[-1]
    shape = (images, components_of(classes)[-1])
    inputs = np.random.default_rng(0).normal(1, 1, shape).astype(np.float32)
    targets = np.full((images, classes), 1 / classes, np.float32)
    targets[:, 0] += inputs[:, 0]
    square = inputs[:512] @ inputs[:512].T
    fit_linear(inputs[:9], targets[:9], DECAY, 1)  # the first time is slower
    student = time_call(lambda: fit_linear(inputs, targets, DECAY, rounds)) * 16 / rounds
    whiten = functools.partial(linalg.eigh, square, subset_by_index=(len(square) // 2,) * 2)
    with BLAS.limit(limits=1, user_api="blas"):
        whiten()
        return FITS * student + time_call(whiten) * (min(images, width) / len(square)) ** 3


def time_call(act: Callable[[], Any], times: int = 1) -> float:
    """Seconds that one of so many calls takes."""
    began = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - began) / times
