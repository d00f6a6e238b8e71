"""`calmatch label`: labels.csv is what was clicked, whatever a page, a kill or a stranger does."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
import types
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from calmatch import files
from calmatch.data.folder import read_folder
from calmatch.options import LabelOptions
from calmatch.web import build_app, label, listen

pytest.importorskip("starlette")
TOKEN = "secret"
EVIL = '<img src=x onerror="alert(1)">'
NAMES = [f"{k:02d}.png" for k in range(30)]


def spaces(number: int = 30, seed: int = 0) -> list[Any]:
    """Unit vectors around three centres, one after the other."""
    draw = np.random.default_rng(seed)
    rows = np.eye(8)[np.arange(number) % 3] + 0.1 * draw.standard_normal((number, 8))
    return [np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Thirty small pictures, one of them broken."""
    root = tmp_path / "pictures"
    root.mkdir()
    for k, name in enumerate(NAMES):
        Image.new("RGB", (20, 12), (8 * k, 0, 0)).save(root / name)
    (root / NAMES[7]).write_bytes(b"no picture")
    return root


@contextmanager
def opened(folder: Path, path: Path) -> Iterator[Any]:
    """A client that has the page open."""
    from starlette.testclient import TestClient

    session = label.Session(folder, NAMES, label.Answers(path, NAMES), spaces(), len(NAMES))
    place = listen("127.0.0.1", 0)
    app = build_app(label.routes(session), place, token=TOKEN, limit=label.LIMIT)
    base = f"http://127.0.0.1:{place.getsockname()[1]}"
    with place, TestClient(app, base_url=base, raise_server_exceptions=False) as client:
        client.session = session
        assert client.get(f"/?token={TOKEN}").status_code == 200
        yield client
    session.close()


@pytest.fixture
def client(folder, tmp_path) -> Any:
    with opened(folder, tmp_path / "labels.csv") as one:
        yield one


def say(client: Any, row: int, after: Any, before: Any = None) -> Any:
    changes = [{"row": row, "before": before, "after": after}]
    return client.post("/do/answer", json={"changes": changes})


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_every_answer_is_on_disk_as_fit_reads_it(client, folder, tmp_path):
    path = tmp_path / "labels.csv"
    cat = ["label", "cat, tabby"]
    assert say(client, 3, cat).json()["labels"] == 1
    assert rows_of(path) == [["file", "label"], ["03.png", "cat, tabby"]]
    say(client, 4, ["label", "dog"])
    say(client, 5, ["none", ""])
    say(client, 6, ["unsure", ""])
    state = say(client, 3, ["label", "dog"], cat).json()
    assert rows_of(path)[1:] == [["03.png", "dog"], ["04.png", "dog"]]
    assert rows_of(tmp_path / "labels.other.csv")[1:] == [
        ["05.png", "none of these"],
        ["06.png", "cannot tell"],
    ]
    assert [(each["name"], each["count"]) for each in state["classes"]] == [
        ("cat, tabby", 0),
        ("dog", 2),
    ]
    say(client, 8, cat)
    read = read_folder(folder, path)
    assert (read.classes, read.counts) == (("cat, tabby", "dog"), (1, 2))


def test_undo_goes_all_the_way_also_after_the_server_was_killed(folder, tmp_path):
    path = tmp_path / "labels.csv"
    with opened(folder, path) as client:
        say(client, 1, ["label", "a"])
        say(client, 1, ["label", "b"], ["label", "a"])
        group = [{"row": row, "before": None, "after": ["label", "c"]} for row in (2, 3, 4)]
        assert client.post("/do/answer", json={"changes": group}).json()["labels"] == 4
        said = client.post("/do/undo", json={"version": 3}).json()
        assert [item["row"] for item in said["undone"]] == [2, 3, 4]
        assert client.post("/do/undo", json={"version": 4}).json()["undone"][0]["answer"] == [
            "label",
            "a",
        ]
    with opened(folder, path) as client:  # nothing but the file is left of the first server
        state = client.get("/see/state/0").json()
        assert (state["labels"], state["undoable"]) == (1, 1)
        assert client.get("/see/one/1").json()["answer"] == ["label", "a"]
        assert client.post("/do/undo", json={"version": 0}).json()["labels"] == 0
        assert client.post("/do/undo", json={"version": 1}).json()["undone"] == []
    assert rows_of(path) == [["file", "label"]]
    assert label.Answers(path, NAMES).held == {}


