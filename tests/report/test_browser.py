"""The report page in a real headless Chromium: `make test-browser`."""

from __future__ import annotations

import json

import pytest

import folders
from calmatch.report import build
from conftest import open_chromium

pytestmark = pytest.mark.browser
SINGLE = ["reliability", "histogram", "smooth", "risk", "confusion", "logits", "curves"]
SINGLE += ["agreement"]
COMPARED = ["reliability", "histogram", "smooth", "risk", "gaps", "curves", "ece-curves"]
COMPARED += ["agreement"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of one run with dangerous names, one of a plain run, and a comparison."""
    folder = tmp_path_factory.mktemp("runs")
    evil = folders.made(
        folder / "evil",
        classes=folders.NASTY,
        title=f'"quoted" {folders.EVIL}',
        notes=[folders.EVIL],
        files=True,
    )
    runs = [
        folders.made(folder / f"run{k}", title=f"method {k}", seed=k, pictures=400)
        for k in range(3)
    ]
    old = folders.made(folder / "old", examples_too=False, pictures=50)
    (old.folder / "metrics.jsonl").unlink()
    build(runs[:1], runs[0].folder / "report.html")
    return {
        "evil": build([evil], folder / "evil.html"),
        "plain": runs[0].folder / "report.html",
        "old": build([old], folder / "old.html"),
        "compared": build([*runs, evil], folder / "compared.html"),
    }


@pytest.fixture(scope="module")
def chromium():
    opened = open_chromium("browser", "performance")
    opened.set_script_timeout(10)
    watch = {"source": "window.alert = () => { window.alerted = true; };"}
    opened.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", watch)
    yield opened
    opened.quit()


@pytest.fixture
def visit(chromium, pages):
    """Open a page; afterwards nothing may have been logged and nothing asked of the network."""
    from selenium.webdriver.support.ui import WebDriverWait

    def go(name, width=1200, theme="light"):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
        media = {"features": [{"name": k, "value": v} for k, v in features.items()]}
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chromium.get(pages[name].as_uri())
        whole = "return document.readyState === 'complete'"  # on a busy machine `get` is early
        WebDriverWait(chromium, 60).until(lambda driver: driver.execute_script(whole))
        return chromium

    chromium.get("about:blank")
    chromium.get_log("browser")
    chromium.get_log("performance")
    yield go
    assert chromium.get_log("browser") == []
    messages = [json.loads(entry["message"]) for entry in chromium.get_log("performance")]
    sent = [
        message["message"]["params"]["request"]["url"]
        for message in messages
        if message["message"]["method"] == "Network.requestWillBeSent"
    ]
    assert all(url.startswith(("file:", "data:", "about:")) for url in sent), sent
    resources = chromium.execute_script("return performance.getEntriesByType('resource').length")
    assert resources == 0


def find(driver, selector):
    return driver.find_elements("css selector", selector)


def one(driver, selector):
    return driver.find_element("css selector", selector)


def hover(driver, element):
    from selenium.webdriver import ActionChains

    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    ActionChains(driver).move_to_element(element).perform()


def click(driver, element):
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def choose(driver, select, value):
    from selenium.webdriver.support.ui import Select

    Select(one(driver, select)).select_by_value(value)


def press(driver, *keys):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    for key in keys:
        ActionChains(driver).send_keys(getattr(Keys, key)).perform()


@pytest.mark.parametrize("width", [360, 800, 1200])
@pytest.mark.parametrize(("name", "wanted"), [("plain", SINGLE), ("compared", COMPARED)])
def test_every_chart_is_drawn_and_fits(visit, name, wanted, width):
    driver = visit(name, width)
    assert [f.get_attribute("data-chart") for f in find(driver, "figure[data-chart]")] == wanted
    for chart in wanted:
        drawn = find(driver, f"figure[data-chart='{chart}'] .plot > svg")
        assert len(drawn) == 1, chart
        assert drawn[0].size["width"] > 200
        assert drawn[0].size["height"] > 150
        marks = "g[aria-label] path, g[aria-label] rect, g[aria-label] circle"
        assert len(drawn[0].find_elements("css selector", marks)) >= 2, chart
        assert len(drawn[0].find_elements("css selector", ".spot")) >= 4, chart
        assert drawn[0].get_attribute("aria-label")
        words = drawn[0].text
        assert any(character.isalpha() for character in words), f"{chart} has no axis label"
    wide = driver.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width


def test_pointing_at_a_bin_shows_count_accuracy_confidence_and_pictures(visit):
    driver = visit("plain")
    bins = find(driver, "#reliability .spot")
    out = one(driver, "#reliability .readout")
    seen = set()
    for spot in (bins[0], bins[-1]):
        hover(driver, spot)
        (
            title,
            *_,
        ) = out.text.splitlines()
        assert spot.get_attribute("aria-label").startswith(title)
        for word in ("pictures", "confidence", "accuracy", "95 %"):
            assert word in out.text
        shown = out.find_elements("css selector", "img")
        assert shown
        for picture in shown:
            assert driver.execute_script("return arguments[0].naturalWidth", picture) == 16
            assert picture.get_attribute("alt")
        seen.add(title)
    assert len(seen) == 2


def test_charts_are_read_by_keyboard_alone(visit):
    driver = visit("plain")
    charts = []
    for _ in range(120):
        press(driver, "TAB")
        here = driver.switch_to.active_element
        if here.get_attribute("class") in ("spot", "spot on"):
            charts.append(
                here.find_element("xpath", "ancestor::figure").get_attribute("data-chart")
            )
            out = one(driver, f"figure[data-chart='{charts[-1]}'] .readout")
            press(driver, "HOME")
            first = out.text
            assert first
            press(driver, "ARROW_RIGHT" if charts[-1] != "confusion" else "END")
            assert out.text != first, charts[-1]
            focused = driver.switch_to.active_element
            assert focused.get_attribute("aria-label")
            ring = "return getComputedStyle(arguments[0]).stroke"
            assert driver.execute_script(ring, focused) != "none"
        if len(charts) == len(SINGLE):
            break
    assert charts == SINGLE  # one tab stop each, in the order of the page


def test_arrow_keys_walk_the_confusion_matrix_in_two_directions(visit):
    driver = visit("plain")
    first = one(driver, "#confusion .spot")
    driver.execute_script("arguments[0].focus()", first)
    press(driver, "ARROW_DOWN")
    below = driver.switch_to.active_element
    assert below.location["y"] > first.location["y"]
    assert below.location["x"] == first.location["x"]
    press(driver, "ARROW_RIGHT")
    beside = driver.switch_to.active_element
    assert beside.location["y"] == below.location["y"]
    assert beside.location["x"] > below.location["x"]


def rows(driver, table):
    return [row for row in find(driver, f"{table} tbody tr") if row.is_displayed()]


def test_the_class_table_sorts_by_pointer_and_keyboard(visit):
    driver = visit("plain")

    def column(place):
        cells = [
            row.find_elements("css selector", "th, td")[place]
            for row in rows(driver, "#class-table")
        ]
        return [cell.get_attribute("data-sort") for cell in cells]

    heads = find(driver, "#class-table thead th")
    click(driver, heads[2].find_element("css selector", "button"))
    errors = [float(value) for value in column(2)]
    assert errors == sorted(errors)
    assert heads[2].get_attribute("aria-sort") == "ascending"
    press(driver, "ENTER")  # the button has the focus
    assert [float(value) for value in column(2)] == sorted(errors, reverse=True)
    assert heads[2].get_attribute("aria-sort") == "descending"
    click(driver, heads[0].find_element("css selector", "button"))
    assert column(0) == sorted(column(0))
    assert heads[2].get_attribute("aria-sort") is None


def test_classes_and_wrong_pictures_can_be_filtered(visit):
    driver = visit("evil")
    one(driver, "#find").send_keys("LANGER")
    assert len(rows(driver, "#class-table")) == 1
    assert one(driver, "#found").text == "1 of 5 classes"
    one(driver, "#find").clear()
    one(driver, "#find").send_keys("<SCRIPT>")
    assert [row.text.startswith("<script>") for row in rows(driver, "#class-table")] == [True]
    one(driver, "#find").clear()
    press(driver, "TAB")
    click(driver, one(driver, "#only-over"))
    assert all(row.get_attribute("data-over") == "1" for row in rows(driver, "#class-table"))
    every = len(find(driver, "#wrong-gallery li"))
    choose(driver, "#wrong-class", "3")
    some = find(driver, "#wrong-gallery li")
    assert 0 < len(some) < every
    assert all("ein recht langer" in item.text for item in some)


def test_another_class_shows_its_own_logits(visit):
    driver = visit("plain")
    chart = "#logits svg[aria-label]"
    seen = set()
    for name in ("3", "1"):
        choose(driver, "#logit-class", name)
        assert one(driver, chart).get_attribute("aria-label").endswith(f"of {name}")
        curves = find(driver, "#logits g[aria-label=line] path")
        seen.add(tuple(curve.get_attribute("d") for curve in curves))
    assert len(seen) == 2


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


COLOUR = """
const probe = document.createElement("canvas").getContext("2d");
const box = document.body.appendChild(document.createElement("i"));
box.style.color = `var(--${arguments[0]})`;
probe.fillStyle = getComputedStyle(box).color;
box.remove();
return probe.fillStyle;
"""


def contrast(driver, first, second):
    lights = sorted(luminance(driver.execute_script(COLOUR, name)) for name in (first, second))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_can_be_read_and_the_button_changes_between_them(visit, theme):
    driver = visit("plain", theme=theme)
    paper = "return getComputedStyle(document.body).backgroundColor"
    first = driver.execute_script(paper)
    for ground in ("paper", "card"):
        assert contrast(driver, "ink", ground) >= 7
        assert contrast(driver, "faint", ground) >= 4.5
        for line in ("c1", "c2", "c3", "c4", "c5", "c6", "focus"):
            assert contrast(driver, line, ground) >= 3, line
    one(driver, "#theme").click()
    assert driver.execute_script(paper) != first
    light = luminance(driver.execute_script(COLOUR, "paper"))
    assert (light < 0.5) == (theme == "light")
    one(driver, "#theme").click()
    assert driver.execute_script(paper) == first


def test_dangerous_names_are_only_words(visit):
    driver = visit("evil")
    assert driver.execute_script("return window.alerted") is None
    assert len(find(driver, "script")) == 3
    assert folders.EVIL in driver.title
    assert one(driver, "h1").text == f'"quoted" {folders.EVIL}'
    assert "{{ 7 * 7 }}" in one(driver, "#class-table").text
    names = [item.text for item in find(driver, "#asked-gallery .name")]
    assert any(folders.EVIL.split("(")[0] in text for text in names)
    hover(driver, find(driver, "#confusion .spot")[1])
    assert "taken for" in one(driver, "#confusion .readout").text


def test_foreign_scripts_and_requests_are_refused(chromium, pages):
    chromium.get(pages["plain"].as_uri())
    done = chromium.execute_async_script(
        """
        const done = arguments[0];
        const script = document.createElement("script");
        script.textContent = "window.intruder = true";
        document.body.append(script);
        const picture = new Image();
        const asked = new Promise((yes) => {
          picture.onload = () => yes("loaded");
          picture.onerror = () => yes("refused");
        });
        picture.src = "https://example.invalid/x.png";
        const fetched = fetch("https://example.invalid/").then(() => "loaded", () => "refused");
        Promise.all([asked, fetched]).then((found) => done([window.intruder, ...found]));
        """
    )
    assert done == [None, "refused", "refused"]
    logged = " ".join(entry["message"] for entry in chromium.get_log("browser"))
    assert logged.count("Content Security Policy") >= 3


def test_a_page_of_an_old_folder_says_what_it_does_not_know(visit):
    driver = visit("old")
    assert "not measured" in one(driver, "#curves").text
    assert "no record" in one(driver, "#agreement").text
    assert not find(driver, "#wrong, #asked")
    hover(driver, find(driver, "#reliability .spot")[0])
    assert "accuracy" in one(driver, "#reliability .readout").text


def test_every_chart_has_its_numbers_in_a_table(visit):
    driver = visit("plain")
    for chart in ("reliability", "smooth", "risk", "confusion", "logits", "curves", "agreement"):
        details = one(driver, f"#{chart} details.numbers")
        click(driver, details.find_element("css selector", "summary"))
        cells = details.find_elements("css selector", "tbody td")
        assert len(cells) >= 6, chart
        assert cells[0].is_displayed()
        assert all(cell.text for cell in cells[:6])


def test_without_scripts_the_words_and_tables_remain(chromium, pages):
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get(pages["plain"].as_uri())
        assert "are classified wrongly" in one(chromium, ".hero").text
        assert "The charts need scripts" in one(chromium, "noscript").text
        assert len(find(chromium, "#class-table tbody tr")) == 5
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_runs_are_compared_on_the_same_axes(visit):
    driver = visit("compared")
    lines = "figure[data-chart='risk'] g[aria-label=line] path"
    assert len(find(driver, lines)) == 4
    hover(driver, find(driver, "#risk .spot")[-1])
    said = one(driver, "#risk .readout").text
    assert all(f"method {k}" in said for k in range(3))
    check = find(driver, "#legend input")[1]
    click(driver, check)
    assert len(find(driver, lines)) == 3
    hover(driver, find(driver, "#risk .spot")[-1])
    assert "method 1" not in one(driver, "#risk .readout").text
    head = find(driver, "#table thead th")[1]
    click(driver, head.find_element("css selector", "button"))
    values = [
        float(cell.get_attribute("data-sort"))
        for cell in find(driver, "#table .sortable tbody td:nth-child(2)")
    ]
    assert values == sorted(values)
    small = one(driver, "#table tbody td small").text
    assert "–" in small  # intervals
    link = one(driver, "#table tbody a")
    assert link.get_attribute("href").endswith("run0/report.html")
