"""Attacks on what came later: the labelling page, the server, the Hub, tables, small machines.

`python tests/faults/second.py --only later` makes these alone.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import http.client
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from second import FIT, PREDICT, Attack, packed, pixels, png, zipped

LABEL = "label pictures --no-browser --net tiny --port 0 --device cpu --quiet".split()
SERVE = "serve model --port 0 --device cpu --quiet".split()
EVIL = "</script><script>alert(1)</script>=cmd|' /C x'!A0"
TRAP = "open({!r}, 'w').close()"


# A server, and those who talk to it -----------------------------------------------------------


class Client:
    """Speaks to a server that printed its address."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)
        self.token = parts.query.removeprefix("token=")

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and content; a body that is no bytes is sent as JSON."""
        head = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        talk = http.client.HTTPConnection(self.host, self.port, timeout=50)
        try:
            method = "GET" if body is None else "POST"
            talk.request(method, path, data, {**head, **headers})
            answer = talk.getresponse()
            content = answer.read()
        finally:
            talk.close()
        kind = answer.headers.get("content-type", "")
        return answer.status, json.loads(content) if "json" in kind else content

    def label(self, row: int, name: str, before: Any = None) -> int:
        change = {"row": row, "before": before, "after": ["label", name]}
        return self.ask("/do/answer", {"changes": [change]})[0]

    def raw(self, data: bytes) -> bytes:
        """What comes back for bytes that need not be HTTP; nothing where nothing comes."""
        with socket.create_connection((self.host, self.port), timeout=5) as one:
            one.sendall(data)
            with contextlib.suppress(OSError):
                return one.recv(65536)
        return b""


def start(words: list[str], output: str = "server.txt") -> tuple[int, Client | None]:
    """A server as a process of its own: its number, and its address; None where it has ended."""
    from calmatch import cli

    Path(output).unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(number, 1)
        os.dup2(number, 2)
        code: Any = 1
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code
        os._exit(code if isinstance(code, int) else 1)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if address := re.search(
            r"http://\S+", Path(output).read_text() if Path(output).exists() else ""
        ):
            return pid, Client(address[0])
        time.sleep(0.01)
    return pid, None


def end(pid: int, number: int = signal.SIGINT, output: str = "server.txt") -> int:
    """Its exit code after a signal; what it said goes where the attack's words go."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(Path(output).read_text(), file=sys.stderr)
    return 0 if code in (130, 143) else code


def talking(
    talk: Callable[[Client, Path], Any], words: list[str], last: int = signal.SIGINT
) -> Any:
    def act(here: Path) -> int:
        pid, client = start(words)
        try:
            assert client is not None, "it did not start"
            talk(client, here)
            assert client.ask("/")[0] == 200, "it no longer answers"
        finally:
            code = end(pid, last)
        return code

    return act


def saved(path: str = "labels.csv") -> dict[str, str]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return {row["file"]: row["label"] for row in csv.DictReader(file)}