def test_of_two_tabs_the_slower_one_changes_nothing(client):
    assert say(client, 3, ["label", "a"]).status_code == 200
    reply = say(client, 3, ["label", "b"])
    assert reply.status_code == 409
    assert "Another tab" in reply.json()["error"]
    assert reply.json()["question"]["row"] != 3
    mixed = [
        {"row": 4, "before": None, "after": ["label", "b"]},
        {"row": 3, "before": None, "after": ["label", "b"]},
    ]
    assert client.post("/do/answer", json={"changes": mixed}).status_code == 409
    assert client.post("/do/undo", json={"version": 0}).status_code == 409
    assert rows_of(client.session.answers.path)[1:] == [["03.png", "a"]]


def test_a_kill_between_two_files_leaves_the_answer_before_or_after(tmp_path, monkeypatch):
    path, real = tmp_path / "labels.csv", files.write
    for before, after in [(("label", "a"), ("none", "")), (("none", ""), ("label", "a"))]:
        answers = label.Answers(path, NAMES)
        answers.change([("03.png", answers.held.get("03.png"), before)])
        written: list[Path] = []

        def once(target, *pieces, written=written):
            if written:
                raise KeyboardInterrupt
            written.append(target)
            real(target, *pieces)

        monkeypatch.setattr(files, "write", once)
        with pytest.raises(KeyboardInterrupt):
            answers.change([("03.png", before, after)])
        monkeypatch.setattr(files, "write", real)
        assert label.Answers(path, NAMES).held["03.png"] in (before, after)


def test_what_cannot_be_written_is_not_believed(client, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    say(client, 1, ["label", "a"])
    monkeypatch.setattr(files, "write", full)
    reply = say(client, 2, ["label", "b"])
    assert reply.status_code == 507
    assert "No space left" in reply.json()["error"]
    assert client.get("/see/state/0").json()["labels"] == 1


HOSTILE: list[tuple[str, str, dict[str, Any], int]] = [
    ("GET", "/see/state/0", {"headers": {"host": "evil.example"}}, 400),
    ("GET", "/see/state/0", {"headers": {"origin": "https://evil.example"}}, 403),
    ("POST", "/do/undo", {"headers": {"origin": "null"}, "json": {"version": 0}}, 403),
    ("GET", "/picture/..%2f..%2f..%2fetc%2fpasswd", {}, 404),
    ("GET", "/picture/../../etc/passwd", {}, 404),
    ("GET", "/picture/0x1", {}, 404),
    ("GET", "/picture/30", {}, 404),
    ("GET", "/see/group/999999999999999999999999", {}, 404),
    ("GET", "/label.py", {}, 404),
    ("GET", "/report", {}, 404),
    ("POST", "/do/answer", {"content": b"x" * 10_000_000}, 413),
    ("POST", "/do/answer", {"content": b"["}, 400),
    ("POST", "/do/answer", {"content": b"[" * 100_000}, 400),
    ("POST", "/do/answer", {"content": b"\xff"}, 400),
    ("POST", "/do/answer", {"json": []}, 400),
    ("POST", "/do/answer", {"json": {"changes": []}}, 400),
    ("POST", "/do/answer", {"json": {"changes": [1]}}, 400),
    ("POST", "/do/answer", {"json": {"changes": [{"row": 1}] * 40}}, 400),
    ("POST", "/do/answer", {"json": {"changes": [{"row": True, "after": None}]}}, 400),
    ("POST", "/do/answer", {"json": {"changes": [{"row": -1, "after": None}]}}, 400),
    ("POST", "/do/answer", {"json": {"changes": [{"row": 1, "after": ["label", 3]}]}}, 400),
    ("POST", "/do/answer", {"json": {"changes": [{"row": 1, "after": ["label", "a\nb"]}]}}, 400),
    ("POST", "/do/answer", {"json": {"changes": [{"row": 1, "after": ["label", "\x1b[2J"]}]}}, 400),
    ("POST", "/do/answer", {"json": {"changes": [{"row": 1, "after": ["label", " "]}]}}, 400),
    ("POST", "/do/answer", {"json": {"changes": [{"row": 1, "after": ["label", "a" * 101]}]}}, 400),
    ("POST", "/do/class", {"content": b'{"name": "\\ud800"}'}, 400),
    ("POST", "/do/skip", {"json": {"row": "1"}}, 400),
    ("POST", "/do/fit", {"json": {}}, 400),
    ("POST", "/do/undo", {"json": {}}, 409),
    ("POST", "/do/nothing", {"json": {}}, 400),
    ("POST", "/see/state/0", {"json": {}}, 405),
]


@pytest.mark.parametrize(("method", "path", "settings", "status"), HOSTILE)
def test_a_hostile_request_is_refused_and_changes_nothing(client, method, path, settings, status):
    say(client, 1, ["label", "a"])
    assert client.request(method, path, **settings).status_code == status
    assert rows_of(client.session.answers.path)[1:] == [["01.png", "a"]]
    assert client.get("/see/state/0").json()["labels"] == 1


def test_without_the_token_nothing_is_served(client):
    client.cookies.clear()
    for path in ("/", "/see/state/0", "/picture/1", "/label.js", "/?token=wrong"):
        assert client.get(path).status_code == 401
    assert say(client, 1, ["label", "a"]).status_code == 401
    assert not client.session.answers.path.exists()


def test_a_label_with_markup_is_text_and_the_page_loads_its_own_files_alone(client):
    assert say(client, 1, ["label", EVIL]).json()["classes"][0]["name"] == EVIL
    assert rows_of(client.session.answers.path)[1] == ["01.png", EVIL]
    here = Path(label.__file__).parent
    script = (here / "label.js").read_text()
    assert not any(word in script for word in ("innerHTML", "insertAdjacentHTML", "document.write"))
    page = (here / "label.html").read_text()
    assert page.count("<script") == 1
    assert "style=" not in page
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_a_picture_is_encoded_anew_and_a_broken_one_is_shown_as_such(client):
    reply = client.get("/picture/3")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "image/png")
    assert reply.headers["x-content-type-options"] == "nosniff"
    reply = client.get("/picture/7?small")
    assert reply.status_code == 404
    assert "cannot be shown" in reply.json()["error"]
    assert say(client, 7, ["unsure", ""]).status_code == 200


