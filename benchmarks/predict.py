"""What people wait for: a cold start, predictions, features for `fit`, its heads, report, export.

    python benchmarks/predict.py [--pictures 300] [--rounds 3] [--parts start predict ...]

Predictions stand beside a bare loop of onnxruntime on the exported model, and beside the way of
timm's inference script (its own transform, DataLoader workers, an eager network). The opponents
take turns round by round on the same photographs, so a busy machine slows all of them; the network
is EfficientNet-Lite0 at 224 px with a random last layer. Prints a table, writes dated JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from serve import SIZE, write_photographs, write_random_model

from calmatch import Classifier, console, export, load_run, nets, report
from calmatch.data.images import ImageFiles
from calmatch.fit import portfolio
from calmatch.fit.features import compute_features
from calmatch.model import load_model
from calmatch.predict import predict
from calmatch.training.setup import describe_environment

PARTS = ("start", "predict", "features", "heads", "files")
LISTS = ("--help", "predict --help", "methods", "nets", "recipes", "bench", "figure")
HEAVY = ("torch", "numpy", "PIL", "timm", "torchvision", "scipy", "sklearn", "pandas", "matplotlib")
BATCH = 32
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--out", type=Path, help="JSON file; by default in benchmarks/results/")
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["CALMATCH_CACHE"] = str(Path(place) / "cache")
        home = Path(place)
        write_random_model(home)
        write_photographs(home / "pictures", options.pictures)
        for part in options.parts:
            for row in globals()[f"time_{part}"](home, options):
                rows.append(row)
                print(f"{row['what']:<60} {row['value']:9.2f} {row['unit']}", flush=True)
    facts = describe_environment(torch.device(kind))
    facts["processor"] = platform.processor() or platform.machine()
    record = {"date": str(date.today()), "environment": facts, "rows": rows}
    record |= {"pictures": options.pictures, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    path = options.out or Path(__file__).parent / f"results/predict-{kind}-{date.today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"Written: {path}")


def row(what: str, value: float, unit: str, **more: Any) -> Row:
    return {"what": what, "value": round(value, 4), "unit": unit, **more}


def seconds_of(*words: str) -> float:
    """Of a process, the better of two: the first may read from a cold disk."""
    spans = []
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        spans.append(time.perf_counter() - began)
    return min(spans)


def time_start(home: Path, options: argparse.Namespace) -> list[Row]:
    """Commands that only say something, and a model's first answer from a new Python."""
    rows = [
        row(f"calmatch {words}", seconds_of("-P", "-m", "calmatch", *words.split()), "s")
        for words in LISTS
    ]
    picture = next((home / "pictures").iterdir())
    code = f"import calmatch; print(calmatch.load({str(home)!r}).predict({str(picture)!r}))"
    rows.append(row("python: import calmatch, load, first answer", seconds_of("-c", code), "s"))
    rows.append(row("python: import torch alone", seconds_of("-c", "import torch"), "s"))
    imports = import_table(code)
    for name in HEAVY:
        if name in imports:
            rows.append(row(f"  of the first answer: import {name}", imports[name], "s"))
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
    model, folder = load_model(home), home / "pictures"
    export.export(model, home / "model.onnx")
    ways: dict[str, Callable[[], Any]] = {
        "calmatch predict": lambda: predict(model, folder, home / "out.csv", quiet=True),
        "onnxruntime, a bare loop": onnx_loop(home / "model.onnx", folder),
        "timm's inference script's way": timm_loop(folder),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # warm
    for _ in range(options.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            speeds[name].append(options.pictures / (time.perf_counter() - began))
    rows = [row(name, statistics.median(s), "pictures/s", all=s) for name, s in speeds.items()]
    ours, *others = speeds.values()
    ratios = [own / max(best) for own, *best in zip(ours, *others, strict=True)]
    rows.append(row("calmatch over the better of the others", statistics.median(ratios), "times"))
    words = ("-P", "-m", "calmatch", "predict", str(home), str(folder), "-o", str(home / "o.csv"))
    what = f"calmatch predict, {options.pictures} pictures, start included"
    rows.append(row(what, seconds_of(*words, "--quiet"), "s"))
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
        workers = min(4, os.cpu_count() or 1)
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
        ways = (lambda: compute_features(extractor, images, quiet=True), loop)
        for way, own in zip(ways, spans, strict=True):
            began = time.perf_counter()
            way()
            own.append((time.perf_counter() - began) / len(names) * 1000)
    ours, theirs = map(statistics.median, spans)
    rows = [row("features for fit, 1,000 pictures at 224 px", ours, "s", all=spans[0])]
    rows.append(row("  a plain float32 loop with Pillow", theirs, "s", all=spans[1]))
    return rows


def time_heads(home: Path, options: argparse.Namespace) -> list[Row]:
    """The whole portfolio on features that are there: 40 labels, 3,000 pictures, ten classes."""
    chance = np.random.default_rng(0)
    truth = chance.integers(0, 10, 3000)
    centres = chance.normal(size=(10, 1280))
    features = (centres[truth] + 3 * chance.normal(size=(3000, 1280))).astype(np.float32)
    rows = np.concatenate([np.flatnonzero(truth == k)[:4] for k in range(10)])
    began = time.perf_counter()
    seen = portfolio.Features([features], None)
    teachers = portfolio.Teachers(portfolio.Embedding.fit(seen).spaces(seen), 10)
    with console.ProgressBar("heads", portfolio.FITS, 0, True) as bar:
        portfolio.fit_transductive(teachers, rows, truth[rows], bar)
        portfolio.fit_logistic(seen, rows, truth[rows], 10, bar)
    middle = time.perf_counter()
    y = np.full(3000, -1)
    y[rows] = truth[rows]
    Classifier().fit(features, y)
    after = time.perf_counter()
    return [
        row("all candidates of fit, 40 labels, 3,000 pictures", middle - began, "s"),
        row("Classifier().fit of the same", after - middle, "s"),
    ]


def time_files(home: Path, options: argparse.Namespace) -> list[Row]:
    """The page of a fit, and an export."""
    from calmatch.fit import fit
    from calmatch.options import FitOptions

    few = home / "few"
    for k, file in enumerate(sorted((home / "pictures").iterdir())[:40]):
        target = few / ("ab"[k % 2] if k < 12 else "unlabelled") / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    net = "efficientnet_lite0(pretrained=False)"
    fit(FitOptions(few, out=home / "run", net=net, frozen=True, tta=1, quiet=True))
    began = time.perf_counter()
    report.build([load_run(home / "run")], home / "page.html")
    middle = time.perf_counter()
    export.export(load_model(home / "run"), home / "again.onnx")
    after = time.perf_counter()
    return [
        row("report of a fit", middle - began, "s"),
        row("export to ONNX, checked", after - middle, "s"),
    ]


if __name__ == "__main__":
    main()
