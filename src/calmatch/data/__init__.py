"""Images: datasets, splits, and batches that are pure functions of (seed, step)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calmatch.data.dataset import DATASETS, Dataset, build

__all__ = ["DATASETS", "Dataset", "build"]


def __getattr__(name: str) -> Any:
    """Datasets on first use: prediction reads images without them."""
    if name not in __all__:
        raise AttributeError(f"module 'calmatch.data' has no attribute {name!r}")
    from calmatch.data import dataset

    return getattr(dataset, name)
