"""Compact results tell the same tables as run folders; packed datasets are nearly the originals."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from calmatch import data, trainer
from calmatch.bench import evidence, tables
from calmatch.bench.groups import gather
from calmatch.bench.measures import values
from calmatch.data.packed import pack

TOOLS = Path(__file__).parent.parent / "tools"


def tool(name, *words):
    """Run a tool as a person does, in this process."""
    before = sys.argv
    sys.argv = [name, *map(str, words)]
    try:
        runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
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
    kept = evidence.read([tmp_path / "some.jsonl"])
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
    kept = evidence.read([tmp_path / "some.jsonl"])
    last = evidence.unaveraged(kept)
    run = kept.groups[0].runs[0, 0].result
    assert values(last.groups[0], "ece")[0, 0] == 100 * run["plain"]["metrics"]["ece"]["value"]
    assert values(last.groups[0], "ece") != values(kept.groups[0], "ece")
    assert len(evidence.averaging(kept).rows) == 2
    assert tables.protocols(last) is None  # the best step of averaged weights is not theirs


def test_the_page_is_made_from_lines_alone(folder, tmp_path, monkeypatch):
    from calmatch.bench import suites

    cells = [c for c in suites.digits() if c.row.startswith("freematch")]
    small = {"steps": 4, "eval_every": 2, "net": "small(width=2)", "ema": 0.9}
    changed = [cell._replace(config=cell.config.replace(**small)) for cell in cells]
    monkeypatch.setitem(suites.SUITES, "digits", lambda: changed)
    tool("evidence", "collect", folder, "--out", tmp_path / "some.jsonl")
    tool("evidence", "write", tmp_path / "some.jsonl", "--page", tmp_path / "results.md")
    page = (tmp_path / "results.md").read_text()
    for words in (
        "## digits",
        "freematch + margin",
        "Paired differences",
        "Friedman",
        "last weights",
    ):
        assert words in page
    assert (tmp_path / "assets" / "results" / "digits_digits_40.svg").stat().st_size > 1000


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1"):
        evidence.read([tmp_path / "bad.jsonl"])


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
