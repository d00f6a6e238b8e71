"""What strangers send: links, bombs, pickles, damaged folders; and nothing that listens."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import types
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import calmatch
from calmatch import console, files, losses, nets, options, train
from calmatch.data import images
from calmatch.data.images import decode
from calmatch.model import load_model
from calmatch.predict import ImageSource, Skipped, start_ray
from calmatch.report import build
from calmatch.runs import Result, load_predictions, load_run
from calmatch.training import checkpoint, loop
from conftest import ALONE, write_random_model
from folders import made

SOURCE = Path(calmatch.__file__).parent


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "times.jsonl", "checkpoint"])
def test_training_follows_no_link_out_of_its_folder(tiny, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir() if name == "checkpoint" else outside.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside)
    with pytest.raises(ValueError, match="link out of the run folder"):
        train(tiny(), tmp_path / "run", quiet=True)
    assert outside.is_dir() or outside.read_text() == "precious"
    assert not outside.is_dir() or not list(outside.iterdir())


def test_a_link_in_the_place_of_a_draft_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tmp_path / f".file.{os.getpid()}.part").symlink_to(outside)
    files.write(tmp_path / "file", "new")
    assert outside.read_text() == "precious"
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "..", "itself"])
@pytest.mark.parametrize("name", ["result.json", "predictions.npz", "model.json"])
def test_nothing_is_read_through_a_link_out_of_a_run_folder(tmp_path, name, target):
    run = made(tmp_path / "run")
    write_random_model(run.folder, "tiny", 5, 8)
    (run.folder / name).unlink()
    (run.folder / name).symlink_to(name if target == "itself" else target)
    for reader in (load_run, load_model):
        with pytest.raises(ValueError, match="link out of the run folder"):
            reader(run.folder)


def test_links_within_a_run_folder_are_fine(tmp_path):
    run = made(tmp_path / "run")
    (run.folder / "result.json").rename(run.folder / "first.json")
    (run.folder / "result.json").symlink_to("first.json")
    assert load_run(run.folder).result == run.result


def test_only_calmatchs_own_litter_is_swept(tmp_path):
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    litter = [tmp_path / f".a.json.{gone.pid}.part", tmp_path / "deep" / f".b.npz.{1 << 80}.part"]
    others = [tmp_path / ".film.mkv.part", tmp_path / "deep" / "deeper" / ".c.json.1.part"]
    others.append(tmp_path / f".report.html.{os.getppid()}.part")  # somebody writes it now
    others.append(tmp_path / ".lock")  # the folder is ours
    for path in (*litter, *others):
        path.touch()
    with files.lock(tmp_path):
        assert not any(path.exists() for path in litter)
        assert all(path.exists() for path in others)


def test_a_folder_with_files_of_others_is_not_trained_into(tiny, tmp_path):
    for name, text in (("thesis.txt", "precious"), ("config.json", '{"model_type": "bert"}')):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(ValueError, match=r"did not write|holds a run"):
            train(tiny(), folder, quiet=True)
        assert [path.name for path in folder.iterdir()] == [name]
        assert (folder / name).read_text() == text


def test_checkpoints_of_others_are_neither_read_nor_renamed_nor_dropped(tmp_path):
    theirs = [tmp_path / name for name in ("best.safetensors", "7.safetensors", "x1.safetensors")]
    for path in theirs:
        path.write_bytes(b"theirs")
    assert checkpoint.newest_checkpoint(tmp_path) == (None, [])
    for step in range(1, 6):
        checkpoint.save_checkpoint(tmp_path, step, {"a": torch.ones(1)}, {"lines": 0})
    assert all(path.read_bytes() == b"theirs" for path in theirs)
    assert [int(path.stem) for path in checkpoint.list_checkpoints(tmp_path)] == [4, 5]


def test_a_continued_run_does_not_mix_pictures(tiny, tmp_path):
    """Two class folders change places; names, sizes and labels agree."""
    for name, grey in (("cat", 40), ("dog", 200)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for k in range(12):
            image = Image.new("RGB", (8, 8), (grey + k,) * 3)
            image.save(tmp_path / "data" / name / f"{k:02d}.bmp")
    config = tiny(dataset=f"folder(path={str(tmp_path / 'data')!r}, size=8)", labels=4)
    loop.train_first_steps(config, tmp_path / "run", 6, quiet=True)
    for one, two in (("cat", "x"), ("dog", "cat"), ("x", "dog")):
        (tmp_path / "data" / one).rename(tmp_path / "data" / two)
    with pytest.raises(ValueError, match="have changed since"):
        train(config, tmp_path / "run", quiet=True)


def test_a_table_that_a_killed_process_left_half_written_is_swept_by_the_next(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    litter = tmp_path / f".out.csv.{gone.pid}.part"
    others = [tmp_path / f".out.csv.x.{gone.pid}.part", tmp_path / f".out.csv.{os.getppid()}.part"]
    for path in (litter, *others):
        path.touch()
    files.write(tmp_path / "out.csv", "whole")
    assert not litter.exists()
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("mode", ["I;16", "RGBA", "P"])
def test_a_large_picture_is_flattened_in_strips_as_if_whole(monkeypatch, mode):
    rng = np.random.default_rng(0)
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 65536, (37, 23), dtype=np.uint16))
    else:
        image = Image.fromarray(rng.integers(0, 256, (37, 23, 4), dtype=np.uint8)).convert(mode)
    packed = io.BytesIO()
    image.save(packed, "PNG", **({"transparency": 3} if mode == "P" else {}))
    whole = decode(packed.getvalue(), 8)
    monkeypatch.setattr(images, "STRIP", 100)
    assert (decode(packed.getvalue(), 8) == whole).all()


def test_all_threads_together_keep_to_the_room(monkeypatch):
    """A picture that needs it all is alone, and small ones share."""
    room, seen, now, lock = images._Room(), [], [], threading.Lock()

    def work(number: int) -> None:
        with room.hold(number):
            with lock:
                now.append(min(number, images.DECODED))
                seen.append(sum(now))
            time.sleep(0.002)
            with lock:
                now.remove(min(number, images.DECODED))

    sizes = [images.DECODED // 3] * 9 + [images.DECODED * 5] * 3 + [1] * 9
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, sizes))
    assert max(seen) <= images.DECODED
    assert room.free == images.DECODED


def test_a_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    code = """
import os, sys, time
from pathlib import Path
from calmatch import files
with files.lock(Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(30)
    print("held", flush=True)
    time.sleep(30)
"""
    words = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=ALONE, start_new_session=True)
    assert process.stdout.readline() == b"held\n"
    process.kill()  # the parent alone
    process.wait()
    try:
        with files.lock(tmp_path):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize("place", ["step", "lines", "best"])
def test_a_changed_note_of_a_checkpoint_is_noticed(tmp_path, place):
    checkpoint.save_checkpoint(tmp_path, 7, {"a": torch.ones(3)}, {"lines": 70, "best": 0.75})
    (path,) = tmp_path.glob("*.safetensors")
    changed = re.sub(rb'(\\"' + place.encode() + rb'\\": [0.]*)7', rb"\g<1>8", path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    with pytest.raises(ValueError, match="checksum"):
        checkpoint.read_checkpoint(path)


def test_a_line_is_whole_or_not_there_when_the_disk_is_full(tmp_path):
    with checkpoint.Lines(tmp_path, 0) as lines:
        lines.write({"step": 1, "kind": "train", "loss": 0.5})
        size = lines.size()
    code = """
import resource, sys
from pathlib import Path
from calmatch.training import checkpoint, loop
with checkpoint.Lines(Path(sys.argv[1]), int(sys.argv[2])) as lines:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]) + 20, -1))
    try:
        lines.write({"step": 2, "kind": "train", "loss": 0.25})
    except OSError as error:
        sys.exit(error.errno)