def test_a_model_learns_in_the_background_and_a_skipped_picture_comes_last(client):
    first = client.get("/see/state/0").json()["question"]["row"]
    assert client.post("/do/skip", json={"row": first}).json()["question"]["row"] != first
    asked: list[int] = []
    while (question := client.get("/see/state/0").json()["question"]) is not None:
        asked.append(question["row"])
        say(client, asked[-1], ["label", "abc"[asked[-1] % 3]])
        if len(asked) == 20:
            while client.get("/see/state/0").json()["busy"]:
                time.sleep(0.02)
            state = client.get("/see/state/0").json()
            value, low, high = state["model"]["error"]
            assert 0 <= low <= value <= high <= 1
            assert value < 0.2
            assert len(state["model"]["random"]) >= 2
            assert state["model"]["curve"][-1][0] == 20
            free = client.get(f"/see/one/{state['question']['row']}").json()["row"]
            assert client.get(f"/see/guess/{free}").json()[0][0] == "abc"[free % 3]
            group = client.get(f"/see/group/{free}").json()
            assert group[0]["row"] == free
            assert len({item["row"] % 3 for item in group[:3]}) == 1
            assert not {item["row"] for item in group} & set(asked)
    assert sorted(asked) == list(range(30))
    assert asked[-1] == first
    assert {row % 3 for row in (first, *asked[:2])} == {0, 1, 2}
    newest = client.get("/see/labelled/0").json()
    assert [item["row"] for item in newest] == asked[::-1]


def test_pictures_put_off_come_again_in_turn(client):
    asked = [client.get("/see/state/0").json()["question"]["row"]]
    for _ in range(89):
        reply = client.post("/do/skip", json={"row": asked[-1]})
        asked.append(reply.json()["question"]["row"])
    assert sorted(asked[:30]) == list(range(30))
    assert asked[30:60] == asked[:30] == asked[60:]


