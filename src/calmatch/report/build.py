"""report.html: one page that opens from disk and loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from calmatch.checkpoint import write
from calmatch.report import content, summary, tables, words
from calmatch.report.console import COLUMNS, LEGEND
from calmatch.results import Run

HERE = Path(__file__).parent
MANY = 50  # runs on a page beyond which their curves get fewer points and no bands
SCRIPTS = ("spots.js", "charts.js", "compare.js", "page.js")
# Only our own scripts run, by their hashes; nothing can be fetched, sent or framed.
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def build(runs: Sequence[Run], path: Path) -> Path:
    """Write the page of one run, or the comparison of several."""
    found = [summary.judged(*run.predictions()) for run in runs]
    detail = content.FINE if len(runs) <= MANY else content.COARSE
    data: dict[str, Any] = {
        "runs": [content.numbers(*pair, detail) for pair in zip(runs, found, strict=True)]
    }
    chances = [summary.chance(one, draws=detail.draws) for one in found]
    view: dict[str, Any] = {"about": [content.about(run, path) for run in runs]}
    if len(runs) == 1:
        data |= content.details(runs[0], found[0])
        view |= {
            "sentences": words.headline(runs[0], data["runs"][0], chances[0]),
            "example": words.example(found[0]),
            "pictures": words.pictures(runs[0]),
        }
    else:
        data["gapGrid"] = summary.gap_grid(found, detail.grid)
        for run, one in zip(data["runs"], found, strict=True):
            run["gaps"] = summary.gaps(one, data["gapGrid"])
        view |= {
            "differences": content.differences(runs),
            "sentences": words.comparison(data["runs"]),
            "example": "",
        }
    for run, chance in zip(data["runs"], chances, strict=True):
        run["chance"] = chance
        run["verdict"] = words.verdict(run, chance)
    write(path, _page(runs, data, view))
    return path


def _page(runs: Sequence[Run], data: dict[str, Any], view: dict[str, Any]) -> str:
    scripts = [_libraries(), "\n".join(_text(name) for name in SCRIPTS)]
    return (
        _environment()
        .get_template("template.html")
        .render(
            view,
            heading=runs[0].title if len(runs) == 1 else f"{len(runs)} runs compared",
            over=" · ".join(dict.fromkeys(content.origin(run) for run in runs)),
            data=_finite(data, 5 if len(runs) <= MANY else 3),
            runs=data["runs"],
            classes=data.get("classes", []),
            per_class=data.get("perClass", []),
            tables=_tables(data),
            columns=[column.head.replace("\n", " ") for column in COLUMNS],
            legend=LEGEND,
            style=Markup(_text("page.css")),
            scripts=[Markup(script) for script in scripts],  # ours, and free of </script
            policy=POLICY.format(scripts=" ".join(map(_hash, scripts))),
        )
    )


def _tables(data: dict[str, Any]) -> dict[str, tables.Table]:
    runs = data["runs"]
    kinds = (tables.reliability, tables.smooth, tables.risk, tables.tested, tables.trained)
    found = {kind.__name__: kind(runs) for kind in kinds}
    if "confusion" in data:
        found |= {"confusion": tables.confusion(data), "logits": tables.logits(data)}
    return found


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("calmatch.report", "")
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    page.trim_blocks = page.lstrip_blocks = True
    page.filters |= {"percent": tables.percent, "signed": tables.signed}
    page.filters["whole"] = lambda text: text.replace(" %", "\u00a0%")  # no line break in between
    # tojson escapes <, >, & and ', and ASCII alone leaves no U+2028: safe inside a script element
    page.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return page


@functools.cache
def _libraries() -> str:
    """The plotting library with its licences, which ask to be in every copy."""
    notes = json.loads(_text("vendor/vendor.json"))
    licences = _text("vendor/LICENSES.txt").replace("*/", "* /")
    return f"/*!\n{licences}*/\n" + "\n;\n".join(_text(f"vendor/{note['file']}") for note in notes)


@functools.cache
def _text(name: str) -> str:
    return (HERE / name).read_text("utf-8")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _finite(value: Any, digits: int = 5) -> Any:
    """JSON knows no NaN; and five digits are more than a chart shows."""
    if isinstance(value, dict):
        return {key: _finite(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
