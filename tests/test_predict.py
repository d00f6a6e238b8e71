"""`calmatch predict`: every picture answered, odd files survived, the table whole or absent."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from calmatch import cli, metrics, posthoc
from calmatch.data.images import decode
from calmatch.model import load_model, save_calibration
from calmatch.predict import (
    Answered,
    ImageSource,
    check_table,
    join_names,
    open_table,
    predict,
    predict_locally,
    predict_on_ray,
    skipped_path,
    split_names,
)
from conftest import ALONE, ON_WINDOWS, write_random_model


def draw(path: Path, seed: int, size: int = 12) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A model with a calibration, sets and a promise."""
    folder = tmp_path_factory.mktemp("model")
    write_random_model(folder, "tiny", 3, 12)
    loaded = load_model(folder)
    pixels = [np.random.default_rng(k).integers(0, 256, (3, 12, 12), np.uint8) for k in range(100)]
    logits = loaded.logits(torch.from_numpy(np.stack(pixels)))
    scaling = posthoc.Scaling("temperature", {"temperature": 0.05}, 100)
    probs = scaling(logits).exp()
    truth = torch.where(torch.arange(100) % 7 == 0, probs.argsort(1)[:, 1], probs.argmax(1))
    sets = posthoc.conformal(probs, truth, coverage=0.95)
    point = posthoc.selective(probs.amax(1).sort().values[20:], np.ones(80))
    save_calibration(folder, scaling, sets, point)
    return folder


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    for k, name in enumerate(
        ["b.png", "a.PNG", "sub/c.jpg", "sub/deep/d.webp", "e, f.bmp", "ü;ß.gif"]
    ):
        draw(folder / name, k)
    (folder / "notes.txt").write_text("not a picture")
    draw(folder / ".hidden" / "x.png", 9)
    draw(folder / "._b.png", 9)
    return folder


NAMES = ["a.PNG", "b.png", "e, f.bmp", "sub/c.jpg", "sub/deep/d.webp", "ü;ß.gif"]


def test_every_picture_is_answered_as_the_model_answers(trained, photos, typed, tmp_path):
    done = typed("predict", trained, photos, "-o", tmp_path / "out.csv")
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "out.csv")
    assert list(rows[0]) == ["file", "label", "confidence", "set", "sure"]
    assert [row["file"] for row in rows] == NAMES
    loaded = load_model(trained)
    pixels = np.stack([decode((photos / name).read_bytes(), 12) for name in NAMES])
    answers = loaded.answer(loaded.probabilities(torch.from_numpy(pixels)))
    for row, answer in zip(rows, answers, strict=True):
        assert row["label"] == answer.label
        assert float(row["confidence"]) == pytest.approx(answer.confidence, abs=1e-6)
        assert split_names(row["set"]) == answer.set
        assert row["sure"] == str(answer.sure).lower()
    assert not list(tmp_path.glob(".*.part"))
    assert not (tmp_path / "out.csv.skipped.csv").exists()
    assert "6 pictures" in done.stderr


def test_a_zip_a_folder_and_parquet_hold_the_same_rows(trained, photos, tmp_path):
    import pyarrow.parquet

    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for path in sorted(photos.rglob("*")):
            archive.write(path, path.relative_to(photos))
        archive.writestr("__MACOSX/b.png", b"junk")
    loaded = load_model(trained)
    outs = [tmp_path / name for name in ("folder.csv", "zip.csv", "table.parquet")]
    for source, out in zip((photos, tmp_path / "photos.zip", photos), outs, strict=True):
        assert predict(loaded, source, out, batch=2, quiet=True).images == 6
    assert outs[0].read_bytes() == outs[1].read_bytes()
    rows = pyarrow.parquet.read_table(outs[2]).to_pylist()
    for row, other in zip(read(outs[0]), rows, strict=True):
        assert tuple(other["set"]) == split_names(row["set"])
        assert (row["file"], row["label"]) == (other["file"], other["label"])
        assert float(row["confidence"]) == pytest.approx(other["confidence"], abs=1e-6)
        assert row["sure"] == str(other["sure"]).lower()