"""
    words = [sys.executable, "-c", code, str(tmp_path), str(size)]
    assert subprocess.run(words, env=ALONE).returncode == 27  # EFBIG
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


def test_a_full_disk_is_one_sentence(capsys):
    def full():
        raise OSError(28, "No space left on device", "/somewhere/metrics.jsonl")

    assert console.run_guarded(full) == 2
    text = capsys.readouterr().err
    assert "No space left on device (/somewhere/metrics.jsonl)" in text
    assert "Traceback" not in text


def test_a_signal_that_somebody_swallows_is_repeated(monkeypatch):
    monkeypatch.setattr(console, "REPEAT_AFTER", 0.05)
    swallowed = []

    def act():
        try:  # as some compiled modules do while they are imported
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except SystemExit:
            swallowed.append(1)
        time.sleep(5)
        return 0

    with pytest.raises(SystemExit) as caught:
        console.run_guarded(act)
    assert swallowed
    assert caught.value.code == 143


def test_a_signal_waits_for_the_end_of_an_import(tmp_path, monkeypatch):
    """A compiled module may abort at what is raised while it is imported, with exit code -6."""
    lines = (
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.4)\ndone = 1"
    )
    (tmp_path / "slow_module.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    done = []

    def act():
        import slow_module  # type: ignore[import-not-found]

        done.append(slow_module.done)
        time.sleep(5)
        return 0

    with pytest.raises(SystemExit) as caught:
        console.run_guarded(act)
    assert done == [1]
    assert caught.value.code == 143


def test_a_signal_in_an_import_before_the_steps_is_answered_between_them(tmp_path, monkeypatch):
    """So that the checkpoint is written: the step in which the alarm comes is not torn."""
    lines = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)"
    (tmp_path / "early_module.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    saved = []
    with console.catch_signals() as signals:
        import early_module  # type: ignore[import-not-found]  # noqa: F401

        with pytest.raises(console.Stopped), signals.patience():  # noqa: PT012
            time.sleep(0.4)  # a step, longer than the alarm
            saved.append(list(signals))
    assert saved == [[signal.SIGTERM]]


def test_a_signal_in_an_import_before_the_run_is_answered_between_steps(tmp_path, monkeypatch):
    """The command's own alarm comes while steps go on already: they answer what it waited for."""
    lines = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "earlier_module.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    saved = []

    def act():
        import earlier_module  # type: ignore[import-not-found]  # noqa: F401

        with console.catch_signals() as signals, signals.patience():
            time.sleep(0.4)
            saved.append(list(signals))
        return 0

    assert console.run_guarded(act) == 130
    assert saved == [[signal.SIGINT]]