def label_pages() -> Iterator[Attack]:
    def rows(client: Client, here: Path) -> None:
        for row in (-1, 8, 10**30, 0.5, True, "0", None, [0], {"a": 1}):
            assert client.ask("/do/answer", {"changes": [{"row": row}]})[0] in (400, 422), row
        for what in ("", "x", "fit/../answer", "answer%00", "%2e%2e/%2e%2e/precious"):
            assert client.ask(f"/do/{what}", {})[0] in (400, 404, 405), what
        for path in ("/picture/99", "/picture/-1", "/picture/0x", "/see/state/1e3", "/../precious"):
            assert client.ask(path)[0] in (400, 404), path
        assert not Path("labels.csv").exists()

    def bodies(client: Client, here: Path) -> None:
        odd = [b"", b"[", b"null", b"[" * 60_000, b'{"changes": NaN}', b"\xff", b"1" * 9000, b"{}"]
        for body in (*odd, b'{"changes": [' + b"{}," * 20 + b"{}]}"):
            assert client.ask("/do/answer", body)[0] == 400, body[:20]
        assert client.ask("/do/answer", bytes(1 << 20))[0] == 413
        assert client.raw(b"POST /do/answer HTTP/1.1\r\nContent-Length: -5\r\n\r\n")[9:10] in (
            b"4",
            b"",
        )
        assert client.raw(b"\x16\x03\x01" + bytes(200))[9:10] in (b"4", b"")
        assert client.raw(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 9000 + b"\r\n")[
            9:10
        ] in (b"4", b"")

    def strangers(client: Client, here: Path) -> None:
        own, client.token = client.token, ""
        assert client.ask("/")[0] == 401
        assert client.ask("/do/answer", {})[0] == 401
        client.token = own
        assert client.ask("/", Host="evil.example")[0] == 400
        assert client.ask("/do/answer", {}, Origin="http://evil.example")[0] == 403

    def names(client: Client, here: Path) -> None:
        good = [EVIL, "=1+1", "a,b", 'a"b', "١", "1e5", "-", "NULL", "\u202egpj", "🙂" * 50]
        for row, name in enumerate(good[:8]):
            assert client.label(row, name) == 200, name
        for name in ("", " ", "a\nb", "\0", "\x1b[2J", "\ud800", "x" * 101):
            assert client.label(7, name, ["label", good[7]]) == 400, name
        assert sorted(saved().values()) == sorted(good[:8])

    def gone(client: Client, here: Path) -> None:
        pictures = sorted((here / "pictures").rglob("*.png"))
        for k, path in enumerate(pictures):
            path.unlink()
            makes = (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.mkdir(), None)
            if make := makes[k % 4]:
                make(path)
        for row in range(len(pictures)):
            assert client.ask(f"/picture/{row}")[0] == 404
            assert client.label(row, "cat") == 200
        assert len(saved()) == len(pictures)

    def swapped(client: Client, here: Path) -> None:
        """A file that grows to 3 GiB after it was listed, and a bomb."""
        for k, path in enumerate(sorted((here / "pictures").rglob("*.png"))):
            with path.open("wb") as file:
                if k % 2:
                    file.truncate(3 << 30)
                else:
                    file.write(png(60_000, 60_000, rows=bytes(99)))
        assert {client.ask(f"/picture/{row}")[0] for row in range(8)} == {404}

    def many(client: Client, here: Path) -> None:
        """Who connects and says nothing keeps nobody out."""
        idle = [socket.create_connection((client.host, client.port)) for _ in range(200)]
        for one in idle[::2]:
            one.sendall(b"POST /do/answer HTTP/1.1\r\nContent-Length: 100\r\n")
        assert client.label(0, "cat") == 200
        for one in idle:
            one.close()
        assert len(saved()) == 1

    def crowd(client: Client, here: Path) -> None:
        """Eight tabs answer the same pictures at once: each answer is refused, or on disk."""
        done: list[tuple[int, str, int]] = []

        def tab(k: int) -> None:
            for row in range(8):
                done.append((row, f"tab {k}", client.label(row, f"tab {k}")))

        threads = [threading.Thread(target=tab, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [name for _, name, status in done if status == 200]
        assert {status for *_, status in done} <= {200, 409}
        assert len(won) == 8
        assert sorted(saved().values()) == sorted(won)

    def full(client: Client, here: Path) -> None:
        """A folder that can no longer be written: said, and the answer is not believed."""
        assert client.label(0, "cat") == 200
        (here / "labels.csv").rename(here / "old.csv")
        (here / "labels.csv").mkdir()
        status, content = client.ask(
            "/do/answer", {"changes": [{"row": 1, "before": None, "after": ["label", "dog"]}]}
        )
        assert status == 507, (status, content)
        (here / "labels.csv").rmdir()
        assert client.label(1, "dog") == 200
        assert len(saved()) == 2

    for talk in (rows, bodies, strangers, names, gone, swapped, many, crowd, full):
        yield Attack("later: the labelling page", talk.__name__, talking(talk, LABEL))
    yield Attack(
        "later: the labelling page", "SIGTERM", talking(lambda c, h: c.label(0, "a"), LABEL, 15)
    )

    def twice(here: Path) -> int:
        pid, client = start(LABEL)
        other, none = start(LABEL, "other.txt")
        assert client is not None
        assert none is None, "two servers write one file"
        assert "Another" in Path("other.txt").read_text()
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 2
        assert client.label(0, "cat") == 200
        code = end(pid)
        assert len(saved()) == 1
        return code

    def by_links(here: Path) -> int:
        """The same file by another name: the second server is refused too, and the link stays."""
        Path("link.csv").symlink_to("labels.csv")
        pid, client = start([*LABEL, "--labels", "link.csv"])
        other, none = start(LABEL, "other.txt")
        assert client is not None
        assert none is None, "two servers write one file"
        os.waitpid(other, 0)
        assert client.label(0, "cat") == 200
        assert Path("link.csv").is_symlink()
        assert len(saved()) == 1
        return end(pid)

    def killed(here: Path) -> int:
        for k in range(4):
            pid, client = start(LABEL)
            assert client is not None
            assert client.label(k, "cat") == 200
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert len(saved()) == 4
        return 0

    for act in (twice, by_links, killed):
        yield Attack("later: the labelling page", act.__name__, act)
    tables: dict[str, bytes] = {
        "a mark first": b"\xef\xbb\xbffile,label\r\ncat/0.png,cat\r\n",
        "UTF-16": "file,label\ncat/0.png,cat\n".encode("utf-16"),
        "quotes": b'"file","label"\n"cat/0.png","a ""b"", c"\n',
        "carriage returns": b"file,label\rcat/0.png,cat\r",
        "another column": b"file,label,who\ncat/0.png,cat,me\n",
        "NUL": b"file,label\ncat/0.png,c\0t\n",
        "no such picture": b"file,label\nnone.png,cat\n",
        "binary": bytes(range(256)),
        "a long label": b"file,label\ncat/0.png," + b"x" * 3000 + b"\n",
        "semicolons": b"file;label\ncat/0.png;cat\n",
        "Latin": b"file,label\ncat/0.png,caf\xe9\n",
    }
    for name, data in tables.items():

        def kept(here: Path, data: bytes = data) -> int:
            """What was there is refused, or is still there after an answer."""
            from calmatch.data.folder import read_labels

            Path("labels.csv").write_bytes(data)
            pid, client = start(LABEL)
            if client is None:
                assert Path("labels.csv").read_bytes() == data
                return end(pid)
            before = {(row.file, row.label) for row in read_labels(Path("labels.csv"))}
            state = client.ask("/see/state/0")[1]
            assert client.label(state["question"]["row"], "new") == 200
            after = {(row.file, row.label) for row in read_labels(Path("labels.csv"))}
            assert before <= after, before - after
            return end(pid)

        yield Attack("later: the labelling page", f"a table with {name}", kept)
    mistakes = {
        "label": (
            "--labels pictures",
            "--labels /dev/null",
            "--first theirs",
            "--first precious",
            "--net none",
            "--labels no/such/place/l.csv --port 70000",
        ),
        "serve": (
            "--host 300.1.1.1",
            "--host x.invalid",
            "--batch -1",
            "--megabytes nan",
            "--megapixels inf --port 70000",
            "--workers -1",
        ),
    }
    for command, server in (("label", LABEL), ("serve", SERVE)):
        words = [word for word in server if word not in ("--port", "0")]
        for line in ("--port -1", "--port 99999", *mistakes[command]):
            yield Attack(
                "later: an option", f"{command} {line}", lambda h, w=words, v=line: [*w, *v.split()]
            )

    def trapped(here: Path) -> int:
        """A fit that the page starts, in a folder with somebody's modules."""
        for name in ("calmatch", "torch", "numpy", "json", "typing"):
            Path(f"{name}.py").write_text(TRAP.format(str(here / "trap")))
        pid, client = start(LABEL)
        assert client is not None
        rows = sorted(client.ask("/see/labelled/0")[1] or [], key=str)
        assert not rows
        for row in range(8):
            name = client.ask(f"/see/one/{row}")[1]["name"]
            assert client.label(row, name.partition("/")[0]) == 200
        assert client.ask("/do/fit", {})[0] == 200
        for _ in range(600):
            state = client.ask("/see/state/0")[1]["fit"]
            if state["code"] is not None or len(state["lines"]) > 2:
                break
            time.sleep(0.1)
        assert state["lines"], state
        return end(pid)

    yield Attack("later: the labelling page", "modules of others beside it", trapped)


def servers() -> Iterator[Attack]:
    good = packed(pixels())
    bomb = png(9400, 9400, 16, 0, bytes(18801) * 9400)
    junk: dict[str, bytes] = {
        "nothing": b"",
        "text": b"hello",
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(trap) (w) file\n",
        "a bomb": png(60_000, 60_000, rows=bytes(99)),
        "16 bit": bomb,
        "cut": good[:40],
        "a pickle": b"\x80\x04cos\nsystem\n(S'touch trap'\ntR.",
    }

    def pictures(client: Client, here: Path) -> None:
        for name, data in junk.items():
            status, content = client.ask("/predict", data)
            assert status in (413, 422), (name, status)
            assert "error" in content
        assert client.ask("/predict", good)[0] == 200

    def requests(client: Client, here: Path) -> None:
        assert client.ask("/predict", bytes(30 << 20))[0] == 413
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        assert client.ask("/predict", b"--x--", **form)[0] == 415
        for path in (
            "/predict/../../precious",
            "/..%2fprecious",
            "//etc/passwd",
            "/%00",
            "/" + "a" * 9000,
        ):
            assert client.ask(path)[0] in (400, 404, 405, 414), path
        assert client.ask("/predict", good, Host="evil.example")[0] == 400
        assert client.ask("/predict", good, Origin="http://evil.example")[0] == 403
        assert client.raw(b"POST /predict HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc")[9:10] in (
            b"4",
            b"",
        )
        endless = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % client.port
        endless += b"Transfer-Encoding: chunked\r\n\r\n" + b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        assert b" 200 " not in client.raw(endless + (b"100000\r\n" + bytes(1 << 20) + b"\r\n") * 25)

    def crowd(client: Client, here: Path) -> None:
        """Pictures of 48 million pixels from twelve at once: answered or refused, in bounds."""
        large = png(6900, 6900, 8, 0, bytes(6901) * 6900)
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(client.ask("/predict", large)[0]))
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) <= {200, 503}, statuses
        assert 200 in statuses

    def gone(client: Client, here: Path) -> None:
        """Those who hang up before they are answered."""
        head = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: %d\r\n\r\n"
        for k in range(40):
            with socket.create_connection((client.host, client.port)) as one:
                one.sendall(head % (client.port, len(good)) + good[: None if k % 2 else 20])
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0] + [0] * 4))
        assert client.ask("/predict", good)[0] == 200

    for talk in (pictures, requests, crowd, gone):
        yield Attack("later: a server", talk.__name__, talking(talk, SERVE))
    yield Attack(
        "later: a server", "SIGTERM", talking(lambda c, h: c.ask("/predict", good), SERVE, 15)
    )

    def few_files(here: Path) -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        pid, client = start(SERVE)
        assert client is not None
        idle = [socket.create_connection((client.host, client.port)) for _ in range(40)]
        time.sleep(0.3)
        for one in idle:
            one.close()
        time.sleep(0.3)
        assert client.ask("/predict", good)[0] == 200
        return end(pid)

    yield Attack("later: a server", "ulimit -n 64", few_files)

    def evil_classes(here: Path) -> int:
        note = json.loads(Path("model/model.json").read_text())
        note["classes"] = [f"{k}{EVIL}\n# TYPE x" for k in range(len(note["classes"]))]
        Path("model/model.json").write_text(json.dumps(note))
        pid, client = start(SERVE)
        if client is None:
            return end(pid)
        status, answer = client.ask("/predict", good)
        assert status == 200
        assert answer["label"] in note["classes"]
        assert b"alert(1)" not in client.ask("/metrics")[1] + client.ask("/")[1]
        return end(pid)

    yield Attack("later: a server", "classes with markup", evil_classes)
    for token in ("", "ü", "a b\r\nSet-Cookie: x", "x" * 9000):

        def tokens(here: Path, token: str = token) -> int:
            os.environ["CALMATCH_TOKEN"] = token
            pid, client = start([*SERVE, "--host", "0.0.0.0"])
            if client is not None:
                client.host, client.token = "127.0.0.1", ""
                assert client.ask("/predict", good)[0] == 401
            return end(pid)

        yield Attack("later: a server", f"a token {token[:9]!a}", tokens)


