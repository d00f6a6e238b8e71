"""What people wait for: a cold start, predictions, features for `fit`, its heads, report, export.

    python benchmarks/predict.py [--pictures 300] [--rounds 3] [--parts start predict ...]

Predictions stand beside a bare loop of onnxruntime on the exported model, and beside the way of
timm's inference script (its own transform, DataLoader workers, an eager network). The opponents
take turns round by round on the same photographs, so a busy machine slows all of them; the network
is EfficientNet-Lite0 at 224 px with a random last layer. Prints a table, writes dated JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from results import Row, row, show, write
from serve import SIZE, write_photographs, write_random_model
from sklearn.linear_model import LogisticRegression
from sklearn.semi_supervised import SelfTrainingClassifier

from calmatch import Classifier, console, export, nets
from calmatch.data.images import ImageFiles
from calmatch.fit import portfolio
from calmatch.fit.features import compute_blocks
from calmatch.model import load_model
from calmatch.predict import predict

PARTS = ("start", "predict", "features", "heads", "files")
LISTS = ("--help", "predict --help", "methods", "nets", "recipes", "bench", "figure")
HEAVY = ("torch", "numpy", "PIL", "timm", "torchvision", "scipy", "sklearn", "pandas", "matplotlib")
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--out", type=Path, help="JSON file; by default in benchmarks/results/")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["CALMATCH_CACHE"] = str(Path(place) / "cache")
        home = Path(place)
        write_random_model(home)
        write_photographs(home / "pictures", options.pictures)
        for part in options.parts:
            measured = globals()[f"time_{part}"](home, options)
            show(measured)
            rows += measured
    write("predict", rows, options.out, pictures=options.pictures)


def seconds_of(*words: str) -> float:
    """Of a process, the better of two: the first may read from a cold disk."""
    spans = []
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        spans.append(time.perf_counter() - began)
    return min(spans)


def torch_alone() -> dict[str, float]:
    """What everything that computes waits for first."""
    return {"`import torch` alone": seconds_of("-c", "import torch")}


def time_start(home: Path, options: argparse.Namespace) -> list[Row]:
    """Commands that only say something, and a model's first answer from a new Python."""
    lists = {words: seconds_of("-P", "-m", "calmatch", *words.split()) for words in LISTS}
    what = f"`calmatch {max(lists, key=lambda words: lists[words])}`, the slowest of the lists"
    rows = [row(what, max(lists.values()), "s", aim="0.3 s", all=lists)]
    picture = next((home / "pictures").iterdir())
    code = f"import calmatch; print(calmatch.load({str(home)!r}).predict({str(picture)!r}))"
    what = "Python: `import calmatch`, load a model, first answer"
    imports = import_table(code)
    rows.append(row(what, seconds_of("-c", code), "s", torch_alone(), aim="3 s", imports=imports))
    return rows


def import_table(code: str) -> dict[str, float]:
    """Seconds that each package takes to import with all it imports, where it comes first."""
    words = [sys.executable, "-X", "importtime", "-c", code]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stderr.splitlines()
    table: dict[str, float] = {}
    for line in lines:
        if line.startswith("import time:") and line.count("|") == 2:
            _, total, name = line.removeprefix("import time:").split("|")
            if name.strip() in HEAVY:
                table[name.strip()] = int(total) / 1e6
    return table


