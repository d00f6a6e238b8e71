"""The report page: one HTML file from run folders alone; it opens from disk and loads nothing."""

import base64
import functools
import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image
from torch import Tensor

from calmatch import files, metrics, runs, spec
from calmatch.console import say_why
from calmatch.model import read_calibration
from calmatch.report import summary, text
from calmatch.report.summary import Predictions
from calmatch.runs import Examples, Run, command_line, describe_guessing

HERE = Path(__file__).parent
MANY = 50  # runs on a page beyond which their curves get fewer points and no bands
SCRIPTS = ("spots.js", "charts.js", "compare.js", "page.js")
# Only our own scripts run, by their hashes; nothing can be fetched, sent or framed.
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
FILTERS: dict[str, Any] = {"percent": summary.percent, "signed": summary.signed}  # of the template
FILTERS["whole"] = lambda words: words.replace(" %", "\u00a0%")  # no line break in between
WANTED = 0.05  # error at most among answered images, where the run chose no operating point


def build(shown: Sequence[Run], path: Path) -> Path:
    """Write the page of one run, or the comparison of several."""
    several = [summary.make_predictions(*run.predictions()) for run in shown]
    pairs = list(zip(shown, several, strict=True))
    many = len(shown) > MANY
    data: dict[str, Any] = {"runs": [chart_numbers(*pair, many) for pair in pairs]}
    view: dict[str, Any] = {"about": [describe_run(run, path) for run in shown], "example": None}
    if len(shown) == 1:
        data |= single_run_details(*pairs[0])
        view["heading"] = shown[0].title
        view["example"] = summary.stated_level(several[0])
    else:
        grid, *gaps = summary.gap_densities(several, 24 if many else summary.GRID)
        data["gapGrid"] = grid
        for numbers, densities in zip(data["runs"], gaps, strict=True):
            numbers["gaps"] = densities
        view["heading"] = f"{len(shown)} runs compared"
        dumps = [run.config.dump() for run in shown]
        settings = [(key, [str(dump[key]) for dump in dumps]) for key in dumps[0]]
        view["differences"] = [each for each in settings if len(set(each[1])) > 1]
        view["sentences"] = text.compare_runs(data["runs"])
    view["over"] = " · ".join(dict.fromkeys(describe_data(run) for run in shown))
    files.write(path, _render(data, view).encode("utf-8", "backslashreplace"))
    return path


def _render(data: dict[str, Any], view: dict[str, Any]) -> str:
    scripts = [_libraries(), "\n".join(_read_asset(name) for name in SCRIPTS)]
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    page: str = files.template(HERE / "template.html", **FILTERS).render(
        view,
        data=_finite(data),
        runs=data["runs"],
        classes=data.get("classes", []),
        per_class=data.get("perClass", []),
        tables=summary.chart_tables(data),
        columns=[head.replace("\n", " ") for head, *_ in text.COLUMNS.values()],
        legend=text.LEGEND,
        style=Markup(_read_asset("page.css")),
        scripts=[Markup(script) for script in scripts],  # ours, and free of </script
        policy=POLICY.format(scripts=hashes),
    )
    return page


@functools.cache
def _libraries() -> str:
    """The plotting library with its licences, which ask to be in every copy."""
    notes = json.loads(_read_asset("vendor/vendor.json"))
    licences = _read_asset("vendor/LICENSES.txt").replace("*/", "* /")
    sources = (_read_asset(f"vendor/{note['file']}") for note in notes)
    return f"/*!\n{licences}*/\n" + "\n;\n".join(sources)


@functools.cache
def _read_asset(name: str) -> str:
    return files.read_text(HERE / name)


