"""Pictures: datasets, splits, and batches that are pure functions of (seed, step)."""

from calmatch.data.dataset import Dataset
from calmatch.data.datasets import DATASETS, build

__all__ = ["DATASETS", "Dataset", "build"]
