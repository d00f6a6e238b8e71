"""A second campaign, thought of without the first: `python tests/faults/second.py`.

Each attack is a process of its own, forked from one that has imported everything. It must end with
exit code 0 or 2 within a minute, say no more than a sentence where it refuses, run nobody's code,
leave no half-written file, and touch no file that is not its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from forks import Watch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from record import put

PATIENCE = 60.0  # seconds, on a machine that has nothing else to do; five times for a suite
ROOM = 1 << 30  # bytes of memory that an attack may cost
KEPT = b"precious"
Act = Callable[[Path], Any]  # makes the scene; returns words of the command line, or calls itself


class Attack(NamedTuple):
    kind: str
    name: str
    act: Act
    env: dict[str, str] = {}


def pixels(k: int = 0, shape: tuple[int, ...] = (8, 8, 3)) -> Any:
    return np.random.default_rng(k).integers(0, 256, shape, dtype=np.uint8)


def packed(array: Any, kind: str = "PNG", **more: Any) -> bytes:
    held = io.BytesIO()
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    image.save(held, kind, **more)
    return held.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    wide: int, high: int, depth: int = 8, kind: int = 2, rows: bytes = b"", *more: bytes
) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", wide, high, depth, kind, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows, 9))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + body + chunk(b"IEND", b"")


PREDICT = "predict model pictures --out out.csv --device cpu".split()
FIT = "fit pictures --out new --steps 1 --net tiny --size 8 --no-frozen --device cpu".split()
FIT += "--method supervised --hold 0.5".split()  # one training


# What a picture may be ------------------------------------------------------------------------


def pictures() -> Iterator[Attack]:
    good = packed(pixels())
    bomb = b"".join(bytes(18801) for _ in range(1))
    tiff = packed(pixels(), "TIFF")
    frames = [Image.fromarray(pixels(k, (4, 4, 3))).convert("P") for k in range(300)]
    gif, webp = io.BytesIO(), io.BytesIO()
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:])
    frames[0].convert("RGB").save(webp, "WEBP", save_all=True, append_images=frames[1:4])
    contents: dict[str, bytes] = {
        "empty": b"",
        "one byte": b"\x89",
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(trap) (w) file\n",
        "PDF": packed(pixels(), "PDF"),
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>",
        "a program": b"\x7fELF" + bytes(100),
        "a zip": zipped({"a.png": good}),
        "gzip": gzip.compress(good),
        "signature alone": good[:8],
        "header alone": good[:33],
        "60,000 x 60,000": png(60_000, 60_000, rows=bytes(99)),
        "no pixels": png(0, 0),
        "2 GiB wide": png(0x7FFFFFFF, 1),
        "100 million high": png(1, 100_000_000),
        "16 bit and 9,400 x 9,400": png(9400, 9400, 16, 0, bomb * 9400),
        "zTXt bomb": png(
            2, 2, 8, 2, bytes(14), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27)))
        ),
        "iCCP bomb": png(
            2, 2, 8, 2, bytes(14), chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 27)))
        ),
        "no palette": png(2, 2, 8, 3, bytes(6)),
        "bad bit depth": png(2, 2, 3, 2, bytes(14)),
        "odd filter": png(2, 2, 8, 2, bytes([9] * 14)),
        "rows cut": png(100, 100, rows=bytes(50)),
        "rows too many": png(2, 2, rows=bytes(1 << 20)),
        "chunk length lies": good[:33] + b"\xff\xff\xff\xff" + good[37:],
        "GIF of 300 frames": gif.getvalue(),
        "GIF without frames": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";",
        "animated WebP": webp.getvalue(),
        "WebP cut": packed(pixels(), "WEBP")[:30],
        "TIFF that points to itself": tiff[:4]
        + struct.pack("<I", 8)
        + b"\1\0"
        + tiff[10:22]
        + struct.pack("<I", 8),
        "TIFF offset beyond": b"II*\0\xff\xff\xff\xff" + bytes(20),
        "TIFF of 65,535 tags": b"II*\0\x08\0\0\0\xff\xff" + bytes(100),
        "TIFF float NaN": packed(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF"),
        "TIFF float inf": packed(Image.fromarray(np.full((4, 4), np.inf, np.float32)), "TIFF"),
        "TIFF of 32 bit": packed(Image.fromarray(np.full((4, 4), -(1 << 31), np.int32)), "TIFF"),
        "TIFF LAB": packed(Image.new("LAB", (4, 4)), "TIFF"),
        "JPEG CMYK": packed(Image.new("CMYK", (4, 4)), "JPEG"),
        "JPEG cut": packed(pixels(0, (64, 64, 3)), "JPEG")[:300],
        "JPEG EXIF of junk": packed(pixels(), "JPEG", exif=b"Exif\0\0II*\0" + b"\xff" * 60),
        "JPEG two SOI": b"\xff\xd8" + packed(pixels(), "JPEG"),
        "BMP negative": packed(pixels(), "BMP")[:22]
        + struct.pack("<i", -8)
        + packed(pixels(), "BMP")[26:],
        "BMP huge palette": packed(pixels(), "BMP")[:46]
        + b"\xff\xff\xff\x7f"
        + packed(pixels(), "BMP")[50:],
        "one pixel": packed(pixels(0, (1, 1, 3))),
        "a strip of 1 x 20,000": packed(pixels(0, (1, 20_000, 3))),
        "all transparent": packed(pixels(0, (8, 8, 4)) * 0),
        "one bit": packed(Image.new("1", (9, 9))),
        "grey and alpha": packed(Image.new("LA", (9, 9))),
        "XBM": b"#define a_width 8\n#define a_height 8\nstatic char a_bits[] = {0};",
        "PPM": b"P6 99999 99999 255\n",
        "ICNS": b"icns" + bytes(40),
        "FLI": bytes(4) + b"\x11\xaf" + bytes(200),
        "HTML": b"<html><script>alert(1)</script></html>" * 100,
    }
    for name, data in contents.items():

        def act(here: Path, data: bytes = data) -> list[str]:
            (here / "pictures" / "cat" / "odd.png").write_bytes(data)
            return PREDICT

        yield Attack("a picture that is none", name, act)


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return held.getvalue()


def archives() -> Iterator[Attack]:
    good = packed(pixels())
    whole = zipped({"a/1.png": good, "a/2.png": good})
    stored = zipped({"1.png": good}, zipfile.ZIP_STORED)
    flags = bytearray(stored)
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        flags[flags.index(mark) + place] |= 1
    kinds = bytearray(stored)
    for mark, place in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        kinds[kinds.index(mark) + place] = 97
    lies = bytearray(stored)
    lies[lies.index(b"PK\1\2") + 24 : lies.index(b"PK\1\2") + 28] = b"\xff\xff\xff\x7f"
    link = zipfile.ZipInfo("link.png")
    link.external_attr = 0o120777 << 16
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive, warnings.catch_warnings():
        archive.writestr("1.png", good)
        warnings.simplefilter("ignore")
        archive.writestr("1.png", b"other")
    contents: dict[str, bytes] = {
        "empty file": b"",
        "empty archive": zipped({}),
        "cut": whole[:-30],
        "junk before": b"#!/bin/sh\n" + whole,
        "junk after": whole + bytes(70_000),
        "a bomb": zipped({"b.png": bytes(300 << 20)}),
        "many bombs": zipped({f"{k}.png": png(9000, 9000, rows=bytes(100)) for k in range(50)}),
        "encrypted": bytes(flags),
        "unknown compression": bytes(kinds),
        "size that lies": bytes(lies),
        "a link": held.getvalue(),
        "one name twice": twice.getvalue(),
        "names that go up": zipped({"../../../trap.png": good, "/trap.png": good}),
        "backslashes": zipped({"..\\..\\trap.png": good, "c:\\trap.png": good}),
        "a zip within": zipped({"inner.zip": whole, "a.png": good}),
        "long names": zipped({f"{'x' * 5000}.png": good}),
        "LZMA": zipped({"a.png": good}, zipfile.ZIP_LZMA),
        "bad CRC": whole.replace(good[40:44], b"\1\2\3\4", 1),
        "control characters": zipped({"a\x1b[2J\r\n.png": good}),
        "deep": zipped({"/".join("d" * 400) + "/a.png": good}),
    }
    for name, data in contents.items():

        def act(here: Path, data: bytes = data) -> list[str]:
            (here / "p.ZIP").write_bytes(data)
            return ["predict", "model", "p.ZIP", "--out", "out.csv", "--device", "cpu"]

        yield Attack("an archive", name, act)


# How a file may be called, and what may lie under its name ---------------------------------------

NAMES = [
    *(
        "a\nb",
        "a\tb",
        "\x1b[31mred",
        "a\rb",
        "\x07",
        "--help",
        "-o",
        "=cmd()|'!A0",
        "a,b",
        '"',
        "'",
    ),
    *("e\u0301", "\u202egpj", "🙂", "x" * 240, "%00", "..", " ", "con", "a\\b", "[bold]", "[red"),
    *("{0}", "$(touch trap)", "`touch trap`", "a;touch trap", "<b>&amp;", "\u2028", "٣", "\ufeff"),
    *("a\x00b"[:1] + "\x7f", os.fsdecode(b"\xff\xfe"), "*?", "~", "#", "nul.tar"),
]


def names() -> Iterator[Attack]:
    for name in NAMES:

        def act(here: Path, name: str = name) -> list[str]:
            (here / "pictures" / "cat" / f"{name}.png").write_bytes(packed(pixels()))
            (here / "pictures" / "cat" / f"bad{name[:200]}.png").write_bytes(b"no")
            return PREDICT

        yield Attack("a name of a picture", ascii(name), act)
    for name in NAMES[::3]:

        def fit(here: Path, name: str = name) -> list[str]:
            (here / "pictures" / "dog").rename(here / "pictures" / f"{name} class")
            return FIT

        yield Attack("a name of a class", ascii(name), fit)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        before = Path.cwd()
        os.chdir(path.parent)
        one.bind(path.name)
        os.chdir(before)


def _chain(path: Path) -> None:
    last = path.with_name("0.png")
    for k in range(60):
        link = path.with_name(f"l{k}.png")
        link.symlink_to(last.name)
        last = link


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


KINDS: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a link nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link out": lambda path: path.symlink_to(path.parents[2] / "precious"),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to the memory": lambda path: path.symlink_to("/proc/self/mem"),
    "a link to a folder": lambda path: path.symlink_to(".."),
    "sixty links": _chain,
    "a folder": lambda path: path.mkdir(),
    "a sparse file of 3 GiB": _sparse,
    "a hard link": lambda path: path.hardlink_to(path.with_name("0.png")),
}


def kinds() -> Iterator[Attack]:
    for words in (PREDICT, FIT):
        for name, make in KINDS.items():

            def act(here: Path, make: Any = make, words: list[str] = words) -> list[str]:
                make(here / "pictures" / "cat" / "odd.png")
                return words

            yield Attack("a file that is none", f"{words[0]}: {name}", act)
    for file in ("model.json", "model.safetensors"):
        for name, make in KINDS.items():
            if name in ("sixty links", "a hard link"):
                continue

            def instead(here: Path, make: Any = make, file: str = file) -> list[str]:
                (here / "model" / file).unlink()
                make(here / "model" / file)
                return PREDICT

            yield Attack("a file that is none", f"{file}: {name}", instead)

    def called_zip(here: Path) -> list[str]:
        (here / "pictures").rename(here / "pictures.zip")
        return ["predict", "model", "pictures.zip", "--out", "out.csv"]

    yield Attack("a file that is none", "a folder called x.zip", called_zip)


# What a model and a run may say -----------------------------------------------------------------

JUNK: list[Any] = [
    None,
    True,
    -1,
    10**400,
    1e999,
    "",
    "x" * 3000,
    [],
    {},
    [[[]]],
    "\ud800",
    "a.b.c",
]


def models() -> Iterator[Attack]:
    keys = (
        "format net method classes size mean std versions calibration conformal selective".split()
    )
    for place, key in enumerate([*keys, "provenance", "licence"]):
        for step in range(3):
            junk = JUNK[(place * 5 + step * 4) % len(JUNK)]

            def act(here: Path, key: str = key, junk: Any = junk) -> list[str]:
                path = here / "model" / "model.json"
                note = json.loads(path.read_text()) | {key: junk}
                path.write_text(json.dumps(note))
                return PREDICT

            yield Attack("a model file", f"{key} = {ascii(junk)[:30]}", act)
    nets = (
        "pydoc.pipepager(text='', cmd='touch trap')",
        "embedded(on='os.system(command=\"touch trap\")')",
        "timm.resnet18(checkpoint_path='/etc/passwd')",
        "timm(name='local-dir:/tmp')",
        "small(width=9999)",
        "tiny(**{})",
        "__import__('os').system('touch trap')",
        "tiny(width=True)",
        "tiny(" * 90,
        "wrn_28_2|tiny",
    )
    for net in nets:

        def named(here: Path, net: str = net) -> list[str]:
            path = here / "model" / "model.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"net": net}))
            return PREDICT

        yield Attack("a model file", f"net = {net[:40]}", named)

        def start(here: Path, net: str = net) -> list[str]:
            named(here, net)
            return [*FIT[:4], "--from", "model", "--steps", "1"]

        yield Attack("a model to start from", f"net = {net[:40]}", start)
    texts: dict[str, bytes] = {
        "empty": b"",
        "not UTF-8": b'{"a": "\xff"}',
        "a mark first": b"\xef\xbb\xbf{}",
        "a list": b"[]",
        "deep": b"[" * 100_000,
        "100 MB of blanks": b" " * (100 << 20),
        "twice a key": b'{"format": 2, "format": 1}',
        "NaN": b'{"format": NaN}',
        "a long number": b'{"format": ' + b"9" * 5000 + b"}",
    }
    for name, data in texts.items():

        def text(here: Path, data: bytes = data) -> list[str]:
            (here / "model" / "model.json").write_bytes(data)
            return PREDICT

        yield Attack("a model file", f"JSON: {name}", text)

    def header(content: Any, more: bytes = b"") -> bytes:
        data = json.dumps(content).encode() if not isinstance(content, bytes) else content
        return struct.pack("<Q", len(data)) + data + more

    tensors: dict[str, bytes] = {
        "empty": b"",
        "length beyond": b"\xff" * 8,
        "length of 8 EiB": struct.pack("<Q", 1 << 62) + b"{}",
        "no JSON": header(b"not json"),
        "offsets beyond": header({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}),
        "negative offsets": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
        "other tensors": header(
            {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)
        ),
        "a huge shape": header(
            {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}, bytes(4)
        ),
        "a pickle": b"\x80\x04cos\nsystem\n(S'touch trap'\ntR.",
    }
    for name, data in tensors.items():

        def weights(here: Path, data: bytes = data) -> list[str]:
            (here / "model" / "model.safetensors").write_bytes(data)
            return PREDICT

        yield Attack("a model file", f"safetensors: {name}", weights)


def folders() -> Iterator[Attack]:
    """Run folders that a stranger sent, into every command that looks at one."""
    commands = {
        "evaluate": "evaluate run --resamples 0",
        "report": "report run --out page.html",
        "table": "table run",
        "figure": "figure reliability run --out f.svg",
        "replay": "replay run --steps 2 --quiet",
        "export": "export run --to pt2 --out m.pt2 --quiet",
        "tensorboard": "report run --tensorboard --out page.html",
    }
    damages: dict[str, Callable[[Path], Any]] = {
        "missing": lambda path: path.unlink(),
        "empty": lambda path: path.write_bytes(b""),
        "torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "other": lambda path: path.write_text('{"versions": 5, "selective": [], "a": {"b": 1}}'),
        "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
        "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    }
    files = "config.json result.json metrics.jsonl predictions.npz environment.json".split()
    number = 0
    for file in (*files, "examples.npz", "model.json", "times.jsonl"):
        for name, damage in damages.items():
            command = list(commands)[number % len(commands)]
            number += 1

            def act(
                here: Path, file: str = file, damage: Any = damage, command: str = command
            ) -> list[str]:
                if (here / "run" / file).exists():
                    damage(here / "run" / file)
                return commands[command].split()

            yield Attack("a stranger's run", f"{command}: {file} {name}", act)


def predictions() -> Iterator[Attack]:
    p = np.full((6, 3), 1 / 3)
    y = np.arange(6) % 3
    cases: dict[str, dict[str, Any]] = {
        "long doubles": {"probs": p.astype(np.longdouble), "labels": y},
        "long double logs": {"log_probs": np.log(p).astype(np.longdouble), "labels": y},
        "big end first": {"log_probs": np.log(p).astype(">f4"), "labels": y.astype(">i8")},
        "half": {"probs": p.astype(np.float16), "labels": y},
        "complex": {"probs": p.astype(complex), "labels": y},
        "bool": {"probs": p > 0, "labels": y},
        "no rows": {"probs": p[:0], "labels": y[:0]},
        "NaN": {"probs": p * np.nan, "labels": y},
        "infinite": {"probs": p * np.inf, "labels": y},
        "negative": {"probs": -p, "labels": y},
        "sums of 3": {"probs": p * 3, "labels": y},
        "label 99": {"probs": p, "labels": y + 99},
        "label -1": {"probs": p, "labels": y - 1},
        "half labels": {"probs": p, "labels": y + 0.5},
        "texts": {"probs": p.astype(str), "labels": y},
        "text labels": {"probs": p, "labels": y.astype(str)},
        "three axes": {"probs": p[None], "labels": y},
        "one axis": {"probs": p[0], "labels": y},
        "one column": {"probs": p[:, :1], "labels": y * 0},
        "other lengths": {"probs": p, "labels": y[:2]},
        "dates": {"probs": p, "labels": y.astype("datetime64[s]")},
        "objects": {"probs": p.astype(object), "labels": y},
        "none of them": {"a": p},
        "unsigned": {"probs": p, "labels": y.astype(np.uint64)},
    }
    for name, arrays in cases.items():

        def act(here: Path, arrays: dict[str, Any] = arrays) -> list[str]:
            np.savez(here / "p.npz", **arrays)
            return ["evaluate", "p.npz", "--resamples", "3"]

        yield Attack("predictions of others", name, act)
    for name, text in {
        "empty": "",
        "header alone": "label,a,b\n",
        "cells missing": "label,a,b\n0,1\n",
        "words": "label,a,b\nx,y,z\n",
        "no end": 'label,a,b\n0,"1',
        "hex": "label,a,b\n0x1,1,0\n",
        "huge": f"label,a,b\n{10**30},1,0\n",
        "NUL": "label,a,b\n0,\0,1\n",
    }.items():

        def table(here: Path, text: str = text) -> list[str]:
            (here / "p.csv").write_text(text)
            return ["evaluate", "p.csv", "--resamples", "0"]

        yield Attack("predictions of others", f"CSV: {name}", table)


# What a person may write ------------------------------------------------------------------------


def labels() -> Iterator[Attack]:
    rows = "".join(f"cat/{k}.png,cat\ndog/{k}.png,dog\n" for k in range(4))
    texts: dict[str, bytes] = {
        "empty": b"",
        "header alone": b"file,label\n",
        "no header": rows.encode(),
        "UTF-16": f"file,label\n{rows}".encode("utf-16"),
        "UTF-16 cut": f"file,label\n{rows}".encode("utf-16")[:-1],
        "NUL": b"file,label\ncat/0.png,\0\n",
        "binary": bytes(range(256)) * 50,
        "10 MB cell": b"file,label\ncat/0.png," + b"x" * (10 << 20),
        "2,000 letters": b"file,label\ncat/0.png,a\ndog/0.png," + b"x" * 2000 + b"\n",
        "semicolons": b"file;label\ncat/0.png;cat\n",
        "no such file": b"file,label\nnone.png,cat\n",
        "outside": b"file,label\n../precious,cat\n",
        "absolute": b"file,label\n/etc/passwd,cat\n",
        "contradiction": b"file,label\ncat/0.png,a\ncat/0.png,b\n",
        "one class": b"file,label\ncat/0.png,a\ncat/1.png,a\n",
        "an open quote": b'file,label\n"cat/0.png,cat\n',
        "carriage returns": f"file,label\n{rows}".replace("\n", "\r").encode(),
        "columns twice": b"file,file,label\na,b,c\n",
        "a formula": f"file,label\n{rows}".replace(",cat", ",=1+1").encode(),
        "control characters": f"file,label\n{rows}".replace(",cat", ",\x1b[2Jcat").encode(),
        "right to left": f"file,label\n{rows}".replace(",cat", ",\u202ecat").encode(),
        "blank labels": b"file,label\ncat/0.png, \ndog/0.png,\t\n",
        "one a class": b"file,label\ncat/0.png,a\ndog/0.png,b\n",
        "a letter not there": b"file,label\ncat/0.png,\xff\ndog/0.png,b\n",
        "JSON deep": b"[" * 50_000,
        "JSON junk": b'{"images": 5}',
        "JSON of nothing": b"[]",
        "a YAML bomb": b"a: &a [x,x]\nb: &b [*a,*a]\n",
    }
    for name, data in texts.items():

        def act(here: Path, data: bytes = data) -> list[str]:
            (here / "labels.csv").write_bytes(data)
            return [*FIT, "--labels", "labels.csv"]

        yield Attack("a table of labels", name, act)
    for name, make in KINDS.items():
        if name not in ("sixty links", "a hard link", "a link out"):

            def other(here: Path, make: Any = make) -> list[str]:
                (here / "x").mkdir()
                (here / "x" / "y").mkdir()
                make(here / "x" / "y" / "labels.csv")
                return [*FIT, "--labels", "x/y/labels.csv"]

            yield Attack("a table of labels", name, other)


def options() -> Iterator[Attack]:
    lines = [
        *(f"predict model pictures --out out.csv --batch {v}" for v in ("0", "-1", "x", "1e3")),
        *(f"predict model pictures --out out.csv --workers {v}" for v in ("-1", "nan")),
        *(f"predict model pictures --out out.csv --device {v}" for v in ("x", "cuda:99", "meta")),
        *(
            f"predict model pictures --out {v}"
            for v in ("x.txt", "no/x.csv", "pictures", "/dev/full")
        ),
        f"predict model pictures --out {'x' * 300}.csv",
        "predict model pictures --engine ray --address 127.0.0.1:1",
        *(
            f"predict {v} pictures --out out.csv"
            for v in ("nowhere", "precious", "/dev/null", "..")
        ),
        *(
            f"predict model {v} --out out.csv"
            for v in ("nowhere", "precious", "/dev/null", "model")
        ),
        *(f"{' '.join(FIT[:2])} --minutes {v}" for v in ("0", "-1", "nan", "x")),
        *(f"{' '.join(FIT)} --hold {v}" for v in ("0", "1", "2", "nan", "-0.5")),
        *(f"{' '.join(FIT)} --seed {v}" for v in ("-1", str(2**70), "x")),
        *(f"{' '.join(FIT)} --batch {v}" for v in ("0", "-3")),
        *(f"{' '.join(FIT[:4])} --steps {v}" for v in ("0", "-3", str(10**30))),
        *(f"{' '.join(FIT[:4])} --size {v}" for v in ("0", "-8", str(10**9))),
        *(f"{' '.join(FIT[:4])} --tta {v}" for v in ("0", "99")),
        *(f"{' '.join(FIT)} --method {v}" for v in ("none", "fixmatch(a=1)", "fixmatch(", "a.b")),
        *(f"{' '.join(FIT)} --penalty {v}" for v in ("none", "margin(m='x')", "cross_entropy")),
        *(f"{' '.join(FIT)} --weak {v}" for v in ("flip|", "crop(-1)", "crop(1e9)", "none")),
        *(
            f"fit pictures --out {v} --steps 1 --net tiny --no-frozen"
            for v in ("precious", "theirs", ".")
        ),
        f"fit pictures --out {'x' * 300} --steps 1",
        *(f"fit {v} --out new" for v in ("nowhere", "precious", "theirs", "/dev/null")),
        *(f"fit pictures --out new --from {v}" for v in ("nowhere", "precious", "theirs")),
        *(
            f"train {v} --out new"
            for v in ("nowhere", "precious", "digits_40 --steps 0", "digits_40 --lr nan")
        ),
        "train digits_40 --dataset synthetic --net tiny --steps 2 --out theirs",
        *(f"report {v} --out page.html" for v in ("nowhere", "theirs", "precious")),
        *("report run --out pictures", "report run --out no/such/page.html", "report"),
        *(f"export model --out {v}" for v in ("no/m.onnx", "pictures")),
        *(
            f"bench {v}"
            for v in ("none", "digits --seeds x", "digits --jobs -1", "digits --minutes 0")
        ),
        *(
            "figure none run",
            "figure",
            "table nowhere",
            "table theirs",
            "evaluate theirs",
            "nonsense",
        ),
        *("datasets check none", "datasets check folder(path='nowhere')", "--version", "", "help"),
    ]
    for line in lines:
        yield Attack(
            "an option", line[:60], lambda here, line=line: line.split(" ") if line else []
        )


def configs() -> Iterator[Attack]:
    laughs = "a: &a [x, x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    texts = {
        "a tag": "!!python/object/apply:os.system ['touch trap']",
        "a tag within": "method: !!python/name:os.system",
        "laughs": laughs,
        "a dotted method": "method: os.system",
        "a dotted net": "net: pydoc.pipepager(text='', cmd='touch trap')",
        "a dotted view": "weak: flip|os.system",
        "a dotted loss": "penalty: margin + os.system",
        "timm from a place": "net: timm(name='local-dir:.')",
        "timm from a file": "net: timm.resnet18(checkpoint_path='precious')",
        "a dataset of another": "dataset: os.listdir",
        "tabs": "\tmethod: x",
        "a list": "- a\n- b",
        "a number": "5",
        "nothing": "",
        "a date": "steps: 2020-01-01",
        "infinite": "lr: .inf",
        "octal": "steps: 0o17",
        "yes": "steps: yes",
        "not UTF-8": b"method: \xff",
        "unknown": "colour: red",
        "a weights file": "net: wrn_28_2(pretrained='/dev/zero')",
        "a folder": "dataset: folder(path='/proc/self/fd')",
    }
    for name, text in texts.items():

        def act(here: Path, text: Any = text) -> list[str]:
            (here / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
            return ["train", "c.yaml", "--steps", "1", "--out", "new", "--quiet", "--device", "cpu"]

        yield Attack("a config", name, act)


# Where it runs -----------------------------------------------------------------------------------


def places() -> Iterator[Attack]:
    settings: list[dict[str, str]] = [
        *({"CALMATCH_CACHE": v} for v in ("precious", "no/such/place", "", "/dev/null", "/proc/x")),
        *({"HOME": v, "CALMATCH_CACHE": ""} for v in ("", "/nonexistent")),
        *({"TMPDIR": v} for v in ("/nonexistent", "precious")),
        *({"LANG": v, "LC_ALL": v} for v in ("C", "tr_TR.UTF-8", "xx")),
        *({"TZ": v} for v in ("Pacific/Kiritimati", "nonsense", ":/dev/zero")),
        *({"COLUMNS": v} for v in ("1", "0", "x", "-5")),
        *({"TERM": v} for v in ("dumb", "x", "")),
        *({"RANK": v} for v in ("x", "5")),
        *({"OMP_NUM_THREADS": v} for v in ("0", "x")),
        *(
            {"NO_COLOR": "1"},
            {"FORCE_COLOR": "1"},
            {"CUDA_VISIBLE_DEVICES": "x"},
            {"CALMATCH_DATA": "precious"},
        ),
    ]
    for env in settings:
        name = ", ".join(f"{k}={v}" for k, v in env.items())
        words = FIT if "CALMATCH_CACHE" in env or "TMPDIR" in env else PREDICT
        yield Attack("an environment", name, lambda here, words=words: words, env)

    def descriptors(here: Path) -> list[str]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
        return PREDICT

    def small_files(here: Path) -> list[str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        return PREDICT

    def small_cache(here: Path) -> list[str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return FIT

    def no_input(here: Path) -> list[str]:
        os.close(0)
        return PREDICT

    def full_output(here: Path) -> list[str]:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        return ["methods"]

    def closed_pipe(here: Path) -> list[str]:
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
        sys.stdout = os.fdopen(1, "w")
        return ["methods"]

    def ascii_console(here: Path) -> list[str]:
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), "ascii")
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), "ascii")
        (here / "pictures" / "dog").rename(here / "pictures" / "größer 🙂")
        return FIT

    def read_only(here: Path) -> list[str]:
        _become_nobody(here)
        return PREDICT

    def read_only_fit(here: Path) -> list[str]:
        _become_nobody(here)
        return FIT

    def closed_pictures(here: Path) -> list[str]:
        (here / "pictures" / "cat").chmod(0)
        (here / "pictures" / "dog" / "0.png").chmod(0)
        here.chmod(0o777)
        _become_nobody(here, True)
        return PREDICT

    def closed_cache(here: Path) -> list[str]:
        cache = here / "closed"
        cache.mkdir(mode=0o555)
        os.environ["CALMATCH_CACHE"] = str(cache)
        here.chmod(0o777)
        _become_nobody(here, True)
        return FIT

    def gone(here: Path) -> list[str]:
        (here / "w").mkdir()
        os.chdir(here / "w")
        (here / "w").rmdir()
        return ["methods"]

    def old_clock(here: Path) -> list[str]:
        time.time = lambda: -1e9  # type: ignore[assignment]
        return FIT

    def jumping_clock(here: Path) -> list[str]:
        ticks = iter(range(10**9))
        time.time = lambda: 1e9 * (next(ticks) % 2)  # type: ignore[assignment]
        return FIT

    for act in (
        *(descriptors, small_files, small_cache, no_input, full_output, closed_pipe, ascii_console),
        *(read_only, read_only_fit, closed_pictures, closed_cache, gone, old_clock, jumping_clock),
    ):
        yield Attack("a machine", act.__name__.replace("_", " "), act)


def _become_nobody(here: Path, own: bool = False) -> None:
    """Another user than root, who may read everything and write nothing."""
    if os.geteuid() == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


def caches() -> Iterator[Attack]:
    """A second fit that meets what somebody did to the first one's cache."""
    from calmatch import cli

    damages: dict[str, Callable[[Path], Any]] = {
        "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
        "empty": lambda path: path.write_bytes(b""),
        "a folder": lambda path: (path.unlink(), path.mkdir()),
        "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
        "a link nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
        "junk": lambda path: path.write_bytes(b"junk" * 100),
    }
    for suffix in (".npy", ".json"):
        for name, damage in damages.items():

            def act(here: Path, damage: Any = damage, suffix: str = suffix) -> list[str]:
                assert cli.main([*FIT, "--quiet"]) == 0
                for path in list((here / "cache").rglob(f"*{suffix}")):
                    damage(path)
                return [*FIT[:3], "again", *FIT[4:]]

            yield Attack("a damaged cache", f"{suffix} {name}", act)


