"""Which images to label next, and a fair estimate of the error while they are being labelled.

Images lie on a graph of neighbours, over which labels spread. Before an answer, what a label would
say of every image is a Gaussian process on that graph; asked is the image whose label leaves least
variance, where each image counts as much as the model doubts between its two likeliest classes
(V-optimality, Ji and Han, 2012, with weights). Without a model all count alike: that covers the
data. One question in FAIR goes to the next image of a random order instead; the answers to those,
and only those, are held out to estimate the error.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calmatch.fit.portfolio import Array, Teachers, echo_agreement, halves_of, log_clipped, softmax
from calmatch.posthoc.few import Estimate, few_label_error, few_label_temperature

DIFFUSION, NOISE = 0.99, 0.1  # of the graph's kernel, whose variances are 1; and of an answer
DUPLICATE = 0.95  # cosine, from which on two images are as good as one
MOST = 2000  # images that are considered at once: the kernel is a matrix of all pairs
FAIR = 5  # one question in so many is drawn at random
FOLDS = 4
Rows = NDArray[np.int64]


class Asked(NamedTuple):
    """Images to label, the first one first."""

    rows: Rows  # [n]
    fair: NDArray[np.bool_]  # [n] whether it was drawn at random


class Questions:
    """Chooses among the images of one pool; the kernel is computed once."""

    def __init__(self, spaces: Sequence[Array], graph: Any, order: Any = None, seed: int = 0):
        """From whitened unit vectors [N, d] each, the wider the later, and their graph.

        `order` is the random order of all rows; without one the seed makes it.
        """
        number = graph.shape[0]
        kernel = np.linalg.inv(np.eye(number, dtype=np.float32) - DIFFUSION * graph.toarray())
        root = np.sqrt(np.maximum(np.diag(kernel), 1e-9))
        self.kernel = np.asarray(kernel / root[:, None] / root, np.float32)
        self.space = spaces[-1]
        self.order = np.random.default_rng(seed).permutation(number) if order is None else order

    def next(self, rows: Any, probs: Array | None = None, n: int = 1, *, fair: int = FAIR) -> Asked:
        """What to ask after these rows have been, by a model's probabilities [N, C] of all.

        Without these every image counts alike. One in `fair` is drawn at random; 0: none.
        """
        rows = [int(row) for row in rows]
        n = min(n, len(self.order) - len(rows))
        doubt = np.ones(len(self.kernel), np.float32)
        if probs is not None and probs.shape[1] > 1:
            two = np.partition(probs, -2, 1)[:, -2:]
            doubt = np.maximum(1 - (two[:, 1] - two[:, 0]), 1e-4)
        left = self.kernel
        if rows:
            own = left[:, rows]
            inner = own[rows] + NOISE * np.eye(len(rows), dtype=np.float32)
            left = left - own @ np.linalg.solve(inner, own.T)
        near = (self.space @ self.space[rows].T).max(1, initial=-1.0)
        free = np.ones(len(left), bool)
        free[rows] = False
        chosen: list[int] = []
        random: list[bool] = []
        for _ in range(n):
            variance = np.diag(left) + NOISE
            drawn = fair > 0 and (len(rows) + len(chosen)) % fair == fair - 1
            if drawn:
                pick = int(self.order[free[self.order].argmax()])
            else:
                gain = (left**2 @ doubt) / variance
                gain[near > DUPLICATE] *= 1e-6
                pick = int(np.where(free, gain, -1.0).argmax())
            chosen.append(pick)
            random.append(drawn)
            free[pick] = False
            near = np.maximum(near, self.space @ self.space[pick])
            left = left - np.outer(left[:, pick], left[pick]) / variance[pick]
        return Asked(np.array(chosen, np.int64), np.array(random, bool))

    def fair_rows(self, rows: Any) -> Rows:
        """Which answered rows are a random sample: the order, up to the first not answered."""
        known = np.isin(self.order, np.asarray(rows, np.int64))
        return np.asarray(self.order[: len(known) if known.all() else known.argmin()], np.int64)


def ask(spaces: Sequence[Array], rows: Any, probs: Array, n: int, *, seed: int) -> Rows:
    """`Questions.next` once; of many images it looks at a random sample of those without a label.

    `spaces` are unit vectors [N, d] of all images, the widest last; `rows` those that have a label.
    """
    rows = np.asarray(rows, np.int64)
    free, rows = np.setdiff1d(np.arange(len(spaces[0])), rows), rows[-MOST:]
    if len(free) > MOST:
        free = np.random.default_rng(seed).choice(free, MOST, replace=False)
    some = np.sort(np.concatenate([rows, free]))
    own = [space[some] for space in spaces]
    questions = Questions(own, Teachers(own, 2).graph, seed=seed)
    known = np.searchsorted(some, rows)
    chosen: Rows = some[questions.next(known, probs[some], n, fair=0).rows]
    return chosen


class Learned(NamedTuple):
    """A model of the labels so far, and what answers to random questions say of it."""

    weights: Array  # [d + 1, C] on student_input
    temperature: float
    error: Estimate  # of new images, with its 95 % interval
    gain: tuple[float, float]  # agreement and labels a class, for posthoc.expected_gain
    held: Array  # [m, C] calibrated probabilities of the random images, each by a model without it
    truth: Rows  # [m]

    def probs(self, inputs: Array) -> Array:
        """Calibrated, of student_input [n, d]."""
        return softmax((inputs @ self.weights[:-1] + self.weights[-1]) / self.temperature)


def learn(teachers: Teachers, rows: Any, labels: Any, fair: Any) -> Learned:
    """The student of all labels; its error by random images and by agreement of halves.

    No class may be empty. Only those of the rows that are a random sample (fair) are held out.
    """
    rows, labels = np.asarray(rows, np.int64), np.asarray(labels, np.int64)
    classes = int(labels.max()) + 1
    inputs = teachers.inputs
    everything = np.ones(len(rows), bool)
    weights = _student(teachers, rows, labels, everything, classes)
    rest = np.setdiff1d(np.arange(len(inputs)), rows)
    rest = rest if len(rest) else rows
    out = np.flatnonzero(np.isin(rows, fair))
    held = np.zeros((len(out), classes), np.float32)
    for k in range(min(FOLDS, len(out))):
        kept = everything.copy()
        kept[out[k::FOLDS]] = False
        if len(np.unique(labels[kept])) > 1:
            own = _student(teachers, rows, labels, kept, classes)
            held[k::FOLDS] = inputs[rows[out[k::FOLDS]]] @ own[:-1] + own[-1]
    guesses = []
    for half in halves_of(labels, 0):
        own = _student(teachers, rows, labels, half, classes)
        guesses.append((inputs[rest] @ own[:-1] + own[-1]).argmax(1))
    agreement, each = float((guesses[0] == guesses[1]).mean()), len(rows) / classes
    free = log_clipped(softmax(inputs[rest] @ weights[:-1] + weights[-1]))
    known = (log_clipped(softmax(held)), labels[out]) if len(out) else ()
    others = len(rows) < len(inputs)
    echo = echo_agreement(teachers, weights, rows, labels, echoes=3) if others else None
    facts: Any = {"agreement": agreement, "echo": echo, "labels_a_class": each}
    fitted = few_label_temperature(free, *known, **facts)
    error = few_label_error(fitted, free, *known)
    shown = softmax(held / fitted.temperature)
    return Learned(weights, fitted.temperature, error, (agreement, each), shown, labels[out])


def _student(teachers: Teachers, rows: Rows, labels: Rows, kept: Any, classes: int) -> Array:
    """Of some of the labels; a class that has none among them is never answered."""
    seen = np.unique(labels[kept])
    own = teachers.student(rows[kept], np.searchsorted(seen, labels[kept]), len(seen))
    weights = np.zeros((len(own), classes), np.float32)
    weights[-1] = -20.0
    weights[:, seen] = own
    return weights