def test_one_file_is_enough(trained, photos, tmp_path):
    counts = predict(load_model(trained), photos / "sub" / "c.jpg", tmp_path / "o.csv", quiet=True)
    assert counts.images == 1
    assert [row["file"] for row in read(tmp_path / "o.csv")] == ["c.jpg"]


def _spoil(photos: Path) -> dict[str, str]:
    """Files that cannot be predicted, and a word of the reason."""
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not really")
    (photos / "empty.png").write_bytes(b"")
    whole = (photos / "b.png").read_bytes()
    (photos / "cut.png").write_bytes(whole[: len(whole) // 2])
    (photos / "out.png").symlink_to("/etc/hosts")
    (photos / "lost.png").symlink_to("nowhere.png")
    (photos / "up").symlink_to("..")
    os.mkfifo(photos / "pipe.png")
    (photos / "folder.png").symlink_to("sub")
    return {
        "broken.jpg": "decoded",
        "empty.png": "decoded",
        "cut.png": "decoded",
        "out.png": "leaves the folder",
        "lost.png": "cannot be opened",
        "pipe.png": "not a regular file",
        "folder.png": "a link to a folder",
        "up": "a link to a folder",
    }


def test_files_that_cannot_be_predicted_are_listed_and_skipped(trained, photos, tmp_path, capsys):
    reasons = _spoil(photos)
    (photos / "inside.png").symlink_to("sub/c.jpg")
    predict(load_model(trained), photos, tmp_path / "out.csv", batch=3)
    assert {row["file"] for row in read(tmp_path / "out.csv")} == {*NAMES, "inside.png"}
    listed = {row["file"]: row["reason"] for row in read(tmp_path / "out.csv.skipped.csv")}
    assert set(listed) == set(reasons)
    assert all(word in listed[name] for name, word in reasons.items())
    assert "8 files were skipped" in capsys.readouterr().err
    for name in reasons:
        (photos / name).unlink()
    predict(load_model(trained), photos, tmp_path / "out.csv", quiet=True)
    assert not (tmp_path / "out.csv.skipped.csv").exists()  # the earlier list is not left


@pytest.mark.skipif(ON_WINDOWS, reason="Windows has no pipes")
def test_strict_stops_and_leaves_no_table(trained, photos, tmp_path, capsys):
    _spoil(photos)
    (tmp_path / "out.csv").write_text("precious")
    words = ["predict", trained, photos, "-o", tmp_path / "out.csv", "--strict"]
    assert cli.main(list(map(str, words))) == 2
    assert "Leave out --strict" in capsys.readouterr().err
    assert (tmp_path / "out.csv").read_text() == "precious"
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_mistakes_are_one_sentence(trained, photos, tmp_path):
    loaded = load_model(trained)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.png").write_bytes(b"x")
    (tmp_path / "not.zip").write_bytes(b"x")
    for source, out, change, words in (
        (tmp_path / "nothing", "o.csv", {}, "There is no"),
        (tmp_path / "empty", "o.csv", {}, "no pictures in"),
        (tmp_path / "bad", "o.csv", {}, "No picture in .* can be decoded; x.png"),
        (tmp_path / "not.zip", "o.csv", {}, "not a zip file"),
        (Path("/dev/null"), "o.csv", {}, "neither a folder"),
        (photos, "o.xlsx", {}, "must end in .csv or .parquet"),
        (photos, "no/such/o.csv", {}, "cannot be written"),
        (photos, "o.csv", {"batch": -1}, "--batch and --workers must be"),
    ):
        with pytest.raises(ValueError, match=words):
            predict(loaded, source, tmp_path / out, quiet=True, **change)
        assert not (tmp_path / out).exists()


def test_hostile_zips_are_read_and_not_believed(trained, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("calmatch.data.images.LARGEST_FILE", 1 << 20)
    good = (photos / "b.png").read_bytes()
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../up.png", good)
        archive.writestr("/root.png", good)
        archive.writestr("bomb.png", bytes(3 << 20))  # 3 MiB in 3 KiB
        archive.writestr("=cmd|' /C calc'!A0.png", good)
        archive.writestr("crc.png", good)
    data = bytearray(path.read_bytes())
    place = data.rindex(good[60:90])  # stored deflated as is, since it is noise
    data[place] ^= 0xFF
    path.write_bytes(data)
    predict(load_model(trained), path, tmp_path / "o.csv", quiet=True)
    names = [row["file"] for row in read(tmp_path / "o.csv")]
    assert names == ["../../up.png", "/root.png", "=cmd|' /C calc'!A0.png"]
    reasons = {row["file"]: row["reason"] for row in read(tmp_path / "o.csv.skipped.csv")}
    assert "larger than" in reasons["bomb.png"]
    assert "crc.png" in reasons


@pytest.mark.skipif(ON_WINDOWS, reason="Windows has no names that are bytes")
def test_a_file_name_that_is_not_unicode_is_shown_in_full(trained, tmp_path):
    folder = tmp_path / "p"
    draw(folder / "x.png", 0)
    odd = os.fsdecode(b"caf\xe9\n.png")
    try:
        (folder / "x.png").rename(folder / odd)
    except OSError:
        pytest.skip("this file system takes Unicode only")
    for out in ("o.csv", "o.parquet"):
        assert predict(load_model(trained), folder, tmp_path / out, quiet=True).images == 1
    assert read(tmp_path / "o.csv")[0]["file"] == "caf\\xe9\n.png"


def test_without_a_promise_nothing_is_sure_and_a_line_says_so(photos, tmp_path, capsys):
    write_random_model(tmp_path, "tiny", 2, 8)
    few = posthoc.selective(np.ones(40), np.ones(40))
    save_calibration(tmp_path, None, None, few)
    predict(load_model(tmp_path), photos, tmp_path / "o.csv")
    assert {row["sure"] for row in read(tmp_path / "o.csv")} == {"false"}
    said = capsys.readouterr().err
    assert "19 more labels are needed" in said
    assert "never calibrated" in said


LOADED = """
import sys
from calmatch import cli
code = cli.main(sys.argv[1:])
ours = sorted(name for name in sys.modules if name.split(".")[0] == "calmatch")
print(code, "torch" in sys.modules, *ours)
"""


def modules_of(*words: object) -> tuple[list[str], list[str]]:
    """The exit code and whether torch was loaded; and the calmatch modules that a command loads."""
    line = [sys.executable, "-c", LOADED, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, env=ALONE, check=True)
    printed = done.stdout.splitlines()[-1].split()
    return printed[:2], printed[2:]


def test_a_prediction_loads_few_modules_and_no_method(trained, photos, tmp_path):
    ended, ours = modules_of("predict", trained, photos, "-o", tmp_path / "out.csv")
    assert ended == ["0", "True"]
    assert not any(name.startswith("calmatch.methods") for name in ours)
    assert len(ours) <= 16, ours


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=5))
@settings(deadline=None)
def test_a_set_survives_its_cell(names):
    assert split_names(join_names(names)) == tuple(names)


def test_parquet_is_written_in_groups(tmp_path, monkeypatch):
    import pyarrow.parquet

    monkeypatch.setattr("calmatch.predict.ROW_GROUP", 10)
    with open_table(tmp_path / "t.parquet") as sheet:
        for k in range(25):
            sheet.write(Answered(f"{k}.png", "a", 0.5, ("a", "b|c"), k % 2 == 0))
    file = pyarrow.parquet.ParquetFile(tmp_path / "t.parquet")
    assert (file.num_row_groups, file.metadata.num_rows) == (3, 25)
    assert file.read().to_pylist()[24]["set"] == ["a", "b|c"]


def test_an_interrupted_table_is_not_there(tmp_path):
    def write(name: str) -> None:
        with open_table(tmp_path / name) as sheet:
            sheet.write(Answered("a.png", "a", 0.5, (), False))
            sheet.skip("b.png", "broken")
            raise KeyboardInterrupt

    for name in ("t.csv", "t.parquet"):
        with pytest.raises(KeyboardInterrupt):
            write(name)
    assert list(tmp_path.iterdir()) == []


MEASURE = """
import resource, sys
from calmatch.model import load_model
from calmatch.predict import predict
predict(load_model(sys.argv[1]), sys.argv[2], sys.argv[3], batch=64, workers=2, quiet=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_pictures(trained, tmp_path):
    """20,000 small pictures need at most 20 MB more than 2,000."""
    draw(tmp_path / "one.png", 0)
    data = (tmp_path / "one.png").read_bytes()
    peaks = []
    for number in (2_000, 20_000):
        folder = tmp_path / str(number)
        folder.mkdir()
        for k in range(number):
            (folder / f"{k:06d}.png").write_bytes(data)
        words = [sys.executable, "-c", MEASURE, trained, folder, tmp_path / f"{number}.csv"]
        done = subprocess.run(words, capture_output=True, text=True, env=ALONE, check=True)
        peaks.append(int(done.stdout) / 1024)
        assert len(read(tmp_path / f"{number}.csv")) == number
    print(f"peak RSS {peaks[0]:.0f} MB and {peaks[1]:.0f} MB")
    assert peaks[1] < peaks[0] + 20


@pytest.mark.skipif(ON_WINDOWS, reason="Windows has no such names")
def test_a_name_like_a_formula_is_left_as_it_is_and_spoken_of(trained, tmp_path, capsys):
    """A table is looked up by names again, so that none is changed; a spreadsheet is warned of."""
    import pandas

    names = ["=cmd|'x'!A0.png", "@SUM(1+1).png", "-5.png", "a=b.png"]
    for k, name in enumerate(names):
        draw(tmp_path / "photos" / name, k)
    predict(load_model(trained), tmp_path / "photos", tmp_path / "o.csv", quiet=True)
    assert sorted(pandas.read_csv(tmp_path / "o.csv")["file"]) == sorted(names)
    assert "3 names begin like a formula" in capsys.readouterr().err
    predict(load_model(trained), tmp_path / "photos" / "a=b.png", tmp_path / "o.csv", quiet=True)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "row",
    (
        "a.png,cat,nan,0.5,0.5 a.png,cat,1.5,0.5,0.5 a.png,cow,0.5,0.5,0.5 a.png,cat,0.5 "
        "a.png,cat,0,0,0 a.png,cat,0.5,-1,0.5 a.png a.png,cat,1e400,1,0"
    ).split(),
)
def test_a_table_that_predict_did_not_write_is_a_sentence(tmp_path, row):
    (tmp_path / "t.csv").write_text(f"file,label,confidence,p(cat),p(dog)\n{row}\n")
    (tmp_path / "l.csv").write_text("file,label\na.png,cat\n")
    with pytest.raises(ValueError, match=r"not a table that|no probability of"):
        check_table(tmp_path / "t.csv", tmp_path / "l.csv")


def test_a_table_of_few_classes_says_what_its_labels_say(tmp_path):
    """Of forty classes two occur, and a tenth is the most that is said of one."""
    (tmp_path / "t.csv").write_text("file,label,confidence\na,c1,0.1\nb,c2,0.12\n")
    (tmp_path / "l.csv").write_text("file,label\na,c1\nb,c2\n")
    checked = check_table(tmp_path / "t.csv", tmp_path / "l.csv")
    assert float(metrics.error(checked.probs, checked.labels)) == 0
    assert np.allclose(checked.probs.max(1), [0.1, 0.12])


def test_names_are_found_however_their_accents_are_written(tmp_path):
    """NFD, as a Mac writes them, in a table or a folder; NFC in the labels."""
    accent = unicodedata.normalize("NFD", "ü.png")
    (tmp_path / "t.csv").write_text(f"file,label,confidence\n{accent},a,0.9\nb.png,b,0.8\n")
    (tmp_path / "l.csv").write_text("file,label\nü.png,a\n./b.png,b\n")
    assert len(check_table(tmp_path / "t.csv", tmp_path / "l.csv").labels) == 2


def test_a_table_of_one_class_alone_is_evaluated_too(tmp_path):
    (tmp_path / "t.csv").write_text("file,label,confidence\na.png,cat,0.9\nb.png,cat,0.7\n")
    (tmp_path / "l.csv").write_text("file,label\na.png,cat\nb.png,cat\n")
    checked = check_table(tmp_path / "t.csv", tmp_path / "l.csv")
    assert checked.probs.max(1).tolist() == [0.9, 0.7]


@pytest.mark.ray
def test_a_cluster_that_does_not_answer_is_one_sentence(trained, photos, tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        predict(
            load_model(trained), photos, tmp_path / "o.csv", engine="ray", address="127.0.0.1:1"
        )
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.ray
def test_a_ray_cluster_of_two_nodes_writes_the_same_table(trained, photos, tmp_path, capfd):
    pytest.importorskip("ray")
    import ray
    import ray.data
    from ray.cluster_utils import Cluster

    reasons = _spoil(photos)
    for k in range(60):
        draw(photos / "many" / f"{k:03d}.png", k)
    loaded = load_model(trained)
    predict(loaded, photos, tmp_path / "local.csv", batch=8, quiet=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        assert sum(node["Alive"] for node in ray.nodes()) == 2
        ray.data.DataContext.get_current().wait_for_min_actors_s = 120  # both nodes take part
        count = predict(loaded, photos, tmp_path / "ray.csv", batch=8, engine="ray")
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert count.skipped == len(reasons)
    assert "Nodes that took part: 2." in capfd.readouterr().err
    here, there = read(tmp_path / "local.csv"), read(tmp_path / "ray.csv")
    assert [row["file"] for row in here] == [row["file"] for row in there]
    for row, other in zip(here, there, strict=True):
        assert float(row.pop("confidence")) == pytest.approx(
            float(other.pop("confidence")), abs=2e-6
        )
        assert row == other


@pytest.mark.ray
def test_a_node_that_vanishes_during_predict_costs_no_row(trained, tmp_path):
    """Its pictures are predicted elsewhere; where no node is left, a sentence says so."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    draw(tmp_path / "pictures" / "000.png", 0, 1500)
    for k in range(1, 80):
        (tmp_path / "pictures" / f"{k:03d}.png").hardlink_to(tmp_path / "pictures" / "000.png")
    loaded, source = load_model(trained), ImageSource(tmp_path / "pictures")
    here = list(predict_locally(loaded, source, 4, 1))
    room = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **room})
    try:
        nodes = [cluster.add_node(num_cpus=1, **room) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        rows = predict_on_ray(loaded, source, 1, None, True)
        there = [next(rows)]
        cluster.remove_node(nodes[0], allow_graceful=False)
        there += rows
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [(row.file, row.label) for row in here] == [(row.file, row.label) for row in there]


@pytest.mark.parametrize("name", ["a\rb,c.png", "a\nb.png", '"q".png', "a,b.png"])
def test_a_carriage_return_in_a_name_does_not_end_its_row(tmp_path, name):
    out = tmp_path / "answers.csv"
    with open_table(out) as sheet:
        sheet.write(Answered(name, "cat", 0.5, ("cat", "d\rog"), True))
        sheet.skip(name, "it is broken")
    for path, width in ((out, 5), (skipped_path(out), 2)):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        assert [len(row) for row in rows] == [width] * 2
        assert rows[1][0] == name
