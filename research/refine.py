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
from zoo import draw_task

from calmatch import augment, nets
from calmatch.data.images import ImageFiles
from calmatch.fit import portfolio, whole
from calmatch.options import FitOptions

RECIPES: dict[str, dict[str, Any]] = {
    "as it is": {"steps": 200, "rate": 2e-4},
    "three rounds": {"steps": 200, "rate": 5e-4, "rounds": 3},
    "long": {"steps": 600, "rate": 5e-4},
    "channels last": {"steps": 100, "rate": 2e-4, "last": True},
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
        embedding = portfolio.Embedding.fit(seen["pool"])
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
        for _ in range(how.get("rounds", 1)):
            embedding, teachers, student, _ = now
            span0 = time.perf_counter()
            refinement = whole.Refinement(
                job, own, embedding, teachers, images["pool"], labelled, y, student
            )
            network = refinement._network(student.weights)
            if how.get("last"):
                network.to(memory_format=torch.channels_last)
            refinement._train(network, student.weights, y, 2, None) if how.get("last") else None
            warm = time.perf_counter() - span0
            span = time.perf_counter()
            refinement._train(network, student.weights, y, steps, None)
            span = time.perf_counter() - span
            direct = {k: refinement.predict(network, some) for k, some in images.items()}
            now = teach(network.body)
            own = own._replace(body=network.body)
        both = {k: softmax(direct[k]) + softmax(start[3][k]) for k in direct}
        said.append(
            f"{recipe}: direct {errors(direct)} anew {errors(now[3])} both {errors(both)} "
            f"{span / steps:.3f} s, warm {warm:.1f}"
        )
        print(" | ".join(said), f"after {time.perf_counter() - began:.0f} s", flush=True)
    print(json.dumps({"lines": said}))


def softmax(logits: Any) -> Any:
    return portfolio.softmax(logits)


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
