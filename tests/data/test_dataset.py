"""Datasets in small files of exactly the official formats, the cache, and streaming."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
import torchvision.datasets as tv
from PIL import Image

from calmatch import train
from calmatch.data import images
from calmatch.data.batches import split
from calmatch.data.dataset import build, check_dataset
from calmatch.data.images import (
    KEPT_SECONDS,
    ImageFiles,
    cached_array,
    decode,
    list_class_folders,
    load_cached,
)
from calmatch.files import write_json
from calmatch.training import recipes
from calmatch.training.config import Config
from calmatch.training.setup import build_parts
from conftest import ALONE

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("CALMATCH_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_cifar(root, monkeypatch, kind=tv.CIFAR10, per_file=20):
    """The official pickles, packed as the official archive; checksums are patched to fit."""
    folder = root / kind.base_folder
    folder.mkdir()
    fine = kind is tv.CIFAR100
    lists = {"train_list": [], "test_list": []}
    pictures = []
    for which in lists:
        for name, _ in getattr(kind, which):
            pixels = RANDOM.integers(0, 256, (per_file, 3072), dtype=np.uint8)
            labels = [k % (100 if fine else 10) for k in range(per_file)]
            entry = {"data": pixels, "fine_labels" if fine else "labels": labels}
            (folder / name).write_bytes(pickle.dumps(entry))
            lists[which].append([name, md5(folder / name)])
            pictures.append((pixels, labels))
        monkeypatch.setattr(kind, which, lists[which])
    names = [f"class {k}" for k in range(100 if fine else 10)]
    meta = folder / kind.meta["filename"]
    meta.write_bytes(pickle.dumps({kind.meta["key"]: names}))
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5(meta)})
    archive = root / kind.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, kind.base_folder)
    monkeypatch.setattr(kind, "tgz_md5", md5(archive))
    return folder, pictures


def test_cifar10_is_read_from_its_pickles(tmp_path, monkeypatch):
    _, pictures = write_cifar(tmp_path / "data", monkeypatch)
    dataset = build("cifar10")
    assert dataset.images.shape == (100, 3, 32, 32)
    first = torch.from_numpy(pictures[0][0][3].reshape(3, 32, 32))
    assert torch.equal(dataset.images[3], first)
    assert dataset.labels[:12].tolist() == [*range(10), 0, 1]
    assert len(dataset.test_labels) == 20
    assert dataset.mean == (0.485, 0.456, 0.406)


def test_a_downloaded_archive_is_unpacked_after_its_checksum_holds(tmp_path, monkeypatch):
    folder, _ = write_cifar(tmp_path / "data", monkeypatch)
    folder.rename(tmp_path / "elsewhere")
    assert len(build("cifar10").labels) == 100


def test_a_changed_pickle_is_never_opened(tmp_path, monkeypatch):
    folder, _ = write_cifar(tmp_path / "data", monkeypatch)
    (tmp_path / "data" / "cifar-10-python.tar.gz").unlink()

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    (folder / "data_batch_2").write_bytes(pickle.dumps(Evil()))
    monkeypatch.setattr(tv.CIFAR10, "url", "http://127.0.0.1:9/nothing")
    with pytest.raises(ValueError, match="put cifar-10-batches-py"):
        build("cifar10")
    assert not (tmp_path / "pwned").exists()


def test_long_tailed_cifar_reverses_the_unlabelled_tail(tmp_path, monkeypatch):
    write_cifar(tmp_path / "data", monkeypatch, tv.CIFAR100, per_file=3000)
    dataset = build("cifar100_lt(gamma_l=5, gamma_u=-5, n1=10, m=15)")
    parts = split(
        dataset.labels.numpy(),
        dataset.labelled_counts,
        0,
        unlabelled=dataset.unlabelled_counts,
        include_labelled=False,
    )
    labelled, unlabelled = (
        torch.bincount(dataset.labels[torch.tensor(rows)], minlength=100)
        for rows in (parts.labelled, parts.unlabelled)
    )
    assert (int(labelled[0]), int(labelled[99])) == (10, 2)
    assert (int(unlabelled[0]), int(unlabelled[99])) == (3, 15)


def test_stl10_has_a_pool_in_which_labelled_pictures_appear_twice(tmp_path, monkeypatch):
    root = tmp_path / "data" / "stl10_binary"
    root.mkdir()
    numbers = {"train": 30, "test": 20, "unlabeled": 50}
    lists = {"train_list": [], "test_list": []}
    for which in lists:
        for name, _ in getattr(tv.STL10, which):
            n = numbers[name.split("_")[0]]
            if name.endswith("X.bin"):
                RANDOM.integers(0, 256, (n, 3, 96, 96), dtype=np.uint8).tofile(root / name)
            else:
                (np.arange(n, dtype=np.uint8) % 10 + 1).tofile(root / name)
            lists[which].append([name, md5(root / name)])
        monkeypatch.setattr(tv.STL10, which, lists[which])
    (root / "class_names.txt").write_text("\n".join(f"c{k}" for k in range(10)))
    (root / "fold_indices.txt").write_text("\n".join(["0 1"] * 10))
    dataset = build("stl10")
    assert dataset.images.shape == (80, 3, 96, 96)
    assert int((dataset.labels < 0).sum()) == 50
    parts = split(dataset.labels.numpy(), 10, 0, whole_pool=True)
    assert len(parts.unlabelled) == 80 + 10
    assert all(parts.unlabelled.count(row) == 2 for row in parts.labelled)


def test_svhn_is_read_from_its_matlab_files(tmp_path, monkeypatch):
    split_list = {}
    for name, n in (("train", 30), ("test", 20)):
        path = tmp_path / "data" / f"{name}_32x32.mat"
        pixels = RANDOM.integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
        scipy.io.savemat(path, {"X": pixels, "y": (np.arange(n) % 10 + 1)[:, None]})
        split_list[name] = ["http://127.0.0.1:9/x", path.name, md5(path)]
    monkeypatch.setattr(tv.SVHN, "split_list", split_list)
    dataset = build("svhn")
    assert dataset.images.shape == (30, 3, 32, 32)
    assert set(dataset.labels.tolist()) == set(range(10))


EUROSAT = """
AnnualCrop Forest HerbaceousVegetation Highway Industrial
Pasture PermanentCrop Residential River SeaLake
"""


def jpeg(seed, size=(64, 64)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG")
    return data.getvalue()


def write_eurosat(root, per_class=10):
    for k, name in enumerate(EUROSAT.split()):
        folder = root / "2750" / name
        folder.mkdir(parents=True)
        for n in range(1, per_class + 1):
            (folder / f"{name}_{n}.jpg").write_bytes(jpeg(1000 * k + n))


def test_eurosat_is_the_same_from_its_tree_and_from_its_zip(tmp_path, monkeypatch):
    write_eurosat(tmp_path / "data")
    tree = build("eurosat")
    assert tree.images.shape == (80, 3, 32, 32)
    assert tree.classes == tuple(EUROSAT.split())
    names = list_class_folders(tmp_path / "data", "2750")["Forest"]
    assert names[:3] == [f"2750/Forest/Forest_{n}.jpg" for n in (1, 10, 2)]
    # the last 20 % in file order: _8 and _9 after _1, _10, _2, ...
    last = decode((tmp_path / "data" / names[-1]).read_bytes(), 32)
    assert torch.equal(tree.test_images[3], torch.from_numpy(last))
    with zipfile.ZipFile(tmp_path / "EuroSAT.zip", "w") as archive:
        for path in sorted((tmp_path / "data").rglob("*.jpg")):
            archive.write(path, path.relative_to(tmp_path / "data").as_posix())
    (tmp_path / "zipped").mkdir()
    (tmp_path / "EuroSAT.zip").rename(tmp_path / "zipped" / "EuroSAT.zip")
    monkeypatch.setenv("CALMATCH_DATA", str(tmp_path / "zipped"))
    packed = build("eurosat")
    assert torch.equal(packed.images, tree.images)
    assert torch.equal(packed.test_labels, tree.test_labels)


def test_missing_files_are_named_in_one_sentence(typed, tmp_path):
    done = typed("datasets", "check", "stl10", "--data-root", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "put stl10_binary/ or stl10_binary.tar.gz under" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def picture_bytes(picture, kind="PNG", **settings):
    data = io.BytesIO()
    picture.save(data, kind, **settings)
    return data.getvalue()


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "CMYK", "1", "I;16"])
@pytest.mark.parametrize("size", [(40, 20), (20, 40), (32, 32), (7, 5)])
def test_any_mode_and_aspect_becomes_a_square_rgb_picture(mode, size):
    if mode == "I;16":
        values = np.full(size[::-1], 65535, dtype=np.uint16)
        picture = Image.fromarray(values)
    else:
        picture = Image.new("RGB", size, (255, 255, 255)).convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    decoded = decode(picture_bytes(picture, kind), 16)
    assert decoded.shape == (3, 16, 16)
    assert decoded.dtype == np.uint8
    assert decoded.min() >= 250


def test_a_rotated_photograph_stands_upright():
    picture = Image.new("RGB", (32, 32), (0, 0, 0))
    picture.paste((255, 0, 0), (0, 0, 32, 8))  # red above
    exif = Image.Exif()
    exif[0x0112] = 3  # stored upside down
    decoded = decode(picture_bytes(picture.rotate(180), exif=exif), 32)
    assert decoded[0, 2].min() > 200


def test_bombs_and_rubbish_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    bomb = picture_bytes(Image.new("RGB", (40, 40)))
    for name, content in (("bomb.png", bomb), ("noise.jpg", b"no picture"), ("empty.png", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be decoded"):
            ImageFiles(tmp_path, (name,), 8).image(0)


def test_the_cache_is_filled_once_and_again_for_a_file_that_changed(tmp_path, monkeypatch):
    write_eurosat(tmp_path / "data")
    first = build("eurosat").images
    monkeypatch.setattr(images, "decode", None)  # decoding again would fail
    assert torch.equal(build("eurosat").images, first)
    monkeypatch.undo()
    monkeypatch.setenv("CALMATCH_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "2750" / "Forest" / "Forest_1.jpg").write_bytes(jpeg(99999))
    assert not torch.equal(build("eurosat").images, first)


def test_an_interrupted_cache_build_is_not_mistaken_for_a_finished_one(tmp_path):
    def broken(pictures):
        pictures[0] = 7
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_array("key", (4, 3, 2, 2), broken)
    left = {path.name for path in images.cache_folder().iterdir()} - {images.MARKER}
    assert not left or os.name == "nt"  # there a part that is mapped stays until it is swept
    whole = cached_array("key", (4, 3, 2, 2), lambda pictures: pictures.fill(9)).tensor
    assert int(whole.min()) == 9


def test_arrays_that_nobody_used_for_long_leave_the_cache_and_nothing_else_does(tmp_path):
    def make(key: str) -> torch.Tensor:
        return cached_array(key, (1, 3, 2, 2), lambda pictures: pictures.fill(9)).tensor

    folder, long_ago = images.cache_folder(), time.time() - 2 * KEPT_SECONDS
    for key in ("used-1", "unused-2"):
        make(key)
        write_json(folder / f"{key}.json", {})
    (folder / ".half-3.npy.1.part").touch()
    theirs = ("../thesis.npy", "../thesis.json", "../data/x.npy", "holiday.npy", "my notes.json")
    for name in theirs:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    for path in tmp_path.joinpath("cache").rglob("*"):
        os.utime(path, (long_ago, long_ago))
    make("used-1")
    images._remove_unused.cache_clear()  # as in another process
    make("new-4")
    ours = {images.MARKER, "new-4.npy", "used-1.json", "used-1.npy"}
    assert {path.name for path in folder.iterdir()} == ours | {"holiday.npy", "my notes.json"}
    assert all((folder / name).exists() for name in theirs)


def test_nothing_leaves_a_folder_that_was_there_before_us(tmp_path):
    folder = tmp_path / "cache" / "arrays"
    folder.mkdir(parents=True)
    (folder / "pictures-1.npy").touch()  # somebody's, although called like ours
    os.utime(folder / "pictures-1.npy", (0, 0))
    cached_array("new-2", (1, 3, 2, 2), lambda pictures: pictures.fill(9))
    assert (folder / "pictures-1.npy").exists()


@pytest.mark.parametrize("damage", ["cut", "grown", "empty", "header", "other", "folder"])
def test_a_damaged_array_in_the_cache_is_made_anew(damage):
    def make() -> torch.Tensor:
        return cached_array("a-1", (5, 3, 2, 2), lambda pictures: pictures.fill(9)).tensor

    make()
    path = images.cache_folder() / "a-1.npy"
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
        with pytest.raises(OSError, match=r"directory|regular file"):
            make()
        return
    changed = {"grown": data[:80] + b" " + data[80:]}
    changed |= {"cut": data[:-7], "empty": b"", "header": b"\0" + data[1:], "other": data[:128]}
    path.write_bytes(changed[damage])
    assert int(make().min()) == 9


def test_a_full_disk_under_the_cache_is_noticed_before_it_is_mapped(tmp_path, monkeypatch):
    """Memory-mapped files grow sparse: without room the first write to a page kills the process."""
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(OSError, match="full") as caught:
        cached_array("a-1", (5, 3, 2, 2), lambda pictures: pictures.fill(9))
    assert caught.value.filename
    assert [path.name for path in images.cache_folder().iterdir()] == [images.MARKER]
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS and Windows: it is written instead
    assert int(cached_array("a-1", (5, 3, 2, 2), lambda p: p.fill(9)).tensor.min()) == 9
    path = images.cache_folder() / "a-1.npy"
    assert path.stat().st_blocks * 512 >= path.stat().st_size - 4096


@pytest.mark.skipif(
    getattr(os, "geteuid", lambda: 1)() != 0, reason="mounting a small disk needs root"
)
def test_a_cache_on_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        code = (
            "from calmatch.console import run_guarded\n"
            "from calmatch.data.images import cached_array\n"
            "act = lambda: cached_array('a-1', (1 << 20,), lambda a: a.fill(1)) and 0\n"
            "raise SystemExit(run_guarded(act))"
        )
        env = ALONE | {"CALMATCH_CACHE": str(disk)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == 2, done
        assert "No space left on device" in done.stderr
        assert [path.name for path in (disk / "arrays").iterdir()] == [images.MARKER]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _fill_slowly(pixels):
    for k in range(len(pixels)):
        pixels[k] = k
        time.sleep(0.01)


def _build_the_cache():
    array = cached_array("both", (40, 3, 4, 4), _fill_slowly).tensor
    assert all(int(array[k].min()) == k == int(array[k].max()) for k in range(40))


def test_two_processes_building_the_same_cache_do_not_clash(tmp_path):
    start = multiprocessing.get_context("fork").Process
    pair = [start(target=_build_the_cache) for _ in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 0]
    names = {path.name for path in (tmp_path / "cache" / "arrays").iterdir()}
    assert names == {"both.npy", images.MARKER}


@pytest.mark.parametrize("workers", [0, 1])
def test_streamed_and_resident_pictures_make_the_same_batches(tiny, workers):
    config = tiny("fixmatch", chunk=3)
    resident = build_parts(config.replace(source="resident")).batches
    streamed = build_parts(config.replace(source="stream", workers=workers)).batches
    for step in (0, 1, 2, 3, 7, 4, 11):  # forwards, and jumping as after a restart
        for ours, theirs in zip(resident[step].u, streamed[step].u, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(resident[step].x[0], streamed[step].x[0])
        assert torch.equal(resident[step].u_id, streamed[step].u_id)


def test_decoding_workers_give_what_the_cache_holds(tmp_path):
    from calmatch.data.batches import Stream

    write_eurosat(tmp_path / "data", per_class=5)
    groups = list_class_folders(tmp_path / "data", "2750")
    names = tuple(name for group in groups.values() for name in group)
    all_files = ImageFiles(tmp_path / "data", names, 32)
    rows = torch.arange(0, 50, 2)
    stream = Stream(all_files, rows, torch.device("cpu"), workers=2)
    expected = load_cached(all_files, "test")[rows]
    assert torch.equal(torch.cat(list(stream.batches(7))), expected)


def test_a_run_that_decodes_as_it_goes_equals_one_from_the_cache(tmp_path):
    root = tmp_path / "pictures"
    for k, name in enumerate("ab"):
        (root / name).mkdir(parents=True)
        for n in range(20):
            (root / name / f"{n}.jpg").write_bytes(jpeg(100 * k + n, (20, 16)))
    predictions = []
    for number, cached in enumerate((True, False)):
        config = Config(
            dataset=f"folder(path={str(root)!r}, size=16, cached={cached})",
            labels=4,
            net="tiny",
            batch=4,
            steps=4,
            log_every=2,
            source="resident" if cached else "stream",
            workers=1,
        )
        run = train(config, tmp_path / f"run{number}", quiet=True)
        predictions.append((run.folder / "predictions.npz").read_bytes())
    assert predictions[0] == predictions[1]


def test_pictures_are_streamed_when_they_do_not_fit(tiny):
    parts = build_parts(tiny(memory=0.0))
    assert type(parts.batches.sources["u"]).__name__ == "Stream"
    assert type(build_parts(tiny()).batches.sources["u"]).__name__ == "Resident"


def test_check_finds_leaks_and_files_that_are_no_pictures(tmp_path):
    root = tmp_path / "pictures"
    for k, name in enumerate("abc"):
        (root / name).mkdir(parents=True)
        for n in range(10):
            (root / name / f"{n}.jpg").write_bytes(jpeg(100 * k + n, (16, 16)))
    leaked = (root / "a" / "3.jpg").read_bytes()
    (root / "b" / "9.jpg").write_bytes(leaked)  # the last of b is in its test set
    findings = dict(check_dataset(f"folder(path={str(root)!r}, size=16)", labels=6))
    assert findings["test pictures also in training"].startswith("1 ")
    assert findings["test pictures nearly in training"].startswith("1 ")
    assert findings["class 1 b"] == "8 training, 2 test"
    assert "6 labelled" in findings["split with seed 0"]
    (root / "c" / "4.jpg").write_bytes(b"rubbish")
    findings = dict(check_dataset(f"folder(path={str(root)!r}, size=16)"))
    assert findings["undecodable files"].startswith("1\nc/4.jpg")


EUROSAT_ZIP = Path(__file__).parents[3] / "shared" / "data" / "EuroSAT.zip"


@pytest.mark.slow
@pytest.mark.skipif(not EUROSAT_ZIP.is_file(), reason="EuroSAT.zip is not here")
def test_eurosat_is_learnt_from_its_real_jpeg_tree(tmp_path, monkeypatch):
    with zipfile.ZipFile(EUROSAT_ZIP) as archive:
        archive.extractall(tmp_path / "data")
    dataset = build("eurosat")
    assert (len(dataset.labels), len(dataset.test_labels)) == (21_600, 5_400)
    config = recipes.eurosat(
        "fixmatch", net="small(width=16)", steps=600, batch=16, ratio=2, lr=3e-3, warmup=20
    )
    run = train(config.replace(eval_every=0, chunk=8), tmp_path / "run", quiet=True)
    assert run.result.images == {
        "labelled": 40,
        "unlabelled": 21_600,
        "validation": 0,
        "test": 5_400,
    }
    assert run.result.metrics["error"].value < 0.65  # chance is 0.9


def test_what_was_looked_at_in_a_kept_array_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path))

    def fill(array):
        array[:] = 7

    cached = cached_array("large", (1024, 4096), fill)
    assert int(cached.take(torch.arange(1024)).long().sum()) == 7 * 1024 * 4096
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    resident = [
        int(next(line for line in lines if line.startswith("Rss:")).split()[1])
        for line in lines
        if line.endswith("large.npy")
    ]
    assert resident
    assert sum(resident) < 400  # KiB, of 4,096