def test_a_step_that_takes_too_long_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(console, "LONGEST_STEP", 0.05)

    def step():
        with console.catch_signals() as asked:
            asked.patient = True
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(console.Stopped) as caught:
        step()
    assert caught.value.exit_code == 143


def png(width: int, height: int) -> bytes:
    """A small file that claims to be large: one row, compressed."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(3 * width + 1))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_picture_that_unpacks_to_gigabytes_is_refused():
    with pytest.raises(ValueError, match="too large"):
        decode(png(60_000, 60_000), 8)


def test_a_member_that_unpacks_to_gigabytes_is_skipped_unread(tmp_path, monkeypatch):
    path = tmp_path / "bomb.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("bomb.png", "w", force_zip64=True) as member,
    ):
        for _ in range(17):
            member.write(bytes(1 << 24))
    assert path.stat().st_size < 1 << 20
    (name,) = ImageSource(path).names()
    assert isinstance(name, Skipped)
    assert "larger than" in name.reason


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_member_that_lies_about_its_size_is_not_unpacked(tmp_path, kind):
    path = tmp_path / "p.zip"
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("a.png", bytes(30 << 20))
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\1\2") + 24
    data[place : place + 4] = struct.pack("<I", 1000)
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"cannot be decoded"):
        images.ImageFiles(path, ("a.png",), 8).image(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20
    with pytest.raises(ValueError, match="plain arrays"):
        files.read_arrays(path)


def test_a_small_file_of_arrays_that_unpacks_to_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "UNPACKED", (1 << 20, 10))
    np.savez_compressed(tmp_path / "p.npz", probs=np.zeros((1 << 16, 4)))
    with pytest.raises(ValueError, match="too large"):
        files.read_arrays(tmp_path / "p.npz")
    np.savez_compressed(tmp_path / "q.npz", probs=np.random.default_rng(0).random((1 << 16, 4)))
    assert files.read_arrays(tmp_path / "q.npz")["probs"].shape == (1 << 16, 4)


def test_json_of_millions_of_lists_is_refused_before_they_are_made(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [' + "[]," * files.MOST_ENTRIES + "[]]}")
    with pytest.raises(ValueError, match="too many entries"):
        files.read_json(tmp_path / "a.json")


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_nothing_but_a_file_is_written_over(tmp_path, kind):
    """As root, a page written to /dev/null would take its place."""
    path = tmp_path / "page.html"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    before = path.lstat().st_mode
    with pytest.raises(OSError, match="not a regular file"):
        files.write(path, "new")
    assert path.lstat().st_mode == before
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "work/a/all"])
def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path, name):
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / "run" / name)
    (tmp_path / "run" / "fit.json").touch()
    with (
        pytest.raises(ValueError, match="neither a file nor a folder"),
        files.lock(tmp_path / "run"),
    ):
        pass


def test_a_lock_follows_no_link_and_waits_for_no_pipe(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to("precious")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="symbolic links"):
        files.open_lock(tmp_path / "link")
    with files.open_lock(tmp_path / "pipe") as file:
        assert files.try_lock(file)
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_link_within_the_work_of_a_fit_is_not_followed(tmp_path):
    (tmp_path / "run" / "work" / "labels-alone").mkdir(parents=True)
    (tmp_path / "run" / "work" / "labels-alone" / "all").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="link out"), files.lock(tmp_path / "run"):
        pass


def test_folders_deeper_than_python_calls_are_walked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    depth = 1200
    for _ in range(depth):
        Path("d").mkdir()
        os.chdir("d")
    Path("x.png").touch()
    os.chdir(tmp_path)
    try:
        assert list(images.walk_images(tmp_path)) == ["d/" * depth + "x.png"]
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


def test_decoding_in_threads_leaves_the_filters_of_warnings_alone():
    packed = io.BytesIO()
    Image.new("RGB", (8, 8)).save(packed, "PNG")
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: decode(packed.getvalue(), 8), range(500)))
    assert list(warnings.filters) == before


def test_the_limit_of_pixels_is_our_own(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(ValueError, match="too large"):
        decode(png(20_000, 20_000), 8)


def test_a_file_of_ours_never_gets_the_number_of_a_closed_stream(tmp_path):
    code = """