def _finite(value: Any) -> Any:
    """JSON knows no NaN; and a chart shows few digits."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def chart_numbers(run: Run, preds: Predictions, many: bool = False) -> dict[str, Any]:
    """What the charts that every page has are drawn from; of many runs, fewer points."""
    points, most, resamples = (21, 12, 0) if many else (101, 200, 500)
    lines = run.log()
    trained = _log_curve(lines, "train", "accepted agree pseudo_accuracy")
    learned = run.result.evaluated_on == "crossfit"  # its "test" set is what it learned from
    tested = [
        {**line, "split": split}
        for split in (("validation",) if learned else ("test", "validation"))
        for line in summary.thin(_log_curve(lines, split, "error ece"), most)
    ]
    numbers = headline_numbers(run, preds) | {"chance": summary.ece_by_chance(preds)}
    return {
        "title": run.title,
        "bins": summary.reliability_bins(preds),
        "smooth": summary.smooth_reliability(preds, points, resamples),
        "risk": summary.risk_coverage(preds, points - 1),
        "point": operating_point(run, preds),
        "tested": tested,
        "trained": summary.thin(trained, most),
        "verdict": text.short_verdict(numbers),
        **numbers,
    }


def _log_curve(lines: Sequence[Mapping[str, Any]], kind: str, names: str) -> list[dict[str, Any]]:
    """The step and these numbers, where they were logged, of the lines of a kind."""
    return [
        {"step": line["step"]} | {k: line[k] for k in names.split() if line.get(k) is not None}
        for line in lines
        if line["kind"] == kind
    ]


def headline_numbers(run: Run, preds: Predictions) -> dict[str, Any]:
    """The headline's numbers; what the folder does not hold is measured now."""
    values = {}
    for name in ("error", "ece"):
        known = run.result.metrics.get(name)
        measured = known or metrics.interval(name, preds.probs, preds.labels, resamples=200)
        values[name] = measured._asdict()
    confidence, accuracy = float(preds.confidence.mean()), float(preds.right.mean())
    means = {"confidence": confidence, "accuracy": accuracy, "over": confidence - accuracy}
    n, own = len(preds.labels), run.result.evaluated_on != "test"  # a fit's labels
    facts = (values["error"]["value"], preds.labels.tolist(), run.result.classes)
    words = {"few": own and n < metrics.FEW, "lost": describe_guessing(*facts) if own else []}
    spread = 1.96 * float((preds.confidence - preds.right).std(correction=0)) / n**0.5
    return {**values, **means, **words, "over_shown": abs(means["over"]) > spread, "n": n}


def operating_point(run: Run, preds: Predictions) -> dict[str, Any] | None:
    """The threshold the model came with, or none; else the most answers with 5 % error here."""
    own = _calibration(run).get("selective")
    if own is None:
        point = summary.most_answers(preds, WANTED)
    else:
        point = None if own.threshold is None else summary.at_threshold(preds, own.threshold)
    return point and {**point, "own": own is not None}


def _calibration(run: Run) -> dict[str, Any]:
    """Calibration and promises of model.json, after they are known to be what they should be."""
    return read_calibration(_read_json(run.folder / "model.json"))


def _read_json(path: Path) -> dict[str, Any]:
    """What a file holds, where it is there."""
    return files.read_json(path) if path.is_file() else {}


def single_run_details(run: Run, preds: Predictions) -> dict[str, Any]:
    """What only the page of a single run shows: confusions, classes, logits, images."""
    data: dict[str, Any] = {"classes": list(run.result.classes)}
    data |= {"confusion": summary.confusion_cells(preds), "perClass": summary.per_class(preds)}
    data["logits"] = summary.logit_densities(preds)
    examples = runs.load_examples(run.folder)
    if examples is None:
        return data
    rows, widths = examples.rows, (2, len(data["classes"]))
    if max(rows, default=0) >= len(preds.labels) or examples.asked_log_probs.shape[1] not in widths:
        raise ValueError(f"{run.folder / runs.EXAMPLES_FILE} belongs to another run; remove it.")
    names = files.read_arrays(run.folder / "predictions.npz").get("files")
    data["pictures"] = example_images(preds, examples, names)
    counts = {"looked": examples.considered, "whole": examples.whole}
    data["asked"] = {"shown": asked_images(examples), "command": runs.label_command(run), **counts}
    data["inBins"] = []  # up to three wrong and three right ones of each bin (left, right]
    for bin in summary.reliability_bins(preds):
        inside = [k for k in rows if bin["left"] < float(preds.confidence[k]) <= bin["right"]]
        wrong = [k for k in inside if not preds.right[k]][:3]
        data["inBins"].append([*wrong, *[k for k in inside if preds.right[k]][:3]])
    return data


