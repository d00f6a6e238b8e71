"""More attacks of the second campaign, thought of after the first ones had been mended.

`python tests/faults/second.py --only anew` makes these alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import stat
import struct
import sys
import threading
import time
import unicodedata
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from second import FIT, PREDICT, Attack, packed, pixels, zipped

NOWHERE = 54321  # a user whom nobody knows
FLAT = (9400, 9400)  # pixels of pictures that are large, and just not too large


# What unpacks to more than it says ------------------------------------------------------------


def archives() -> Iterator[Attack]:
    kinds = {"deflate": zipfile.ZIP_DEFLATED, "LZMA": zipfile.ZIP_LZMA, "bzip2": zipfile.ZIP_BZIP2}
    good = packed(pixels())

    def lying(kind: int) -> bytes:
        """A member that says it has a thousand bytes, and has millions."""
        large = 300 if kind == zipfile.ZIP_DEFLATED else 40
        data = bytearray(zipped({"a.png": bytes(large << 20)}, kind))
        place = data.rindex(b"PK\1\2") + 24
        data[place : place + 4] = struct.pack("<I", 1000)
        return bytes(data)

    for name, kind in kinds.items():

        def size(here: Path, kind: int = kind) -> list[str]:
            (here / "p.zip").write_bytes(lying(kind))
            return ["predict", "model", "p.zip", "--out", "out.csv", "--device", "cpu"]

        yield Attack("anew: an archive", f"a size that lies, {name}", size)

        def arrays(here: Path, kind: int = kind) -> list[str]:
            held = io.BytesIO()
            np.save(held, np.zeros((1 << (20 if kind == zipfile.ZIP_DEFLATED else 16), 64)))
            members = {"probs.npy": held.getvalue(), "labels.npy": b""}
            (here / "p.npz").write_bytes(zipped(members, kind))
            return ["evaluate", "p.npz", "--resamples", "0"]

        yield Attack("anew: an archive", f"large arrays, {name}", arrays)

    def shape(here: Path) -> list[str]:
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999, 99), }\n"
        body = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header
        (here / "p.npz").write_bytes(zipped({"probs.npy": body, "labels.npy": body}))
        return ["evaluate", "p.npz", "--resamples", "0"]

    yield Attack("anew: an archive", "an array that says it is huge", shape)
    members: dict[str, dict[str, bytes]] = {
        "a name with NUL": {"a\0b.png": good},
        "folders called so": {"a.png/": b"", "b.png": good},
        "5,000 members": {f"{k}.png": good for k in range(5000)},
        "one good among bad": {"a.png": good, **{f"{k}.jpg": b"x" for k in range(50)}},
        "hidden": {".a.png": good, "__MACOSX/b.png": good, "c.png": good},
        "capitals": {"A.PNG": good, "a.png": good},
    }
    for name, content in members.items():

        def whole(here: Path, content: dict[str, bytes] = content) -> list[str]:
            (here / "p.zip").write_bytes(zipped(content))
            return ["predict", "model", "p.zip", "--out", "out.csv", "--device", "cpu"]

        yield Attack("anew: an archive", name, whole)


def large() -> Iterator[Attack]:
    """Pictures of 88 million pixels, four of each kind and as many workers."""
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "progressive JPEG": ("JPEG", "RGB", {"progressive": True, "quality": 10}),
        "JPEG of four colours": ("JPEG", "CMYK", {"progressive": True, "quality": 10}),
        "WebP": ("WEBP", "RGB", {"lossless": True, "method": 0}),
        "PNG with alpha": ("PNG", "RGBA", {}),
        "TIFF of floats": ("TIFF", "F", {"compression": "tiff_deflate"}),
        "GIF": ("GIF", "P", {}),
    }
    for name, (format, mode, more) in kinds.items():

        def act(here: Path, format: str = format, mode: str = mode, more: Any = more) -> list[str]:
            if (pid := os.fork()) == 0:  # what it takes to make one does not count
                data = packed(Image.new(mode, FLAT), format, **more)
                for k in range(4):
                    (here / "pictures" / "cat" / f"large{k}.{format.lower()}").write_bytes(data)
                os._exit(0)
            os.waitpid(pid, 0)
            return [*PREDICT, "--workers", "4", "--batch", "1"]

        yield Attack("anew: large pictures", name, act)


# Where files lie, and what lies in their place ---------------------------------------------------


def _dig(folder: Path, depth: int, name: str = "d") -> Path:
    """Folders within folders, deeper than a path can say."""
    before = Path.cwd()
    os.chdir(folder)
    for _ in range(depth):
        Path(name).mkdir()
        os.chdir(name)
    Path("deep.png").write_bytes(packed(pixels()))
    os.chdir(before)
    return folder


def places() -> Iterator[Attack]:
    for depth in (1200, 3000):
        for words in (PREDICT, FIT):

            def deep(here: Path, depth: int = depth, words: list[str] = words) -> list[str]:
                _dig(here / "pictures" / "cat", depth)
                return words

            yield Attack("anew: places", f"{words[0]}: {depth} folders deep", deep)

    def tables(here: Path) -> list[str]:
        shutil.copytree(here / "run", here / "all" / "run")
        _dig(here / "all", 1200)
        return ["table", "all"]

    yield Attack("anew: places", "table: 1200 folders deep", tables)

    def closed(here: Path, words: list[str]) -> list[str]:
        (here / "pictures" / "cat" / "more").mkdir(mode=0)
        for path in (here, *here.rglob("*")):
            if path.name != "more":
                path.chmod(0o777 if path.is_dir() else 0o666)
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        return words

    for words in (PREDICT, FIT):
        yield Attack(
            "anew: places", f"{words[0]}: a closed folder", lambda here, w=words: closed(here, w)
        )
    outs = {
        "predict": "predict model pictures --out {}.csv --device cpu",
        "report": "report run --out {}.html",
        "table": "table run --out {}.md",
        "figure": "figure reliability run --out {}.svg",
        "export": "export run --to pt2 --out {}.pt2 --quiet",
    }
    makes: dict[str, Callable[[Path], Any]] = {
        "a device": lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3)),
        "a pipe": os.mkfifo,
        "a link to a device": lambda path: path.symlink_to("/dev/null"),
    }
    for command, line in outs.items():
        for name, make in makes.items():

            def onto(here: Path, make: Any = make, line: str = line) -> int:
                from calmatch import cli

                words = line.format("odd").split()
                path = here / words[words.index("--out") + 1]
                make(path)
                kind = stat.S_IFMT(path.lstat().st_mode)
                code = cli.main(words)
                assert stat.S_IFMT(path.lstat().st_mode) == kind, "it was replaced"
                return code

            yield Attack("anew: places", f"{command} onto {name}", onto)
    for file in (".lock", "metrics.jsonl", "fit.json", "config.json", "checkpoint", "work/.lock"):
        for name, line in {
            "fit": " ".join(FIT),
            "train": "train digits_40 --dataset synthetic --net tiny --steps 1 --out new --quiet",
        }.items():

            def pipe(here: Path, file: str = file, line: str = line) -> list[str]:
                (here / "new" / file).parent.mkdir(parents=True)
                os.mkfifo(here / "new" / file)
                return line.split()

            yield Attack("anew: places", f"{name}: {file} is a pipe", pipe)
    for file in ("arrays", "arrays/CACHEDIR.TAG"):

        def cache(here: Path, file: str = file) -> list[str]:
            (here / "cache" / file).parent.mkdir(parents=True)
            os.mkfifo(here / "cache" / file)
            return FIT

        yield Attack("anew: places", f"the cache's {file} is a pipe", cache)

    def planted(here: Path) -> list[str]:
        """A stranger's unfinished fit, whose inner folder leads to ours."""
        from calmatch import cli

        assert cli.main([*FIT, "--quiet"]) == 0
        (here / "new" / "result.json").unlink()
        inner = here / "new" / "work" / "labels-alone" / "all"
        shutil.rmtree(inner)
        inner.symlink_to(here / "theirs")
        return FIT

    yield Attack("anew: places", "a link within work/", planted)
    lines = {
        "fit from a run into itself": "fit pictures --from run --out run --steps 1 --device cpu",
        "fit into its own pictures": "fit pictures --out pictures/cat/new --steps 1",
        "predict a model's file": "predict model model/model.json --out out.csv",
        "predict one picture": "predict model pictures/cat/0.png --out out.csv --device cpu",
        "predict without a name": "predict model pictures --out .csv --device cpu",
        "predict into a picture": "predict model pictures --out pictures/cat/0.png",
        "two hundred thousand workers": " ".join([*PREDICT, "--workers", "200000"]),
        "a batch beyond numbers": " ".join([*PREDICT, "--batch", str(10**20)]),
        "a batch of a billion": " ".join([*PREDICT, "--batch", str(10**9)]),
        "endless minutes": " ".join([*FIT, "--minutes", "inf"]),
        "a tolerance of nan": "replay run --tolerance nan --steps 2 --quiet",
        "another format's ending": "predict model pictures --out x.csv --format fiftyone",
        "for Label Studio": "predict model pictures --out x.json --format label-studio",
        "for FiftyOne": "predict model pictures --out x.json --format fiftyone",
        "push without a name": "push run",
        "the Hub's folder above": "predict hf://../.. pictures --out out.csv",
    }
    for name, line in lines.items():
        yield Attack("anew: options", name, lambda here, line=line: line.split())