def time_predict(home: Path, options: argparse.Namespace) -> list[Row]:
    """Pictures a second of three ways that take turns, and the command with its start."""
    cuda = torch.cuda.is_available()
    model, folder = load_model(home, device="cuda" if cuda else "cpu"), home / "pictures"
    ways: dict[str, Callable[[], Any]] = {
        "calmatch predict": lambda: predict(model, folder, home / "out.csv", quiet=True),
        "timm's inference script's way": timm_loop(folder),
    }
    if not cuda:  # a GPU machine may have neither onnx nor its runtime
        export.export(load_model(home), home / "model.onnx")
        ways["onnxruntime, a bare loop"] = onnx_loop(home / "model.onnx", folder)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # warm
    for _ in range(options.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            speeds[name].append(options.pictures / (time.perf_counter() - began))
    (ours, own), *others = speeds.items()
    best = [max(each) for each in zip(*(speed for _, speed in others), strict=True)]
    times = statistics.median(mine / other for mine, other in zip(own, best, strict=True))
    beside = {name: statistics.median(speed) for name, speed in others}
    aim = "3,000 pictures/s, 1.0 times the best" if cuda else "1.0 times the best"
    how = {"aim": aim, "times": times, "all": speeds}
    rows = [row(ours, statistics.median(own), "pictures/s", beside, **how)]
    words = ("-P", "-m", "calmatch", "predict", str(home), str(folder), "-o", str(home / "o.csv"))
    what = f"`calmatch predict`, {options.pictures} pictures, start included"
    how = {"aim": "6 s"} if cuda else {}
    rows.append(row(what, seconds_of(*words, "--quiet"), "s", **how))
    if cuda:  # where files of the network's own size leave little to decode
        small = home / "small"
        small.mkdir()
        for file in folder.iterdir():
            Image.open(file).resize((SIZE, SIZE)).save(small / file.name, quality=90)
        predict(model, small, home / "out.csv", quiet=True)
        began = time.perf_counter()
        predict(model, small, home / "out.csv", quiet=True)
        speed = options.pictures / (time.perf_counter() - began)
        rows.append(row("calmatch predict, files of 224 px", speed, "pictures/s", aim="3,000"))
    return rows


def onnx_loop(path: Path, folder: Path) -> Callable[[], Any]:
    """Decoded and resized by Pillow, in batches: what the file would resize, it does faster."""
    import onnxruntime

    cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    providers = ["CUDAExecutionProvider"] if cuda else ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(str(path), providers=providers)

    def loop() -> None:
        files = sorted(folder.iterdir())
        for start in range(0, len(files), BATCH):
            some = [read_squashed(file) for file in files[start : start + BATCH]]
            session.run(None, {"images": np.stack(some)})

    return loop


def read_squashed(file: Path) -> Any:
    image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


class Folder(torch.utils.data.Dataset[Any]):
    """What timm's reader gives: a path, decoded and changed by timm's transform."""

    def __init__(self, folder: Path, transform: Any) -> None:
        self.files, self.transform = sorted(folder.iterdir()), transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> Any:
        return self.transform(Image.open(self.files[place]).convert("RGB"))


def timm_loop(folder: Path) -> Callable[[], Any]:
    import timm

    net = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=10).eval()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = net.to(device)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=net))
    files = Folder(folder, transform)

    @torch.inference_mode()
    def loop() -> None:
        workers = min(16, os.cpu_count() or 1)
        batches: Any = torch.utils.data.DataLoader(files, batch_size=BATCH, num_workers=workers)
        for images in batches:
            net(images.to(device)).softmax(-1).cpu()

    return loop