def example_images(preds: Predictions, examples: Examples, names: Any | None) -> dict[str, Any]:
    """Images by row, and the rows of the most confidently wrong ones, worst first."""
    images = {}
    for row, image in zip(examples.rows, examples.images, strict=True):
        truth, guess = int(preds.labels[row]), int(preds.guess[row])
        images[str(row)] = {
            "src": data_uri(image),
            "name": f"picture {row}" if names is None else str(names[row]),
            "truth": truth,
            "guess": guess,
            "confidence": float(preds.confidence[row]),
            "truth_probability": float(preds.probs[row, truth]),
        }
    wrong = runs.most_confident_mistakes(preds.confidence, preds.right > 0).tolist()
    side = max(examples.images.shape[-2:], default=0)
    return {"shown": images, "wrong": [k for k in wrong if str(k) in images], "side": side}


def data_uri(image: Tensor) -> str:
    """uint8 [3, H, W] as a data URI, PNG or JPEG, whichever is smaller."""
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    png, jpeg = io.BytesIO(), io.BytesIO()
    picture.save(png, "png", optimize=True)
    picture.save(jpeg, "jpeg", quality=88, subsampling=0)
    encoded = (("jpeg", jpeg.getvalue()), ("png", png.getvalue()))
    kind, raw = min(encoded, key=lambda pair: len(pair[1]))
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def asked_images(examples: Examples) -> list[dict[str, Any]]:
    """Unlabelled images worth a label, with the model's first three guesses."""
    entries = []
    probs = runs.probabilities(examples.asked_log_probs)
    for place, row in enumerate(examples.asked_rows):
        chances, ids = probs[place].topk(min(3, probs.shape[1]))
        name = examples.asked_files[place] if examples.asked_files else f"row {row}"
        guesses = list(zip(ids.tolist(), chances.tolist(), strict=True))
        source = data_uri(examples.asked_images[place])
        entries.append({"src": source, "name": name, "guesses": guesses})
    return entries


def describe_run(run: Run, page: Path) -> dict[str, Any]:
    """How a run was made and how to make it again."""
    home, folder = page.parent.resolve(), run.folder.resolve()
    config = Path("config.json") if home == folder else Path(run.folder.name) / "config.json"
    train = command_line("calmatch", "train", str(config), "--out", "NEW_FOLDER")
    repeat = [train, "calmatch report NEW_FOLDER"]
    linked = folder.parent == home and (run.folder / "report.html").is_file()
    point = _calibration(run).get("selective")
    return {
        "result": run.result,
        "promise": point.describe() if point else "",
        "candidates": {k: (v, k == run.result.kept) for k, v in run.result.scores.items()},
        "cells": text.table_cells(run),
        "commands": list(run.result.commands) or repeat,
        "config": json.dumps(run.config.dump(), indent=2, ensure_ascii=False),
        "facts": run_facts(run),
        "link": f"{run.folder.name}/report.html" if linked else "",
    }


def run_facts(run: Run) -> list[tuple[str, str]]:
    """A line each of what a reader asks first."""
    config, result = run.config, run.result
    averaged = "averaged, " if result.weights == "ema" else ""
    weights = f"{averaged}step {result.step:,} of {result.steps:,} ({result.selected})"
    environment = _read_json(run.folder / "environment.json")
    known = environment.get("versions")
    versions = [f"{k} {v}" for k, v in known.items()] if isinstance(known, dict) else []
    learned = f"{config.method}{f' + {config.penalty}' if config.penalty else ''}"
    was, before = result.before_calibration, ""
    if {"ece", "nll"} <= set(was):
        before = f"ECE {summary.percent(was['ece'])} %, NLL {was['nll']:.2f} nats"
    facts = {
        "pictures": describe_data(run),
        "method": result.kept if result.kept and not result.step else learned,
        "network": config.net,
        "weights": weights if result.step else "",
        "seed": str(config.seed),
        "evaluated on": text.EVALUATED_ON.get(result.evaluated_on, result.evaluated_on),
        "calibration": text.describe_calibration(_calibration(run)),
        "before it": before,
        "device": str(environment.get("device", "")),
        "versions": ", ".join(versions),
    }
    return [(name, fact) for name, fact in facts.items() if fact]