# The Hub ---------------------------------------------------------------------------------


def hubs() -> Iterator[Attack]:
    """A Hub that says what it likes."""

    def pulled(here: Path, sha: Any, write: Callable[[Path], Any], ends: bool) -> int:
        def download(name: str, file: str, *, revision: str, local_dir: Path) -> None:
            local_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy(here / "model" / file, local_dir / file)
            write(local_dir / file)

        api = SimpleNamespace(model_info=lambda *a, **k: SimpleNamespace(sha=sha))
        own: Any = SimpleNamespace(HfApi=lambda **k: api, hf_hub_download=download)
        sys.modules["huggingface_hub"] = own
        from calmatch import cli

        words = ["predict", "hf://somebody/thing", *PREDICT[2:]]
        code = cli.main(words)
        assert (code == 0) == ends, code
        return code

    good = "a" * 40
    for sha in ("../../../../theirs", "/etc", "", None, 7, "main", "a" * 39 + "/"):
        yield Attack(
            "later: the Hub",
            f"a commit {sha!r}",
            lambda h, s=sha: pulled(h, s, lambda path: None, False),
        )
    writes: dict[str, Callable[[Path], Any]] = {
        "a whole model": lambda path: None,
        "empty files": lambda path: path.write_bytes(b""),
        "cut files": lambda path: path.write_bytes(path.read_bytes()[:50]),
        "pages": lambda path: path.write_bytes(b"<html>not found</html>"),
        "links": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
        "pipes": lambda path: (path.unlink(), os.mkfifo(path)),
        "a pickle": lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch trap'\ntR."),
    }
    for name, write in writes.items():
        yield Attack(
            "later: the Hub",
            name,
            lambda h, w=write, n=name: pulled(h, good, w, n == "a whole model"),
        )
    for address in (
        "hf://",
        "hf://a",
        "hf://a/b/c",
        "hf://a/b@",
        "hf://a/b@../..",
        "hf://../x",
        "hf:a/b@-x",
        "hf://a/b@" + "x/" * 3000,
    ):
        yield Attack(
            "later: the Hub",
            f"address {address[:30]}",
            lambda h, a=address: ["predict", a, *PREDICT[2:]],
            {"HF_HUB_OFFLINE": "1"},
        )


