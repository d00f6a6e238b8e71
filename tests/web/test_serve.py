"""`calmatch serve`: what it answers is what the model says, and no request harms it or is lost."""

from __future__ import annotations

import http.client
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from calmatch import posthoc
from calmatch.files import read_json
from calmatch.model import load_model, save_calibration
from calmatch.options import ServeOptions
from calmatch.web import build_app, listen, serve
from conftest import ALONE, write_random_model

pytest.importorskip("starlette")
HERE = Path(serve.__file__).parent


def picture(seed: int = 0, format: str = "png", size: tuple[int, int] = (40, 30)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(data, format)
    return data.getvalue()


def opened_image(seed: int) -> Image.Image:
    return Image.open(io.BytesIO(picture(seed)))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model with random weights that promises sets and accuracy."""
    (tmp_path / "run").mkdir()
    write_random_model(tmp_path / "run", "tiny", 4, 16)
    scaling = posthoc.Scaling("temperature", {"temperature": 2.0}, 100)
    sets = posthoc.Conformal("aps", 0.9, 0.8, 100, 0)
    save_calibration(tmp_path / "run", scaling, sets)
    said = load_model(tmp_path / "run").predict([np.asarray(opened_image(k)) for k in range(9)])
    middle = sorted(answer.confidence for answer in said)[4]
    sure = posthoc.Selective(middle, 0.6, 0.96, 100, 0)
    save_calibration(tmp_path / "run", scaling, sets, sure)
    return tmp_path / "run"


@pytest.fixture
def client(folder) -> Any:
    with opened(folder) as one:
        yield one


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[Any]:
    from starlette.testclient import TestClient

    options = ServeOptions(folder, device="cpu", **settings)
    service, place = serve.Service(load_model(folder), options), listen("127.0.0.1", 0)
    limit = int(options.megabytes * 1e6)
    app = build_app(service.routes(), place, token=None, limit=limit, lifespan=service.lifespan)
    app.state.service = service
    with (
        place,
        TestClient(app, base_url=f"http://127.0.0.1:{place.getsockname()[1]}") as client,
    ):
        yield client


def test_answers_are_the_models_own_and_as_openapi_describes_them(client, folder, tmp_path):
    import jsonschema

    described = client.get("/openapi.json").json()
    schema = {**described["components"]["schemas"]["Answer"], "components": described["components"]}
    model, sure = load_model(folder), set()
    for seed, format in enumerate(["png", "jpeg", "webp", "bmp", "gif", "tiff"] * 3):
        (tmp_path / "one").write_bytes(data := picture(seed, format, (20 + 9 * seed, 37)))
        answer, reply = model.predict(tmp_path / "one"), client.post("/predict", content=data)
        said = reply.json()
        jsonschema.validate(said, schema)
        assert (said["label"], tuple(said["set"]), said["sure"]) == (*answer[:1], *answer[2:])
        assert said["confidence"] == round(answer.confidence, 6)
        assert said["probabilities"][said["label"]] == max(said["probabilities"].values())
        assert abs(sum(said["probabilities"].values()) - 1) < 1e-5
        assert said["model"] == model.version
        sure.add(said["sure"])
    assert sure == {True, False}


def test_every_address_is_described_and_the_page_loads_its_own_files_alone(client):
    service = client.app.state.service
    paths = {route.path for route in service.routes()}
    described = client.get("/openapi.json").json()["paths"]
    own = {"/", "/serve.js", "/serve.css", "/favicon.ico", "/openapi.json"}
    assert paths - described.keys() == own
    assert described.keys() <= paths
    loaded = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            names = dict(attrs)
            assert "style" not in names
            assert not any(name.startswith("on") for name in names)
            assert tag != "style"
            assert tag != "script" or names["src"]
            loaded.extend(f"/{names[key]}" for key in ("src", "href") if names.get(key))

    reply = client.get("/")
    Links().feed(reply.text)
    assert set(loaded) == {"/serve.js", "/serve.css", "/openapi.json", "/metrics"}
    assert "script-src 'self'" in reply.headers["content-security-policy"]
    for path in loaded:
        assert client.get(path).status_code == 200
    assert "innerHTML" not in (HERE / "serve.js").read_text()


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"", 422, "it is no picture"),
        (b"hello", 422, "cannot be decoded"),
        (picture(format="jpeg")[:300], 422, "cannot be decoded"),
        (picture(format="eps"), 422, "cannot be decoded"),
        (
            picture(format="gif", size=(2000, 600)),
            413,
            "2,000 x 600 pixels; at most 1,000,000 are read",
        ),
        (bytes(100_001), 413, "100,000 bytes"),
    ],
)
def test_what_is_no_picture_or_too_large_is_one_sentence(folder, data, status, words):
    with opened(folder, megabytes=0.1, megapixels=1) as client:
        reply = client.post("/predict", content=data)
        assert (reply.status_code, words in reply.text) == (status, True), reply.text
        chunks = client.post("/predict", content=iter([data]))  # its length is not said
        assert (chunks.status_code, words in chunks.text) == (status, True), chunks.text
        form = client.post("/predict", files={"file": data})
        assert form.status_code == (413 if status == 413 and len(data) > 9e4 else 415)
        assert client.post("/predict", content=picture()).status_code == 200
        assert client.app.state.service.held == 0


def test_requests_that_wait_are_computed_together_and_each_gets_its_own(client, folder):
    service, model = client.app.state.service, load_model(folder)
    go, real = threading.Event(), service.model.probabilities

    def slow(images: Any) -> Any:
        go.wait(30)
        return real(images)

    service.model.probabilities = slow
    pictures = [picture(seed) for seed in range(24)]
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(client.post, "/predict", content=data) for data in pictures]
        until = time.monotonic() + 20
        while len(service.waiting) < 24 - service.workers and time.monotonic() < until:
            time.sleep(0.01)
        waiting = client.get("/metrics").text
        go.set()
        said = [reply.result().json() for reply in asked]
    assert f"calmatch_waiting {24 - service.workers}" in waiting
    for seed, one in enumerate(said):
        assert one["label"] == model.predict(opened_image(seed)).label
    assert service.batches < 24


def test_metrics_add_up_in_prometheus_format(client):
    for seed in range(5):
        client.post("/predict", content=picture(seed))
    client.post("/predict", content=b"no")
    line = re.compile(
        r"(# (HELP|TYPE) calmatch_\w+ .+|calmatch_\w+(\{\w+=\"[^\"]*\"\})? [0-9.e+-]+)"
    )
    lines = client.get("/metrics").text.splitlines()
    assert all(line.fullmatch(each) for each in lines)
    for wanted in (
        'calmatch_requests_total{status="200"} 5',
        'calmatch_requests_total{status="422"} 1',
        "calmatch_request_seconds_count 6",
        'calmatch_request_seconds_bucket{le="+Inf"} 6',
        "calmatch_confidence_count 5",
        "calmatch_waiting 0",
    ):
        assert wanted in lines
    described = client.get("/openapi.json").json()["components"]["schemas"]["Health"]
    pytest.importorskip("jsonschema").validate(client.get("/health").json(), described)


def test_a_fault_of_ours_is_answered_and_ends_nothing(client, capsys):
    service = client.app.state.service
    real = service.model.probabilities
    service.model.probabilities = lambda images: 1 / 0
    reply = client.post("/predict", content=picture())
    service.model.probabilities = real
    assert (reply.status_code, "fault" in reply.json()["error"]) == (500, True)
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert client.post("/predict", content=picture()).status_code == 200


def test_more_than_memory_holds_is_asked_to_come_again(client, monkeypatch):
    monkeypatch.setattr(serve, "DECODED", 10)
    client.app.state.service.held = 10
    reply = client.post("/predict", content=picture())
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_only_other_machines_need_a_token_and_may_use_any_name(folder, monkeypatch, capsys, host):
    from starlette.testclient import TestClient

    served = []
    monkeypatch.setattr(serve, "run", lambda app, place: served.append((app, place)))
    serve.serve(ServeOptions(folder, host=host, port=0, device="cpu"))
    (app, place), said = served[0], capsys.readouterr().out
    token = said.partition("?token=")[2].strip()
    assert bool(token) == (host == "0.0.0.0")
    port = place.getsockname()[1]
    with TestClient(app, base_url=f"http://example.org:{port}") as client:
        assert client.get("/health").status_code == (401 if token else 400)
    with TestClient(app, base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/health").status_code == (401 if token else 200)
        head = {"authorization": f"Bearer {token}"}
        assert client.post("/predict", content=picture(), headers=head).status_code == 200
        other = {**head, "origin": "http://example.org"}
        assert client.post("/predict", content=picture(), headers=other).status_code == 403
        assert client.get(f"/?token={token}").status_code == 200
        assert client.get("/health").status_code == 200  # by the cookie
    place.close()


def test_mistakes_are_sentences(folder, typed):
    for words, sentence in (
        (["--port", "70000"], "--port"),
        (["--megapixels", "0"], "--megapixels"),
        (["--host", "203.0.113.9"], "Cannot listen on 203.0.113.9"),
    ):
        done = typed("serve", folder, *words)
        assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr


def test_nothing_is_lost_when_the_server_is_terminated(folder):
    """Every request that reached an open connection is answered; afterwards nobody is let in."""
    command = [sys.executable, "-m", "calmatch", "serve", folder, "--port", "0", "--quiet"]
    clients = 32
    answered, lost, data = [0] * clients, [], picture()

    def ask(number: int) -> None:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while True:
            try:
                line.connect() if line.sock is None else None
            except ConnectionRefusedError:
                return
            try:
                line.request("POST", "/predict", data)
                reply = line.getresponse()
                assert reply.status == 200
                json.loads(reply.read())
                answered[number] += 1
            except (OSError, http.client.HTTPException) as error:
                lost.append(repr(error))
                return

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ALONE) as server:
        port = int(server.stdout.readline().rstrip("/\n").rpartition(":")[2])
        threads = [threading.Thread(target=ask, args=(k,)) for k in range(clients)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 30
        while min(answered) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 143
        for thread in threads:
            thread.join(30)
    assert min(answered) >= 3
    assert not lost


def test_the_description_is_openapi_and_names_every_status():
    described = read_json(HERE / "openapi.json")
    source = (HERE / "serve.py").read_text()
    statuses = set(re.findall(r"(?:return |\()(4\d\d|5\d\d), ", source)) - {
        "499"
    }  # nobody sees that
    assert statuses | {"200"} == described["paths"]["/predict"]["post"]["responses"].keys()
