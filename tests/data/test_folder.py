"""A person's own pictures: folders, CSV files, odd files, and mistakes that are named."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from calmatch.console import ProgressBar
from calmatch.data import folder as folder_module
from calmatch.data.dataset import build
from calmatch.data.folder import (
    decode_folder,
    fitting_size,
    match_labels,
    own_images,
    read_folder,
    read_labels,
)
from calmatch.data.images import decode
from calmatch.data.labelfiles import LabelRow


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "cache"))


def draw(path: Path, colour: str = "red", size: tuple[int, int] = (20, 16), **how: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **how)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """Six pictures in a folder of a person."""
    root = tmp_path / "pics"
    for name, colour in zip("abcdef", ["red", "red", "blue", "blue", "green", "red"], strict=True):
        draw(root / f"{name}.png", colour)
    return root


def table(folder: Path, text: str | bytes) -> Path:
    path = folder.parent / "labels.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


GOOD = "file,label\na.png,warm\nb.png,warm\nc.png,cold\nd.png,cold\n"


def test_class_folders_with_an_unlabelled_one_nested_and_loose_pictures(tmp_path):
    root = tmp_path / "pics"
    for name in ("cat/1.png", "cat/deep/2.jpg", "dog/1.webp", "Unlabeled/x.bmp", "loose.gif"):
        draw(root / name)
    (root / "dog" / "notes.txt").write_text("not a picture")
    (root / ".hidden").mkdir()
    listing = read_folder(root)
    assert listing.classes == ("cat", "dog")
    named = dict(zip(listing.names, listing.labels, strict=True))
    wanted = {"cat/1.png": 0, "cat/deep/2.jpg": 0, "dog/1.webp": 1}
    assert named == wanted | {"Unlabeled/x.bmp": -1, "loose.gif": -1}
    assert listing.notes[0] == "Pictures in pics itself count as unlabelled: 1."
    assert "'dog' has one label" in listing.notes[1]


def test_parts_of_a_dataset_are_not_silently_taken_for_classes(tmp_path):
    for part in ("train", "val"):
        for kind in (" cat", "dog "):
            draw(tmp_path / part / kind / "1.png")
    notes = read_folder(tmp_path).notes
    assert any("train and val are taken for classes" in note for note in notes)
    assert read_folder(tmp_path / "train").classes == ("cat", "dog")


@pytest.mark.parametrize(
    "raw",
    [
        GOOD.encode(),
        b"\xef\xbb\xbf" + GOOD.encode(),
        GOOD.replace("\n", "\r\n").encode(),
        GOOD.encode("utf-16"),
        b"File , LABEL\n a.png , warm\nb.png,warm\n\nc.png,cold\nd.png,cold",
        b"label,file,who\nwarm,a.png,me\nwarm,b.png,me\ncold,c.png,\ncold,./d.png,you\n",
        GOOD.replace("a.png,warm\n", "a.png,warm\ne.png,\n").encode(),
    ],
    ids=["plain", "bom", "crlf", "utf-16", "spaces", "columns", "empty label"],
)
def test_a_csv_is_read_however_it_was_saved(folder, raw):
    listing = read_folder(folder, table(folder, raw))
    assert listing.classes == ("cold", "warm")
    assert listing.labels == (1, 1, 0, 0, -1, -1)


def test_latin_1_and_both_unicode_forms_name_the_same_class_and_file(folder):
    draw(folder / unicodedata.normalize("NFD", "käse, alt.png"))
    draw(folder / "brot.png")
    text = 'file,label\n"käse, alt.png",Käse\nbrot.png,Brot\n'
    for raw in (text.encode("latin-1"), text.encode(), unicodedata.normalize("NFD", text).encode()):
        listing = read_folder(folder, table(folder, raw))
        assert listing.classes == ("Brot", "Käse")
        assert sorted(listing.labels)[-2:] == [0, 1]


def test_labels_that_are_numbers_are_ordered_as_numbers(folder):
    csv = table(folder, "file,label\na.png,10\nb.png,9\nc.png,-1\nd.png,9\n")
    assert read_folder(folder, csv).classes == ("-1", "9", "10")


MISTAKES = {
    "unknown": ("file,label\na.png,x\nbb.png,y\n", "row 3: bb.png (is it b.png?)"),
    "contradiction": ("file,label\na.png,x\nb.png,y\n./a.png,y\n", "rows 2 and 4"),
    "header": ("name,class\na.png,x\n", "row 1: the first line must be file,label"),
    "no header": ("a.png,x\nb.png,y\n", "row 1"),
    "semicolons": ("file;label\na.png;x\n", "separated by semicolons; save it with commas"),
    "tabs": ("file\tlabel\na.png\tx\n", "separated by tabs"),
    "comma": ("file,label\na,b.png,x\n", "row 2: 3 cells"),
    "no file": ("file,label\n,x\n", "row 2: the file name is empty"),
    "up": ("file,label\na.png,x\n../b.png,y\n", "row 3: ../b.png lies outside"),
    "up in Windows": ("file,label\na.png,x\n..\\b.png,y\n", "row 3"),
    "absolute": ("file,label\na.png,x\n/etc/passwd.png,y\n", "row 3: /etc/passwd.png lies outside"),
    "drive": ("file,label\na.png,x\nC:\\b.png,y\n", "row 3"),
    "one class": ("file,label\na.png,x\nb.png,x\n", "one class only, 'x'"),
    "empty": ("", "row 1"),
    "no rows": ("file,label\n", "no labels below its header"),
    "twice": ("file,label,label\na.png,x,y\n", "names the column 'label' twice"),
    "binary": (b"\x89PNG\0\0\0", "not a text file"),
    "quote": ('file,label\n"a.png,x\n', "not a CSV file"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_a_csv_is_a_sentence_that_names_the_row(folder, kind):
    text, sentence = MISTAKES[kind]
    with pytest.raises(ValueError, match=r"labels\.csv") as caught:
        read_folder(folder, table(folder, text))
    assert sentence in str(caught.value)


def test_a_repeated_row_is_harmless_and_said(folder):
    listing = read_folder(folder, table(folder, GOOD + "a.png,warm\n"))
    assert "more than once" in listing.notes[0]


def test_mistakes_of_folders_are_sentences(tmp_path):
    with pytest.raises(ValueError, match="There is no folder"):
        read_folder(tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds no pictures"):
        read_folder(empty)
    (empty / "a.png").symlink_to(draw(tmp_path / "elsewhere" / "a.png"))
    with pytest.raises(ValueError, match=r"a.png: it is a link that leaves.*copy them into it"):
        read_folder(empty)
    draw(tmp_path / "flat" / "a.png")
    with pytest.raises(ValueError, match=r"no class folders.*--labels"):
        read_folder(tmp_path / "flat")
    draw(tmp_path / "pics" / "cat" / "a.png")
    draw(tmp_path / "pics" / "dog" / "a.png")
    (tmp_path / "pics" / "cow").mkdir()
    with pytest.raises(ValueError, match=r"class folder .*cow holds no pictures"):
        read_folder(tmp_path / "pics")


def test_links_that_leave_the_folder_are_skipped_or_refused(tmp_path, folder):
    outside = draw(tmp_path / "secret" / "s.png")
    (folder / "link.png").symlink_to(outside)
    (folder / "inside.png").symlink_to(folder / "a.png")
    (folder / "all").symlink_to(outside.parent)
    csv = table(folder, GOOD)
    listing = read_folder(folder, csv)
    assert {item.file for item in listing.skipped} == {"link.png", "all"}
    assert "inside.png" in listing.names
    with pytest.raises(ValueError, match="--strict"):
        read_folder(folder, csv, strict=True)
    with pytest.raises(ValueError, match=r"row 6: link.png"):
        read_folder(folder, table(folder, GOOD + "link.png,warm\n"))


def test_broken_files_are_listed_and_left_out_unless_strict(folder):
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    whole = (folder / "a.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    csv = table(folder, GOOD)
    for _ in range(2):  # decoded, then from the cache
        bar = ProgressBar("", 9, 0, True)
        images, listing = decode_folder(read_folder(folder, csv), 16, bar=bar)
        assert [item.file for item in listing.skipped] == ["broken.png", "cut.png", "empty.jpg"]
        assert len(images) == len(listing.names) == 6
    assert bar.done == 0  # nothing is decoded twice
    del images  # Windows removes no file that is mapped
    with pytest.raises(ValueError, match=r"broken.png cannot be decoded"):
        decode_folder(read_folder(folder, csv), 16, strict=True)


def test_a_changed_file_is_decoded_anew(folder):
    csv = table(folder, GOOD)
    before = decode_folder(read_folder(folder, csv), 16)[0].take([0])
    draw(folder / "a.png", "white")
    os.utime(folder / "a.png", ns=(1, 1))
    after = decode_folder(read_folder(folder, csv), 16)[0].take([0])
    assert not torch.equal(before, after)


def test_a_class_whose_only_label_cannot_be_decoded_is_an_error(folder):
    (folder / "x.png").write_bytes(b"rubbish")
    csv = table(folder, GOOD + "x.png,odd\n")
    with pytest.raises(ValueError, match="Class 'odd' has no label left"):
        own_images(root=str(folder), labels=str(csv), size=16)


def saved(picture: Image.Image, kind: str, **how: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **how)
    return file.getvalue()


def test_transparent_pictures_lie_on_white_and_long_strips_are_cut(tmp_path):
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    assert decode(saved(clear, "PNG"), 16).min() == 255
    palette = Image.new("P", (20, 20), 0)
    palette.putpalette([0, 0, 0] * 256)
    assert decode(saved(palette, "PNG", transparency=0), 16).min() == 255
    assert decode(saved(Image.new("RGB", (1, 20_000), "red"), "PNG"), 64).shape == (3, 64, 64)


def test_sixteen_bits_are_scaled_alike_in_dark_and_bright_pictures():
    for value in (200, 20_000, 65_535):
        deep = Image.fromarray(np.full((8, 8), value, np.uint16))
        for kind in ("PNG", "TIFF"):
            assert abs(int(decode(saved(deep, kind), 8)[0, 0, 0]) - value / 257) <= 1


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch):
    raw = saved(Image.new("L", (64, 64)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ValueError, match="too large"):
        decode(raw, 16)


def test_pillow_warns_of_no_large_picture_on_the_console():
    words = "import io; from PIL import Image; from calmatch.data.images import open_image as see;"
    words += "Image.MAX_IMAGE_PIXELS = 3000; file = io.BytesIO();"
    words += "Image.new('L', (64, 64)).save(file, 'PNG'); print(see(file.getvalue()).size)"
    answer = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert (answer.stdout, answer.stderr) == ("(64, 64)\n", "")


def test_a_large_jpeg_looks_the_same_as_a_png():
    random = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    large = Image.fromarray(random).resize((900, 900), Image.Resampling.BICUBIC)
    a = decode(saved(large, "PNG"), 32).astype(int)
    b = decode(saved(large, "JPEG", quality=95), 32).astype(int)
    assert abs(a - b).mean() < 3


@pytest.mark.parametrize(("side", "size"), [(8, 16), (40, 32), (64, 64), (100, 96), (3000, 128)])
def test_the_training_size_follows_the_pictures(tmp_path, side, size):
    for k in range(2):
        draw(tmp_path / "pics" / f"class{k}" / "a.png", size=(side + 5, side))
    assert fitting_size(read_folder(tmp_path / "pics")) == (size, side)


def test_the_dataset_holds_out_a_share_of_each_class_and_limits_the_unlabelled(tmp_path):
    root = tmp_path / "pics"
    for k in range(6):
        draw(root / "cat" / f"{k}.png")
        draw(root / "dog" / f"{k}.png", "blue")
        draw(root / "unlabelled" / f"{k}.png", "green")
    dataset = build(f"pictures(root={str(root)!r}, size=16, hold=0.5, most=4)")
    assert dataset.labelled_counts == (3, 3)
    assert dataset.test_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(dataset.labels) == 10
    assert (dataset.labels == -1).sum() == 4
    own = build(f"pictures(root={str(root)!r}, size=16, mean=(0.5, 0.5, 0.5), std=(1, 1, 1))")
    assert own.mean == (0.5, 0.5, 0.5) != dataset.mean  # else by the pictures themselves
    assert len(own.test_labels) == 12  # the labelled ones stand in


def test_many_large_pictures_are_decoded_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "LARGEST", 100)
    root = tmp_path / "pics"
    for name in ("cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png"):
        draw(root / name)
    (root / "dog" / "broken.png").write_bytes(b"rubbish")
    dataset = build(f"pictures(root={str(root)!r}, size=16)")
    assert not isinstance(dataset.images, torch.Tensor)
    assert dataset.images.take([0, 3]).shape == (2, 3, 16, 16)


def test_class_names_that_differ_in_capitals_only_are_pointed_out(folder):
    csv = table(folder, "file,label\na.png,Cat\nb.png,cat\nc.png,dog\n")
    assert any("differ in capitals" in note for note in read_folder(folder, csv).notes)


def test_rows_know_where_they_stand(folder):
    rows = read_labels(table(folder, "file,label\n\na.png,x\n\n\nb.png,y\n"))
    assert [row.number for row in rows] == [3, 6]


@pytest.mark.parametrize("label", ["", " ", "\ud800", "x" * 1001])
def test_what_no_model_could_hold_is_refused_as_a_label_before_training(folder, label):
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.png"))][:3]
    path = folder / "labels.json"
    rows = [{"file_name": name, "label": k or label} for k, name in enumerate(names)]
    path.write_text(json.dumps(rows))
    if label.strip():
        with pytest.raises(ValueError, match="cannot be a label"):
            read_folder(folder, path)
    else:  # it has no label yet
        assert len(read_folder(folder, path).known) == 2


def test_two_pictures_whose_names_look_the_same_are_not_mixed_up(folder):
    names = [unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD")]
    for name in names:
        shutil.copy(next(folder.rglob("*.png")), folder / name)
    path = folder / "labels.csv"
    path.write_text(f"file,label\n{names[0]},a\n{names[1]},b\n", "utf-8")
    with pytest.raises(ValueError, match="rename one"):
        read_folder(folder, path)


def test_a_mistaken_name_among_very_many_is_spoken_of_at_once():
    names = [f"pool/img_{k:06d}.jpg" for k in range(50_000)]
    rows = [LabelRow("img_000007.jpeg", "a", 2)] * 5
    began = time.process_time()
    with pytest.raises(ValueError, match=r"is it pool/img_000007\.jpg"):
        match_labels(rows, names, Path("labels.csv"))
    assert time.process_time() - began < 2
