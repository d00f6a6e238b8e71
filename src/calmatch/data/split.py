"""Which pictures are labelled: the field's rule (USB), as ids that are saved with the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
FOLDS = 5  # at most


class Split(NamedTuple):
    """Rows of the training pictures; a picture may be both labelled and unlabelled."""

    labelled: list[int]
    unlabelled: list[int]
    validation: list[int]


def split(
    labels: Sequence[int] | Ids,
    labelled: int | Sequence[int],
    seed: int,
    *,
    unlabelled: Sequence[int] | None = None,
    validation: float = 0.0,
    include_labelled: bool = True,
    whole_pool: bool = False,
    shuffle_first: bool = False,
) -> Split:
    """Shuffle each class in turn; the first are labelled, the last validation, the rest unlabelled.

    Args:
        labels: class ids of the training pictures; -1 (unknown) is always unlabelled.
        labelled: how many in all (the same number a class), or how many of each class.
        seed: of the choice alone, apart from the seed of training.
        unlabelled: how many of each class; all that are left by default.
        validation: share of each class held out, with its labels, for choosing a checkpoint.
        include_labelled: whether the labelled pictures also serve as unlabelled ones.
        whole_pool: the unlabelled pictures are all of them, labelled ones included (STL-10).
        shuffle_first: shuffle the whole list before splitting, as USB does with EuroSAT.
    """
    y = np.asarray(labels)
    order = np.arange(len(y))
    classes = int(y.max()) + 1
    wanted = counts(labelled, classes)
    random = np.random.RandomState(
        seed
    )  # the legacy generator: the field's splits are made with it
    if shuffle_first:
        random.shuffle(order)
    chosen: list[Ids] = []
    rest: list[Ids] = []
    held: list[Ids] = []
    for k in range(classes):
        ids = np.flatnonzero(y[order] == k)
        random.shuffle(ids)
        ids = order[ids]
        hold = math.floor(validation * len(ids))
        if wanted[k] + hold > len(ids):
            raise ValueError(
                f"Class {k} has {len(ids)} training pictures, too few for {wanted[k]} labels "
                f"and {hold} for validation; ask for fewer."
            )
        stop = len(ids) - hold
        if unlabelled is not None:
            stop = min(stop, wanted[k] + unlabelled[k])
        chosen.append(ids[: wanted[k]])
        rest.append(ids[0 if whole_pool else wanted[k] : stop])
        held.append(ids[len(ids) - hold :])
    rest.append(np.flatnonzero(y < 0))
    pool = ([*chosen] if include_labelled else []) + rest
    return Split(*(np.concatenate(part).tolist() for part in (chosen, pool, held)))


def folds(labels: Sequence[int], seed: int) -> list[list[int]]:
    """Places of labels in two to five folds; a class's only label is in none.

    There are as many folds as labels of a typical class, and every class starts with the first, so
    that what is left to learn from stays as balanced as it was: a class that lost more labels than
    the others would be guessed less often, and just its labels are judged.

    >>> [len(fold) for fold in folds([0, 0, 0, 1, 1, 1, 2], 0)]
    [2, 2, 2]
    """
    random = np.random.default_rng([seed, 12])
    y = np.asarray(labels)
    counts = np.unique(y, return_counts=True)[1]
    number = int(np.clip(np.median(counts), 2, FOLDS))
    found: list[list[int]] = [[] for _ in range(number)]
    for k in np.unique(y):
        own = random.permutation(np.flatnonzero(y == k))
        for place, row in enumerate(own if len(own) > 1 else []):
            found[place % number].append(int(row))
    return [fold for fold in found if fold]


def without(chosen: Split, labels: Sequence[int], number: int, seed: int) -> Split:
    """The split without fold `number` (1, 2, ...) of its labels, which is the validation set then.

    The fold's pictures serve neither as labelled nor as unlabelled ones.

    Args:
        chosen: all labelled and unlabelled rows.
        labels: class ids of the labelled rows.
        number: which fold.
        seed: of the folds.
    """
    parts = folds(labels, seed)
    if number > len(parts):
        raise ValueError(f"These labels make {len(parts)} folds; --fold cannot be {number}.")
    held = {chosen.labelled[place] for place in parts[number - 1]}
    return Split(
        [row for row in chosen.labelled if row not in held],
        [row for row in chosen.unlabelled if row not in held],
        sorted(held),
    )


def counts(labelled: int | Sequence[int], classes: int) -> list[int]:
    """Labelled pictures of each class."""
    if not isinstance(labelled, int):
        return list(labelled)
    if labelled < classes or labelled % classes:
        raise ValueError(
            f"{labelled} labels cannot be shared equally among {classes} classes; "
            f"ask for a multiple of {classes}."
        )
    return [labelled // classes] * classes


def long_tail(head: int, gamma: float, classes: int) -> list[int]:
    """Pictures of each class from `head` down to head / |gamma|; a negative gamma reverses them.

    >>> long_tail(15, 10, 10)
    [15, 11, 8, 6, 5, 4, 3, 2, 1, 1]
    """
    ratio = float(np.power(1 / abs(gamma), 1 / (classes - 1)))
    numbers = [int(head * np.power(ratio, k)) for k in range(classes - 1)]
    numbers.append(int(head / abs(gamma)))
    return numbers[::-1] if gamma < 0 else numbers
