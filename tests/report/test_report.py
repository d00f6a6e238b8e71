"""The report page, made from run folders alone; test_browser.py opens it in a real browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import folders
from calmatch import cli, metrics, report, train
from calmatch.report import (
    SCRIPTS,
    _read_asset,
    build,
    charts,
    summary,
    write_mlflow,
    write_tensorboard,
    write_wandb,
)
from calmatch.report.summary import make_predictions, most_answers, risk_coverage
from calmatch.report.text import print_runs, short_verdict
from calmatch.runs import load_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    from calmatch.training.config import Config

    folder = tmp_path_factory.mktemp("runs")
    settings = {"dataset": "synthetic", "labels": 16, "net": "tiny", "weak": "crop(1)"}
    settings |= {"strong": "crop(2)", "steps": 12, "log_every": 4, "eval_every": 6}
    return [
        train(Config(method=method, **settings), folder / method, quiet=True)
        for method in ("supervised", "fixmatch")
    ]


class Tags(HTMLParser):
    """What a browser would see: the elements, and the content of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.words, self.now = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.now = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.now = None

    def handle_data(self, data):
        if self.now == "script":
            self.scripts[-1] += data
        elif self.now != "style":
            self.words.append(data)


def page_of(runs, path):
    text = build(runs, path).read_text("utf-8")
    return text, Tags(text)


def test_the_page_stands_alone_and_shows_every_run(runs, tmp_path):
    text, page = page_of(runs, tmp_path / "report.html")
    for run in runs:
        assert run.title in text
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base"), tag
        for name in ("src", "href", "action", "data", "srcset"):
            assert not re.match(r"\w+:|//", attributes.get(name, "")), attributes
    assert not re.search(r"url\(|@import", _read_asset("page.css"))


def test_a_page_of_many_runs_is_smaller_and_still_has_them_all(runs, tmp_path, monkeypatch):
    few, _ = page_of(runs, tmp_path / "few.html")
    monkeypatch.setattr(report, "MANY", 1)
    many, page = page_of(runs, tmp_path / "many.html")
    assert len(many) < len(few) - 10_000
    for run in runs:
        assert run.title in many
    data = json.loads(next(script for script in page.scripts if script.startswith("{")))
    for run in data["runs"]:
        assert "low" not in run["smooth"]
        assert 2 <= len(run["risk"]) <= 21
        assert len(run["gaps"]) == len(data["gapGrid"]) == 24


def test_only_the_pages_own_scripts_may_run_and_nothing_may_be_fetched(runs, tmp_path):
    _, page = page_of(runs[:1], tmp_path / "report.html")
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy
    data, *code = page.scripts
    json.loads(data)
    for script in code:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_every_name_on_the_page_is_escaped(tmp_path):
    run = folders.made(
        tmp_path / "run",
        classes=folders.NASTY,
        title=f'"a" {folders.EVIL}',
        notes=[folders.EVIL],
        evaluation_note=folders.EVIL,
        files=True,
    )
    text, page = page_of([run], tmp_path / "report.html")
    assert [tag for tag, _ in page.tags].count("script") == 3  # data, library, page
    assert len(page.scripts) == 3
    assert json.loads(page.scripts[0])["classes"] == folders.NASTY
    assert "\u2028" not in page.scripts[0]
    assert "<" not in page.scripts[0]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "alert(1)" in "".join(page.words)  # shown as text
    assert "{{ 7 * 7 }}" in text
    _, page = page_of([run, run], tmp_path / "both.html")
    assert [tag for tag, _ in page.tags].count("script") == 3


def test_the_page_is_the_same_bytes_each_time(runs, tmp_path):
    first = build(runs, tmp_path / "a.html").read_bytes()
    assert build(runs, tmp_path / "b.html").read_bytes() == first


def test_a_page_says_error_calibration_and_chance_in_words(runs, tmp_path):
    text, _ = page_of(runs[:1], tmp_path / "report.html")
    assert "are classified wrongly" in text
    assert "percentage points on average" in text
    assert "by chance alone" in text
    assert "calmatch train config.json" not in text  # the page is not in the run folder
    assert "calmatch train supervised/config.json --out NEW_FOLDER" in text


@pytest.mark.parametrize(
    "missing", ["examples.npz", "metrics.jsonl", "environment.json", "model.json"]
)
def test_a_folder_that_lacks_a_part_still_makes_a_page(tmp_path, missing):
    run = folders.made(tmp_path / "run", pictures=60)
    (run.folder / missing).unlink(missing_ok=True)
    for several in ([run], [run, run]):
        _, page = page_of(several, tmp_path / "report.html")
        assert json.loads(page.scripts[0])["runs"]