import os, sys
from calmatch import console
def act():
    print("words")
    with open(sys.argv[1], "w") as file:
        file.write(str(file.fileno()))
    raise ValueError("no")
sys.exit(console.run_guarded(act))
"""
    words = [sys.executable, "-c", code, str(tmp_path / "file")]
    line = 'exec "$@" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", line, "sh", *words], env=ALONE).returncode == 1
    assert int((tmp_path / "file").read_text()) > 2


def test_arrays_that_unpack_to_gigabytes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(files.LARGEST_BYTES, "npz", 1 << 20)
    np.savez_compressed(tmp_path / "p.npz", probs=np.zeros((1 << 16, 4)), labels=np.zeros(1 << 16))
    with pytest.raises(ValueError, match="too large"):
        load_predictions(tmp_path / "p.npz")


def test_a_zip_with_very_many_entries_is_listed_in_bounded_memory(tmp_path):
    path = tmp_path / "many.zip"
    number = 100_000
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"x"
    entries = io.BytesIO()
    for k in range(number):
        name = f"{k:07d}.txt".encode()
        fields = (b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0, 0, 0, 0, 0, 0)
        entries.write(struct.pack("<4s6H3I5H2I", *fields) + name)
    body = entries.getvalue()
    start = len(local)
    last = struct.pack(
        "<4sQHHIIQQQQ", b"PK\6\6", 44, 20, 20, 0, 0, number, number, len(body), start
    )
    there = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(body), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(body), start, 0)
    path.write_bytes(local + body + last + there + end)
    assert len(zipfile.ZipFile(path).infolist()) == number
    assert list(ImageSource(path).names()) == []


JUNK = [None, [], {}, "x", -1, 1e308, float("nan"), 10**400, [[]], {"value": "a"}, "\ud800"]


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(Result)])
def test_junk_in_a_result_is_a_sentence_or_a_page(tmp_path, key):
    run = made(tmp_path / "run", pictures=40, examples_too=False)
    for junk in JUNK:
        files.write(run.folder / "result.json", json.dumps({**run.result.dump(), key: junk}))
        try:
            build([load_run(run.folder)], run.folder / "report.html")
        except ValueError as error:
            text = str(error)
            assert str(run.folder) in text, text


def test_classes_that_do_not_fit_the_predictions_are_a_sentence(tmp_path):
    run = made(tmp_path / "run", pictures=40)
    files.write_json(run.folder / "result.json", {**run.result.dump(), "classes": ["a", "b"]})
    with pytest.raises(ValueError, match="that fit"):
        build([load_run(run.folder)], run.folder / "report.html")


class Evil:
    def __reduce__(self):
        return (os.system, ("touch pwned",))


@pytest.mark.parametrize("name", ["w.pth", "w.pt", "w.safetensors", "w.bin"])
@pytest.mark.parametrize("packed", ["pickle", "torch"])
def test_pretrained_files_run_no_code(tmp_path, monkeypatch, name, packed):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    if packed == "torch":
        torch.save({"model": Evil()}, path)
    else:
        path.write_bytes(pickle.dumps({"state_dict": Evil()}))
    with pytest.raises(ValueError, match="is not a"):
        nets.read_state(path)
    assert not (tmp_path / "pwned").exists()


def test_arrays_with_pickles_in_them_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "p.npz", probs=np.array([Evil()], dtype=object), labels=np.zeros(1))
    with pytest.raises(ValueError, match="plain arrays"):
        load_predictions(tmp_path / "p.npz")
    assert not (tmp_path / "pwned").exists()


@pytest.fixture
def published(tmp_path, monkeypatch):
    """USB's server stands in for by a file."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    content = [b"first"]

    def fetch(url: str, target: str, **_: object) -> None:
        assert url.startswith("https://")
        Path(target).write_bytes(content[0])

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    nets.messages.clear()
    return content


