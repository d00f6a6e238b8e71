"""The report page: one HTML file from run folders alone, which opens from disk and loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from calmatch import files, metrics
from calmatch.files import write
from calmatch.report.summary import (
    ChartTable,
    Predictions,
    at_threshold,
    confusion_cells,
    confusion_table,
    ece_by_chance,
    gap_grid,
    gaps,
    logit_densities,
    logits_table,
    make_predictions,
    most_answers,
    per_class,
    percent,
    reliability_bins,
    reliability_table,
    risk_coverage,
    risk_table,
    signed,
    smooth_reliability,
    smooth_table,
    tested_table,
    thin,
    trained_table,
)
from calmatch.report.text import (
    COLUMNS,
    EVALUATED_ON,
    LEGEND,
    cell,
    compare_runs,
    describe_before,
    describe_calibration,
    describe_example,
    describe_headline,
    describe_promise,
    evaluated_on,
    name_images,
    short_verdict,
)
from calmatch.runs import (
    EXAMPLES_FILE,
    Examples,
    Run,
    load_examples,
    most_confident_mistakes,
    probabilities,
    read_lines,
)

HERE = Path(__file__).parent
MANY = 50  # runs on a page beyond which their curves get fewer points and no bands
SCRIPTS = ("spots.js", "charts.js", "compare.js", "page.js")
# Only our own scripts run, by their hashes; nothing can be fetched, sent or framed.
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def build(runs: Sequence[Run], path: Path) -> Path:
    """Write the page of one run, or the comparison of several."""
    found = [make_predictions(*run.predictions()) for run in runs]
    detail = FINE if len(runs) <= MANY else COARSE
    data: dict[str, Any] = {
        "runs": [chart_numbers(*pair, detail) for pair in zip(runs, found, strict=True)]
    }
    chances = [ece_by_chance(one, draws=detail.draws) for one in found]
    view: dict[str, Any] = {"about": [describe_run(run, path) for run in runs]}
    if len(runs) == 1:
        data |= single_run_details(runs[0], found[0])
        view |= {
            "sentences": describe_headline(runs[0], data["runs"][0], chances[0]),
            "example": describe_example(found[0]),
            "pictures": name_images(runs[0]),
        }
    else:
        data["gapGrid"] = gap_grid(found, detail.grid)
        for run, one in zip(data["runs"], found, strict=True):
            run["gaps"] = gaps(one, data["gapGrid"])
        view |= {
            "differences": config_differences(runs),
            "sentences": compare_runs(data["runs"]),
            "example": "",
        }
    for run, chance in zip(data["runs"], chances, strict=True):
        run["chance"] = chance
        run["verdict"] = short_verdict(run, chance)
    write(path, _page(runs, data, view))
    return path


def _page(runs: Sequence[Run], data: dict[str, Any], view: dict[str, Any]) -> str:
    scripts = [_libraries(), "\n".join(_read_asset(name) for name in SCRIPTS)]
    return (
        _environment()
        .get_template("template.html")
        .render(
            view,
            heading=runs[0].title if len(runs) == 1 else f"{len(runs)} runs compared",
            over=" · ".join(dict.fromkeys(describe_data(run) for run in runs)),
            data=_finite(data, 5 if len(runs) <= MANY else 3),
            runs=data["runs"],
            classes=data.get("classes", []),
            per_class=data.get("perClass", []),
            tables=_chart_tables(data),
            columns=[column.head.replace("\n", " ") for column in COLUMNS],
            legend=LEGEND,
            style=Markup(_read_asset("page.css")),
            scripts=[Markup(script) for script in scripts],  # ours, and free of </script
            policy=POLICY.format(scripts=" ".join(map(_script_hash, scripts))),
        )
    )


def _chart_tables(data: dict[str, Any]) -> dict[str, ChartTable]:
    runs = data["runs"]
    kinds = (reliability_table, smooth_table, risk_table, tested_table, trained_table)
    found = {kind.__name__.removesuffix("_table"): kind(runs) for kind in kinds}
    if "confusion" in data:
        found |= {"confusion": confusion_table(data), "logits": logits_table(data)}
    return found


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("calmatch.report", "")
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    page.trim_blocks = page.lstrip_blocks = True
    page.filters |= {"percent": percent, "signed": signed}
    page.filters["whole"] = lambda text: text.replace(" %", "\u00a0%")  # no line break in between
    # tojson escapes <, >, & and ', and ASCII alone leaves no U+2028: safe inside a script element
    page.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return page


@functools.cache
def _libraries() -> str:
    """The plotting library with its licences, which ask to be in every copy."""
    notes = json.loads(_read_asset("vendor/vendor.json"))
    licences = _read_asset("vendor/LICENSES.txt").replace("*/", "* /")
    return f"/*!\n{licences}*/\n" + "\n;\n".join(
        _read_asset(f"vendor/{note['file']}") for note in notes
    )


@functools.cache
def _read_asset(name: str) -> str:
    return (HERE / name).read_text("utf-8")


def _script_hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _finite(value: Any, digits: int = 5) -> Any:
    """JSON knows no NaN; and five digits are more than a chart shows."""
    if isinstance(value, dict):
        return {key: _finite(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


WANTED = 0.05  # error at most among answered pictures, where the run chose no operating point
TRAINED = ("accepted", "agree", "pseudo_accuracy", "pseudo_ece")


def headline_numbers(run: Run, found: Predictions) -> dict[str, Any]:
    """The headline's numbers; what the folder does not tell is measured now."""
    known = run.result.get("metrics", {})
    values = {
        name: known.get(name)
        or metrics.interval(name, found.probs, found.labels, resamples=200)._asdict()
        for name in ("error", "ece")
    }
    confidence, accuracy = float(found.confidence.mean()), float(found.right.mean())
    means = {"confidence": confidence, "accuracy": accuracy, "over": confidence - accuracy}
    n = len(found.labels)
    spread = 1.96 * float((found.confidence - found.right).std(correction=0)) / n**0.5
    return {**values, **means, "over_shown": abs(means["over"]) > spread, "n": n}


