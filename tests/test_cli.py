"""The command line as a person uses it: real processes, exit codes, messages."""

from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from calmatch import cli, console
from conftest import calmatch


def test_a_real_process_tells_a_mistake_by_its_exit_code(tmp_path):
    answer = calmatch("train", "digits_40", "--method", "freematc", "--out", tmp_path / "run")
    assert answer.returncode == 2
    assert answer.stderr.startswith("calmatch: There is no method called 'freematc'. Did you mean")
    assert len(answer.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trian"], "Did you mean 'train'"),
        (["train", "digits_4"], "Did you mean 'digits_40'"),
        (["train", "digits_40", "--method", "freematc"], "Did you mean 'freematch'"),
        (["train", "digits_40", "--penalty", "margin(mm=1)"], "no argument 'mm'"),
        (["train", "digits_40", "--penalty", "margin(m=__import__('os'))"], "is not a spec"),
        (["train", "digits_40", "--steps", "0"], "steps must be at least 1"),
        (["train", "digits_40", "--config", "nowhere.yaml"], "Cannot read nowhere.yaml"),
        (["evaluate", "nowhere.npz"], "There is no file nowhere.npz"),
        (["report", "nowhere"], "not the folder of a finished run"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(typed, tmp_path, words, sentence):
    if words[0] == "train":
        words = [*words, "--out", str(tmp_path / "run")]
    answer = typed(*words)
    assert answer.returncode == 2
    assert sentence in answer.stderr
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_an_unknown_flag_and_a_wrong_type_exit_with_2(typed, capsys):
    with pytest.raises(SystemExit) as left:
        typed("train", "digits_40", "--stepz", "5")
    assert left.value.code == 2
    with pytest.raises(SystemExit) as left:
        typed("train", "digits_40", "--steps", "many")
    assert left.value.code == 2
    assert "many" in "".join(capsys.readouterr())


@pytest.mark.parametrize("kind", ["methods", "datasets", "nets", "recipes", "losses", "metrics"])
def test_lists_have_a_line_each(typed, kind):
    answer = typed(kind)
    assert answer.returncode == 0
    lines = answer.stdout.strip().splitlines()
    assert lines
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_a_config_file_changes_the_recipe_and_flags_change_it_again(typed, tmp_path):
    (tmp_path / "c.yaml").write_text("steps: 7\nlr: 0.5\nmethod: flexmatch\n")
    words = ["train", "digits_40", "--config", tmp_path / "c.yaml", "--steps", "3"]
    answer = typed(*words, "--out", tmp_path / "run", "--quiet")
    assert answer.returncode == 0, answer.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["steps"], config["lr"], config["method"]) == (3, 0.5, "flexmatch")
    again = typed("train", tmp_path / "run" / "config.json", "--out", tmp_path / "two")
    assert again.returncode == 0, again.stderr
    assert "digits: 40 labels" in again.stdout
    for name in ("predictions.npz", "metrics.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert (tmp_path / "two" / "report.html").exists()


def test_any_models_predictions_can_be_measured(typed, tmp_path):
    random = np.random.default_rng(0)
    logits = random.normal(size=(200, 4))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = random.integers(4, size=200)
    np.savez(tmp_path / "p.npz", probs=probs, labels=labels)
    with (tmp_path / "p.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["cat", "label", "dog", "owl", "elk"])
        for row, label in zip(probs, labels, strict=True):
            writer.writerow([row[0], label, *row[1:]])
    words = ("--json", "--resamples", "20")
    answers = [typed("evaluate", tmp_path / name, *words) for name in ("p.npz", "p.csv")]
    assert [one.returncode for one in answers] == [0, 0]
    first, second = (json.loads(one.stdout) for one in answers)
    assert first["ece"]["value"] == pytest.approx(second["ece"]["value"])
    table = typed("evaluate", tmp_path / "p.npz", "--resamples", "20").stdout
    assert "ece (%)" in table
    assert "95 %" in table
    assert "95 %" not in typed("evaluate", tmp_path / "p.npz", "--resamples", "0").stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "column `label`"),
        ("label,a,b\n0,0.5,x\n", "row 2"),
        ("label,a,b\n0,0.5\n", "row 2"),
        ("label,a,b\n0,3.0,4.0\n", "apply softmax"),
        ("label,a,b\n7,0.5,0.5\n", "0..1"),
    ],
)
def test_bad_predictions_are_named_by_row(typed, tmp_path, text, words):
    (tmp_path / "p.csv").write_text(text)
    answer = typed("evaluate", tmp_path / "p.csv")
    assert answer.returncode == 2
    assert words in answer.stderr


def test_files_that_are_no_predictions_are_refused(typed, tmp_path):
    np.savez(tmp_path / "pickle.npz", probs=np.array([{}], dtype=object), labels=np.zeros(1, int))
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    np.savez(tmp_path / "words.npz", probs=np.full((2, 2), 0.5), labels=np.array(["a", "b"]))
    with (tmp_path / "bare.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    for name in ("pickle", "broken", "words", "bare"):
        answer = typed("evaluate", tmp_path / f"{name}.npz")
        assert answer.returncode == 2, name
        assert len(answer.stderr.strip().splitlines()) == 1
    assert typed("report").returncode == 2
    assert typed("train", "digits_40", "--out", tmp_path / "broken.npz").returncode == 2


def test_our_own_faults_show_a_traceback_and_exit_with_1(tmp_path, monkeypatch, capsys):
    def broken(words):
        return {}["nothing"]

    monkeypatch.setitem(cli.COMMANDS, "demo", (broken, ""))
    assert cli.main(["demo"]) == 1
    assert "KeyError" in capsys.readouterr().err


def test_a_bar_moves_with_every_step(monkeypatch):
    """Also with batches of eight, and where a second passes between one and two."""
    bar, drawn = console.ProgressBar("", 100, 0, quiet=True), []
    monkeypatch.setattr(bar, "_draw", lambda: drawn.append(bar.done))
    steps = [1, 2, *range(8, 100, 8), 100]
    for step in steps:
        bar.update(step)
    assert drawn == steps


@pytest.mark.parametrize("width", [80, 140])
def test_a_bar_of_a_long_title_keeps_its_numbers_and_time_left(monkeypatch, width):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=width)
    monkeypatch.setattr(console, "console", terminal)
    title = "freematch(momentum=0.9) + margin(cap=0.98) x 5"
    with console.ProgressBar(title, 2000, 0, quiet=False) as bar:
        bar.began -= 100
        bar.update(1000)
        bar.note({"accepted": 0.88})
    last = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).strip())[
        -1
    ]
    assert "1000/2000" in last
    assert "10 steps/s" in last
    assert re.search(r"\d:\d\d:\d\d|-:--:--", last)
    assert len(last.rstrip()) < width
    assert ("pseudo-labels in use 88%" in last) == (width > 80)


def test_an_interrupted_fit_says_that_it_goes_on(capsys):
    def stop():
        raise KeyboardInterrupt

    assert console.run_guarded(stop, "fit") == 130
    assert capsys.readouterr().err == "calmatch: interrupted; the same command continues.\n"
    assert console.run_guarded(stop, "predict") == 130
    assert capsys.readouterr().err == "calmatch: interrupted.\n"