# Tables, runs and pages ------------------------------------------------------------------------


def tables() -> Iterator[Attack]:
    head = "file,label,confidence,set,sure"
    truth = "file,label\ncat/0.png,cat\ndog/0.png,dog\n"
    body = "cat/0.png,cat,0.9,cat,true\ndog/0.png,dog,0.8,dog,true\n"
    texts: dict[str, tuple[bytes, bytes]] = {
        "as predict writes it": (f"{head}\n{body}".encode(), truth.encode()),
        "a mark first": (f"\ufeff{head}\n{body}".encode(), f"\ufeff{truth}".encode()),
        "UTF-16": (f"{head}\n{body}".encode("utf-16"), truth.encode("utf-16")),
        "NUL": (f"{head}\n{body}".replace("0.9", "0\0").encode(), truth.encode()),
        "carriage returns": (f"{head}\n{body}".replace("\n", "\r").encode(), truth.encode()),
        "no number": (f"{head}\ncat/0.png,cat,x,cat,true\n".encode(), truth.encode()),
        "not a number": (f"{head}\ncat/0.png,cat,nan,cat,true\n".encode(), truth.encode()),
        "beyond one": (f"{head}\ncat/0.png,cat,1e9,cat,true\n".encode(), truth.encode()),
        "below zero": (f"{head}\ncat/0.png,cat,-0.1,cat,true\n".encode(), truth.encode()),
        "cells missing": (b"file,confidence,label\ncat/0.png,0.5\n", truth.encode()),
        "cells too many": (f"{head}\ncat/0.png,cat,0.5,a,b,c,d,e\n".encode(), truth.encode()),
        "a class without a column": (
            b"file,label,confidence,p(a),p(b)\ncat/0.png,c,1,1,0\n",
            truth.encode(),
        ),
        "columns of one name": (
            b"file,label,confidence,p(cat),p(cat)\ncat/0.png,cat,1,1,0\n",
            truth.encode(),
        ),
        "a column of no name": (
            b"file,label,confidence,p(),p(cat)\ncat/0.png,cat,1,0,1\n",
            truth.encode(),
        ),
        "one class alone": (
            f"{head}\ncat/0.png,cat,0.9,cat,true\n".encode(),
            b"file,label\ncat/0.png,cat\n",
        ),
        "numbers as classes": (
            f"{head}\na.png,1,0.9,1,true\nb.png,01,0.9,1,true\n".encode(),
            b"file,label\na.png,1\nb.png,1.0\n",
        ),
        "a picture twice": (f"{head}\n{body}{body}".encode(), truth.encode()),
        "truth of others": (f"{head}\n{body}".encode(), b"file,label\nx.png,cat\n"),
        "nothing": (b"", truth.encode()),
        "a header alone": (head.encode(), truth.encode()),
        "a long cell": (f"{head}\n{'x' * 200_000},cat,0.9,cat,true\n".encode(), truth.encode()),
        "markup": (
            f"{head}\n{body}".replace("cat", EVIL.replace(",", "")).encode(),
            truth.encode(),
        ),
    }
    for name, (table, labels) in texts.items():

        def act(here: Path, table: bytes = table, labels: bytes = labels) -> list[str]:
            (here / "t.csv").write_bytes(table)
            (here / "truth.csv").write_bytes(labels)
            return "evaluate t.csv --labels truth.csv --resamples 2".split()

        yield Attack("later: a table to evaluate", name, act)

    def formulas(here: Path) -> int:
        """Names are as they were when a program reads the table."""
        import pandas

        from calmatch import cli

        names = ["=cmd|' C x'!A0", "@x", "+1+1", "-2+3", "a"]
        shutil.rmtree(here / "pictures")
        for k, name in enumerate(names):
            (here / "pictures" / name).mkdir(parents=True)
            for n in range(3):
                (here / "pictures" / name / f"{n}.png").write_bytes(packed(pixels(5 * n + k)))
        assert cli.main(FIT) == 0
        assert cli.main(["predict", "new", *PREDICT[2:]]) == 0
        table = pandas.read_csv("out.csv", keep_default_na=False)
        assert {name.partition("/")[0] for name in table["file"]} == set(names)
        assert set(table["label"]) <= set(names)
        return 0

    yield Attack("later: names", "classes like formulas", formulas)
    for name in (
        "1 2 10",
        "1 01 1.0",
        "nan inf -inf",
        "1e400 2",
        "٣ ٢",
        "² ³",
        "true false",
        "None null",
        f"{'9' * 200} 1",
        "-1 0 1",
        "0x10 16",
    ):

        def numbers(here: Path, text: str = name) -> list[str]:
            for old, new in zip(("cat", "dog"), text.split(), strict=False):
                (here / "pictures" / old).rename(here / "pictures" / new)
            return FIT

        yield Attack("later: names", f"classes {name[:30]}", numbers)

    def evil_names(here: Path) -> int:
        """Names of classes and pictures on every page, in notebooks and in figures."""
        import calmatch
        from calmatch import cli

        evil = "<img src=x onerror=alert(1)>"
        (here / "pictures" / "cat").rename(here / "pictures" / evil)
        for path in sorted((here / "pictures" / evil).iterdir()):
            path.rename(path.with_name(f"{evil}{path.name}"))
        (here / "pictures" / "dog" / f"{evil}.png").write_bytes(b"no picture")
        assert cli.main(FIT) == 0
        assert cli.main("report new --out page.html".split()) == 0
        run, model = calmatch.load_run(Path("new")), calmatch.load("new")
        own = [(here / "page.html").read_text(), run._repr_html_(), model._repr_html_()]
        for text in own:
            assert "<img src=x onerror" not in text, "a name became markup"
        assert cli.main("figure reliability new --out f.svg".split()) == 0
        assert "<img" not in (here / "f.svg").read_text()
        return 0

    yield Attack("later: names", "markup on pages and in notebooks", evil_names)

    def exported(here: Path) -> int:
        from calmatch import cli

        note = json.loads(Path("model/model.json").read_text())
        names = [f'{k}"\n\0{EVIL}' for k in range(len(note["classes"]))]
        Path("model/model.json").write_text(json.dumps({**note, "classes": names}))
        code = cli.main("export model --to onnx --out m.onnx --quiet".split())
        if code == 0:
            import onnx

            facts = {item.key: item.value for item in onnx.load("m.onnx").metadata_props}
            held = [value for value in facts.values() if "alert" in value]
            assert held
            assert any(json.loads(value) == names for value in held if value.startswith("[")), facts
        return code

    yield Attack("later: names", "classes in an ONNX file", exported)

    def many_classes(here: Path) -> list[str]:
        shutil.rmtree(here / "pictures")
        lines = ["file,label"]
        (here / "pictures").mkdir()
        for k in range(1500):
            (here / "pictures" / f"{k}.png").write_bytes(packed(pixels(k, (4, 4, 3))))
            lines.append(f"{k}.png,class {k // 2}")
        (here / "labels.csv").write_text("\n".join(lines))
        return [*FIT, "--labels", "labels.csv"]

    yield Attack("later: names", "750 classes of two", many_classes)

    def twins(here: Path) -> list[str]:
        for name in ("A.png", "a.png", "A.PNG"):
            (here / "pictures" / "cat" / name).write_bytes(packed(pixels()))
        (here / "labels.csv").write_text(
            "file,label\ncat/A.png,x\ncat/a.png,y\ndog/0.png,x\ndog/1.png,y\n"
        )
        return [*FIT, "--labels", "labels.csv"]

    yield Attack("later: names", "capitals alone differ", twins)
    for kind in ("../labels.csv", "/proc/self/environ", "precious", "labels.csv"):

        def linked(here: Path, kind: str = kind) -> list[str]:
            (here.parent / "labels.csv").write_text(
                "file,label\ncat/0.png,a\ncat/1.png,a\ndog/0.png,b\ndog/1.png,b\n"
            )
            (here / "labels.csv").symlink_to(kind)
            return [*FIT, "--labels", "labels.csv"]

        yield Attack("later: names", f"labels.csv is a link to {kind}", linked)


