"""Compact results tell the same tables as run folders; packed datasets are nearly the originals."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from calmatch import data, load_run, trainer
from calmatch.bench import again, compact, evidence, suites, tables, trusting
from calmatch.bench.groups import gather
from calmatch.bench.measures import values
from calmatch.bench.own import FITTED
from calmatch.data.packed import pack

TOOLS = Path(__file__).parent.parent / "tools"


def tool(name, *words):
    """Run a tool as a person does, in this process; its exit code."""
    before = sys.argv
    sys.argv = [name, *map(str, words)]
    try:
        runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
        return 0
    except SystemExit as ended:
        return ended.code
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two rows of two seeds on digits, a few steps each."""
    from calmatch import recipes

    made = tmp_path_factory.mktemp("runs")
    for penalty in ("", "margin(m=10)"):
        for seed in (0, 1):
            config = recipes.digits_40(
                "freematch", penalty=penalty, seed=seed, split_seed=seed, ema=0.9
            )
            config = config.replace(steps=4, eval_every=2, net="small(width=2)", chunk=2)
            trainer.train(config, made / f"{penalty or 'plain'}{seed}", quiet=True)
    return made


def test_lines_give_the_same_tables_as_folders(folder, tmp_path):
    tool("evidence", "collect", folder, "--out", tmp_path / "some.jsonl")
    kept = compact.read([tmp_path / "some.jsonl"])
    whole = gather([folder])
    assert sorted(kept.rows) == sorted(whole.rows)
    for own in kept.groups:
        other = whole.at(own.row, own.column)
        for metric in ("error", "ece", "nll", "smooth_ece", "aurc", "ece_views", "nll_oracle"):
            assert values(own, metric) == pytest.approx(values(other, metric), rel=1e-5)
        assert len(values(own, "ece_seeds")) == 2
    titles = [table.title for table in tables.build(kept)]
    assert titles == [table.title for table in tables.build(whole)]
    assert kept.groups[0].runs[0, 0].lines("test")[0]["step"] == 2


def test_collecting_again_adds_and_renews_but_never_repeats(folder, tmp_path, capsys):
    out = tmp_path / "some.jsonl"
    tool("evidence", "collect", folder / "plain0", folder / "plain1", "--out", out)
    tool("evidence", "collect", folder, "--out", out)
    tool("evidence", "collect", folder, "--out", out)
    assert "4 in all" in capsys.readouterr().out.splitlines()[-1]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["code"] for line in lines}) == 2
    assert len(out.read_bytes()) < 4 * 5_000  # no weights, no predictions


def test_last_weights_stand_beside_averaged_ones(folder, tmp_path):
    tool("evidence", "collect", folder, "--out", tmp_path / "some.jsonl")
    kept = compact.read([tmp_path / "some.jsonl"])
    last = evidence.unaveraged(kept)
    run = kept.groups[0].runs[0, 0].result
    assert values(last.groups[0], "ece")[0, 0] == 100 * run["plain"]["metrics"]["ece"]["value"]
    assert values(last.groups[0], "ece") != values(kept.groups[0], "ece")
    assert len(evidence.averaging(kept).rows) == 2
    assert tables.protocols(last) is None  # the best step of averaged weights is not theirs


@pytest.fixture
def stand_in(folder, monkeypatch):
    """The folder's runs as the suite `frozen`: plain FreeMatch, and what `fit` does."""
    from calmatch.bench.rows import Cell

    names = {"": "freematch", "margin(m=10)": FITTED}
    configs = [load_run(path).config for path in sorted(folder.iterdir())]
    cells = [Cell("frozen", names[c.penalty], "digits_40", c.seed, c, "made up") for c in configs]
    cells.sort(key=lambda cell: cell.row)
    monkeypatch.setitem(suites.SUITES, "frozen", lambda: cells)


def test_runs_made_again_stand_beside_the_first_ones(folder, tmp_path):
    tool("evidence", "collect", folder, "--out", tmp_path / "some.jsonl")
    lines = compact.kept([tmp_path / "some.jsonl"])
    found = compact.grouped(lines)
    first, *_ = found.groups
    others = [run for run in lines if run.config.penalty == first.config.penalty]
    table = again.repeats(others, found)
    assert [[entry.text for entry in row][2:3] for row in table.rows] == [["2"]]
    (row,) = table.rows
    assert row[3:5] == row[5:7]  # the same runs
    folds = [run._replace(config=run.config.replace(fold=k)) for run in others for k in (1, 2)]
    (row,) = again.sisters([*lines, *folds], found).rows
    assert row[4].text == "4"
    assert row[2].text.split()[0] == row[5].text.split()[0]  # each run counted twice
    assert again.repeats([], found) is None
    assert again.sisters(lines, found) is None