# Names that look alike, and labels of other programs ----------------------------------------------


def names() -> Iterator[Attack]:
    one, two = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))

    def table(here: Path, *rows: str) -> list[str]:
        (here / "labels.csv").write_text("file,label\n" + "".join(f"{row}\n" for row in rows))
        return [*FIT, "--labels", "labels.csv"]

    def twins(here: Path) -> list[str]:
        for name in (one, two):
            (here / "pictures" / f"{name}.png").write_bytes(packed(pixels()))
        return table(here, f"{one}.png,a", f"{two}.png,b", "cat/0.png,a", "dog/0.png,b")

    def twin_classes(here: Path) -> list[str]:
        (here / "pictures" / "cat").rename(here / "pictures" / one)
        (here / "pictures" / "dog").rename(here / "pictures" / two)
        return FIT

    def renamed(here: Path, name: str) -> list[str]:
        (here / "pictures" / "dog").rename(here / "pictures" / name)
        return FIT

    def broken(here: Path) -> list[str]:
        name = os.fsdecode(b"\xff\xfe\x1b[2J.png")
        (here / "pictures" / "cat" / name).write_bytes(b"no")
        return FIT

    yield Attack("anew: names", "pictures that look alike", twins)
    yield Attack("anew: names", "classes that look alike", twin_classes)
    yield Attack("anew: names", "a broken picture without a name in Unicode", broken)
    for name in (
        "cat ",
        "CAT",
        " ",
        "🙂👩‍👩‍👧",
        "\u202edog",
        "unlabelled ",
        "\u200b",
        "-",
        "a" * 200,
    ):
        yield Attack("anew: names", f"class {name!a}", lambda h, n=name: renamed(h, n))
    for name in ("\ufeffcat/0.png", "./cat/0.png", "cat//0.png", "CAT/0.PNG", "cat\\0.png"):
        yield Attack(
            "anew: names",
            f"a row for {name!a}",
            lambda h, n=name: table(h, f"{n},a", "cat/1.png,a", "dog/0.png,b", "dog/1.png,b"),
        )

    def many(here: Path) -> int:
        from calmatch.data.folder import match_labels
        from calmatch.data.labelfiles import LabelRow, read_label_json

        known = [f"pool/img_{k:06d}.jpg" for k in range(100_000)]
        rows = [LabelRow(f"img_{k:06d}.jpeg", "a", k) for k in range(9)]
        began = time.monotonic()
        with contextlib.suppress(ValueError):
            match_labels(rows, known, here)
        tasks = json.dumps([{"file_name": "a/" * 50_000 + "x.png", "label": "a"}])
        read_label_json(tasks, here, known)
        assert time.monotonic() - began < 20, "it takes too long to say what is wrong"
        return 0

    yield Attack("anew: names", "a hundred thousand, and mistaken ones", many)