@pytest.mark.parametrize("right", [True, False])
def test_a_model_that_is_always_right_or_always_wrong_makes_a_page(tmp_path, right):
    run = folders.made(tmp_path / "run", pictures=30)
    with np.load(run.folder / "predictions.npz") as held:
        log_probs = held["log_probs"]
    guess = log_probs.argmax(1)
    labels = guess if right else (guess + 1) % 5
    np.savez(run.folder / "predictions.npz", log_probs=log_probs, labels=labels)
    # and nothing measured: then it is measured now
    result = dataclasses.replace(run.result, metrics={})
    _, page = page_of([run._replace(result=result)], tmp_path / "report.html")
    data = json.loads(page.scripts[0])
    assert data["runs"][0]["error"]["value"] == (0.0 if right else 1.0)
    assert (data["runs"][0]["point"] is None) != right


@pytest.mark.slow
def test_ten_thousand_pictures_of_a_hundred_classes_make_a_small_page_soon(tmp_path):
    names = [f"class {k}" for k in range(100)]
    run = folders.made(tmp_path / "run", pictures=10_000, classes=names, size=64, steps=2000)
    began = time.monotonic()
    path = build([run], tmp_path / "report.html")
    assert time.monotonic() - began < 20  # about one second when the machine is free
    assert path.stat().st_size < 4_000_000
    (run.folder / "examples.npz").unlink()
    assert build([run], path).stat().st_size < 1_800_000


def test_a_thousand_classes_make_a_page_too(tmp_path):
    run = folders.made(
        tmp_path / "run", pictures=2000, classes=[str(k) for k in range(1000)], size=64
    )
    path = build([run], tmp_path / "report.html")
    assert path.stat().st_size < 4_000_000
    data = json.loads(Tags(path.read_text("utf-8")).scripts[0])
    assert len(data["confusion"]["order"]) == summary.MATRIX
    assert 0 < sum(bool(rows) for rows in data["logits"]["classes"]) <= summary.CHOICE


