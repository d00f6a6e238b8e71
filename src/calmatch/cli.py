"""The command line: a line of help for everything, one sentence and exit code 2 for mistakes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from calmatch import spec
from calmatch.console import message, run_guarded

DEMO = (
    ("supervised", ""),
    ("fixmatch", ""),
    ("fixmatch", "margin(m=10)"),
    ("freematch", ""),
    ("freematch", "margin(m=10)"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it ended."""
    words = list(sys.argv[1:] if argv is None else argv)
    # threads that wait by spinning are five times slower where other programs want the cores
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return run_guarded(lambda: _dispatch(words), words[0] if words else "")


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        from calmatch import __version__

        print(f"calmatch {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise ValueError(f"There is no command {words[0]!r}.{spec.nearest(words[0], COMMANDS)}")
    COMMANDS[words[0]](words[1:])
    return 0


def _overview() -> str:
    lines = ["usage: calmatch COMMAND ...", ""]
    lines += [
        f"  {name:<13} {(run.__doc__ or '').splitlines()[0]}" for name, run in COMMANDS.items()
    ]
    return "\n".join([*lines, "", "calmatch COMMAND --help says more."])


def _parse(kind: type[Any], words: list[str], command: str, **default: Any) -> Any:
    import tyro

    return tyro.cli(kind, args=words, prog=f"calmatch {command}", **default)


def _demo(words: list[str]) -> None:
    """The main job on data that ships with scikit-learn; a table and a report page."""
    from calmatch.options import DemoOptions

    options = _parse(DemoOptions, words, "demo")
    from calmatch import train
    from calmatch.report import build
    from calmatch.report.charts import reliability_figure, save_figure
    from calmatch.report.text import print_runs
    from calmatch.training.recipes import digits_40

    message(
        "Five runs on scikit-learn's digits: 40 labels, the other pictures unlabelled.",
        options.quiet,
    )
    runs = []
    for method, penalty in DEMO:
        folder = options.out / (f"{method}-margin" if penalty else method)
        runs.append(train(digits_40(method, penalty=penalty), folder, quiet=options.quiet))
    picture = save_figure(reliability_figure(runs), options.out / "reliability.png")
    page = build(runs, options.out / "report.html")
    print_runs(runs)
    print(f"Run folders: {options.out}\nPicture:     {picture}\nReport:      {page}")


def _fit(words: list[str]) -> None:
    """Own pictures: class folders (+ unlabelled/), or a folder and a CSV of a few labels."""
    from calmatch.options import FitOptions

    options = _parse(FitOptions, words, "fit")
    from calmatch.fit import fit
    from calmatch.report import build

    run = fit(options)
    if not (run.folder / "report.html").exists():
        build([run], run.folder / "report.html")


def _train(words: list[str]) -> None:
    """One research run: calmatch train RECIPE [--flags]; the same line again continues it."""
    options = _train_options(words)
    from calmatch import ops, train_seeds
    from calmatch.report.text import print_runs

    _use_root(options.data_root)
    if options.together < 1:
        raise ValueError("--together must be at least 1.")
    seeds = range(options.run.seed, options.run.seed + options.together)
    runs = train_seeds(options.run, seeds, options.out, quiet=options.quiet)
    if not options.quiet and ops.is_first_rank():
        print_runs(runs)
        for run in runs:
            print(f"Run folder: {run.folder}\nReport:     {run.folder / 'report.html'}")


def _train_options(words: list[str]) -> Any:
    """Recipe, then file, then flags: the command line always wins."""
    from calmatch.options import TrainOptions
    from calmatch.training.config import Config, load_config
    from calmatch.training.recipes import RECIPES

    if not words or words[0] in ("-h", "--help"):
        _parse(TrainOptions, ["--help"], "train RECIPE", default=TrainOptions(Config()))
    name, flags = words[0], words[1:]
    file = None
    if name not in RECIPES:
        file = Path(name)
        if file.suffix not in (".json", ".yaml", ".yml") or not file.is_file():
            raise ValueError(f"There is no recipe {name!r}.{spec.nearest(name, RECIPES)}")

    def base(method: str | None, also: Path | None, trust: bool) -> Config:
        config = Config()
        if file is None:
            config = RECIPES[name](method) if method else RECIPES[name]()
        for path in (file, also):
            config = load_config(path, config, trust) if path else config
        return config

    bare = base(None, None, True)
    first = _parse(TrainOptions, flags, f"train {name}", default=TrainOptions(bare))
    given = base(None, first.config, first.trust).method
    asked = given if given != bare.method else None  # None: the recipe's own
    if any(word.startswith("--method") for word in flags):
        asked = first.run.method
    default = TrainOptions(base(asked, first.config, first.trust))
    found = _parse(TrainOptions, flags, f"train {name}", default=default)
    if file is not None:
        return found
    named = [asked] if asked else []
    method = RECIPES[name](*named, steps=found.run.steps).method  # a recipe may set its arguments
    return dataclasses.replace(found, run=found.run.replace(method=method))


def _use_root(path: Path | None) -> None:
    if path is not None:
        os.environ["CALMATCH_DATA"] = str(path)


def _datasets(words: list[str]) -> None:
    """What datasets there are, a line each; calmatch datasets check NAME looks into one."""
    if not words or words[0] != "check":
        _listing("datasets", "calmatch.data", "DATASETS")(words)
        return
    from calmatch.options import CheckOptions

    options = _parse(CheckOptions, words[1:], "datasets check")
    _use_root(options.data_root)
    from calmatch.data.dataset import check_dataset

    for finding in check_dataset(options.name, options.labels, options.split_seed):
        print(f"{finding.what:<34} {finding.value}", flush=True)


def _evaluate(words: list[str]) -> None:
    """Error and calibration of a run, or of any model's predictions in a .npz or .csv."""
    from calmatch import metrics
    from calmatch.options import EvaluateOptions
    from calmatch.report.text import print_metrics
    from calmatch.runs import load_predictions, load_run

    options = _parse(EvaluateOptions, words, "evaluate")
    if options.resamples < 0:
        raise ValueError("--resamples must be at least 0.")
    path, leaky = options.path, False
    if path.is_dir():
        leaky = load_run(path).result["leaky"]
        path = path / "predictions.npz"
    probs, labels = load_predictions(path)
    found = metrics.summary(probs, labels, resamples=options.resamples)
    if options.json:
        print(json.dumps({name: item._asdict() for name, item in found.items()}))
        return
    print_metrics(found, len(labels), options.resamples > 0)
    if leaky:
        print("Leaky: these weights were chosen on the test set, as the paper and USB do.")


def _predict(words: list[str]) -> None:
    """A model on pictures: class, calibrated confidence, set, sure or not; CSV or Parquet."""
    from calmatch.options import PredictOptions

    options = _parse(PredictOptions, words, "predict")
    from calmatch.model import load_model
    from calmatch.ops import pick_device
    from calmatch.predict import predict

    predict(
        load_model(options.model, device=pick_device(options.device), trust=options.trust),
        options.pictures,
        options.out,
        batch=options.batch,
        workers=options.workers,
        strict=options.strict,
        engine=options.engine,
        address=options.address,
        quiet=options.quiet,
    )


def _export(words: list[str]) -> None:
    """A model as one file, ONNX or PT2: bytes in, calibrated probabilities out."""
    from calmatch.options import ExportOptions

    options = _parse(ExportOptions, words, "export")
    from calmatch import export
    from calmatch.model import load_model

    path = export.export(
        load_model(options.run, trust=options.trust),
        options.out or options.run / f"model.{options.to}",
        options.to,
    )
    if not options.quiet:
        print(f"Exported: {path}")


def _bench(words: list[str]) -> None:
    """A suite of runs, with its table and figures; on one machine or a cluster."""
    if not words:
        _listing("suites", "calmatch.bench.paper", "SUITES")(words)
        return
    from calmatch.options import BenchOptions

    options = _parse(BenchOptions, words, "bench")
    _use_root(options.data_root)
    from calmatch.bench import run_suite

    run_suite(options)


def _replay(words: list[str]) -> None:
    """A run again: the same byte for byte, or how far away; RUN/fault: a step that went wrong."""
    from calmatch.options import ReplayOptions

    options = _parse(ReplayOptions, words, "replay")
    _use_root(options.data_root)
    from calmatch.training.replay import replay_command

    replay_command(options)


def _report(words: list[str]) -> None:
    """One page from one or more run folders."""
    from calmatch.options import ReportOptions
    from calmatch.report import build
    from calmatch.runs import load_run

    options = _parse(ReportOptions, words, "report")
    if not options.runs:
        raise ValueError("Name at least one run folder: calmatch report RUN ...")
    runs = [load_run(folder) for folder in options.runs]
    first = options.runs[0]
    page = build(runs, options.out or (first if len(runs) == 1 else first.parent) / "report.html")
    print(f"Report: {page}")
    if options.tensorboard:
        from calmatch.report import write_tensorboard

        for run in runs:
            print(f"Events: {write_tensorboard(run)}")


def _table(words: list[str]) -> None:
    """Error / ECE tables of run folders, ranks and paired tests: calmatch table RUNS ..."""
    from calmatch.options import TableOptions

    options = _parse(TableOptions, words, "table")
    from calmatch.bench import table_command

    table_command(options)


def _figure(words: list[str]) -> None:
    """A figure of the paper: calmatch figure NAME RUNS ..."""
    from calmatch.bench import figure_command

    if not words or words[0] in ("-h", "--help"):
        from calmatch.bench.figures import FIGURES

        print("usage: calmatch figure NAME [RUNS ...] [-o FILE.svg|.pdf|.png]\n")
        print("\n".join(f"  {name:<12} {item.line}" for name, item in FIGURES.items()))
        print("\ncalmatch figure NAME --help says more.")
        return
    from calmatch.options import FigureOptions

    figure_command(words[0], _parse(FigureOptions, words[1:], f"figure {words[0]}"))


def _listing(kind: str, module: str, table: str) -> Callable[[list[str]], None]:
    def show(words: list[str]) -> None:
        if words and words[0] not in ("-h", "--help"):
            raise ValueError(f"calmatch {kind} takes no arguments.")
        found = getattr(importlib.import_module(module), table)
        width = max(map(len, found))
        for name, item in found.items():
            plain = getattr(item, "func", item)  # a recipe with its labels chosen
            print(f"{name:<{width}}  {(plain.__doc__ or '').strip().splitlines()[0]}")

    show.__doc__ = f"What {kind} there are, a line each."
    return show


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": _demo,
    "fit": _fit,
    "train": _train,
    "evaluate": _evaluate,
    "report": _report,
    "predict": _predict,
    "export": _export,
    "bench": _bench,
    "table": _table,
    "figure": _figure,
    "replay": _replay,
    "methods": _listing("methods", "calmatch.methods", "METHODS"),
    "datasets": _datasets,
    "nets": _listing("nets", "calmatch.nets", "NETS"),
    "recipes": _listing("recipes", "calmatch.training.recipes", "RECIPES"),
    "losses": _listing("losses", "calmatch.losses", "LOSSES"),
    "metrics": _listing("metrics", "calmatch.metrics", "METRICS"),
    "augmentations": _listing("augmentations", "calmatch.augment", "OPS"),
}