def labels() -> Iterator[Attack]:
    def coco(images: Any = None, categories: Any = None, annotations: Any = None) -> Any:
        shown = [
            {"id": k, "file_name": f"{'cat' if k % 2 else 'dog'}/{k % 4}.png"} for k in range(4)
        ]
        classes = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
        notes = [{"image_id": k, "category_id": 1 + k % 2} for k in range(4)]
        return {
            "images": shown if images is None else images,
            "categories": classes if categories is None else categories,
            "annotations": notes if annotations is None else annotations,
        }

    def rows(*values: Any) -> Any:
        return [
            {"file_name": f"{'cat' if k % 2 else 'dog'}/{k // 2}.png", "label": value}
            for k, value in enumerate(values)
        ]

    contents: dict[str, Any] = {
        "COCO, an id twice": coco(categories=[{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]),
        "COCO, a list as id": coco(categories=[{"id": [], "name": "a"}]),
        "COCO, no name": coco(categories=[{"id": 1, "name": ""}, {"id": 2, "name": "b"}]),
        "COCO, null": coco(categories=[{"id": 1, "name": None}, {"id": 2, "name": "b"}]),
        "COCO, numbers": coco(categories=[{"id": 1, "name": 1}, {"id": 2, "name": 2.5}]),
        "COCO, mappings": coco(categories={"1": "a"}),
        "COCO, a path up": coco(images=[{"id": 0, "file_name": "../../precious"}]),
        "COCO, a number as file": coco(images=[{"id": 0, "file_name": 7}]),
        "COCO, images null": {**coco(), "images": None},
        "a lone surrogate": rows("\ud800", "b", "\ud800", "b"),
        "a blank": rows(" ", "b", "c", "b"),
        "null": rows(None, "b", "c", "b"),
        "a mapping": rows({"a": 1}, "b", {"a": 1}, "b"),
        "a list of one": rows(["a"], ["b"], ["a"], ["b"]),
        "a list of two": rows(["a", "b"], "b", "a", "b"),
        "a list of lists": rows([["a"]], ["b"]),
        "true and false": rows(True, False, True, False),
        "numbers": rows(1, 2.5, 1, 2.5),
        "not a number": rows(float("nan"), "b", float("inf"), "b"),
        "a long name": rows("x" * 3000, "b", "a", "b"),
        "markup": rows("<script>alert(1)</script>", "{{7*7}}", "</script>", "b"),
        "Label Studio, no result": [{"data": {"image": "cat/0.png"}, "annotations": [{}]}],
        "Label Studio, null": [{"data": None, "annotations": None}],
        "Label Studio, text": [{"data": {"image": "cat/0.png"}, "annotations": "abc"}],
        "Label Studio, an odd address": [
            {"data": {"image": "http://[::1/x.png"}, "annotations": []}
        ],
        "numbers for tasks": [1, 2, 3],
    }
    texts = {name: json.dumps(value).encode() for name, value in contents.items()}
    texts |= {
        "keys twice": b'[{"file_name": "cat/0.png", "label": "a", "label": "b"}]',
        "a mark first": b"\xef\xbb\xbf" + json.dumps(rows("a", "b", "a", "b")).encode(),
        "UTF-16": json.dumps(rows("a", "b", "a", "b")).encode("utf-16"),
        "lines": b"\r\n".join(json.dumps(row).encode() for row in rows("a", "b", "a", "b")),
        "a long number": b'[{"file_name": "cat/0.png", "label": ' + b"9" * 9000 + b"}]",
        "a wide table": b"file,label," + b"x," * 100_000 + b"x\n",
        "lines in a cell": b'file,label\n"cat\n/0.png",a\ndog/0.png,b\n',
        "Windows' letters": b"file,label\ncat/0.png,caf\xe9\ndog/0.png,\x80\ncat/1.png,caf\xe9\n",
        "two marks": b"\xef\xbb\xbf\xef\xbb\xbffile,label\ncat/0.png,a\ndog/0.png,b\n",
    }
    for name, data in texts.items():

        def act(here: Path, data: bytes = data) -> list[str]:
            (here / "labels.json").write_bytes(data)
            return [*FIT, "--labels", "labels.json"]

        yield Attack("anew: labels", name, act)


# What a stranger's run says -----------------------------------------------------------------------

ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\u202e<script>alert(1)</script></title>"


def runs() -> Iterator[Attack]:
    commands = "report run --out p.html|table run|evaluate run --resamples 0|replay run --steps 2"
    commands += "|figure reliability run --out f.svg|export run --to pt2 --out m.pt2"
    contents: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "a title": ("result.json", lambda note: {**note, "title": ESCAPES}),
        "notes": ("result.json", lambda note: {**note, "notes": [ESCAPES] * 3}),
        "classes": (
            "result.json",
            lambda note: {
                **note,
                "classes": [f"{k}{ESCAPES}" for k in range(len(note["classes"]))],
            },
        ),
        "commands": ("result.json", lambda note: {**note, "commands": [ESCAPES]}),
        "a dataset": ("config.json", lambda note: {**note, "dataset": f"folder(path={ESCAPES!r})"}),
        "threads": ("environment.json", lambda note: {**note, "threads": 10**9}),
        "versions": ("environment.json", lambda note: {**note, "versions": {ESCAPES: ESCAPES}}),
        "a data folder": ("config.json", lambda note: {**note, "dataset": "folder(path='/proc')"}),
        "a million steps": ("config.json", lambda note: {**note, "steps": 10**15}),
        "a batch of a billion": ("config.json", lambda note: {**note, "batch": 10**9}),
        "a wide network": ("config.json", lambda note: {**note, "net": "small(width=4000)"}),
        "many lists": ("result.json", lambda note: {**note, "notes": [[]] * 3_000_000}),
    }
    for number, line in enumerate(commands.split("|")):
        for place, (name, (file, change)) in enumerate(contents.items()):
            if (number + place) % 2:
                continue

            def act(here: Path, file: str = file, change: Any = change, line: str = line) -> Any:
                path = here / "run" / file
                path.write_text(json.dumps(change(json.loads(path.read_text()))))
                return line.split()

            yield Attack("anew: a run", f"{line.split()[0]}: {name}", act)


