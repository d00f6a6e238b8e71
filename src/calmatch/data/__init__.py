"""Pictures: datasets, splits, and batches that are pure functions of (seed, step)."""

from calmatch.data.datasets import DATASETS, Dataset, build

__all__ = ["DATASETS", "Dataset", "build"]