# Small and odd machines ---------------------------------------------------------------------------


def _mount(place: Path, size: str) -> None:
    """A small disk that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
    assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
    place.mkdir(exist_ok=True)
    options = f"size={size}".encode()
    assert libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, options) == 0


def _fill(place: Path, left: int) -> None:
    room = os.statvfs(place)
    with (place / "ballast").open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - left))


def machines() -> Iterator[Attack]:
    outs = {
        "predict, CSV": "predict model pictures --out small/o.csv --device cpu",
        "predict, Parquet": "predict model pictures --out small/o.parquet --device cpu",
        "predict, Label Studio": "predict model pictures --out small/o.json --format label-studio",
        "fit": " ".join([*FIT[:3], "small/new", *FIT[4:]]),
        "train": "train digits_40 --dataset synthetic --net tiny --steps 2 --out small/new --quiet",
        "report": "report run --out small/page.html",
        "figure": "figure reliability run --out small/f.svg",
        "figure, PDF": "figure reliability run --out small/f.pdf",
        "table": "table run --out small/t.md",
        "export": "export model --to pt2 --out small/m.pt2 --quiet",
        "export, ONNX": "export model --to onnx --out small/m.onnx --quiet",
        "replay": "replay run --steps 2 --quiet --out small/again",
    }
    for name, line in outs.items():
        for left in (0, 4096, 40_960):

            def full(here: Path, line: str = line, left: int = left) -> int:
                from calmatch import cli

                _mount(here / "small", "1m")
                _fill(here / "small", left)
                code = cli.main(line.split())
                rest = [p.name for p in (here / "small").rglob("*.part")]
                assert not rest, f"left behind: {rest}"
                return code

            yield Attack("later: a full disk", f"{name}, {left} bytes left", full)
    for name, line in {
        "fit": " ".join(FIT),
        "predict": " ".join(PREDICT),
        "export": "export model --to onnx --out m.onnx --quiet",
        "figure": "figure reliability run --out f.pdf",
        "push": "push run somebody/thing",
        "bench": "bench digits --only freematch --steps 2 --seeds 0 --out b",
    }.items():

        def no_tmp(here: Path, line: str = line) -> list[str]:
            _mount(here / "tmp", "4k")
            _fill(here / "tmp", 0)
            os.environ.update(TMPDIR=str(here / "tmp"), HF_HUB_OFFLINE="1", HF_TOKEN="x")
            return line.split()

        yield Attack("later: a machine", f"{name} without room in /tmp", no_tmp)

    def no_shared(here: Path) -> list[str]:
        libc = ctypes.CDLL(None, use_errno=True)
        other = Path(tempfile.mkdtemp(dir="/var/tmp"))
        _mount(other / "own", "9m")
        shutil.copytree(here / "pictures", other / "own" / "pictures")
        options = b"size=4k"
        assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, options) == 0
        os.chdir(other / "own")
        os.environ["CALMATCH_CACHE"] = "cache"
        data = "folder(path='pictures',size=8,cached=False)"
        line = f"train digits_40 --dataset {data} --source stream --workers 2 --net tiny --steps 3"
        return f"{line} --labels 4 --out new --quiet --device cpu".split()

    yield Attack("later: a machine", "no shared memory", no_shared)
    for number in (16, 32, 64):
        for words in (PREDICT, FIT, "report run --out p.html".split(), ["table", "run"]):

            def few(here: Path, number: int = number, words: list[str] = words) -> list[str]:
                resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
                return words

            yield Attack("later: a machine", f"{words[0]} with ulimit -n {number}", few)
    for more in (0, 20, 100, 300):
        for words in (PREDICT, FIT, "report run --out p.html".split()):

            def small(here: Path, more: int = more, words: list[str] = words) -> list[str]:
                now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (now + (more << 20), resource.RLIM_INFINITY))
                return words

            yield Attack("later: a machine", f"{words[0]} with {more} MiB", small)

    def nobody(here: Path, words: list[str], closed: str) -> list[str]:
        """Another user than root: some pictures closed, a folder read-only."""
        for path in (here, *here.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        (here / "pictures" / "cat" / "0.png").chmod(0)
        if closed:
            (here / closed).mkdir(exist_ok=True)
            (here / closed).chmod(0o555)
        os.environ["HOME"] = str(here / "home")
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        return words

    lines = (
        " ".join(PREDICT),
        " ".join(FIT),
        "report run",
        "report run --out run/p.html",
        "replay run --steps 2",
        "evaluate run --resamples 0",
        "table run --out run/t.md",
    )
    for line in lines:
        for closed in ("", "home", "run", "new", "cache"):
            yield Attack(
                "later: another user",
                f"{line[:30]}, {closed or 'nothing'} is read-only",
                lambda h, w=line, c=closed: nobody(h, w.split(), c),
            )

    def deleted(here: Path, words: list[str], pause: float) -> int:
        """Pictures deleted while they are read."""
        from calmatch import cli

        for k in range(120):
            (here / "pictures" / ("cat" if k % 2 else "dog") / f"n{k}.png").write_bytes(
                packed(pixels(k))
            )
        if (pid := os.fork()) == 0:
            for path in sorted((here / "pictures").rglob("n*.png")):
                path.unlink(missing_ok=True)
                time.sleep(pause)
            os._exit(0)
        code = cli.main(words)
        os.waitpid(pid, 0)
        return code

    for words in (PREDICT, FIT, [*FIT[:4], "--size", "32", "--device", "cpu", "--minutes", "0.2"]):
        for pause in (0.0005, 0.004, 0.02):
            yield Attack(
                "later: several at once",
                f"{' '.join(words)[:60]} as pictures go, {pause} s",
                lambda h, w=words, p=pause: deleted(h, w, p),
            )

    def jumps(here: Path, step: float) -> int:
        """A wall clock that is set while --minutes run: they are as long as before."""
        from calmatch import cli

        real, ticks = time.time, iter(range(10**9))
        time.time = lambda: real() + step * next(ticks)  # type: ignore[assignment]
        began, words = (
            time.monotonic(),
            "--net tiny --size 8 --no-frozen --device cpu --minutes 0.2",
        )
        code = cli.main([*FIT[:4], *words.split()])
        assert time.monotonic() - began > 1
        return code

    for step in (1e7, -1e7):
        yield Attack(
            "later: a machine",
            f"a clock that is set by {step:g} s each time",
            lambda h, s=step: jumps(h, s),
        )
    python = [sys.executable, "-P"]
    for flags in (["-O"], ["-OO"], ["-b"], ["-X", "utf8=0"], ["-W", "error::UserWarning"], ["-I"]):
        for words in (PREDICT, FIT, "report run --out p.html".split()):

            def real(here: Path, flags: list[str] = flags, words: list[str] = words) -> int:
                own = {**os.environ, "LANG": "C", "LC_ALL": "C"}
                (here / "pictures" / "cat" / "größer 🙂.png").write_bytes(packed(pixels()))
                done = subprocess.run([*python, *flags, "-m", "calmatch", *words], env=own)
                return done.returncode

            if flags != ["-I"] or "PYTHONPATH" not in os.environ:  # which it would not look at
                yield Attack("later: Python", f"{' '.join(flags)} {words[0]}", real)
    for line in (
        "methods",
        "table run",
        "evaluate run --resamples 0",
        "predict --help",
        "report run --out p.html",
    ):

        def head(here: Path, line: str = line) -> int:
            """`| head -1`: no traceback, and exit code 0."""
            words = f"{sys.executable} -P -m calmatch {line} | head -1; exit ${{PIPESTATUS[0]}}"
            return subprocess.run(["bash", "-c", words]).returncode

        yield Attack("later: Python", f"{line} | head -1", head)

    def modules(here: Path) -> int:
        """The command itself, where somebody's modules lie, and a suite that starts others."""
        for name in ("calmatch", "torch", "numpy", "json", "sitecustomize"):
            (here / f"{name}.py").write_text(TRAP.format(str(here / "trap")))
        words = "bench digits --only freematch --steps 2 --seeds 0 --out b".split()
        return subprocess.run([*python, "-m", "calmatch", *words]).returncode

    yield Attack("later: Python", "bench where modules of others lie", modules)