# Several at once ----------------------------------------------------------------------------------


def crowds() -> Iterator[Attack]:
    from calmatch import cli

    def fork(words: list[str], delay: float = 0.0, number: int = 0) -> Callable[[], int]:
        if (pid := os.fork()) == 0:
            with contextlib.suppress(SystemExit):
                os._exit(cli.main(words))
            os._exit(0)
        if number:
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def two_tables(here: Path) -> int:
        codes = [wait() for wait in [fork(PREDICT) for _ in range(3)]]
        assert codes == [0, 0, 0], codes
        return 0

    def two_fits(here: Path) -> int:
        codes = [wait() for wait in [fork(FIT) for _ in range(3)]]
        assert 0 in codes, codes
        assert set(codes) <= {0, 2}, codes
        return 0

    def killed(here: Path, delay: float, number: int = signal.SIGKILL) -> list[str]:
        code = fork(PREDICT, delay, number)()
        assert code in (0, -number, 128 + number), code
        return PREDICT

    def killed_fit(here: Path, delay: float) -> list[str]:
        assert fork(FIT, delay, signal.SIGKILL)() in (0, -9)
        return FIT

    def swapped(here: Path) -> int:
        """Class folders that change places between a kill and the next start."""
        assert fork(FIT, 0.8, signal.SIGKILL)() in (0, -9)
        begun = (here / "new" / "fit.json").exists() and not (here / "new" / "result.json").exists()
        for one, two in (("cat", "x"), ("dog", "cat"), ("x", "dog")):
            (here / "pictures" / one).rename(here / "pictures" / two)
        code = cli.main(FIT)
        assert code == (2 if begun else 0), (code, begun)
        return code

    def vanishing(here: Path) -> list[str]:
        if os.fork() == 0:
            for path in sorted((here / "pictures").rglob("*.png"))[1:]:
                path.unlink(missing_ok=True)
                time.sleep(0.01)
            os._exit(0)
        return PREDICT

    def growing(here: Path) -> list[str]:
        if os.fork() == 0:
            for k in range(100):
                (here / "pictures" / "cat" / f"n{k}.png").write_bytes(packed(pixels())[: k * 3])
            os._exit(0)
        return PREDICT

    def stopped_export(here: Path) -> list[str]:
        words = "export model --to pt2 --out m.pt2 --quiet".split()
        assert fork(words, 1.0, signal.SIGKILL)() in (0, -9)
        return words

    yield Attack("several at once", "three predict into one table", two_tables)
    yield Attack("several at once", "three fits into one folder", two_fits)
    for delay in (0.02, 0.05, 0.1, 0.2):
        yield Attack("several at once", f"killed after {delay} s", lambda h, d=delay: killed(h, d))
        yield Attack(
            "several at once", f"ended after {delay} s", lambda h, d=delay: killed(h, d, 15)
        )
    for delay in (0.1, 0.3, 0.6, 1.0):
        yield Attack(
            "several at once", f"fit killed after {delay} s", lambda h, d=delay: killed_fit(h, d)
        )
    yield Attack("several at once", "classes change places", swapped)
    yield Attack("several at once", "pictures vanish", vanishing)
    yield Attack("several at once", "pictures appear", growing)
    yield Attack("several at once", "export killed", stopped_export)


