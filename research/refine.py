"""Does a whole network on a GPU gain by learning from the student of `fit`? An experiment.

`python research/refine.py FOLDER_OF_SETS SET SPLIT` prints errors (%) of the student, of the
refined network, and of a student taught anew on the refined network's features, by recipes.
"""

from __future__ import annotations

import argparse
import json
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from zoo import draw_task

from calmatch import augment, nets
from calmatch.data.images import ImageFiles
from calmatch.fit import portfolio, whole
from calmatch.options import FitOptions

RECIPES: dict[str, dict[str, Any]] = {
    "labels": {"steps": 150, "rate": 5e-4, "rounds": 2},
    "40 clusters": {"steps": 150, "rate": 5e-4, "rounds": 2, "clusters": 40},
    "15 clusters": {"steps": 150, "rate": 5e-4, "rounds": 2, "clusters": 15},
    "gentle": {"steps": 150, "rate": 2e-4, "rounds": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("name")
    parser.add_argument("split", type=int)
    parser.add_argument("--labels", type=int, default=4)
    parser.add_argument("--net", default="efficientnet_lite012")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    options = parser.parse_args()
    device, began = torch.device(options.device), time.perf_counter()
    task = draw_task(options.home / options.name, options.labels, options.split)
    extractor = portfolio.load_extractor(options.net, None, device)
    extractor = extractor.showing(augment.tta_views(3, extractor.size))
    names = {part: sorted(task.truth[part]) for part in ("pool", "new")}
    images = {k: decode(task.folder / k, own, extractor) for k, own in names.items()}
    truth = {k: task.ids(k, own).numpy() for k, own in names.items()}
    labelled = np.array([k for k, name in enumerate(names["pool"]) if name in task.known])
    free = np.setdiff1d(np.arange(len(names["pool"])), labelled)
    y, classes = truth["pool"][labelled], len(task.classes)

    def teach(body: Any) -> tuple[Any, ...]:
        """Student on a network's features, and its logits."""
        own = extractor._replace(body=body, quick=body)
        seen = {k: features(own, some) for k, some in images.items()}
        embedding = portfolio.Embedding.fit(seen["pool"], portfolio.components_of(classes))
        teachers = portfolio.Teachers(embedding.spaces(seen["pool"]), classes)
        bar = types.SimpleNamespace(advance=lambda k: None)
        student = portfolio.fit_transductive(teachers, labelled, y, bar)
        inputs = {k: portfolio.student_input(embedding.spaces(some)) for k, some in seen.items()}
        logits = {k: x @ student.weights[:-1] + student.weights[-1] for k, x in inputs.items()}
        return embedding, teachers, student, logits

    def errors(logits: Any) -> str:
        wrong = {k: logits[k].argmax(1) != truth[k] for k in logits}
        return f"{100 * wrong['pool'][free].mean():5.1f} {100 * wrong['new'].mean():5.1f}"

    start = teach(extractor.body)
    said = [f"{options.name} {options.split}", f"student {errors(start[3])}"]
    job: Any = types.SimpleNamespace(options=FitOptions(Path()), folder=Path())
    for recipe in options.recipes:
        how, now = RECIPES[recipe], start
        whole.BODY_RATE = how["rate"]
        steps, own = max(4, int(how["steps"] * options.scale)), extractor
        text = recipe
        for number in range(how["rounds"]):
            embedding, teachers, student, _ = now
            facts: Any = (teachers, labelled, y, student)
            if how.get("clusters"):
                facts = clusters(teachers, how["clusters"], number)
            refinement = whole.Refinement(job, own, embedding, facts[0], images["pool"], *facts[1:])
            network = refinement._network(facts[3].weights)
            span = time.perf_counter()
            refinement._train(network, facts[3].weights, facts[2], steps, None)
            span = time.perf_counter() - span
            now = teach(network.body)
            text += f" anew {errors(now[3])}"
            own = own._replace(body=network.body)
        both = {k: portfolio.softmax(now[3][k]) + portfolio.softmax(start[3][k]) for k in images}
        said.append(f"{text} both {errors(both)} {span / steps:.3f} s")
        print(" | ".join(said), f"after {time.perf_counter() - began:.0f} s", flush=True)
    print(json.dumps({"lines": said}))


def clusters(teachers: Any, number: int, seed: int) -> tuple[Any, ...]:
    """Clusters in the place of classes: what adapts a network without any label."""
    found = KMeans(number, n_init=3, random_state=seed).fit(teachers.spaces[-1]).labels_
    rows = np.random.default_rng(seed).permutation(len(found))[: len(found) // 3]
    weights = portfolio.fit_linear(teachers.inputs, np.eye(number, dtype="f")[found], 3e-2)
    student = types.SimpleNamespace(weights=weights, fitted=types.SimpleNamespace(temperature=0.5))
    return types.SimpleNamespace(inputs=teachers.inputs, classes=number), rows, found[rows], student


def decode(root: Path, names: list[str], extractor: Any) -> torch.Tensor:
    """All images, on the device."""
    files = ImageFiles(root, tuple(names), extractor.views.source, True)
    stack = np.stack([files.image(k) for k in range(len(names))])
    return torch.from_numpy(stack).to(extractor.device)


def features(extractor: Any, images: torch.Tensor) -> portfolio.Features:
    """Of all views."""
    parts = torch.cat([extractor(some).float().cpu() for some in images.split(128)]).numpy()
    last = nets.feature_size(extractor.body, extractor.size)
    own, stages = np.split(parts.swapaxes(0, 1), [last], 2)
    return portfolio.Features([*own], [*stages])


if __name__ == "__main__":
    main()
