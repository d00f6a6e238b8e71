"""What stands on a report page: from run folders to the page's data, tables and sentences."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calmatch import examples, metrics, runfiles
from calmatch.report import pictures, summary, words
from calmatch.report.console import COLUMNS, cell
from calmatch.report.summary import Judged
from calmatch.results import Run

WANTED = 0.05  # error at most among answered pictures, where the run chose no operating point
TRAINED = ("accepted", "agree", "pseudo_accuracy", "pseudo_ece")


def measured(run: Run, found: Judged) -> dict[str, Any]:
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


def numbers(run: Run, found: Judged, detail: Detail = FINE) -> dict[str, Any]:
    """What the charts that every page has are drawn from."""
    known = run.result["metrics"].get("smooth_ece") if detail is COARSE else None
    trained = [_chosen(line, TRAINED) for line in _lines(run, "train")]
    return {
        "title": run.title,
        "bins": summary.bins(found),
        "smooth": summary.smooth(found, detail.points, detail.band, known and known["value"]),
        "risk": summary.risk(found, detail.points - 1),
        "point": operating_point(run, found),
        "tested": curves(run, detail.lines),
        "trained": summary.thin(trained, detail.lines),
        **measured(run, found),
    }


def details(run: Run, found: Judged) -> dict[str, Any]:
    """What only the page of a single run shows: confusions, classes, logits, pictures."""
    data: dict[str, Any] = {
        "classes": [str(name) for name in run.result["classes"]],
        "confusion": summary.confusion(found),
        "perClass": summary.per_class(found),
        "logits": summary.logits(found),
    }
    kept = examples.load(run.folder)
    if kept is not None:
        classes, rows = len(data["classes"]), len(found.labels)
        if max(kept.rows, default=0) >= rows or kept.asked_log_probs.shape[1] not in (2, classes):
            raise ValueError(f"{run.folder / examples.FILE} belongs to another run; remove it.")
        data["pictures"] = pictures.judged(found, kept, files(run))
        data["asked"] = {"shown": pictures.asked(kept), "looked": kept.looked, "whole": kept.whole}
        data["inBins"] = [
            pictures.in_bin(found, kept.rows, row["left"], row["right"])
            for row in summary.bins(found)
        ]
    return data


def operating_point(run: Run, found: Judged) -> dict[str, Any] | None:
    """The threshold the model came with; else the most answers with at most 5 % error here."""
    selective = _selective(run)
    if isinstance(selective.get("threshold"), int | float):
        point = summary.at_threshold(found, float(selective["threshold"]))
        return point and {**point, "own": True}
    point = summary.most_answers(found, WANTED)
    return point and {**point, "own": False}


def _selective(run: Run) -> dict[str, Any]:
    return _json(run.folder / "model.json").get("selective") or {}


def curves(run: Run, most: int) -> list[dict[str, Any]]:
    """Error and ECE over time, on every set that was measured."""
    lines: list[dict[str, Any]] = []
    for split in ("test", "validation"):
        chosen = [_chosen(line, ("error", "ece")) for line in _lines(run, split)]
        lines += [{**line, "split": split} for line in summary.thin(chosen, most)]
    return lines


def files(run: Run) -> list[str] | None:
    """Names of the judged pictures where there are any."""
    held = runfiles.read_arrays(run.folder / "predictions.npz")
    return [str(name) for name in held["files"]] if "files" in held else None


def _lines(run: Run, kind: str) -> list[dict[str, Any]]:
    path = run.folder / "metrics.jsonl"
    if not path.is_file():
        return []
    facts = path.stat()
    return [line for line in _read(path, facts.st_mtime_ns, facts.st_size) if line["kind"] == kind]


@functools.lru_cache(maxsize=1)
def _read(path: Path, *changed: int) -> list[dict[str, Any]]:
    """The lines of a run, parsed once for all its charts."""
    return runfiles.read_lines(path)


def _chosen(line: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {"step": line["step"]} | {k: line[k] for k in names if line.get(k) is not None}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return runfiles.read_json(path)


def about(run: Run, page: Path) -> dict[str, Any]:
    """How a run was made and how to make it again."""
    inside = page.parent.resolve() == run.folder.resolve()
    place = Path("config.json") if inside else Path(run.folder.name) / "config.json"
    environment = _json(run.folder / "environment.json")
    own = run.folder / "report.html"
    return {
        "title": run.title,
        "leaky": bool(run.result.get("leaky")),
        "notes": [str(note) for note in run.result.get("notes", ())],
        "judged": str(run.result.get("judged_note", "")),
        "promise": words.promise(_selective(run)),
        "cells": [_cell(run, k) for k in range(len(COLUMNS))],
        "commands": run.result.get("commands") or _repeat(run, place),
        "config": json.dumps(run.config.dump(), indent=2, ensure_ascii=False),
        "facts": facts(run, environment),
        "link": f"{run.folder.name}/report.html"
        if run.folder.resolve().parent == page.parent.resolve() and own.is_file()
        else "",
    }


def _repeat(run: Run, place: Path) -> list[str]:
    if (run.folder / "fit.json").is_file():
        return ["calmatch fit PICTURES --out NEW_FOLDER"]
    return [f"calmatch train {place} --out NEW_FOLDER", "calmatch report NEW_FOLDER"]


def _cell(run: Run, place: int) -> dict[str, Any]:
    found = run.result.get("metrics", {}).get(COLUMNS[place].key)
    value, ends = cell(found, COLUMNS[place])
    return {"value": value, "ends": ends, "sort": found["value"] if found else ""}


def origin(run: Run) -> str:
    """The dataset and how many pictures of each kind."""
    judged = "test" if words.judged_on(run) == "test" else "of them judged"
    counts = {k: v for k, v in run.result.get("pictures", {}).items() if v}
    said = ", ".join(
        f"{number:,} {judged if kind == 'test' else kind}" for kind, number in counts.items()
    )
    return f"{run.data}: {said}" if said else run.data


def facts(run: Run, environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line each of what a reader asks first."""
    config = run.config
    found = [
        ("pictures", origin(run)),
        ("method", f"{config.method}{f' + {config.penalty}' if config.penalty else ''}"),
        ("network", config.net),
        ("weights", _weights(run)),
        ("seed", str(config.seed)),
        ("judged on", words.JUDGED.get(words.judged_on(run), words.judged_on(run))),
        ("calibration", words.calibration(_json(run.folder / "model.json"))),
        ("before it", words.before(run.result.get("before_calibration") or {})),
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


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs."""
    dumps = [run.config.dump() for run in runs]
    return [
        (key, [str(dump[key]) for dump in dumps])
        for key in dumps[0]
        if len({str(dump[key]) for dump in dumps}) > 1
    ]
