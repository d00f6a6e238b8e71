"""The labelling page in a real headless Chromium, by keyboard: `make test-browser`."""

from __future__ import annotations

import csv
import importlib.util
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ALONE, open_chromium

pytestmark = pytest.mark.browser
EXAMPLE = Path(__file__).parents[2] / "examples" / "draw_pictures.py"
EVIL = "<b>bird & co</b>"


def draw(folder: Path, number: int) -> dict[str, str]:
    place = importlib.util.spec_from_file_location("draw_pictures", EXAMPLE)
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    drawn: dict[str, str] = module.draw_folder(folder, number)
    return drawn


class Server:
    """`calmatch label` as a person starts it."""

    def __init__(self, place: Path) -> None:
        words = ["label", "photos", "--labels", "labels.csv", "--no-browser", "--quiet"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "calmatch", *words, "--net", "efficientnet_lite0"],
            cwd=place,
            env=ALONE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match, line
        self.address = match.group()


@pytest.fixture
def start(tmp_path) -> Any:
    """Starts servers in the test's folder; none outlives it."""
    servers: list[Server] = []

    def begin() -> Server:
        servers.append(Server(tmp_path))
        return servers[-1]

    yield begin
    for server in servers:
        server.process.terminate()  # and with it a fit
        server.process.communicate(timeout=60)


@pytest.fixture
def chromium() -> Any:
    opened = open_chromium("browser")
    yield opened
    opened.quit()


class Person:
    """Somebody who knows what the pictures show, and uses the keyboard alone."""

    def __init__(self, driver: Any, truth: dict[str, str]) -> None:
        self.driver, self.truth, self.said = driver, truth, dict[str, str]()

    def script(self, code: str) -> Any:
        return self.driver.execute_script(f"return {code}")

    def wait(self, what: Callable[[], Any], seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.script("[state?.busy, state?.version, timer]")
            time.sleep(0.05)

    def settle(self) -> None:
        self.wait(lambda: self.script("typeof state === 'object' && state !== null && !waiting"))

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()
        self.settle()

    def answer(self, name: str | None = None) -> str:
        """What the picture in view shows, by number key, or typed where it is new."""
        from selenium.webdriver.common.keys import Keys

        self.settle()
        file = self.script("current.name")
        name = name or self.truth[file]
        classes = self.script("state.classes.map((each) => each.name)")
        if name in classes:
            self.press(str(classes.index(name) + 1))
        else:
            if self.script("document.activeElement.id") != "new":
                self.press("/")
            self.press(name, Keys.ENTER)
        self.said[file] = name
        return str(file)


def rows_of(path: Path) -> dict[str, str]:
    with path.open(newline="", encoding="utf-8") as file:
        return {row["file"]: row["label"] for row in csv.DictReader(file)}


def test_forty_pictures_by_keyboard_from_zero_to_a_model(chromium, start, tmp_path):
    from selenium.webdriver.common.keys import Keys

    truth = draw(tmp_path / "photos", 60)
    path = tmp_path / "labels.csv"
    server = start()
    chromium.get(server.address)
    person = Person(chromium, truth)
    person.settle()
    assert "token" not in chromium.current_url
    assert person.script("document.activeElement.id") == "new"
    for _ in range(14):
        person.answer()
        assert rows_of(path) == person.said  # on disk before the next picture is there
    wrong = person.answer(EVIL)  # a mistake, with markup in its name
    assert rows_of(path)[wrong] == EVIL
    assert person.script("document.querySelectorAll('b').length") == 0
    person.press("u")
    del person.said[wrong]
    assert person.script("current.name") == wrong
    assert rows_of(path) == person.said
    person.answer()
    person.press("n")
    person.press("c")
    assert sorted(rows_of(tmp_path / "labels.other.csv").values()) == [
        "cannot tell",
        "none of these",
    ]
    person.press("s")
    last = person.answer("fish")
    person.press("b")  # back to it, and right this time
    assert person.script("current.name") == last
    person.answer()
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    person.press("1")
    assert "does not answer" in chromium.find_element("id", "trouble").text
    server = start()
    chromium.get(server.address)
    person.settle()
    assert person.script("state.labels") == len(person.said)
    assert rows_of(path) == person.said
    while len(person.said) < 34:
        person.answer()
    person.press("g")  # a group: all that are not of the first one's kind are left out
    person.wait(lambda: person.script("document.querySelectorAll('#tiles button').length > 5"))
    names = person.script("[...document.querySelectorAll('#tiles img')].map((each) => each.alt)")
    kind = truth[names[0]]
    for name in names:
        if truth[name] != kind:
            person.press(Keys.SPACE)
        else:
            person.said[name] = kind
        person.press(Keys.ARROW_RIGHT)
    classes = person.script("state.classes.map((each) => each.name)")
    person.press(str(classes.index(kind) + 1))
    assert rows_of(path) == person.said
    person.press("o")
    while len(person.said) < 40:
        person.answer()
    assert rows_of(path) == person.said
    assert all(truth[name] == kind for name, kind in person.said.items())
    person.wait(lambda: person.script("state.model !== null && !state.busy"))
    assert "95 % interval" in chromium.find_element("id", "sentence").text
    assert chromium.find_elements("css selector", "#curve svg .line")
    for width in (360, 1200):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert person.script("document.documentElement.scrollWidth") <= width
    bare = person.script(
        "[...document.querySelectorAll('button, input, select')].filter((each) => "
        "!(each.textContent || each.ariaLabel || each.labels?.length || "
        "each.querySelector('img')?.alt)).length"
    )
    assert bare == 0
    person.press("m")
    person.wait(lambda: person.script("state.fit && state.fit.code !== null"), 900)
    assert person.script("state.fit.code") == 0
    assert rows_of(path) == person.said
    chromium.get(chromium.find_element("id", "report").get_attribute("href"))
    number = len(person.said)  # forty, and what a group confirmed at once brought with it
    assert f"4 classes from {number} labels" in chromium.title + chromium.page_source
    # while the server is away, and when the old page asks its successor, which has another token
    expected = ("ERR_CONNECTION", "401 (Unauthorized)")
    log = [str(entry) for entry in chromium.get_log("browser")]
    assert not [line for line in log if not any(word in line for word in expected)]
    server.process.send_signal(signal.SIGINT)
    assert f"Saved: {number} labels of 4 classes" in server.process.communicate(timeout=60)[0]
    assert server.process.returncode == 0