def caches() -> Iterator[Attack]:
    def games(here: Path, make: Callable[[Path], Any]) -> list[str]:
        (here / "cache").mkdir(exist_ok=True)
        make(here / "cache")
        return FIT

    def old(cache: Path) -> None:
        """Somebody's old files, called as ours are."""
        (cache / "arrays").mkdir()
        for name in ("pictures-abc.npy", "pictures-abc.json", "thesis.npy"):
            (cache / "arrays" / name).write_bytes(b"precious")
            os.utime(cache / "arrays" / name, (0, 0))

    kinds: dict[str, Callable[[Path], Any]] = {
        "a link to a folder of others": lambda cache: (cache / "arrays").symlink_to("../pictures"),
        "a link to itself": lambda cache: (cache / "arrays").symlink_to("arrays"),
        "a file": lambda cache: (cache / "arrays").write_bytes(b""),
        "a link nowhere": lambda cache: (cache / "arrays").symlink_to("nowhere"),
        "files of others": old,
        "many files": lambda cache: [
            (cache / "arrays").mkdir(),
            *((cache / "arrays" / f"x-{k:x}.npy").touch() for k in range(20_000)),
        ],
    }
    for name, make in kinds.items():
        yield Attack("later: a cache", name, lambda h, m=make: games(h, m))

    def swept(here: Path) -> int:
        from calmatch import cli

        (here / "cache").mkdir()
        old(here / "cache")
        assert cli.main(FIT) == 0
        assert len(list((here / "cache" / "arrays").glob("*abc*"))) == 2, (
            "somebody's files are gone"
        )
        assert (here / "cache" / "arrays" / "thesis.npy").exists()
        return 0

    yield Attack("later: a cache", "old files of others stay", swept)

    def other_shape(here: Path) -> int:
        """An array of another picture in the place of one: of the right shape, it is believed."""
        from calmatch import cli

        assert cli.main([*FIT, "--quiet"]) == 0
        for path in (here / "cache").rglob("*.npy"):
            array = np.load(path)
            np.save(path, np.zeros((*array.shape, 1), array.dtype))
        return cli.main([*FIT[:3], "again", *FIT[4:]])

    yield Attack("later: a cache", "arrays of another shape", other_shape)


