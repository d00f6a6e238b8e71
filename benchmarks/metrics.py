"""ECE of 1,000,000 x 100 probabilities: calmatch beside torchmetrics, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from calmatch import metrics

N, CLASSES, ROUNDS = 1_000_000, 100, 7


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Alternate the two and compare medians, so that a busy machine slows both."""
    torch.manual_seed(0)
    probs = (3 * torch.randn(N, CLASSES)).softmax(1)
    labels = torch.randint(CLASSES, (N,))

    def ours() -> object:
        return metrics.ece(probs, labels)

    def theirs() -> object:
        return multiclass_calibration_error(probs, labels, CLASSES, n_bins=15, norm="l1")

    print(f"ECE of {N:,} x {CLASSES} probabilities, {torch.get_num_threads()} threads")
    print(
        f"  values: calmatch {float(metrics.ece(probs, labels)):.7f}, torchmetrics {theirs():.7f}"
    )
    times = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS)]
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"  calmatch      {1000 * mine:7.1f} ms   (median of {ROUNDS})")
    print(f"  torchmetrics  {1000 * other:7.1f} ms")
    print(f"  ratio         {other / mine:7.2f}")
    for name, metric in metrics.METRICS.items():
        print(f"  {name:<14}{1000 * seconds(lambda metric=metric: metric(probs, labels)):7.1f} ms")


if __name__ == "__main__":
    main()