def test_a_second_server_and_another_programs_file_are_refused(folder, tmp_path):
    path = tmp_path / "labels.csv"
    with (
        label._hold(path),
        pytest.raises(ValueError, match="Another `calmatch label` has"),
        label._hold(path),
    ):
        pass
    path.write_text("file,label,note\n01.png,a,mine\n")
    with pytest.raises(ValueError, match="would be lost"):
        label.Answers(path, NAMES)
    path.write_text("file,label\nelsewhere.png,a\n")
    with pytest.raises(ValueError, match="not there"):
        label.Answers(path, NAMES)
    assert path.read_text() == "file,label\nelsewhere.png,a\n"


def test_names_that_a_csv_would_change_are_left_out():
    names = ["a.png", " b.png", "c,\n.png", "\udcff.png"]
    assert [label._is_plain(name) for name in names] == [True, False, True, False]


def test_class_folders_begin_a_new_file_where_unlabelled_says_what_they_are(tmp_path):
    path = tmp_path / "labels.csv"
    names = ["a/1.jpg", "b/x/2.jpg", "loose.jpg", "unlabelled/3.jpg"]
    begin = label._by_class_folder(names)
    accent = unicodedata.normalize("NFD", "Kröte")
    again = label._by_class_folder([f"{accent}/1.jpg", "unlabelled/2.jpg"])
    assert again == {f"{accent}/1.jpg": "Kröte"}  # as the page says it back
    assert begin == {"a/1.jpg": "a", "b/x/2.jpg": "b"}
    assert label._by_class_folder(["2024/1.jpg", "2025/2.jpg"]) == {}  # any tree of photographs
    answers = label.Answers(path, names, begin)
    assert rows_of(path)[1:] == [["a/1.jpg", "a"], ["b/x/2.jpg", "b"]]
    answers.undo(0)
    assert label.Answers(path, names, begin).held == {"a/1.jpg": ("label", "a")}  # not once more


def test_a_fit_ends_with_the_server_that_started_it():
    words = [sys.executable, "-c", label.WATCHED, "methods"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as fit:
        fit.stdin.close()  # as the kernel does for a server that was killed
        assert fit.wait(60) in (-signal.SIGTERM, 143, 15)  # 15: Windows
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as fit:
        assert fit.wait(120) == 0  # and ends well while the server lives


def synthetic(monkeypatch: Any, names: list[str], seconds: dict[str, float]) -> None:
    """Pictures and features without files."""
    from calmatch.fit import portfolio

    def compute(extractor: Any, images: Any, quiet: bool) -> Any:
        draw = np.random.default_rng(0)
        rows = draw.standard_normal((len(images), 64)) + 6 * np.eye(64)[np.arange(len(images)) % 9]
        seconds["features"] = time.process_time()
        features = portfolio.Features([np.asarray(np.abs(rows), np.float32)])
        return types.SimpleNamespace(some=lambda: features)

    monkeypatch.setattr(label, "compute_blocks", compute)
    monkeypatch.setattr(label, "choose_network", lambda *_: ("tiny", True, []))
    monkeypatch.setattr(
        label.folder, "decode_folder", lambda listed, *_, **__: (list(listed.names), listed)
    )


@pytest.mark.slow
def test_of_100_000_pictures_the_page_is_ready_soon_and_memory_stays_bounded(tmp_path, monkeypatch):
    import resource

    names = [f"{k // 1000}/{k}.jpg" for k in range(100_000)]
    path, seconds = tmp_path / "labels.csv", {}
    path.write_text("file,label\n" + "".join(f"{n},{k % 9}\n" for k, n in enumerate(names[:500])))
    synthetic(monkeypatch, names, seconds)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = LabelOptions(tmp_path, path, device="cpu", quiet=True)
    session = label.open_session(options, label.Answers(path, names), names, [])
    state = json.loads(json.dumps(session.state()))
    assert time.process_time() - seconds["features"] < 10  # on one core, whatever else runs
    assert (state["pictures"], state["whole"], state["labels"]) == (2500, 100_000, 500)
    assert state["question"]["answer"] is None
    while session.learned != session.answers.version:
        time.sleep(0.05)
    assert session.model is not None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kB
    session.close()
