"""Takes the docs' pictures of the report and of the labelling page.

`python tools/screenshots.py RUNS`, their folder; or `label` in its place: `calmatch label` alone.

Pages are made anew from the run folders, so the pictures show what the code of today makes.
"""

from __future__ import annotations

import base64
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys

from calmatch import recipes, train
from calmatch.report import build

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
RUNS = ("supervised", "fixmatch", "fixmatch-margin", "freematch", "freematch-margin")
SHOTS = {  # name: page, width of the window, theme, what is shown (None: the top of the page)
    "report-top": ("one", 1120, "light", None),
    "report-reliability": ("one", 1120, "light", "#reliability"),
    "report-smooth": ("one", 1120, "light", "#smooth"),
    "report-risk": ("one", 1120, "light", "#risk"),
    "report-confusion": ("one", 1120, "dark", "#confusion"),
    "report-wrong": ("one", 1120, "dark", "#wrong"),
    "report-asked": ("one", 1120, "light", "#asked"),
    "report-logits": ("one", 1120, "light", "#logits"),
    "report-agreement": ("one", 1120, "light", "#agreement"),
    "report-curves": ("one", 1120, "light", "#curves"),
    "report-dark": ("one", 1120, "dark", None),
    "report-phone": ("one", 360, "light", None),
    "report-compared": ("several", 1120, "light", None),
    "report-gaps": ("several", 1120, "dark", "#gaps"),
}


def opened() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for word in ("headless=new", "no-sandbox", "disable-background-networking", "hide-scrollbars"):
        options.add_argument(f"--{word}")
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def take(driver: webdriver.Chrome, page: Path, width: int, theme: str, part: str | None) -> bytes:
    """One picture, as PNG."""
    size = {"width": width, "height": 1000 if width > 500 else 800, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "deviceScaleFactor": 1.5})
    features = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
    media = [{"name": name, "value": value} for name, value in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    driver.get(page.resolve().as_uri())
    clip: dict[str, Any] = {"x": 0, "y": 0, **{k: size[k] for k in ("width", "height")}}
    if part:
        element = driver.find_element("css selector", part)
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        _point(driver, part)
        time.sleep(0.2)
        clip = {k: element.rect[k] for k in ("x", "y", "width", "height")}
    shot = {"captureBeyondViewport": part is not None, "clip": {**clip, "scale": 1}}
    capture = driver.execute_cdp_cmd("Page.captureScreenshot", shot)
    return base64.b64decode(capture["data"])


def _point(driver: webdriver.Chrome, part: str) -> None:
    """Point at a place of a chart, so that its numbers show."""
    spots = driver.find_elements("css selector", f"{part} .spot")
    if spots and part not in ("#reliability", "#confusion"):  # these show something at first
        ActionChains(driver).move_to_element(spots[3 * len(spots) // 4]).perform()


def small(data: bytes) -> bytes:
    """The same picture in 256 colours, a third of the bytes; thin lines keep theirs."""
    smaller = io.BytesIO()
    image = Image.open(io.BytesIO(data)).convert("RGB")
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(smaller, "png", optimize=True)
    return smaller.getvalue()


LABEL_SHOTS = {  # name: labels by then, keys, width, height, theme
    "label-first": (0, "", 1120, 860, "light"),
    "label-learning": (32, "", 1120, 1180, "light"),
    "label-dark": (32, "h", 1120, 1180, "dark"),
    "label-group": (33, "g", 1120, 860, "light"),
    "label-list": (33, "l", 1120, 860, "dark"),
    "label-phone": (33, "o", 390, 800, "light"),
    "label-fit": (33, "m", 1120, 1400, "light"),
}


def label_shots(driver: webdriver.Chrome) -> None:
    """Label drawn pictures by keyboard, and look at the page now and then."""
    sys.path.insert(0, str(ASSETS.parent.parent / "examples"))
    from draw_pictures import draw_folder

    with tempfile.TemporaryDirectory() as place:
        truth = draw_folder(Path(place) / "photos")
        words = [sys.executable, "-m", "calmatch", "label", "photos", "--no-browser", "--quiet"]
        server = subprocess.Popen(words, cwd=place, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            driver.get(server.stdout.readline().split(": ")[1].strip())
            for name, (labels, keys, width, height, theme) in LABEL_SHOTS.items():
                while _look(driver, "state.labels") < labels:
                    _label_one(driver, truth)
                _look(driver, "!state.busy", wait=True)
                if keys:
                    ActionChains(driver).send_keys(keys).perform()
                if keys == "m":
                    _look(driver, "state.fit && state.fit.code !== null", wait=True)
                size = {"width": width, "height": height, "mobile": width < 500}
                size["deviceScaleFactor"] = 1
                driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                media = [{"name": "prefers-color-scheme", "value": theme}]
                driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
                time.sleep(1)
                capture = driver.execute_cdp_cmd("Page.captureScreenshot", {})
                shot = small(base64.b64decode(capture["data"]))
                (ASSETS / f"{name}.png").write_bytes(shot)
        finally:
            server.terminate()
            server.wait()


def _look(driver: webdriver.Chrome, what: str, wait: bool = False) -> Any:
    """A value of the page, when it is at rest."""
    while not driver.execute_script("return typeof state === 'object' && state && !waiting"):
        time.sleep(0.05)
    while wait and not driver.execute_script(f"return {what}"):
        time.sleep(0.2)
    return driver.execute_script(f"return {what}")


def _label_one(driver: webdriver.Chrome, truth: dict[str, str]) -> None:
    name, classes = _look(driver, "[current.name, state.classes.map((each) => each.name)]")
    keys = ActionChains(driver)
    if truth[name] in classes:
        keys.send_keys(str(classes.index(truth[name]) + 1)).perform()
        return
    if _look(driver, "document.activeElement.id") != "new":
        keys.send_keys("/")
    keys.send_keys(truth[name], Keys.ENTER).perform()


def main() -> None:
    driver = opened()
    try:
        label_shots(driver)
    finally:
        driver.quit()
    if sys.argv[1] == "label":
        return
    folder, runs = Path(sys.argv[1]), []
    for name in RUNS:
        method, _, margin = name.partition("-")
        config = recipes.digits_40(method, penalty="margin(m=10)" if margin else "")
        runs.append(train(config, folder / name))
    build(runs[-1:], runs[-1].folder / "report.html")
    pages = {
        "one": runs[-1].folder / "report.html",
        "several": build(runs, folder / "report.html"),
    }
    driver = opened()
    try:
        for name, (page, width, theme, part) in SHOTS.items():
            shot = take(driver, pages[page], width, theme, part)
            (ASSETS / f"{name}.png").write_bytes(small(shot))
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