# Where it runs ------------------------------------------------------------------------------------


def machines() -> Iterator[Attack]:
    def closed(here: Path, numbers: tuple[int, ...], words: list[str]) -> list[str]:
        for number in numbers:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        return words

    for numbers in ((0,), (1,), (2,), (0, 1, 2)):
        for words in (["methods"], PREDICT, FIT, ["predict", "model", "nowhere"]):
            yield Attack(
                "anew: a machine",
                f"{words[0]} without {numbers}",
                lambda h, n=numbers, w=words: closed(h, n, w),
            )

    def nobody(here: Path, words: list[str], home: str | None) -> list[str]:
        """A number for a user, as in a container: no name, no home."""
        here.chmod(0o777)
        os.environ.pop("HOME", None)
        if home is not None:
            os.environ["HOME"] = home
        os.environ.pop("CALMATCH_CACHE")
        os.setresgid(NOWHERE, NOWHERE, NOWHERE)
        os.setresuid(NOWHERE, NOWHERE, NOWHERE)
        return words

    for words in (PREDICT, FIT, ["methods"]):
        for home in (None, "/nonexistent", "here"):
            yield Attack(
                "anew: a machine",
                f"{words[0]} by a user whom nobody knows, HOME={home}",
                lambda h, w=words, v=home: nobody(h, w, v),
            )

    def limited(here: Path, kind: int, most: int, words: list[str]) -> list[str]:
        here.chmod(0o777)
        os.setresuid(65534, 65534, 65534)
        resource.setrlimit(kind, (most, most))
        return words

    yield Attack(
        "anew: a machine",
        "predict without a right to threads",
        lambda h: limited(h, resource.RLIMIT_NPROC, 0, PREDICT),
    )
    yield Attack(
        "anew: a machine",
        "fit without a right to threads",
        lambda h: limited(h, resource.RLIMIT_NPROC, 0, FIT),
    )
    for env in (
        {"CALMATCH_CACHE": "~/x"},
        {"CALMATCH_CACHE": "~nobodyknows/x"},
        {"COLUMNS": str(10**6)},
        {"PYTHONWARNINGS": "error"},
        {"LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT": "/nonexistent"},
    ):
        words = [*PREDICT[:4], "x.json", "--format", "label-studio"]
        words = words if "LABEL" in next(iter(env)) else FIT
        yield Attack("anew: a machine", str(env), lambda h, w=words: w, env)
    yield Attack(
        "anew: a machine",
        "figure, MPLBACKEND=x",
        lambda h: ["figure", "reliability", "run", "--out", "f.svg"],
        {"MPLBACKEND": "x"},
    )


