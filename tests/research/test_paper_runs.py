"""The stages of research/paper_runs.py, tried on a CPU with few pictures and a tiny transformer."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

RESEARCH = Path(__file__).parents[2] / "research"
NET = "calmatch.nets.timm.ViT(size=32, patch=8, width=24, heads=2, depth=2)"


def load(name):
    spec = importlib.util.spec_from_file_location(name, RESEARCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_stage_from_pictures_to_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CALMATCH_DATA", str(tmp_path))
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def typed(module, *words):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
        module.main()

    archive = load("archive")
    typed(archive, "few", "synthetic(classes=10, per_class=24, size=32)")
    file = tmp_path / "archive" / "few.npz"
    stages = load("paper_runs")
    stages.RESERVE = 0.0
    parts, work, lines = tmp_path / "parts", tmp_path / "work", tmp_path / "lines.jsonl"
    typed(stages, "pretrain", file, parts, "--minutes", 0.02, "--net", NET, "--batch", 16)
    assert {path.name for path in parts.iterdir()} == {"part0.npz", "note.json"}
    assert json.loads((parts / "note.json").read_text())["steps"] > 0
    typed(stages, "join", parts, tmp_path / "joined.safetensors")
    again = ("--start", parts, "--minutes", 0.02, "--net", NET, "--batch", 16)
    text = f"research.archive.read_archive(name='{file}')"
    typed(stages, "teach", text, tmp_path / "known.npz", "--net", "tiny", "--most", 20)
    taught = tmp_path / "known.npz"
    known = ("--also", file, file, "--features", taught, taught, "--share", 0.25)
    typed(stages, "pretrain", file, tmp_path / "more", *again, *known)
    assert json.loads((tmp_path / "more" / "note.json").read_text())["also"] == 4

    typed(stages, "probe", file, parts, "--net", NET, "--tested", 20)
    assert "4 labels a class: " in capsys.readouterr().out

    few = ("--steps", 4, "--seeds", 0, 1, "--net", NET, "--lines", lines, "--done", lines)
    only = ("--only", "eurosat_20 freematch")
    typed(stages, "runs", file, parts, work, *few, *only)
    made = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(made) == 4
    assert {(line["penalty"], line["seed"]) for line in made} == {
        (penalty, seed) for penalty in ("", "margin(m=8)") for seed in (0, 1)
    }
    assert all(0 <= line["sure"] <= 1 and line["steps"] == 4 for line in made)
    weights = json.loads(next(work.glob("*/result.json")).read_text())["notes"]
    assert any("weights.safetensors" in note for note in weights)
    typed(stages, "runs", file, parts, work, *few, *only)
    assert "0 runs of 4 steps, 4 are done" in capsys.readouterr().out
    typed(stages, "page", "--lines", lines, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| eurosat_20 | freematch + margin | distilled | 4 | 5e-05 | 2 |" in page
    assert "4.30" in page  # the published number stands beside it
    assert "The margin lowers freematch's ece: eurosat_20, 4 steps, rate 5e-05" in page


def line(row, column="eurosat_40", seed=0, ece=0.1, steps=10, **more):
    method, _, added = row.partition(" + ")
    numbers = {"error": 0.2, "ece": ece, "nll": 1.0, "classwise_ece": 0.1, "adaptive_ece": 0.1}
    values = {"penalty": added if "margin" in added else "", "unlabelled_loss": ""}
    values["unlabelled_loss"] = "" if "margin" in added else added
    return {
        **{"key": f"{row} {seed} {steps}", "column": column, "method": method, "seed": seed},
        **values,
        **{
            "network": "distilled",
            "steps": steps,
            "lr": 5e-5,
            "last": numbers,
            "best_on_test": numbers | {"step": 5},
        },
        **{"sure": 0.95, "agree": 0.9, "ece_crossfit": 0.05},
        **more,
    }


def test_the_page_says_what_holds_what_does_not_and_what_is_missing():
    stages = load("paper_runs")
    lines = [line("freematch", seed=s, ece=0.1 + 0.01 * s) for s in range(6)]
    lines += [line("freematch + margin(m=8)", seed=s, ece=0.05 + 0.01 * s) for s in range(6)]
    lines += [line("freematch + smoothing(alpha=0.1)", seed=s, ece=0.02) for s in range(6)]
    lines += [line("freematch + margin(m=8, where='all')", seed=0, ece=0.05)]
    page = stages.make_page(lines)
    rows = {
        cells[1].strip(): cells
        for cells in (row.split("|") for row in page.splitlines())
        if len(cells) == 5
    }
    assert rows["The margin lowers ece, all pairs (Tables 1 and 2)"][3].strip() == "yes"
    assert "-5.00" in rows["The margin lowers ece, all pairs (Tables 1 and 2)"][2]
    assert rows["The margin has less ECE than label smoothing (radar)"][3].strip() == "no"
    assert "no run yet" in rows["The margin has less ECE than focal loss (radar)"][2]
    both = rows["U'' alone has less ECE than both subsets (subset table)"]
    assert both[3].strip() == "too few pairs"
    assert "| freematch + margin on both |" in page
    assert "3.50" in page
