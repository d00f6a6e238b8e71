"""Mutated input into everything that reads a stranger's file: `make fuzz`.

A reader may answer or raise a ValueError of calmatch's own; anything else, a hang, a write outside
of the work folder, a process or a connection is a finding. The same seed makes the same inputs.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml
from PIL import Image
from record import put

import calmatch
from calmatch import augment, console, losses, methods, metrics, nets, spec
from calmatch.bench.render import RENDERERS
from calmatch.bench.tables import build_tables, gather_runs, tidy_csv
from calmatch.data.dataset import DATASETS
from calmatch.data.folder import decode_folder, match_labels, read_folder, read_labels
from calmatch.data.images import ImageFiles, cache_folder, cached_array, valid_text
from calmatch.files import lock
from calmatch.fit.plan import read_plan
from calmatch.model import load_model
from calmatch.options import FitOptions
from calmatch.predict import (
    TABLE_COLUMNS,
    Answered,
    ImageSource,
    Skipped,
    check_table,
    decode_one,
    open_table,
    split_names,
)
from calmatch.report import build
from calmatch.runs import load_predictions, load_run
from calmatch.training import checkpoint, loop
from calmatch.training.config import Config, load_config
from calmatch.web.label import Answers, Session, Stale

HOME = Path(calmatch.__file__).parent
HANG = 20  # seconds
ROOM = 6 << 30  # bytes of address space that an input may cost
JUNK: list[Any] = [
    *(None, True, 0, -1, 1 << 40, 10**400, 1e308, -1e-320, float("nan"), float("inf")),
    *(
        "",
        "x" * 5000,
        "../../etc/passwd",
        "/etc/passwd",
        "<script>alert(1)</script>",
        "\ud800",
        "\0",
    ),
    *([], {}, [[]], [{}], {"": []}, [1, "a", None], "os.system('true')", "{{ 7 * 7 }}", "nan"),
    *("os.system", "timm.resnet18(pretrained=True)", "a.b.c(x=1)", "1e5", "٣"),
]
SPECS = [
    "freematch(momentum=0.99)",
    "bam(on='fixmatch', draws=5)",
    "flip|crop(4)|randaugment(3)|cutout(0.5)",
    "cross_entropy + margin(m=8, where='agree')",
    "focal(gamma=2.0) + entropy",
    "timm.vit_small_patch16_224(pretrained=True)",
    "small(width=4)",
    "folder(path='x', size=32, share=0.2)",
    "my_package.mine.MyMethod(a=1, b=[1, (2, 3)], c={'d': None})",
]
TOKENS = "()|+,=.'\"\\[]{}*:#-_ \n\t\r\0éß\u2028٣0123456789eEjxabc"
Target = Callable[[random.Random, Path], None]


def bytes_of(chance: random.Random, data: bytes) -> bytes:
    """Some bits, bytes or stretches changed."""
    held = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        place = chance.randrange(len(held) + 1)
        match chance.randrange(7):
            case 0 if held:
                held[place % len(held)] ^= 1 << chance.randrange(8)
            case 1 if held:
                held[place % len(held)] = chance.choice((0, 1, 127, 128, 255))
            case 2:
                del held[place : place + chance.choice((1, 4, 100))]
            case 3:
                held[place:place] = chance.randbytes(chance.choice((1, 4, 64)))
            case 4:
                held = held[:place]
            case 5:
                number = chance.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 31))
                order = chance.choice(("little", "big"))
                held[place : place + 4] = number.to_bytes(4, order)
            case _:
                other = chance.randrange(len(held) + 1)
                held[place:place] = held[other : other + 32]
    return bytes(held)


def text_of(chance: random.Random, text: str) -> str:
    """Some characters inserted, removed or doubled."""
    held = list(text)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        place = chance.randrange(len(held) + 1)
        match chance.randrange(5):
            case 0:
                held.insert(place, chance.choice(TOKENS))
            case 1:
                del held[place : place + chance.choice((1, 3))]
            case 2:
                held[place:place] = held[chance.randrange(len(held) + 1) :][:12]
            case 3:
                held[place:place] = list(str(chance.choice(JUNK)))[:3000]
            case _:
                held[place : place + 1] = chance.choice(TOKENS) * chance.choice((1, 1, 300))
    return "".join(held)


def value_of(chance: random.Random, value: Any) -> Any:
    """One entry somewhere in it removed, added or replaced by junk."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        match chance.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, str(chance.choice(JUNK)): chance.choice(JUNK)}
            case _:
                return {**value, key: value_of(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        match chance.randrange(4):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value + value[place:]
            case _:
                return [*value[:place], value_of(chance, value[place]), *value[place + 1 :]]
    return chance.choice(JUNK)


def arrays_of(chance: random.Random, data: bytes) -> bytes:
    """An .npz with an array of another type, shape or content."""
    with np.load(io.BytesIO(data)) as file:
        held = {name: file[name] for name in file.files}
    name = chance.choice(list(held))
    array = held[name]
    changes: list[Callable[[], Any]] = [
        lambda: held.pop(name),
        lambda: array[: chance.randrange(len(array) + 1)] if array.ndim else array,
        lambda: array.astype(chance.choice((np.float16, np.int8, np.complex64, np.bool_, "U8"))),
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: array * chance.choice((0, -1, 1e300)) if array.dtype.kind in "if" else array,
        lambda: np.full_like(array, np.nan) if array.dtype.kind == "f" else array[..., :0],
        lambda: np.array(chance.choice(("<script>", "../x", ""))),
        lambda: np.zeros((0, *array.shape[1:]), array.dtype),
    ]
    changed = chance.choice(changes)()
    if name in held:
        held[name] = changed
    packed = io.BytesIO()
    np.savez(packed, **held)
    return packed.getvalue()


# The readers --------------------------------------------------------------------------------


def specs(chance: random.Random, work: Path) -> None:
    text = text_of(chance, chance.choice(SPECS))
    ways: list[Callable[[str], Any]] = [spec.parse, spec.chain, spec.added, spec.components]
    if not any("." in item.name for item in spec.components(text)):  # code is its owner's to run
        ways = [losses.build, augment.pipeline, methods.find, _bound]
    chance.choice(ways)(text)


def _bound(text: str) -> None:
    item = spec.parse(text)
    for known, kind in ((nets.NETS, "net"), (DATASETS, "dataset"), (methods.METHODS, "method")):
        if item.name in known:
            spec.bind(item, known, kind, 0 if kind == "dataset" else 2 if kind == "net" else 1)


def configs(chance: random.Random, work: Path) -> None:
    whole = Config().dump()
    some = {key: whole[key] for key in chance.sample(list(whole), 6)} | {"method": "fixmatch"}
    suffix = chance.choice((".json", ".yaml", ".yml"))
    path = work / f"config{suffix}"
    changed = value_of(chance, some) if chance.random() < 0.6 else some
    text = json.dumps(changed) if suffix == ".json" else _yaml(changed)
    if changed is some:
        text = text_of(chance, text)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    load_config(path, Config())


def _yaml(value: Any) -> str:
    try:
        return yaml.safe_dump(value, allow_unicode=True)
    except (yaml.YAMLError, ValueError):
        return repr(value)


def csvs(chance: random.Random, work: Path) -> None:
    path = work / "predictions.csv"
    rows = [f"{k % 3},{0.5},{0.25},{0.25}" for k in range(chance.choice((0, 1, 6)))]
    text = "\n".join(["label,a,b,c", *rows])
    path.write_bytes(
        bytes_of(chance, text.encode()) if chance.random() < 0.4 else _text(chance, text)
    )
    probs, truth = load_predictions(path)
    metrics.summary(probs, truth, ("error", "ece", "nll"), resamples=0)


def labelled(chance: random.Random, work: Path) -> None:
    names = ["a/1.png", "a/2.png", "b/ü 3.png", "4.png"]
    path = work / "labels.csv"
    text = "file,label\n" + "".join(f"{name},{name[0]}\n" for name in names)
    path.write_bytes(
        bytes_of(chance, text.encode()) if chance.random() < 0.4 else _text(chance, text)
    )
    labels_of = match_labels(read_labels(path), names, path)
    assert set(labels_of) <= set(names)


def others(chance: random.Random, work: Path) -> None:
    """Labels as Label Studio, COCO and imagefolder write them."""
    names = ["a/1.png", "a/2.png", "b/ü 3.png", "4.png"]
    kind = chance.randrange(3)
    content: Any = [{"file_name": name, "label": name[0]} for name in names]
    if kind == 1:
        content = {
            "categories": [{"id": k, "name": name} for k, name in enumerate("ab")],
            "images": [{"id": k, "file_name": name} for k, name in enumerate(names)],
            "annotations": [{"image_id": k, "category_id": k % 2} for k in range(4)],
        }
    elif kind == 2:
        choice = [{"result": [{"type": "choices", "value": {"choices": ["a"]}}]}]
        address = "/data/local-files/?d="
        content = [{"data": {"image": address + name}, "annotations": choice} for name in names]
    path = work / "labels.json"
    text = json.dumps(value_of(chance, content) if chance.random() < 0.7 else content)
    path.write_bytes(_text(chance, text) if chance.random() < 0.3 else text.encode())
    labels_of = match_labels(read_labels(path, names), names, path)
    assert set(labels_of) <= set(names)
    assert all(label.strip() == label != "" for label in labels_of.values())


def liars(chance: random.Random, work: Path) -> None:
    """Archives whose directory does not say what they hold, as pictures and as arrays."""
    data = bytearray(ZIP if chance.random() < 0.5 else FOLDER["predictions.npz"])
    for mark, places in ((b"PK\1\2", (8, 10, 20, 24, 28, 42)), (b"PK\3\4", (6, 8, 18, 22, 26))):
        start = data.find(mark, chance.randrange(len(data)))
        if start >= 0 and chance.random() < 0.8:
            place = start + chance.choice(places)
            value = chance.choice((0, 1, 8, 12, 14, 0xFFFF, 1 << 20, 1 << 31, 0xFFFFFFFF))
            size = 2 if place - start in (6, 8, 10, 26, 28) else 4
            data[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    path = work / "liar.zip"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = ImageSource(path)
    for name in list(source.names())[:4]:
        if isinstance(name, str):
            decode_one(source.root, name, SMALL)
    path.rename(path.with_suffix(".npz"))
    try:
        load_predictions(path.with_suffix(".npz"))
    finally:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 300 << 10, f"{grown >> 10} MiB"


def odd_folders(chance: random.Random, work: Path) -> None:
    """A run folder in which something lies in the place of a file."""
    folder = work / "odd"
    shutil.rmtree(folder, ignore_errors=True)
    places = (".lock", "fit.json", "config.json", "checkpoint/1", "work/.lock", "work/a/all", "x")
    for place in chance.sample(places, chance.randrange(1, 4)):
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        makes: list[Callable[[], Any]] = [
            lambda path=path: os.mkfifo(path),
            lambda path=path: path.mkdir(),
            lambda path=path: path.write_bytes(b"{}"),
            lambda path=path: path.symlink_to(chance.choice((OUTSIDE, "..", "nowhere", "x"))),
        ]
        chance.choice(makes)()
    with lock(folder):
        assert (folder / ".lock").is_file()


def weights(chance: random.Random, work: Path) -> None:
    name, data = chance.choice(WEIGHTS)
    (work / name).write_bytes(bytes_of(chance, data))
    nets.fit_state(nets.read_state(work / name), OURS)


def _text(chance: random.Random, text: str) -> bytes:
    return text_of(chance, text).encode("utf-8", "surrogatepass")


def answers(chance: random.Random, work: Path) -> None:
    """Names of files and classes that somebody else chose, into a table and back."""
    classes = tuple({text_of(chance, name) for name in ("cat", "dog")} - {""})
    names = [os.fsdecode(bytes_of(chance, b"a/picture 1.png")) for _ in range(3)]
    out = work / f"answers.{chance.choice(('csv', 'csv', 'csv', 'parquet'))}"
    held = tuple(name for name in classes if "\ud800" not in name)  # model.json may not name it
    with open_table(out) as sheet:
        for name in names:
            sheet.write(Answered(name, (held or ("x",))[0], 0.5, held, True))
            sheet.skip(name, "it is broken")
    if out.suffix == ".csv":
        with out.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        assert [len(row) for row in rows] == [len(TABLE_COLUMNS)] * (len(names) + 1)
        assert all(split_names(row[3]) == held for row in rows[1:])
        assert [row[0] for row in rows[1:]] == [valid_text(name) for name in names]


def evaluated(chance: random.Random, work: Path) -> None:
    """A table of answers that somebody changed, beside the truth."""
    more, cells = chance.choice((("", ""), (",p(a),p(b)", ",0.5,0.5")))
    lines = [
        f"{name},{name[0]},0.5,a|b,true{cells}" for name in ("a/1.png", "b/ü 3.png", "a/2.png")
    ]
    text = "\n".join([f"file,label,confidence,set,sure{more}", *lines])
    table, truth = work / "table.csv", work / "truth.csv"
    table.write_bytes(
        bytes_of(chance, text.encode()) if chance.random() < 0.4 else _text(chance, text)
    )
    truth.write_text("file,label\na/1.png,a\na/2.png,b\nb/ü 3.png,b\n", "utf-8")
    checked = check_table(table, truth)
    metrics.summary(checked.probs, checked.labels, ("error", "ece"), resamples=0)


def pages(chance: random.Random, work: Path) -> None:
    """What a browser may send: refused, or on disk."""
    held, row = PAGE[0].answers, chance.randrange(len(PAGE[0].names))
    before = held.held.get(PAGE[0].names[row])
    after = chance.choice((["label", "cat"], ["label", text_of(chance, "dog")], ["none", ""], None))
    change = {"row": row, "before": before and list(before), "after": after}
    body = {"changes": [change], "version": held.version, "name": text_of(chance, "x"), "row": row}
    body = value_of(chance, body) if chance.random() < 0.6 else body
    held.classes = dict.fromkeys(list(held.classes)[-50:])
    try:
        what = chance.choice(("answer", "answer", "answer", "undo", "class", "skip", "x"))
        PAGE[0].act(what, body if isinstance(body, dict) else {})
    except Stale:
        pass
    finally:
        PAGE[0].put_off.clear()
        if held.path.exists():
            with held.path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))[1:]
            kept = {name: text for name, (kind, text) in held.held.items() if kind == "label"}
            assert dict(rows) == kept, "an answer is not on disk"


PAGE: list[Any] = []  # the session behind the page


def pictures(chance: random.Random, work: Path) -> None:
    name, data = chance.choice(PICTURES)
    (work / name).write_bytes(bytes_of(chance, data))
    ImageFiles(work, (name,), 8).image(0)


def zips(chance: random.Random, work: Path) -> None:
    path = work / "pictures.zip"
    path.write_bytes(bytes_of(chance, ZIP))
    source = ImageSource(path)
    for name in list(source.names())[:4]:
        if isinstance(name, str):
            assert isinstance(decode_one(source.root, name, SMALL), np.ndarray | Skipped)


SMALL: Any = types.SimpleNamespace(size=8, squash=False)  # what decoding wants to know of a model


def folders(chance: random.Random, work: Path) -> None:
    """A folder of pictures with names and kinds of files that somebody else chose."""
    home = work / "folder"
    shutil.rmtree(home, ignore_errors=True)
    for label in ("a", "b"):
        (home / label).mkdir(parents=True)
        (home / label / "1.png").write_bytes(PICTURES[0][1])
    name = os.fsdecode(bytes_of(chance, b"picture 1").replace(b"/", b"").replace(b"\0", b"")[:200])
    path = home / "a" / f"{name}.png"
    makes: list[Callable[[], Any]] = [
        lambda: path.write_bytes(bytes_of(chance, PICTURES[0][1])),
        lambda: path.symlink_to(chance.choice(("nowhere", path.name, "..", "/dev/zero", "1.png"))),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
        lambda: (home / f"{name}c").mkdir() or (home / f"{name}c" / "1.png").write_bytes(b"x"),
    ]
    if not path.exists():  # it may be called 1.png itself
        chance.choice(makes)()
    listed = read_folder(home)
    assert {"a/1.png", "b/1.png"} <= set(listed.names)
    known = decode_folder(listed, 8)[1]
    assert {"a/1.png", "b/1.png"} <= set(known.names)
    json.dumps(list(known.classes), ensure_ascii=False).encode()
    console.visible(name).encode()


def caches(chance: random.Random, work: Path) -> None:
    """An array of the cache that somebody changed is made anew."""
    path = cache_folder() / "fuzz-1.npy"
    path.unlink(missing_ok=True)
    cached_array("fuzz-1", (5, 4), lambda array: array.fill(7))
    data = path.read_bytes()
    changed = bytes_of(chance, data)
    path.write_bytes(changed)
    array = cached_array("fuzz-1", (5, 4), lambda array: array.fill(7)).tensor
    assert tuple(array.shape) == (5, 4)
    assert len(changed) == len(data) or int(array.min()) == 7  # cut or grown: noticed


def plans(chance: random.Random, work: Path) -> None:
    """What a stranger's fit.json says of an interrupted fit, and code among it."""
    poison = chance.choice(("poison.Thing", "crop(1)|poison.Thing(1)", "embedded(on='poison.x')"))
    entries = value_of(chance, PLAN)
    if chance.random() < 0.3:
        entries = {**PLAN, chance.choice(list(PLAN)): poison}
    plan = read_plan(entries, FitOptions(work, net="tiny"), work)
    assert plan.net == "tiny"
    assert "poison" not in f"{plan.weak} {plan.strong}", "code passed"


PLAN: dict[str, Any] = {
    **{"net": "tiny", "size": 8, "mean": None, "std": None, "steps": 2, "alone_steps": 2},
    **{"batch": 4, "ratio": 1, "lr": 0.01, "ema": 0.9, "weak": "crop(1)", "strong": "crop(2)"},
    **{"hold": 0.0, "most": 0, "notes": []},
}


def checkpoints(chance: random.Random, work: Path) -> None:
    path = work / "checkpoint" / "000000006.safetensors"
    path.parent.mkdir(exist_ok=True)
    changed = bytes_of(chance, CHECKPOINT)
    path.write_bytes(changed)
    newest, complaints = checkpoint.newest_checkpoint(path.parent)
    assert newest is None or changed == CHECKPOINT or not complaints
    assert newest is None or newest[1] == NOTE, "a damaged checkpoint was believed"


def models(chance: random.Random, work: Path) -> None:
    folder = _copied(work, ("model.json", "model.safetensors"))
    _hurt(chance, folder, chance.choice(("model.json", "model.json", "model.safetensors")))
    loaded = load_model(folder)
    loaded.answer(loaded.probabilities(torch.zeros(1, 3, loaded.size, loaded.size).byte()))


RUN = ("config.json", "result.json", "metrics.jsonl", "predictions.npz", "examples.npz")


def runs(chance: random.Random, work: Path) -> None:
    folder = _copied(work, (*RUN, "model.json", "environment.json"))
    more = ("result.json", "environment.json", "model.json")
    _hurt(chance, folder, chance.choice((*RUN, *RUN, *more)))
    run = load_run(folder)
    if chance.random() < 0.3:
        build([run], folder / "report.html")
    else:
        run.lines("test")
        load_predictions(folder / "predictions.npz")


def tabled(chance: random.Random, work: Path) -> None:
    folder = _copied(work, ("config.json", "result.json"))
    _hurt(chance, folder, chance.choice(("config.json", "result.json", "result.json")))
    runs = gather_runs([work])
    tidy_csv(runs)
    if chance.random() < 0.2:
        RENDERERS["latex"](build_tables(runs))


def _copied(work: Path, names: tuple[str, ...]) -> Path:
    folder = work / "run"
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(FOLDER[name])
    return folder


def _hurt(chance: random.Random, folder: Path, name: str) -> None:
    path, data = folder / name, FOLDER[name]
    kind, suffix = chance.random(), path.suffix
    if kind < 0.1:
        path.unlink()
    elif kind < 0.2:
        path.unlink()
        if chance.random() < 0.3:
            os.mkfifo(path)
        else:
            path.symlink_to(chance.choice((str(OUTSIDE), "/etc/passwd", "/dev/zero", "..", name)))
    elif suffix == ".json" and kind < 0.8:
        junk = json.dumps(value_of(chance, json.loads(data)))
        path.write_bytes(junk.encode("utf-8", "surrogatepass"))
    elif suffix == ".jsonl" and kind < 0.8:
        lines = value_of(chance, [json.loads(line) for line in data.splitlines()])
        lines = lines if isinstance(lines, list) else [lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif suffix == ".npz" and kind < 0.7:
        path.write_bytes(arrays_of(chance, data))
    else:
        path.write_bytes(bytes_of(chance, data))


TARGETS: dict[str, tuple[int, Target]] = {  # share of the inputs in percent
    "spec strings": (16, specs),
    "YAML and JSON configs": (12, configs),
    "CSV predictions": (9, csvs),
    "CSV labels": (6, labelled),
    "labels of other programs": (3, others),
    "tables of answers": (4, answers),
    "tables to evaluate": (2, evaluated),
    "requests to the labelling page": (2, pages),
    "pretrained weights": (4, weights),
    "pictures": (15, pictures),
    "zips of pictures": (4, zips),
    "archives that lie": (2, liars),
    "folders of pictures": (4, folders),
    "odd run folders": (1, odd_folders),
    "arrays in the cache": (2, caches),
    "plans of fits": (1, plans),
    "checkpoints": (4, checkpoints),
    "model folders": (4, models),
    "run folders, reports": (4, runs),
    "run folders, tables": (1, tabled),
}


# What they read before it is changed --------------------------------------------------------

PICTURES: list[tuple[str, bytes]] = []
WEIGHTS: list[tuple[str, bytes]] = []
OURS: dict[str, torch.Tensor] = {}
FOLDER: dict[str, bytes] = {}
ZIP = CHECKPOINT = b""
NOTE = {"lines": 10, "step": 6}
OUTSIDE = Path()


def prepare(work: Path) -> None:
    """Whole files of every kind."""
    global ZIP, CHECKPOINT, OUTSIDE
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = "png RGB, jpeg RGB, gif P, bmp RGB, webp RGBA, tiff RGB, png I;16, tiff F, png P"
    for kind, mode in (pair.split() for pair in kinds.split(", ")):
        packed = io.BytesIO()
        more: dict[str, Any] = {"exif": exif} if kind in ("jpeg", "png", "webp") else {}
        picture = Image.fromarray(pixels)
        picture = picture.convert("I").convert(mode) if mode == "I;16" else picture.convert(mode)
        picture.save(packed, kind, **more)
        PICTURES.append((f"{mode.replace(';', '')}.{kind}", packed.getvalue()))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in PICTURES[:4]:
            archive.writestr(f"a/{name}", data)
    ZIP = packed.getvalue()
    OURS.update(nets.build("vit_tiny_patch2_32", 3, 16).state_dict())
    some = {k: v for k, v in OURS.items() if k.startswith(("pos", "patch", "cls", "norm"))}
    torch.save({"model": some}, work / "w.pth")
    safetensors.torch.save_file(some, work / "w.safetensors")
    WEIGHTS.extend((name, (work / name).read_bytes()) for name in ("w.pth", "w.safetensors"))
    checkpoint.save_checkpoint(work / "saved", 6, {"net/a": torch.arange(6.0)}, {"lines": 10})
    CHECKPOINT = (work / "saved" / "000000006.safetensors").read_bytes()
    small = Config(
        **{"dataset": "synthetic", "labels": 16, "net": "tiny", "weak": "crop(1)", "steps": 12},
        **{"strong": "crop(2)", "eval_every": 6, "log_every": 3, "device": "cpu"},
    )
    loop.RESAMPLES = 20  # most time is there
    run = calmatch.train(small, work / "whole", quiet=True)
    for path in run.folder.iterdir():
        if path.is_file():
            FOLDER[path.name] = path.read_bytes()
    OUTSIDE = work.parent / "outside.json"
    names = tuple(f"{k}.png" for k in range(9))
    space = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    held = Answers(work / "page.csv", names)  # other targets write labels.csv
    PAGE.append(Session(work, names, held, [space / np.linalg.norm(space, axis=1)[:, None]], 9))


def watch(work: Path) -> list[str]:
    """From now on, writes outside of the work folder, processes and connections are noted."""
    seen: list[str] = []
    bad = {"socket.bind", "socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.fork"}
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    inside = str(work)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in bad:
            seen.append(f"{event} {args!r:.200}")
        elif event == "open" and isinstance(args[0], str | bytes) and args[2] & writing:
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith(inside) and path != os.devnull:
                seen.append(f"writes {path}")
        elif event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir"):
            plain = all(number == -1 for number in args if isinstance(number, int))
            for path in args[:2] if plain else ():  # else relative to a folder that rmtree opened
                if isinstance(path, str) and not str(Path(path).parent.resolve()).startswith(
                    inside
                ):
                    seen.append(f"{event} {path}")

    sys.addaudithook(hook)
    return seen


def tried(target: Target, seed: int, work: Path, seen: list[str]) -> str:
    """Nothing, or what went wrong with the input of this seed."""
    seen.clear()
    signal.alarm(HANG)
    try:
        target(random.Random(seed), work)
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not Path(last.filename).is_relative_to(HOME):
            return f"{type(error).__name__} {error!s:.80} in {_where(error)}"
        if "\n" in str(error) and len(str(error)) > 3000:
            return f"a sentence of {len(str(error))} characters from {_where(error)}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__} {error!s:.80} in {_where(error)}"
    finally:
        signal.alarm(0)
    return seen[0] if seen else ""


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(HOME)] or frames[-1:]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets with this text in their names")
    parser.add_argument("--record", type=Path, help="a page with a place for the table")
    parser.add_argument("--keep", type=Path, help="where counts are kept: the same line goes on")
    options = parser.parse_args()
    kept = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("it hangs")))
    torch.set_num_threads(1)
    top = Path(tempfile.mkdtemp(prefix="calmatch-fuzz-", dir=_fast()))
    work = top / "work"
    work.mkdir()
    os.environ["CALMATCH_CACHE"] = str(work / "cache")
    prepare(work)
    OUTSIDE.write_text('{"secret": 1}')
    resource.setrlimit(resource.RLIMIT_AS, (_now() + ROOM, resource.RLIM_INFINITY))
    seen = watch(work)
    findings: dict[str, list[str]] = {}
    lines, total = [], 0
    for name, (share, target) in TARGETS.items():
        if options.only not in name:
            continue
        number, began = options.inputs * share // 100, time.monotonic()
        bad: Counter[str] = Counter(kept.get(name, {}))
        for k in range(number if name not in kept else 0):
            if trouble := tried(target, options.seed * 10**9 + k, work, seen):
                bad[trouble.partition(" in ")[2] or trouble] += 1
                findings.setdefault(f"{name}: {trouble.rpartition(' in ')[2]}", []).append(
                    f"seed {k}: {trouble}"
                )
        took = time.monotonic() - began
        kept[name] = dict(bad)
        if options.keep:
            options.keep.write_text(json.dumps(kept))
        lines.append(f"| {name} | {number:,} | {sum(bad.values())} |")
        total += number
        print(f"{name}: {number:,} inputs, {sum(bad.values())} findings, {took:.0f} s", flush=True)
    lines.append(f"| all | {total:,} | {sum(sum(bad.values()) for bad in kept.values())} |")
    written = "| input | inputs | findings |\n|---|---|---|\n" + "\n".join(lines)
    print(f"\n{written}")
    if options.record:
        put(
            options.record,
            "fuzz",
            written,
            f"`make fuzz INPUTS={options.inputs}`, seed {options.seed}",
        )
    for where, examples in findings.items():
        print(f"{len(examples):>6}  {where}\n        {examples[0]}")
    if OUTSIDE.read_text() != '{"secret": 1}':
        print("A file outside was changed.")
        return 1
    shutil.rmtree(top)
    return 1 if findings else 0


def _fast() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _now() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    raise SystemExit(main())