class Detail(NamedTuple):
    """How finely a page's curves are drawn."""

    points: int  # of the smooth and the risk curve
    band: int  # resamples behind the smooth curve's band; 0: none is drawn
    draws: int  # behind the ECE of chance alone
    lines: int  # of a training curve
    grid: int  # points of a density


FINE = Detail(points=101, band=500, draws=200, lines=200, grid=64)
COARSE = Detail(points=21, band=0, draws=100, lines=12, grid=24)


def chart_numbers(run: Run, found: Predictions, detail: Detail = FINE) -> dict[str, Any]:
    """What the charts that every page has are drawn from."""
    known = run.result["metrics"].get("smooth_ece") if detail is COARSE else None
    trained = [_pick_fields(line, TRAINED) for line in _run_lines(run, "train")]
    return {
        "title": run.title,
        "bins": reliability_bins(found),
        "smooth": smooth_reliability(found, detail.points, detail.band, known and known["value"]),
        "risk": risk_coverage(found, detail.points - 1),
        "point": operating_point(run, found),
        "tested": test_curves(run, detail.lines),
        "trained": thin(trained, detail.lines),
        **headline_numbers(run, found),
    }


def single_run_details(run: Run, found: Predictions) -> dict[str, Any]:
    """What only the page of a single run shows: confusions, classes, logits, pictures."""
    data: dict[str, Any] = {
        "classes": [str(name) for name in run.result["classes"]],
        "confusion": confusion_cells(found),
        "perClass": per_class(found),
        "logits": logit_densities(found),
    }
    kept = load_examples(run.folder)
    if kept is not None:
        classes, rows = len(data["classes"]), len(found.labels)
        if max(kept.rows, default=0) >= rows or kept.asked_log_probs.shape[1] not in (2, classes):
            raise ValueError(f"{run.folder / EXAMPLES_FILE} belongs to another run; remove it.")
        data["pictures"] = shown_images(found, kept, image_files(run))
        data["asked"] = {"shown": asked_images(kept), "looked": kept.looked, "whole": kept.whole}
        data["inBins"] = [
            rows_in_bin(found, kept.rows, row["left"], row["right"])
            for row in reliability_bins(found)
        ]
    return data


def operating_point(run: Run, found: Predictions) -> dict[str, Any] | None:
    """The threshold the model came with; else the most answers with at most 5 % error here."""
    selective = _selective(run)
    if isinstance(selective.get("threshold"), int | float):
        point = at_threshold(found, float(selective["threshold"]))
        return point and {**point, "own": True}
    point = most_answers(found, WANTED)
    return point and {**point, "own": False}


