"""Out of memory, in one sentence that names the settings to lower."""

from __future__ import annotations

# what torch says in a plain RuntimeError where it has no class of its own for it
TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "MPS backend out of memory",
)
TRAINING = (
    "--batch, --ratio, --chunk (steps augmented at once), --eval-batch (pictures predicted at "
    "once) or --memory (the share of it that pictures may take)"
)
SETTINGS = {
    "train": TRAINING,
    "replay": "--steps, or repeat it on a larger device",
    "predict": "--batch (pictures computed at once)",
    "bench": "--jobs (runs at once on a device)",
}


def full(error: BaseException) -> bool:
    """Whether an error means too little memory."""
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)
    return named or said or isinstance(error, MemoryError)


def free() -> None:
    """Give back what a failed step held on the device."""
    import gc

    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def behind(error: BaseException | None) -> bool:
    """Whether too little memory led to it: ending a capture hides the error that broke it."""
    return error is not None and (full(error) or behind(error.__cause__ or error.__context__))


def advice(error: Exception, command: str) -> str | None:
    """The sentence for an error that means too little memory; None for any other."""
    if not full(error):
        return None
    return f"There is not enough memory on the device; lower {SETTINGS.get(command, TRAINING)}."