def archives() -> Iterator[Attack]:
    good = packed(pixels())
    info = zipfile.ZipInfo("a.png")
    info.external_attr = 0o010644 << 16  # a pipe, it says
    pipe = io.BytesIO()
    with zipfile.ZipFile(pipe, "w") as archive:
        archive.writestr(info, good)
    members: dict[str, bytes] = {
        "names that go up": zipped(
            {"../../trap.png": good, "a/../../trap2.png": good, "b.png": good}
        ),
        "absolute names": zipped({"/trap.png": good, "//trap.png": good, "C:/trap.png": good}),
        "names of formulas": zipped({"=cmd|' C x'!A0.png": good, "@b.png": good}),
        "a folder and a file of one name": zipped({"a.png/b.png": good, "a.png": good}),
        "names of devices": zipped({"/dev/stdin.png": good, "con.png": good, "nul.png": good}),
        "a pipe, it says": pipe.getvalue(),
        "no Unicode": zipped({"a.png": good}).replace(b"a.png", b"\xff.png"),
        "a comment of 64 KiB": zipped({"a.png": good})[:-2] + b"\xff\xff" + b"c" * 65535,
        "two directories": zipped({"a.png": good}) + zipped({"b.png": good}),
    }
    for name, data in members.items():

        def act(here: Path, data: bytes = data) -> list[str]:
            (here / "p.zip").write_bytes(data)
            return ["predict", "model", "p.zip", *PREDICT[3:]]

        yield Attack("later: an archive", name, act)

    def changing(here: Path) -> list[str]:
        """An archive that is written anew while it is read."""
        members = {f"{k}.png": packed(pixels(k, (64, 64, 3))) for k in range(300)}
        (here / "p.zip").write_bytes(zipped(members))
        if os.fork() == 0:
            time.sleep(0.05)
            for size in (20_000, 0):
                with (here / "p.zip").open("r+b") as file:
                    file.truncate(size)
                time.sleep(0.05)
            os._exit(0)
        return ["predict", "model", "p.zip", *PREDICT[3:]]

    yield Attack("later: an archive", "cut while it is read", changing)