def test_the_page_is_made_from_lines_alone(stand_in, folder, tmp_path):
    tool("evidence", "collect", folder, "--out", tmp_path / "some.jsonl")
    written = ["evidence", "write", tmp_path / "some.jsonl", "--page", tmp_path / "results.md"]
    assert tool(*written) == 0
    page = (tmp_path / "results.md").read_text()
    for words in (
        "## A frozen network",
        "### The bar",
        "at least 95 % confidence",
        "Paired differences",
        "Friedman",
        "### Last weights: digits, 40 labels",
        "T by labels",
        "95 % interval of a mean of 2 runs (Student): ± 8.98 times its deviation.",
    ):
        assert words in page, words
    for name in ("frozen_digits_40_labels.svg", "trust_frozen.png"):
        assert (tmp_path / "assets" / "results" / name).stat().st_size > 1000
    assert tool(*written, "--check") == 0
    (tmp_path / "results.md").write_text(page + "by hand")
    assert tool(*written, "--check") == 1


def test_the_bar_asks_for_half_the_ece_at_no_higher_error():
    def variant(name, error, ece):
        numbers = ({(s, s): value for s, value in enumerate(part)} for part in (error, ece))
        return evidence.Variant(name, *numbers, {})

    first = variant("last weights", [10.0, 11.0, 12.0], [4.0, 5.0, 6.0])
    cases = {
        "yes": ([9.0, 10.5, 11.0], [1.0, 2.0, 2.5]),
        "noise": ([9.0, 12.5, 12.5], [1.0, 2.0, 2.5]),
        "no": ([12.0, 13.0, 14.1], [1.0, 2.0, 2.5]),  # worse without doubt
    }
    for told, numbers in cases.items():
        assert evidence._against(variant("averaged", *numbers), first)[-1].text == told
    half = evidence._against(variant("averaged", [9.0] * 3, [3.0, 3.0, 3.5]), first)
    assert half[-1].text == "no"
    assert evidence._against(first, first)[-1].text == "–"


def test_sure_predictions_are_counted_over_seeds(stand_in, folder, tmp_path):
    tool("evidence", "collect", folder, "--out", tmp_path / "some.jsonl")
    found = compact.read([tmp_path / "some.jsonl"], "frozen")
    table = evidence.sure(found, ["freematch"], 0.5)
    assert [row[2].text for row in table.rows] == [
        "last weights",
        "averaged",
        "averaged, T by views",
        "averaged, T by seeds",
    ]
    wanted = []
    for seed in (0, 1):
        log_probs = load_run(folder / f"plain{seed}").predictions()[0]
        wanted.append(100 * float((log_probs.double().exp().amax(1) >= 0.5).double().mean()))
    assert table.rows[1][3].text.startswith(f"{np.mean(wanted):.1f}")
    named = evidence.named(found, {"digits_40": "digits"})
    shown = evidence.short(named, "freematch", FITTED)
    assert [row[1].text for row in shown.rows] == ["FreeMatch", "calmatch fit"]
    assert {row[0].text for row in shown.rows} == {"digits"}


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1"):
        compact.read([tmp_path / "bad.jsonl"])


def test_a_packed_dataset_is_nearly_the_original_and_within_its_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("CALMATCH_DATA", str(tmp_path))
    spec = "synthetic(classes=5, per_class=70, size=16, noise=10.0)"
    whole = data.build(spec)
    tool("pack", "some", spec, "--limit", 0.25)
    assert (tmp_path / "packed" / "some.npz").stat().st_size <= 2**18
    found = data.build("packed(name='some')")
    assert torch.equal(found.labels, whole.labels)
    assert torch.equal(found.test_labels, whole.test_labels)
    assert (found.classes, found.mean, found.std) == (whole.classes, whole.mean, whole.std)
    off = (found.test_images.float() - whole.test_images.float()).abs()
    assert off.mean() < 8
    assert data.build("packed(name='some', size=32)").images.shape[1:] == (3, 32, 32)
    tight, generous = (pack(whole, limit)[1] for limit in (2**17, 2**20))
    assert tight["quality"] < generous["quality"] == 100
    assert tight["psnr"] < generous["psnr"]


def test_packed_pictures_do_not_bleed_into_each_other():
    pictures = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)
    pictures[::2] = 255
    labels = torch.arange(4) % 2
    made = data.Dataset(pictures[:4], labels, pictures[4:], labels[:2], ("a", "b"))
    assert pack(made, 2**17)[1]["psnr"] > 60


@pytest.mark.parametrize("content", [b"", b"PK no zip", None])
def test_a_missing_or_damaged_pack_is_a_sentence(tmp_path, monkeypatch, content):
    monkeypatch.setenv("CALMATCH_DATA", str(tmp_path))
    (tmp_path / "packed").mkdir()
    if content is not None:
        (tmp_path / "packed" / "x.npz").write_bytes(content)
    with pytest.raises(ValueError, match="packed dataset"):
        data.build("packed(name='x')")
    np.savez(tmp_path / "packed" / "y.npz", labels=np.zeros(3))
    with pytest.raises(ValueError, match="damaged"):
        data.build("packed(name='y')")