def crowds() -> Iterator[Attack]:
    from calmatch import cli

    def fork(words: list[str]) -> int:
        if (pid := os.fork()) == 0:
            code: Any = 1
            try:
                code = cli.main(words)
            except SystemExit as end:
                code = end.code
            os._exit(code if isinstance(code, int) else 0)
        return pid

    def ended(pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def one_cache(here: Path) -> int:
        pids = [fork([*FIT[:3], f"new{k}", *FIT[4:], "--quiet"]) for k in range(3)]
        codes = [ended(pid) for pid in pids]
        assert codes == [0, 0, 0], codes
        return 0

    yield Attack("anew: several at once", "three fits, one cache", one_cache)

    def hung_up(here: Path) -> list[str]:
        pid = fork(FIT)
        time.sleep(1.0)
        os.kill(pid, signal.SIGHUP)
        assert (code := ended(pid)) in (0, 129, -1), code
        return FIT

    yield Attack("anew: several at once", "fit hung up", hung_up)
    commands = {
        "predict": (PREDICT, 0.4),
        "fit": (FIT, 3.0),
        "export": ("export model --to pt2 --out m.pt2 --quiet".split(), 2.0),
        "report": ("report run --out page.html".split(), 0.6),
        "figure": ("figure reliability run --out f.svg".split(), 1.5),
    }
    chance = random.Random(5)
    for name, (words, span) in commands.items():
        for k in range(4):
            delay = chance.uniform(0.01, span)
            number = chance.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))

            def act(
                here: Path, words: list[str] = words, delay: float = delay, number: int = number
            ) -> list[str]:
                pid = fork(words)
                time.sleep(delay)
                os.kill(pid, number)
                assert (code := ended(pid)) in (0, -number, 128 + number), code
                return words

            yield Attack("anew: several at once", f"{name} ended at a moment, {k}", act)

    def replaced(here: Path) -> list[str]:
        """Pictures that turn into pipes, folders and links while they are read."""
        if os.fork() == 0:
            for k, path in enumerate(sorted((here / "pictures").rglob("*.png"))[1:]):
                path.unlink()
                if k % 3:
                    os.mkfifo(path) if k % 2 else path.mkdir()
                else:
                    path.symlink_to("/dev/zero")
            os._exit(0)
        return PREDICT

    yield Attack("anew: several at once", "pictures turn into pipes", replaced)