def memory() -> Iterator[Attack]:
    """Small files that take much: in folders, archives and alone, by many workers."""
    deep = png(9400, 9400, 16, 0, bytes(18801) * 9400)
    wide = png(9400, 9400, 8, 6, bytes(4 * 9400 + 1) * 9400)
    many = ["--workers", "4", "--batch", "1"]
    for name, data in {"16 bit": deep, "transparent": wide, "3 GiB of nothing": b""}.items():

        def put(path: Path, data: bytes = data) -> None:
            path.write_bytes(data)
            if not data:
                os.truncate(path, 3 << 30)

        def folder(here: Path, put: Any = put) -> list[str]:
            for k in range(4):
                put(here / "pictures" / "cat" / f"large{k}.png")
            return [*PREDICT, *many]

        def fit(here: Path, put: Any = put) -> list[str]:
            folder(here, put)
            return FIT

        def alone(here: Path, put: Any = put) -> list[str]:
            put(here / "large.png")
            return ["predict", "model", "large.png", *PREDICT[3:], *many]

        def archive(here: Path, data: bytes = data) -> list[str]:
            with zipfile.ZipFile(
                here / "p.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1
            ) as held:
                for k in range(4 if data else 1):
                    with held.open(f"{k}.png", "w", force_zip64=True) as member:
                        for _ in range(1 if data else 384):
                            member.write(data or bytes(8 << 20))
                held.writestr("good.png", packed(pixels()))
            return ["predict", "model", "p.zip", *PREDICT[3:], *many]

        for act in (folder, fit, alone, archive):
            yield Attack("later: memory", f"{name}, {act.__name__}", act)


FAMILIES = (memory, tables, archives, caches, hubs, label_pages, servers, machines)