def time_features(home: Path, options: argparse.Namespace) -> list[Row]:
    """Of `fit`: decoded, resized, one view, in one pass; beside a plain loop."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    extractor = portfolio.load_extractor("efficientnet_lite0(pretrained=False)", SIZE, device)
    names = tuple(sorted(path.name for path in (home / "pictures").iterdir()))
    images = ImageFiles(home / "pictures", names, SIZE, squash=True)
    plain = nets.build("efficientnet_lite0(pretrained=False)", 2, SIZE).eval().to(device)

    @torch.inference_mode()
    def loop() -> None:
        for start in range(0, len(names), BATCH):
            some = [read_squashed(home / "pictures" / n) for n in names[start : start + BATCH]]
            plain(torch.from_numpy(np.stack(some)).to(device).float() / 127.5 - 1).features.cpu()

    spans: list[list[float]] = [[], []]
    for number in range(options.rounds):
        os.environ["CALMATCH_CACHE"] = str(home / f"cache{number}")
        ways = (lambda: compute_blocks(extractor, images, quiet=True).some(), loop)
        for way, own in zip(ways, spans, strict=True):
            began = time.perf_counter()
            way()
            own.append((time.perf_counter() - began) / len(names) * 1000)
    ours, theirs = map(statistics.median, spans)
    times = statistics.median(b / a for a, b in zip(*spans, strict=True))
    beside = {"a plain float32 loop with Pillow": theirs}
    aim = "3 s" if device.type == "cuda" else "14 s, 1.64 times"
    how = {"aim": aim, "times": times, "all": spans}
    return [row("features for `fit`, 1,000 pictures at 224 px", ours, "s", beside, **how)]


def time_heads(home: Path, options: argparse.Namespace) -> list[Row]:
    """The whole portfolio on features that are there: 40 labels, 3,000 pictures, ten classes."""
    chance = np.random.default_rng(0)
    truth = chance.integers(0, 10, 3000)
    # as wide as what EfficientNet-Lite0 says: its last layer, and its earlier maps
    last, stages = (
        (chance.normal(size=(10, width))[truth] + 3 * chance.normal(size=(3000, width))).astype("f")
        for width in (1280, 944)
    )
    rows = np.concatenate([np.flatnonzero(truth == k)[:4] for k in range(10)])
    seen = portfolio.Features([last], [stages])
    began = time.perf_counter()
    teachers = portfolio.Teachers(portfolio.Embedding.fit(seen).spaces(seen), 10)
    with console.ProgressBar("heads", portfolio.FITS, 0, True) as bar:
        portfolio.fit_transductive(teachers, rows, truth[rows], bar)
        portfolio.fit_logistic(seen, rows, truth[rows], 10, bar)
    whole = time.perf_counter() - began
    cases = [(rows[rest], truth[rows][rest]) for _, rest in portfolio.folds_of(truth[rows], 0)] * 6
    spans: list[list[float]] = [[], []]
    ways = (lambda: teachers.teach(cases), lambda: [teachers.student(*case) for case in cases])
    for _ in range(options.rounds):
        for way, own in zip(ways, spans, strict=True):
            began = time.perf_counter()
            way()
            own.append(time.perf_counter() - began)
    y = np.full(3000, -1)
    y[rows] = truth[rows]
    began = time.perf_counter()
    Classifier().fit(last, y)
    middle = time.perf_counter()
    SelfTrainingClassifier(LogisticRegression(max_iter=1000)).fit(last, y)
    after = time.perf_counter()
    together, alone = map(statistics.median, spans)
    beside = {"one after another": alone}
    theirs = {"scikit-learn's SelfTrainingClassifier, not evaluated": after - middle}
    return [
        row("all candidates of `fit`, 40 labels, 3,000 pictures", whole, "s", aim="15 s"),
        row("24 students side by side", together, "s", beside, times=alone / together),
        row("`Classifier().fit`, 3,000 x 1,280, evaluated by folds", middle - began, "s", theirs),
    ]


def time_files(home: Path, options: argparse.Namespace) -> list[Row]:
    """The page of a fit, and an export, by their commands."""
    from calmatch.fit import fit
    from calmatch.options import FitOptions

    few = home / "few"
    for k, file in enumerate(sorted((home / "pictures").iterdir())[:40]):
        target = few / ("ab"[k % 2] if k < 12 else "unlabelled") / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    net, run = "efficientnet_lite0(pretrained=False)", str(home / "run")
    fit(FitOptions(few, out=home / "run", net=net, frozen=True, tta=1, quiet=True))
    page = seconds_of("-P", "-m", "calmatch", "report", run, "--out", str(home / "page.html"))
    to = ("--to", "onnx", "-o", str(home / "again.onnx"))
    exported = seconds_of("-P", "-m", "calmatch", "export", run, *to)
    return [
        row("`calmatch report` of a fit, start included", page, "s", torch_alone(), aim="2 s"),
        row("`calmatch export --to onnx`, checked, start included", exported, "s", aim="20 s"),
    ]


if __name__ == "__main__":
    main()