def _selective(run: Run) -> dict[str, Any]:
    return _read_optional_json(run.folder / "model.json").get("selective") or {}


def test_curves(run: Run, most: int) -> list[dict[str, Any]]:
    """Error and ECE over time, on every set that was measured."""
    lines: list[dict[str, Any]] = []
    for split in ("test", "validation"):
        chosen = [_pick_fields(line, ("error", "ece")) for line in _run_lines(run, split)]
        lines += [{**line, "split": split} for line in thin(chosen, most)]
    return lines


def image_files(run: Run) -> list[str] | None:
    """Names of the judged pictures where there are any."""
    held = files.read_arrays(run.folder / "predictions.npz")
    return [str(name) for name in held["files"]] if "files" in held else None


def _run_lines(run: Run, kind: str) -> list[dict[str, Any]]:
    path = run.folder / "metrics.jsonl"
    if not path.is_file():
        return []
    facts = path.stat()
    return [line for line in _read(path, facts.st_mtime_ns, facts.st_size) if line["kind"] == kind]


@functools.lru_cache(maxsize=1)
def _read(path: Path, *changed: int) -> list[dict[str, Any]]:
    """The lines of a run, parsed once for all its charts."""
    return read_lines(path)


def _pick_fields(line: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {"step": line["step"]} | {k: line[k] for k in names if line.get(k) is not None}


def _read_optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return files.read_json(path)


def describe_run(run: Run, page: Path) -> dict[str, Any]:
    """How a run was made and how to make it again."""
    inside = page.parent.resolve() == run.folder.resolve()
    place = Path("config.json") if inside else Path(run.folder.name) / "config.json"
    environment = _read_optional_json(run.folder / "environment.json")
    own = run.folder / "report.html"
    return {
        "title": run.title,
        "leaky": bool(run.result.get("leaky")),
        "notes": [str(note) for note in run.result.get("notes", ())],
        "judged": str(run.result.get("judged_note", "")),
        "promise": describe_promise(_selective(run)),
        "cells": [_table_cell(run, k) for k in range(len(COLUMNS))],
        "commands": run.result.get("commands") or _repeat(run, place),
        "config": json.dumps(run.config.dump(), indent=2, ensure_ascii=False),
        "facts": run_facts(run, environment),
        "link": f"{run.folder.name}/report.html"
        if run.folder.resolve().parent == page.parent.resolve() and own.is_file()
        else "",
    }


def _repeat(run: Run, place: Path) -> list[str]:
    if (run.folder / "fit.json").is_file():
        return ["calmatch fit PICTURES --out NEW_FOLDER"]
    return [f"calmatch train {place} --out NEW_FOLDER", "calmatch report NEW_FOLDER"]


def _table_cell(run: Run, place: int) -> dict[str, Any]:
    found = run.result.get("metrics", {}).get(COLUMNS[place].key)
    value, ends = cell(found, COLUMNS[place])
    return {"value": value, "ends": ends, "sort": found["value"] if found else ""}


def describe_data(run: Run) -> str:
    """The dataset and how many pictures of each kind."""
    judged = "test" if evaluated_on(run) == "test" else "of them judged"
    counts = {k: v for k, v in run.result.get("pictures", {}).items() if v}
    said = ", ".join(
        f"{number:,} {judged if kind == 'test' else kind}" for kind, number in counts.items()
    )
    return f"{run.data}: {said}" if said else run.data


def run_facts(run: Run, environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line each of what a reader asks first."""
    config = run.config
    found = [
        ("pictures", describe_data(run)),
        ("method", f"{config.method}{f' + {config.penalty}' if config.penalty else ''}"),
        ("network", config.net),
        ("weights", _weights(run)),
        ("seed", str(config.seed)),
        ("judged on", EVALUATED_ON.get(evaluated_on(run), evaluated_on(run))),
        ("calibration", describe_calibration(_read_optional_json(run.folder / "model.json"))),
        ("before it", describe_before(run.result.get("before_calibration") or {})),
        ("device", str(environment.get("device", ""))),
        (
            "versions",
            ", ".join(f"{name} {v}" for name, v in environment.get("versions", {}).items()),
        ),
    ]
    return [(name, text) for name, text in found if text]


def _weights(run: Run) -> str:
    result = run.result
    if "step" not in result:
        return ""
    averaged = "averaged, " if result.get("weights") == "ema" else ""
    chosen = result.get("selected", "last")
    return (
        f"{averaged}step {result['step']:,} of {result.get('steps', result['step']):,} ({chosen})"
    )


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs."""
    dumps = [run.config.dump() for run in runs]
    return [
        (key, [str(dump[key]) for dump in dumps])
        for key in dumps[0]
        if len({str(dump[key]) for dump in dumps}) > 1
    ]


def data_uri(picture: Tensor) -> str:
    """uint8 [3, H, W] as a data URI, PNG or JPEG, whichever is smaller."""
    image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
    kinds: tuple[tuple[str, dict[str, Any]], ...]
    kinds = (("png", {"optimize": True}), ("jpeg", {"quality": 88, "subsampling": 0}))
    packed = []
    for kind, settings in kinds:
        data = io.BytesIO()
        image.save(data, kind, **settings)
        packed.append((len(data.getvalue()), kind, data.getvalue()))
    _, kind, raw = min(packed)
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def shown_images(found: Predictions, kept: Examples, files: Sequence[str] | None) -> dict[str, Any]:
    """Pictures by row, and the rows of the most confidently wrong ones, worst first."""
    shown = {}
    for row, picture in zip(kept.rows, kept.pictures, strict=True):
        truth, guess = int(found.labels[row]), int(found.guess[row])
        shown[str(row)] = {
            "src": data_uri(picture),
            "name": files[row] if files else f"picture {row}",
            "truth": truth,
            "guess": guess,
            "confidence": float(found.confidence[row]),
            "truth_probability": float(found.probs[row, truth]),
        }
    wrong = most_confident_mistakes(found.confidence, found.right > 0).tolist()
    side = max(kept.pictures.shape[-2:], default=0)
    return {"shown": shown, "wrong": [k for k in wrong if str(k) in shown], "side": side}


def rows_in_bin(found: Predictions, rows: Sequence[int], left: float, right: float) -> list[int]:
    """The kept rows of a bin (left, right]; wrong ones first, for they are what one looks for."""
    own = [k for k in rows if left < float(found.confidence[k]) <= right]
    wrong = [k for k in own if not found.right[k]]
    right_ones = [k for k in own if found.right[k]]
    return [*wrong[:3], *right_ones[:3]]


def asked_images(kept: Examples) -> list[dict[str, Any]]:
    """Unlabelled pictures worth a label, with the model's first three guesses."""
    entries = []
    probs = probabilities(kept.asked_log_probs)
    for place, row in enumerate(kept.asked_rows):
        chances, ids = probs[place].topk(min(3, probs.shape[1]))
        entries.append(
            {
                "src": data_uri(kept.asked_pictures[place]),
                "name": kept.asked_files[place] if kept.asked_files else f"row {row}",
                "guesses": list(zip(ids.tolist(), chances.tolist(), strict=True)),
            }
        )
    return entries


TENSORBOARD = "tensorboard"


def write_tensorboard(run: Run) -> Path:
    """Write the numbers of metrics.jsonl under tensorboard/ in the run folder, anew."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "TensorBoard is not installed; pip install 'calmatch[tensorboard]'."
        ) from error
    folder = run.folder / TENSORBOARD
    for old in folder.glob("events.out.*"):
        old.unlink()
    times = _step_times(run.folder / "times.jsonl")
    with SummaryWriter(folder) as writer:
        writer.add_text("config", f"    {json.dumps(run.config.dump(), indent=4)}")
        for kind in ("train", "test", "validation"):
            for line in run.lines(kind):
                step, when = line["step"], times.get(line["step"])
                for name, value in line.items():
                    if name != "step" and isinstance(value, int | float):
                        writer.add_scalar(f"{kind}/{name}", value, step, walltime=when)
    return folder


def _step_times(path: Path) -> dict[int, float]:
    """When each step was reached; a continued run wrote some steps twice, and the last counts."""
    if not path.is_file():
        return {}
    with path.open() as file:
        return {line["step"]: line["unix"] for line in map(json.loads, file)}
