"""What each method costs beside the network, as a share of a FixMatch step.

The network and its heads are replaced by ones that hand out ready outputs; what is left of a step
(targets, weights, losses, memory, backward through them) is the method's. Eager, on the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from calmatch import methods
from calmatch.core import Output, Task
from calmatch.training import recipes
from calmatch.training.setup import build_parts
from calmatch.training.step import Training, make_training

ROUNDS = 30
LARGE = 105_000  # STL-10's unlabelled pictures


def hand_out(head: nn.Module) -> nn.Module:
    """The head, answering with what it answered the first time to as many rows."""
    answers: dict[tuple[int, ...], Tensor] = {}
    real = head.forward

    def forward(rows: Tensor, *more: Tensor) -> Tensor:
        key = (len(rows), *(len(other) for other in more))
        if key not in answers:
            answers[key] = real(rows, *more).detach().requires_grad_()
        return answers[key]

    head.forward = forward  # type: ignore[method-assign]
    if hasattr(head, "divergence"):  # the Bayesian layer's own penalty
        constant = head.divergence().detach()
        head.divergence = lambda: constant
    return head


class Ready(nn.Module):
    """Logits, features and the heads' outputs without a network."""

    def __init__(self, heads: dict[str, nn.Module], features: int, classes: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: hand_out(head) for name, head in heads.items()})
        self.logits = nn.Parameter(torch.randn(512, classes))
        self.features = torch.randn(512, features)

    def forward(self, images: Tensor) -> Output:
        n = len(images)
        pixel = images[:, 0, 0, :1]  # VAT asks how pictures change predictions
        return Output(self.logits[:n] + pixel, self.features[:n])


def milliseconds(run: Callable[[], object]) -> float:
    for _ in range(5):
        run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def own(name: str, training: Training, unlabelled: int) -> float:
    """Milliseconds of a step without the network."""
    parts = training.parts
    known = parts.method.task
    task = Task(
        known.classes, known.labelled, unlabelled, known.features, known.steps, known.counts
    )
    method = methods.build(name, task)
    method.image_shape = (3, 16, 16)
    net = Ready(method.heads(), task.features, task.classes)
    batch = parts.batches[0]
    generator = torch.Generator().manual_seed(0)
    b, r = len(batch.y), len(batch.u_id)
    kinds = {"weak": batch.u[0], "strong": batch.u[1]}
    batch = batch._replace(
        x=tuple(batch.x[0] for _ in method.x_views),
        u=tuple(kinds[view] for view in method.u_views),
        u_id=torch.randperm(unlabelled)[:r],
        draws=method.draws(generator, b, r),
    )

    def step() -> None:
        plan = method(net, net, batch)
        loss = parts.labelled_loss(plan.labelled) + sum(plan.extra.values())
        if plan.unlabelled is not None:
            loss = loss + parts.unlabelled_loss(plan.unlabelled)
        loss.backward()
        method.commit(plan.state)

    return milliseconds(step)


def main() -> None:
    config = recipes.digits_40("fixmatch", steps=100_000)
    training = make_training(config, build_parts(config))
    whole = milliseconds(lambda: training.advance())
    threads = torch.get_num_threads()
    print(f"A FixMatch step with the demo's network: {whole:.1f} ms ({threads} threads)")
    print(f"{'method':<24}{'own ms':>8}{'of a step':>12}")
    cases = [(name, training.parts.method.task.unlabelled) for name in methods.METHODS]
    for name, unlabelled in [*cases, ("flexmatch", LARGE)]:
        cost = own(name, training, unlabelled)
        label = name if unlabelled != LARGE else f"{name} ({LARGE:,})"
        print(f"{label:<24}{cost:>8.2f}{cost / whole:>11.1%}")


if __name__ == "__main__":
    main()