# From Python ----------------------------------------------------------------------------


def python() -> Iterator[Attack]:
    import calmatch

    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, 1, (20, 4)), rng.normal(4, 1, (20, 4))])
    y = np.repeat([0, 1], 20)

    def learn(scale: float) -> Act:
        def act(here: Path) -> int:
            state = torch.get_rng_state()
            fitted = calmatch.Classifier(steps=60).fit(x * scale, y)
            assert torch.equal(state, torch.get_rng_state()), "torch's random state has changed"
            assert (fitted.predict(x * scale) == y).mean() > 0.9, "at chance, without a word"
            return 0

        return act

    for scale in (1e30, 1e-10, 1e-30, -1e20, 1e100, 1e-100, 1.0):
        yield Attack("Classifier", f"X times {scale:g}", learn(scale))
    cases: dict[str, tuple[Any, Any]] = {
        "mixed labels": (x[:4], [1, "a", 1, "a"]),
        "floats of -1": (x, np.where(np.arange(40) % 2, -1.0, y)),
        "None": (x, np.where(np.arange(40) % 2, None, y)),
        "NaN in X": (x * np.nan, y),
        "infinite X": (x * np.inf, y),
        "one class": (x, y * 0),
        "no label": (x, y * 0 - 1),
        "short y": (x, y[:3]),
        "texts in X": (x.astype(str), y),
        "no rows": (x[:0], y[:0]),
        "one row": (x[:1], y[:1]),
        "five axes": (np.zeros((2, 2, 2, 2, 2)), [0, 1]),
        "constant X": (x * 0, y),
        "complex X": (x + 1j, y),
        "float labels": (x, y + 0.5),
        "huge labels": (x, np.where(y, 2**62, -(2**62))),
        "bool labels": (x, y > 0),
        "tuples": (x, [(0, 1)] * 40),
        "y of two columns": (x, np.stack([y, y], 1)),
        "pictures out of range": (np.full((4, 8, 8), 1e6), [0, 1, 0, 1]),
    }
    for name, (one, two) in cases.items():

        def fit(here: Path, one: Any = one, two: Any = two) -> int:
            calmatch.Classifier(steps=5).fit(one, two)
            return 0

        yield Attack("Classifier", name, fit)
    for name, settings in {
        "steps 0": {"steps": 0},
        "steps -1": {"steps": -1},
        "no method": {"method": "none"},
        "no penalty": {"penalty": "none"},
        "a dotted penalty": {"penalty": "a.b"},
        "a text as seed": {"random_state": "x"},
    }.items():

        def odd(here: Path, settings: dict[str, Any] = settings) -> int:
            calmatch.Classifier(**{"steps": 5, **settings}).fit(x, y)  # type: ignore[arg-type]
            return 0

        yield Attack("Classifier", name, odd)
    items: dict[str, Any] = {
        "None": None,
        "a number": 5,
        "bytes": b"x",
        "nothing": [],
        "floats": np.zeros((8, 8, 3)),
        "no pixels": np.zeros((0, 0, 3), np.uint8),
        "five channels": np.zeros((8, 8, 5), np.uint8),
        "a row": np.zeros(8, np.uint8),
        "no such file": "nowhere.png",
        "a folder": "pictures",
        "a device": "/dev/zero",
        "grey": np.zeros((8, 8), np.uint8),
        "a mode": Image.new("I;16", (8, 8)),
        "one bit": Image.new("1", (8, 8)),
        "in a list": ["pictures/cat/0.png", None],
        "a NUL": "a\0b.png",
    }
    for name, item in items.items():

        def answer(here: Path, item: Any = item) -> int:
            calmatch.load("model").predict(item)
            return 0

        yield Attack("Model.predict", name, answer)