def describe_data(run: Run) -> str:
    """The dataset and how many images of each kind."""
    evaluated = "test" if run.result.evaluated_on == "test" else "of them evaluated"
    counts = {k: v for k, v in run.result.images.items() if v}
    parts = [f"{n:,} {evaluated if kind == 'test' else kind}" for kind, n in counts.items()]
    return f"{run.data}: {', '.join(parts)}" if parts else run.data


def write_tensorboard(run: Run) -> Path:
    """Write the numbers of metrics.jsonl under tensorboard/ in the run folder, anew."""
    why = "TensorBoard is not installed; pip install 'calmatch[tensorboard]'."
    (tensorboard,) = spec.import_extra(why, "torch.utils.tensorboard.writer")
    folder = run.folder / "tensorboard"
    for old in folder.glob("events.out.*"):
        old.unlink()
    with tensorboard.SummaryWriter(folder) as writer:
        writer.add_text("config", f"    {json.dumps(run.config.dump(), indent=4)}")
        for step, when, values in _logged_values(run):
            for name, value in values.items():
                writer.add_scalar(name, value, step, walltime=when)
    return folder


def write_wandb(run: Run) -> str:
    """The same numbers as a run of Weights & Biases; with WANDB_MODE=offline in the run folder."""
    (wandb,) = spec.import_extra("W&B is not installed; pip install 'calmatch[wandb]'.", "wandb")
    settings: Any = {"project": os.environ.get("WANDB_PROJECT", "calmatch"), "name": run.title}
    settings |= {"dir": run.folder, "config": run.config.dump()}
    with say_why("W&B does not take the run"), wandb.init(**settings) as one:
        for step, _, values in _logged_values(run):
            one.log(values, step=step)
        return str(one.url or Path(one.dir).parent)


def write_mlflow(run: Run) -> str:
    """The same numbers as a run of MLflow; without MLFLOW_TRACKING_URI in the run folder."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder needs no database
    why = "MLflow is not installed; pip install 'calmatch[mlflow]'."
    mlflow, kinds = spec.import_extra(why, "mlflow", "mlflow.entities")
    with say_why("MLflow does not take the run"):
        place = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").resolve().as_uri()
        client, name = mlflow.MlflowClient(place), "calmatch"
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        number = client.create_run(experiment, run_name=run.title).info.run_id
        params = [kinds.Param(k, str(v)) for k, v in run.config.dump().items() if v is not None]
        client.log_batch(number, params=params)
        for step, when, values in _logged_values(run):
            unix = int(1000 * (when or 0))
            client.log_batch(number, [kinds.Metric(k, v, unix, step) for k, v in values.items()])
        client.set_terminated(number)
        return f"{place} {number}"


def _logged_values(run: Run) -> Iterator[tuple[int, float | None, dict[str, float]]]:
    """What every tracker shows: the numbers of each step with its time, the result's too."""
    path, times = run.folder / "times.jsonl", dict[int, float]()
    if path.is_file():
        with files.open_file(path) as file:  # a continued run wrote some twice: the last counts
            times = {line["step"]: line["unix"] for line in map(json.loads, file)}
    steps: dict[int, dict[str, float]] = {}
    for line in run.log():
        if line["kind"] in ("train", "test", "validation"):
            values = steps.setdefault(line["step"], {})
            for name, value in line.items():
                if name != "step" and isinstance(value, int | float):
                    values[f"{line['kind']}/{name}"] = value
    last = steps.setdefault(max(run.result.step, *steps, 0), {})
    last |= {f"result/{name}": item.value for name, item in run.result.metrics.items()}
    for step in sorted(steps):
        yield step, times.get(step), steps[step]
