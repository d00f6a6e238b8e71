"""What a result depends on besides its config: versions, hardware, and how CUDA computes."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from calmatch import parallel

VERSIONS = ("calmatch", "torch", "torchvision", "timm", "numpy")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without a fixed one cuBLAS may choose other sums each time
RECOMPILES = 1_000  # versions of a function that a process may compile


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and settings of now that a result depends on."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in VERSIONS},
        "cpu": f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "ranks": parallel.world(),
        "deterministic": device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        found |= {
            "driver": _first(Path("/proc/driver/nvidia/version"), r"(\d+\.\d[\d.]*)"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    return _first(Path("/proc/cpuinfo"), r"model name\s*: (.+)") or platform.machine()


def _first(path: Path, pattern: str) -> str | None:
    """What a file of the kernel says, where there is one."""
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        return None
    return found[1].strip() if found else None


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What two environments do not share, a few words each."""
    first, second = _flat(one), _flat(other)
    return [
        f"{name} {first[name]} -> {second[name]}"
        for name in first
        if name in second and first[name] != second[name]
    ]


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    versions = found.get("versions", {})
    return {**{k: v for k, v in found.items() if k != "versions"}, **versions}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, CUDA computes the same bits every time, or an operation that cannot says so."""
    if not wanted:
        yield
        return
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.benchmark,
        cuda.cudnn_sdp_enabled(),
        os.environ.get(WORKSPACE),
    )
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark = False  # it times algorithms, and time is never the same
    cuda.enable_cudnn_sdp(False)  # flash and memory-efficient attention have an exact backward
    try:
        with _compiler():
            yield
    except RuntimeError as error:
        found = re.search(r"(\w+) does not have a deterministic implementation", str(error))
        if not found:
            raise
        raise ValueError(
            f"{found[1]} cannot be computed the same way twice on this device; drop "
            f"--deterministic, or choose another --net or --method."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark = before[2]
        cuda.enable_cudnn_sdp(before[3])
        if before[4] is None:
            os.environ.pop(WORKSPACE, None)


@contextmanager
def _compiler() -> Iterator[None]:
    """The compiler chooses kernels by rule, not by their speed of the moment."""
    from torch._inductor import config

    if not hasattr(config, "deterministic"):
        yield
        return
    with config.patch(deterministic=True):
        yield


def allow_recompiles() -> None:
    """Let this process compile the step of every run it makes; else it stops after eight.

    The limits are torch's, for the whole process, and stay raised: a step is compiled when it is
    first made, long after the run was asked for.
    """
    from torch._dynamo import config

    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, name, max(RECOMPILES, getattr(config, name)))
