"""What tests share: the golden numbers, tiny problems, a real command line."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calmatch import cli, methods, nets
from calmatch.fit import crossval
from calmatch.model import write_model
from calmatch.training import loop
from calmatch.training.config import Config

GOLDEN = Path(os.environ.get("CALMATCH_GOLDEN", Path(__file__).parent / "golden"))
torch.set_num_threads(1)  # pytest-xdist already uses every core
ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}
ON_WINDOWS = os.name == "nt" or "CALMATCH_AS_ON_WINDOWS" in os.environ
collect_ignore = ["faults", "windows.py"] if ON_WINDOWS else []
POSIX = re.compile(  # what a test needs that Windows has not: pipes, links, forks, signals, bits
    r"mkfifo|symlink_to|os\.fork|killpg|os\.kill\(|send_signal|SIGKILL|SIGTERM|SIGINT|context..fork"
    r"|import resource|posix_fallocate|st_blocks|chmod|/dev/|/proc/|\bwindows\.|on_windows"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On Windows, tests of what it has not are left out; `windows.py` tries ours elsewhere."""
    for item in items if ON_WINDOWS else ():
        if isinstance(item, pytest.Function) and POSIX.search(inspect.getsource(item.function)):
            item.add_marker(pytest.mark.skip(reason="Windows has not what it needs"))


class Golden:
    """One golden file: arrays by key, integers as int64, floats as float64 tensors."""

    def __init__(self, name: str) -> None:
        with np.load(GOLDEN / f"{name}.npz") as file:
            self.arrays = {key: file[key] for key in file.files}
        self.meta: dict[str, Any] = json.loads(str(self.arrays.pop("meta")))

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def __getitem__(self, key: str) -> torch.Tensor:
        array = torch.from_numpy(np.asarray(self.arrays[key]))
        return array.double() if array.is_floating_point() else array.long()


@pytest.fixture(scope="session", autouse=True)
def _session(tmp_path_factory):
    """Nothing reads or fills a person's cache; and intervals rest on few resamples.

    The bootstrap would take most of a tiny run; test_metrics tests it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CALMATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        for module in (loop, crossval):
            patch.setattr(module, "RESAMPLES", 3)
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(ALONE, "CALMATCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def typed(capsys):
    """A command in this process: its exit code, output and errors. `calmatch` starts a real one."""

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run


@pytest.fixture
def golden() -> type[Golden]:
    return Golden


@pytest.fixture
def tiny() -> Any:
    """A config that trains in a second."""

    def make(method: str = "fixmatch", **changes: Any) -> Config:
        settings: dict[str, Any] = {
            "dataset": "synthetic",
            "labels": 16,
            "method": method,
            "net": "tiny",
            "weak": "crop(1)",
            "strong": "crop(2)|cutout(0.5)",
            "batch": 8,
            "ratio": 2,
            "steps": 12,
            "lr": 1e-2,
            "log_every": 5,
            "eval_every": 6,
            "chunk": 4,
            "device": "cpu",
        }
        return Config(**settings | changes)

    return make


def calmatch(*words: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line as a person uses it."""
    command = [sys.executable, "-m", "calmatch", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ALONE)


ALL_METHODS = sorted(methods.METHODS)


def write_random_model(folder: Path, net: str, classes: int, size: int) -> torch.nn.Module:
    """A model folder of a fresh network with confident logits and used BatchNorms; its body."""
    torch.manual_seed(0)
    body = nets.build(net, classes, size)
    with torch.no_grad():
        body.train()(torch.randn(8, 3, size, size))
        for name, parameter in body.named_parameters():
            if name.endswith(("head.weight", "fc.weight", "classifier.weight")):
                parameter.copy_(parameter.sign() * parameter.abs().clamp_min(0.1) * 3)
    write_model(
        folder,
        nets.Net(body, {}),
        net=net,
        method="supervised",
        classes=[f"class {k}" for k in range(classes)],
        size=size,
        mean=[0.5] * 3,
        std=[0.25] * 3,
        versions={},
        provenance={"seed": 5},
    )
    return body


def open_chromium(*logs: str) -> Any:
    """A headless browser that keeps these logs; a test without one installed is skipped."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("Chromium and its driver are not installed; `make test-browser` does that.")
    os.environ["SE_OFFLINE"] = "true"
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for word in ("headless=new", "no-sandbox", "disable-background-networking"):
        options.add_argument(f"--{word}")
    options.add_argument("--disable-dev-shm-usage")
    options.set_capability("goog:loggingPrefs", dict.fromkeys(logs, "ALL"))
    return webdriver.Chrome(options=options, service=Service(driver))