def test_the_bundled_library_is_what_its_note_says():
    folder = Path(report.__file__).parent / "vendor"
    for note in json.loads((folder / "vendor.json").read_text()):
        data = (folder / note["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == note["sha256"]
        assert note["version"].encode() in data[:100]
        assert b"</script" not in data.lower()
        assert b"<!--" not in data
        assert f"{note['name']} {note['version']}" in (folder / "LICENSES.txt").read_text()
    for name in SCRIPTS:
        assert "</script" not in _read_asset(name).lower()
        assert "innerHTML" not in _read_asset(name)
        assert len(_read_asset(name).splitlines()) <= 330


def test_bins_and_risk_agree_with_the_metrics(runs):
    preds = make_predictions(*runs[0].predictions())
    bins = summary.reliability_bins(preds)
    n = sum(row["n"] for row in bins)
    ece = sum(row["n"] * abs(row["confidence"] - row["accuracy"]) for row in bins if row["n"]) / n
    assert ece == pytest.approx(runs[0].result.metrics["ece"].value)
    last = risk_coverage(preds)[-1]
    assert last["coverage"] == 1.0
    assert last["error"] == pytest.approx(runs[0].result.metrics["error"].value)
    assert sum(count for *_, count in summary.confusion_cells(preds)["cells"]) == n
    assert sum(row["n"] for row in summary.per_class(preds)) == n


def test_chance_alone_covers_the_ece_of_calibrated_models():
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(40):
        log_probs = (3 * torch.randn(400, 5, generator=generator)).log_softmax(-1)
        labels = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
        preds = make_predictions(log_probs, labels)
        chance = summary.ece_by_chance(preds)
        inside += chance["low"] <= float(metrics.ece(preds.probs, labels)) <= chance["high"]
    assert inside >= 34  # 38 expected


def test_the_band_of_the_smooth_curve_holds_the_curve_and_a_calibrated_models_truth():
    generator = torch.Generator().manual_seed(0)
    held = total = 0
    for _ in range(20):
        log_probs = (2 * torch.randn(500, 3, generator=generator)).log_softmax(-1)
        labels = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
        curve = summary.smooth_reliability(make_predictions(log_probs, labels), 101, 500)
        at, accuracy, low, high = (np.array(curve[k]) for k in ("at", "accuracy", "low", "high"))
        assert np.all((low - 0.02 <= accuracy) & (accuracy <= high + 0.02))
        held += int(((low <= at) & (at <= high)).sum())
        total += len(at)
    assert 0.87 <= held / total <= 0.99  # 95 % wanted; the curve is smoothed, so near that


def test_most_answers_is_the_last_point_with_little_enough_error(tmp_path):
    preds = make_predictions(*folders.made(tmp_path / "run").predictions())
    fine = [row for row in risk_coverage(preds, points=10**9) if row["error"] <= 0.05]
    point = most_answers(preds, 0.05)
    assert point["coverage"] == fine[-1]["coverage"]
    assert point["error"] == pytest.approx(fine[-1]["error"])
    tied = preds._replace(confidence=torch.full_like(preds.confidence, 0.5))
    assert most_answers(tied, 0.1) is None
    assert most_answers(tied, 0.5)["coverage"] == 1.0


def test_logit_densities_integrate_to_one_and_do_not_depend_on_the_shift():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(300, 4, generator=generator, dtype=torch.float64)
    labels = torch.arange(300) % 4
    densities = summary.logit_densities(make_predictions(logits.log_softmax(-1), labels))
    step = densities["x"][1] - densities["x"][0]
    for curves in densities["classes"]:
        for curve in curves:
            assert sum(curve["y"]) * step == pytest.approx(1.0, abs=0.03)
    centred = logits - logits.mean(1, keepdim=True)
    own = densities["classes"][2][0]
    assert own["of"] == 2
    assert own["mean"] == pytest.approx(float(centred[labels == 2, 2].mean()))


SELECTIVE = {"coverage": 0.5, "bound": 0.96, "accuracy": 0.95, "certainty": 0.95}


def test_the_operating_point_is_the_models_own_where_it_has_one(tmp_path):
    run = folders.made(tmp_path / "run")
    preds = make_predictions(*run.predictions())
    assert not report.operating_point(run, preds)["own"]
    selective = SELECTIVE | {"threshold": 0.9, "labels": 80, "missing": 0, "cross_fitted": True}
    (run.folder / "model.json").write_text(json.dumps({"selective": selective}))
    point = report.operating_point(run, preds)
    assert point["own"]
    assert point["coverage"] == float((preds.confidence >= 0.9).double().mean())
    text, _ = page_of([run], tmp_path / "report.html")
    assert "Where its confidence is 0.90 or more" in text
    assert "right at least 95% of the time" in text
    assert "approximate" in text
    selective |= {"threshold": None, "labels": 40, "missing": 19}
    (run.folder / "model.json").write_text(json.dumps({"selective": selective}))
    text, _ = page_of([run], tmp_path / "report.html")
    assert "of evaluated labels it lacks at least 19." in text


def test_few_labels_of_a_fit_are_not_called_a_measured_calibration(tmp_path):
    result = {"evaluated_on": "crossfit", "kept": "transductive"}
    result |= {"scores": {"transductive": 0.5123, "logistic regression": 0.75}}
    run = folders.made(tmp_path / "run", pictures=40, steps=0, **result)
    selective = SELECTIVE | {"threshold": None, "labels": 40, "missing": 0, "cross_fitted": True}
    (run.folder / "model.json").write_text(json.dumps({"selective": selective}))
    text, page = page_of([run], tmp_path / "report.html")
    words = " ".join(page.words)
    assert "Of 100 new pictures, about" in words
    assert "40 labels are too few to measure it" in words
    assert "percentage points on average" not in words
    assert "No better than guessing" not in words
    assert "Could answer" not in words  # nothing is promised, so nothing is called sure
    assert re.search(r"transductive</th><td>0.512</td><td>kept<", text)
    assert 'data-chart="curves"' not in text
    flat = {"value": 0.75, "low": 0.6, "high": 0.9}
    metrics_of = {name: item._asdict() for name, item in run.result.metrics.items()}
    entries = run.result.dump() | {"metrics": metrics_of | {"error": flat}}
    (run.folder / "result.json").write_text(json.dumps(entries))
    assert "No better than guessing" in page_of([load_run(run.folder)], tmp_path / "report.html")[0]


def test_fits_with_few_labels_are_not_compared_by_their_calibration(tmp_path, capsys):
    names = ("a", "b")
    fits = [
        folders.made(tmp_path / name, title=name, pictures=40, evaluated_on="crossfit", steps=0)
        for name in names
    ]
    text, _ = page_of(fits, tmp_path / "report.html")
    assert "has the lowest error" in text
    assert "calibration error (ECE):" not in text
    print_runs(fits)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["a"]]
    assert rows[0].split()[2:5] == ["-"] * 3
    (fits[0].folder / "result.json").write_text(json.dumps(fits[0].result.dump() | {"images": {}}))
    text, _ = page_of([load_run(fits[0].folder), fits[1]], tmp_path / "report.html")
    assert "calibration error (ECE):" not in text  # of how many is not known


def test_the_verdict_follows_the_direction_of_the_error(tmp_path):
    sure = folders.made(tmp_path / "run")
    preds = make_predictions(*sure.predictions())
    measured, chance = report.headline_numbers(sure, preds), summary.ece_by_chance(preds)
    assert short_verdict(measured | {"chance": chance}) == "too sure"
    flat = make_predictions(0.2 * preds.log_probs, preds.labels)
    unmeasured = sure._replace(result=dataclasses.replace(sure.result, metrics={}))
    measured = report.headline_numbers(unmeasured, flat)
    assert short_verdict(measured | {"chance": summary.ece_by_chance(flat)}) == "not sure enough"
    assert short_verdict(measured | {"ece": {"value": 0.0}, "chance": chance}) == "no fault shown"


def test_event_files_hold_the_log(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_tensorboard(runs[1])
    folder = write_tensorboard(runs[1])  # again: replaced, not doubled
    assert len(list(folder.iterdir())) == 1
    events = EventAccumulator(str(folder)).Reload()
    lines = runs[1].lines("test")
    scalars = events.Scalars("test/error")
    assert [event.step for event in scalars] == [line["step"] for line in lines]
    assert [event.value for event in scalars] == pytest.approx([line["error"] for line in lines])
    assert [event.step for event in events.Scalars("train/loss")] == [4, 8, 12]
    last = (runs[1].folder / "times.jsonl").read_text().splitlines()[-1]
    assert scalars[-1].wall_time == pytest.approx(json.loads(last)["unix"])


@pytest.mark.slow
def test_mlflow_has_the_same_lines(runs, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    place, number = write_mlflow(runs[1]).split()
    client = mlflow.MlflowClient(place)
    history = client.get_metric_history(number, "test/error")
    lines = runs[1].lines("test")
    assert [(m.step, m.value) for m in history] == [(n["step"], n["error"]) for n in lines]
    assert [m.step for m in client.get_metric_history(number, "train/loss")] == [4, 8, 12]
    kept = client.get_run(number)
    assert kept.data.params["method"] == "fixmatch"
    assert kept.info.status == "FINISHED"
    assert kept.data.metrics["result/ece"] == runs[1].result.metrics["ece"].value


def leveldb_records(log: bytes, block: int = 1 << 15) -> Iterator[bytes]:
    """What W&B's offline file holds: pieces of records in blocks, each with checksum and length."""
    place, parts = 7, b""  # after the file's own head
    while place + 7 <= len(log):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        parts += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandb_has_the_same_lines(runs, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    (file,) = Path(write_wandb(runs[1])).glob("*.wandb")
    wandb.teardown()  # its own process has written all when it ends
    history = []
    for data in leveldb_records(file.read_bytes()):
        (record := Record()).ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            pairs = [(i.key or "/".join(i.nested_key), i.value_json) for i in record.history.item]
            history.append({key: json.loads(value) for key, value in pairs})
    tested = [(line["_step"], line["test/error"]) for line in history if "test/error" in line]
    assert tested == [(line["step"], line["error"]) for line in runs[1].lines("test")]
    assert [line["_step"] for line in history if "train/loss" in line] == [4, 8, 12]
    assert history[-1]["result/ece"] == runs[1].result.metrics["ece"].value


@pytest.mark.parametrize("write", [write_mlflow, write_wandb])
def test_without_a_tracker_a_sentence_names_the_extra(runs, monkeypatch, write):
    name = write.__name__.removeprefix("write_")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"calmatch\[{name}\]"):
        write(runs[0])


def test_without_tensorboard_a_sentence_names_the_extra(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ValueError, match=r"calmatch\[tensorboard\]"):
        write_tensorboard(runs[0])


def test_the_command_puts_a_comparison_above_its_runs_and_spares_their_pages(tmp_path, capsys):
    pair = [folders.made(tmp_path / name, pictures=50) for name in "ab"]
    assert cli.main(["report", str(pair[0].folder), "--tensorboard"]) == 0
    own = (pair[0].folder / "report.html").read_bytes()
    assert list((pair[0].folder / "tensorboard").iterdir())
    assert cli.main(["report", *(str(run.folder) for run in pair)]) == 0
    assert f"Report: {tmp_path / 'report.html'}" in capsys.readouterr().out
    assert (pair[0].folder / "report.html").read_bytes() == own
    assert "a/report.html" in (tmp_path / "report.html").read_text()


def test_a_diagram_is_computed_apart_from_its_drawing(runs):
    numbers = charts.reliability_numbers(*runs[0].predictions())
    assert sum(row["n"] for row in numbers["bins"]) == len(runs[0].predictions()[1])
    assert all(("confidence" in row) == (row["n"] > 0) for row in numbers["bins"])
    assert numbers["ece"] == pytest.approx(runs[0].result.metrics["ece"].value)


def test_the_table_has_units_intervals_and_a_warning_of_test_selection(runs, capsys):
    result = dataclasses.replace(runs[1].result, test_selected=True)
    print_runs([runs[0], runs[1]._replace(result=result)])
    out = capsys.readouterr().out
    assert "95 % interval" in out
    assert "(test-selected)" in out
    assert "Test-selected: these weights were chosen on the test set" in out
    assert "–" in out
    assert max(map(len, out.splitlines())) <= 80