def test_without_published_weights_every_way_to_get_them_is_said(published, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(ValueError, match="no network") as caught:
        nets._download("vit_small_patch2_32")
    for way in ("https://", "put it at", "--weights FILE", "pretrained='FILE'", "paper_runs.py"):
        assert way in str(caught.value)


def test_weights_without_published_checksum_are_remembered_and_checked(published):
    path = nets._download("vit_tiny_patch2_32")
    digest = hashlib.sha256(b"first").hexdigest()
    assert digest in nets.messages[0]
    assert nets._download("vit_tiny_patch2_32") == path
    path.write_bytes(b"changed")
    with pytest.raises(ValueError, match="is not what"):
        nets._download("vit_tiny_patch2_32")
    path.unlink()
    published[0] = b"other"
    with pytest.raises(ValueError, match="is not what"):
        nets._download("vit_tiny_patch2_32")


def test_nothing_listens_on_a_network_port():
    """Only `label` and `serve` open a listener, on loopback unless asked; so does Ray for us."""
    assert options.ServeOptions(Path()).host == "127.0.0.1"
    listening = re.compile(
        r"sock\w*\.bind\(|\.listen\(|HTTPServer|socketserver|create_server|\.serve\(|0\.0\.0\.0"
    )
    for path in set(SOURCE.rglob("*.py")) - set((SOURCE / "web").rglob("*.py")):
        assert not listening.search(path.read_text("utf-8")), path
    calls = [path.name for path in SOURCE.rglob("*.py") if "ray.init(" in path.read_text("utf-8")]
    assert calls == ["predict.py"]
    started: dict[str, object] = {}
    fake = types.SimpleNamespace(init=lambda **settings: started.update(settings))
    start_ray(fake, None)
    assert started["include_dashboard"] is False
    assert started["_node_ip_address"] == "127.0.0.1"
    started.clear()
    start_ray(fake, "somewhere:6379")
    assert "include_dashboard" not in started  # somebody else's cluster is theirs to configure


@pytest.mark.parametrize("text", [f"focal(gamma={10**30})", f"smoothing({-(10**30)})"])
def test_a_number_that_no_tensor_holds_is_a_sentence(text):
    with pytest.raises(ValueError, match="it takes a number"):
        losses.build(text)