@pytest.mark.parametrize("frozen", [0, 1])
def test_labels_choose_a_temperature_that_no_run_saw_them_for(tmp_path, monkeypatch, frozen):
    """Every label is held out once, by the folds' runs together; then the temperature is fit's."""
    from calmatch import judge, recipes

    config = recipes.digits_40("freematch", ema=0.9, steps=4, eval_every=2, chunk=2, labels=20)
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "cache"))
    config = config.replace(net="small(width=2)", device="cpu", frozen=frozen)
    whole = trainer.train(config, tmp_path / "runs" / "whole", quiet=True)
    split = json.loads((whole.folder / "split.json").read_text())
    held = []
    for fold in (1, 2):
        run = trainer.train(config.replace(fold=fold), tmp_path / f"runs/{fold}", quiet=True)
        own = json.loads((run.folder / "split.json").read_text())
        assert not {*own["validation"]} & {*own["labelled"], *own["unlabelled"]}
        held += own["validation"]
    assert sorted(held) == sorted(split["labelled"])
    with pytest.raises(ValueError, match="2 folds"):
        trainer.train(config.replace(fold=3), tmp_path / "three", quiet=True)
    with pytest.raises(ValueError, match="--fold and --validation"):
        trainer.train(config.replace(fold=1, validation=0.1), tmp_path / "both", quiet=True)
    lines = compact.collect([tmp_path / "runs"])
    assert sum("fold" in line["config"] for line in lines) == 2
    found = next(line for line in lines if "fold" not in line["config"])["result"]
    files = [np.load(tmp_path / "runs" / str(k) / "predictions.npz") for k in (1, 2)]
    logits, labels = (
        torch.from_numpy(np.concatenate([file[name] for file in files]))
        for name in ("held_log_probs", "held_labels")
    )
    wanted = judge.temperature(logits, labels, folds=2).values["temperature"]
    by_labels = found["temperature_scaled"]["labels"]
    assert by_labels["temperature"] == pytest.approx(wanted, rel=1e-5)
    assert by_labels["labels"] == 20
    assert "ece" in found["plain"]["temperature_scaled"]["labels"]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = compact.read([tmp_path / "some.jsonl"])
    assert len(kept.groups) == 1  # folds are no rows
    assert values(kept.groups[0], "ece_labels")[0, 0] == pytest.approx(100 * by_labels["ece"])
    beside = config.replace(penalty="margin(m=10)")  # a row without folds
    trainer.train(beside, tmp_path / "beside", quiet=True)
    both = gather([tmp_path / "runs", tmp_path / "beside"]).groups
    scaled = [next(iter(group.runs.values())).result["temperature_scaled"] for group in both]
    assert sorted("labels" in one for one in scaled) == [False, True]
    shutil.rmtree(tmp_path / "runs" / "2")
    again = compact.collect([tmp_path / "runs"])
    assert not any("labels" in line["result"]["temperature_scaled"] for line in again)


def test_trust_counts_the_sure_and_the_right():
    logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 0.1], [0.0, 1.0]])
    found = trusting.trust(logits.log_softmax(-1), torch.tensor([0, 1, 1, 1]))
    assert sum(row[0] for row in found["bins"]) == 4
    assert found["bins"][-1][::2] == [2, 0.5]
    number, confidence, right = found["above"][trusting.LIMITS.index(0.95)]
    assert (number, right) == (2, 0.5)
    assert confidence == pytest.approx(1 / (1 + np.exp(-9)))


def test_the_row_of_fit_is_what_fit_does_on_a_cpu(tmp_path):
    """The head's settings of `calmatch fit` with its defaults and most time, and of our tables."""
    from calmatch import plan, planning
    from calmatch.config import LOOKS

    wish = plan.Wish(pictures=tmp_path, device="cpu")
    weak, strong, _ = planning.views(wish, 64, colourless=False)
    own = {"net": "efficientnet_lite0", "size": 64, "imagenet": True, "whole": False, "views": 4}
    steps = planning.STEPS["head"][1]
    own |= {"head_steps": steps, "steps": 10, "alone_steps": 10, "batch": 32, "ratio": 2}
    own |= {"lr": 1e-3, "ema": 0.95, "weak": weak, "strong": strong}
    made = plan.Plan(**own, hold=0.0, holdout=False, most=0, looks=LOOKS)
    wanted = plan.head(wish, made, False, made.net, 1280).dump()
    cells = suites.cells("frozen", [0])
    row = next(cell for cell in cells if cell.row == FITTED)
    found = row.config.dump()
    aside = {"dataset", "labels", "device", "log_every", "eval_every", "checkpoint_every"}
    assert {k for k in wanted if wanted[k] != found[k]} <= aside