def python() -> Iterator[Attack]:
    """What a program that calls calmatch finds again as it was."""
    import calmatch
    from calmatch.predict import predict

    def manners(here: Path, act: Callable[[], Any]) -> int:
        def facts() -> tuple[Any, ...]:
            handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
            return (
                *(list(warnings.filters), dict(os.environ), Path.cwd(), list(sys.path), handlers),
                *(
                    torch.get_num_threads(),
                    torch.get_rng_state().tolist(),
                    np.random.get_state()[1:],
                ),
                *(torch.get_default_dtype(), random.getstate(), threading.active_count()),
            )

        act()  # the first time imports change some
        before = facts()
        act()
        for old, new in zip(before, facts(), strict=True):
            assert str(old) == str(new), f"{str(old)[-200:]} is now {str(new)[-200:]}"
        return 0

    rng = np.random.default_rng(0)
    x, y = rng.normal(0, 1, (20, 4)), np.arange(20) % 2
    for name, act in {
        "predict": lambda: predict(calmatch.load("model"), "pictures", "o.csv"),
        "Model.predict": lambda: calmatch.load("model").predict(["pictures/cat/0.png"] * 9),
        "Classifier": lambda: calmatch.Classifier(steps=5).fit(x, y).predict(x),
        "evaluate": lambda: calmatch.metrics.ece(np.full((4, 2), 0.5), np.arange(4) % 2),
    }.items():
        yield Attack("anew: Python", name, lambda here, act=act: manners(here, act))

    def unlimited(here: Path) -> int:
        """A program that has switched off Pillow's own limit."""
        Image.MAX_IMAGE_PIXELS = None
        data = packed(Image.new("1", (12_000, 12_000)))
        (here / "large.png").write_bytes(data)
        calmatch.load("model").predict("large.png")
        raise AssertionError("it was decoded")

    yield Attack("anew: Python", "Pillow without a limit", unlimited)


FAMILIES = (archives, places, names, labels, runs, machines, python, crowds, large)
