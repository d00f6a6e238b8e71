"""Takes the docs' pictures of the report page: `python tools/screenshots.py RUNS`, their folder.

Pages are made anew from the run folders, so the pictures show what the code of today makes.
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service

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


def main() -> None:
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
