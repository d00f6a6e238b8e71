import re

import pytest

from calmatch import train
from calmatch.report import build, charts, console


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    from calmatch.config import Config

    folder = tmp_path_factory.mktemp("runs")
    settings = {"dataset": "synthetic", "labels": 16, "net": "tiny", "weak": "crop(1)"}
    settings |= {"strong": "crop(2)", "steps": 12, "log_every": 4, "eval_every": 6}
    return [
        train(Config(method=method, **settings), folder / method, quiet=True)
        for method in ("supervised", "fixmatch")
    ]


def test_the_page_stands_alone_and_shows_every_run(runs, tmp_path):
    text = build.build(runs, tmp_path / "report.html").read_text()
    assert text.count("<svg") == 3  # reliability of both, curves of each
    for run in runs:
        assert run.title in text
    assert not re.search(r"<(script|link|img|iframe)\b", text)
    assert not re.search(r"(src|href)=\"http", text)


def test_every_name_on_the_page_is_escaped(runs, tmp_path):
    nasty = "<script>alert(1)</script>"
    run = runs[0]._replace(result=runs[0].result | {"title": nasty, "notes": [nasty]})
    text = build.build([run], tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_the_page_is_the_same_bytes_each_time(runs, tmp_path):
    first = build.build(runs, tmp_path / "a.html").read_bytes()
    assert build.build(runs, tmp_path / "b.html").read_bytes() == first


def test_a_diagram_is_computed_apart_from_its_drawing(runs):
    found = charts.prepare_reliability(*runs[0].predictions())
    assert sum(found["count"]) == len(runs[0].predictions()[1])
    assert len(found["confidence"]) == sum(found["filled"])
    assert found["ece"] == pytest.approx(runs[0].result["metrics"]["ece"]["value"])


def test_the_table_has_units_intervals_and_a_leak_warning(runs, capsys):
    leaky = runs[1]._replace(result=runs[1].result | {"leaky": True})
    console.show([runs[0], leaky])
    out = capsys.readouterr().out
    assert "95 % interval" in out
    assert "leaky" in out
    assert "–" in out
    assert max(map(len, out.splitlines())) <= 80