FAMILIES = (
    *(pictures, archives, names, kinds, models, folders, predictions, labels, options, configs),
    *(places, caches, crowds, python),
)


# The stage ------------------------------------------------------------------------------


def prepare(home: Path) -> None:
    """A model, a run, pictures, and files that are nobody's business."""
    import calmatch
    from calmatch.training.config import Config

    home.mkdir()
    for name in ("cat", "dog"):
        (home / "pictures" / name).mkdir(parents=True)
        for k in range(4):
            base = 60 if name == "cat" else 190
            colours = (pixels(k) // 8 + base).astype(np.uint8)
            (home / "pictures" / name / f"{k}.png").write_bytes(packed(colours))
    (home / "precious").write_bytes(KEPT)
    (home / "theirs").mkdir()
    (home / "theirs" / "thesis.txt").write_bytes(KEPT)
    config = Config(
        dataset="synthetic", labels=16, net="tiny", weak="crop(1)", strong="crop(2)", steps=6,
        log_every=2, eval_every=3, device="cpu",
    )  # fmt: skip
    calmatch.train(config, home / "run", quiet=True)
    (home / "model").mkdir()
    for name in ("model.json", "model.safetensors"):
        shutil.copy(home / "run" / name, home / "model" / name)


def perform(attack: Attack, home: Path, here: Path) -> str:
    """Nothing, or what went wrong."""
    shutil.copytree(home, here)
    output, watch = here.with_suffix(".txt"), Watch()
    if (pid := os.fork()) == 0:
        _act(attack, here, output)
    code = status = None
    while status is None:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if not ended:
            status = None
            if watch.seconds() > PATIENCE * (5 if "bench" in attack.name else 1):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return f"it hangs; it said: {output.read_text(errors='replace')[-200:]}"
            time.sleep(0.003)
    code = os.waitstatus_to_exitcode(status)
    text = output.read_text(errors="replace")
    last = (text.strip().splitlines() or [""])[-1]
    if trap := _find(here.parent, "trap*"):
        return f"somebody's code ran: {trap}"
    if (here / "precious").read_bytes() != KEPT or not (here / "theirs" / "thesis.txt").exists():
        return "a file was changed that is not ours"
    if {path.name for path in (here / "theirs").iterdir()} != {"thesis.txt"}:
        return "a folder was written to that is not ours"
    apart = code == 1 and "further away than the tolerance" in text  # what replay is for
    if "Traceback" in text or not (code in (0, 2) or apart):
        return f"exit code {code}: {last[:200]}"
    if "FORCE_COLOR" not in attack.env and any(mark in text for mark in "\x1b\x07\r\u202e"):
        return f"control characters on the console: {ascii(text)[-200:]}"
    marks = ("calmatch: ", "Python: ", "error", "──")
    if code == 2 and "without (" not in attack.name and not any(mark in text for mark in marks):
        return f"exit code 2 without a sentence: {text[-200:]}"
    if litter := _find(here, ".*.part"):
        return f"left behind: {litter}"
    if os.environ.get("SHOW"):
        print(f"{attack.name}: {(usage.ru_maxrss * 1024 - BEFORE) >> 20} MiB", flush=True)
    if usage.ru_maxrss * 1024 - BEFORE > ROOM:
        return f"{usage.ru_maxrss >> 10} MiB of memory"
    return ""


def _find(folder: Path, name: str) -> str:
    """By a program: some attacks make folders deeper than Python can walk."""
    words = ["find", str(folder), "-name", name]
    return subprocess.run(words, capture_output=True, text=True, errors="replace").stdout


BEFORE = 0  # bytes of memory before anything is done


def _act(attack: Attack, here: Path, output: Path) -> None:
    """In the child: never returns."""
    code: Any = 1
    try:
        os.setsid()
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for number in (1, 2):
            os.dup2(out, number)
        os.chdir(here)
        os.environ.update({"CALMATCH_CACHE": str(here / "cache"), **attack.env})
        if "TZ" in attack.env:
            time.tzset()
        tempfile.tempdir = None
        from calmatch import cli, console

        made = None
        try:
            made = attack.act(here)
        except (ValueError, TypeError) as error:
            sentence = console._sentence(error, "")
            place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if sentence is None and "sklearn" in place.parts:  # its own checks of X and y
                sentence = str(error).splitlines()[0]
            if sentence is None:
                raise
            print(f"Python: {sentence}", file=sys.stderr)
            code = 2
        if isinstance(made, list):
            code = cli.main(made)
        elif made is not None:
            code = made
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 2
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def main() -> int:
    global BEFORE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="attacks with this text in kind or name")
    parser.add_argument("--record", type=Path, help="a page with a place for the table")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    from calmatch import ops

    ops.keep_freed_memory()  # as a command does first: one arena for all threads
    import calmatch.bench
    import calmatch.estimator
    import calmatch.fit
    import calmatch.report.text
    import calmatch.training.loop

    calmatch.training.loop.RESAMPLES = calmatch.fit.crossval.RESAMPLES = 20  # most time is there
    work = Path(tempfile.mkdtemp(prefix="calmatch-second-", dir=_fast()))
    work.chmod(0o755)
    os.environ["CALMATCH_CACHE"] = str(work / "first-cache")
    prepare(work / "home")
    BEFORE = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    done: Counter[str] = Counter()
    held: Counter[str] = Counter()
    findings, began = [], time.monotonic()
    import anew
    import later

    families = (*FAMILIES, *anew.FAMILIES, *later.FAMILIES)
    attacks = [attack for family in families for attack in family()]
    for number, attack in enumerate(attacks):
        if options.only not in f"{attack.kind}: {attack.name}":
            continue
        here = work / f"{number:03d}" / "here"
        here.parent.mkdir()
        trouble = perform(attack, work / "home", here)
        done[attack.kind] += 1
        held[attack.kind] += not trouble
        if trouble:
            findings.append(f"{attack.kind}: {attack.name}: {trouble}")
            print(findings[-1], flush=True)
        else:
            subprocess.run(["rm", "-rf", str(here.parent)], check=False)
    rows = [f"| {kind} | {n} | {held[kind]} |" for kind, n in done.items()]
    rows.append(f"| all | {sum(done.values())} | {sum(held.values())} |")
    table = "| attack | tried | held |\n|---|---|---|\n" + "\n".join(rows)
    print(f"\n{table}\n{time.monotonic() - began:.0f} s")
    if options.record:
        put(options.record, "second", table, "`python tests/faults/second.py`")
    if not findings:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if findings else 0


def _fast() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    raise SystemExit(main())
