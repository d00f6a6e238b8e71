"""From run folders to results/*.jsonl, and from these alone to docs/results.md and the README.

`python tools/evidence.py collect RUNS ... --out results/NAME.jsonl [--suite SUITE]` makes a line of
every finished run (no weights, no predictions); where the file is there, its other lines stay.
`python tools/evidence.py write` rewrites docs/results.md, its figures and the README's part from
results/*.jsonl; `--check` says whether the page is what the lines give.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from calmatch import checkpoint
from calmatch.bench import (
    again,
    chosen,
    compact,
    comparisons,
    evidence,
    figures,
    published,
    render,
    tables,
)
from calmatch.bench.figures.forest import draw_forest
from calmatch.bench.figures.style import LOOK
from calmatch.bench.figures.trust import draw_trust, prepare_trust
from calmatch.bench.groups import Found
from calmatch.bench.own import CLOSER, FITTED, LOOKED, MILDER
from calmatch.recipes import METHOD

ROOT = Path(__file__).parent.parent
SUITES = {  # the order of the page
    "evidence": "Whole networks, one H200",
    "longer": "Whole networks, three times as long",
    "scratch": "Without ImageNet: WRN-28-2 from scratch",
    "draws": "A frozen network, twenty draws of labels",
    "frozen": "A frozen network, two CPU cores",
    "network": "Another frozen network",
}
CAPPED, MARGIN = f"{METHOD} + cap", f"{METHOD} + margin"
# the row that each suite sets beside plain FreeMatch: what fit does, where it has that
DEFAULTS = {
    "evidence": CAPPED,
    "longer": CAPPED,
    "scratch": MARGIN,
    "draws": FITTED,
    "frozen": FITTED,
    "network": FITTED,
}
SAID = {
    CAPPED: "FreeMatch with a cap, averaged",
    MARGIN: "FreeMatch with the published margin, averaged",
    FITTED: "what calmatch fit does",
}
LINES = 5  # that a picture bears whatever they are
NAMES = {
    "eurosat_pack_40": "EuroSAT, 40 labels",
    "eurosat_pack_20": "EuroSAT, 20 labels",
    "cifar10_pack_40": "CIFAR-10, 40 labels",
    "eurosat_frozen_40": "EuroSAT, 40 labels",
    "eurosat_frozen_20": "EuroSAT, 20 labels",
    "cifar10_frozen_40": "CIFAR-10, 40 labels",
    "cifar10_frozen_250": "CIFAR-10, 250 labels",
    "cifar10_pack_250": "CIFAR-10, 250 labels",
    "eurosat_long_40": "EuroSAT, 40 labels",
    "cifar10_long_40": "CIFAR-10, 40 labels",
    "cifar10_scratch_250": "CIFAR-10, 250 labels",
    "eurosat_lite2_40": "EuroSAT, 40 labels",
    "eurosat_lite2_20": "EuroSAT, 20 labels",
    "cifar10_lite2_40": "CIFAR-10, 40 labels",
    "digits_40": "digits, 40 labels",
}
INTRO = """# Results

Made by `python tools/evidence.py write` from `results/*.jsonl` alone; every line there is a run:
its settings, seed, numbers, learning curve, device and time. `calmatch train` with those settings
repeats it; `calmatch bench SUITE` makes all of a part (evidence, longer, scratch,
draws, frozen, network).

Weights are those of the last step, never chosen on test pictures. "Averaged" are the EMA of the
same run, "last weights" what the paper evaluates. Numbers of other papers were chosen on the test
set and made with another network.
"""


def collect(runs: list[Path], out: Path, suite: str | None) -> None:
    """Add the runs to a file of lines, in place of older lines of the same settings and seed."""
    made = compact.collect(runs, suite)
    before = out.read_text("utf-8").splitlines() if out.exists() else []
    lines = {_name(line): line for line in [*map(json.loads, before), *made]}
    out.parent.mkdir(parents=True, exist_ok=True)
    ordered = [lines[name] for name in sorted(lines)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in ordered)
    checkpoint.write(out, text)
    print(f"{out}: {len(made)} runs added or renewed, {len(lines)} in all, {len(text):,} bytes")


def _name(line: dict[str, Any]) -> tuple[str, int, int]:
    seeds = [line["config"].get(field, 0) for field in ("seed", "split_seed")]
    return str(line["code"]), seeds[0], seeds[1]


def pages(files: list[Path], page: Path) -> dict[Path, bytes]:
    """The page and its figures, by path."""
    made: dict[Path, bytes] = {}
    parts = [INTRO, *_prose("intro")]
    there: dict[str, Found] = {}
    lines = compact.kept(files)  # a damaged one is told
    beside = (path.parent / "repeats" / path.name for path in files)
    twice = compact.kept([path for path in beside if path.exists()])
    for suite in SUITES:
        try:
            there[suite] = evidence.named(compact.grouped(lines, suite), NAMES)
        except ValueError:
            continue  # none of its runs is there
    if {"evidence", "frozen"} <= there.keys():
        parts += [render.markdown([card(there["evidence"], there["frozen"])]), *_prose("card")]
    parts += _headed("Where we differ from the paper", "paper")
    for suite, found in there.items():
        parts += _headed(SUITES[suite], suite)
        if found.at(DEFAULTS[suite], found.columns[0]):
            parts += trust(suite, found, page, made)
        if suite not in ("draws", "network"):  # the bar is all that they ask
            more = _there(again.repeats(twice, found), again.sisters(lines, found))
            parts += [render.markdown(more)] if more else []
            parts += section(suite, found, page, made)
    made[page] = "\n".join(parts).encode()
    return made


def _prose(name: str) -> list[str]:
    """What a person wrote beside the numbers: results/NAME.md."""
    path = ROOT / "results" / f"{name}.md"
    return [path.read_text("utf-8")] if path.exists() else []


def _headed(title: str, name: str) -> list[str]:
    return [f"## {title}\n", *_prose(name)]


def section(suite: str, found: Found, page: Path, made: dict[Path, bytes]) -> list[str]:
    """Every quantity of one suite."""
    parts = []
    last = evidence.unaveraged(found)
    shown = [evidence.details(found, column) for column in found.columns]
    hidden: list[render.Table] = []
    if len(found.columns) > 1:
        shown, hidden = [tables.grid(found, metric) for metric in ("error", "ece")], shown
    notes = dict.fromkeys([*shown[0].notes, tables.seeds_note(found), evidence.span(found)])
    shown[0] = shown[0]._replace(notes=list(notes))
    parts.append(render.markdown(shown))
    parts += _folded("Every quantity of each setting", hidden)
    parts += margins(suite, found, page, made)
    parts.append(render.markdown(_there(comparisons.ranks(found))))
    parts += _folded("Paired differences", _there(comparisons.differences(found)))
    parts += _folded("Temperatures with and without labels", [evidence.free(found)])
    parts += _folded("Honest and leaky protocol", _there(tables.protocols(found)))
    parts += _folded("Agreement of views", [evidence.agreements(found)])
    if last.groups:
        parts += _folded("Averaged and last weights", [evidence.averaging(found)])
        more = [*(evidence.details(last, c) for c in last.columns), *_there(evidence.free(last))]
        more += _there(comparisons.differences(last))
        parts += [_last(part) for part in _folded("The same of the last weights", more)]
    if any(published.find(g.row, evidence.as_published(g), "error", "") for g in found.groups):
        renamed = [g._replace(column=evidence.as_published(g)) for g in found.groups]
        beside = comparisons.beside(found._replace(groups=renamed), "")
        parts += _folded("Ours beside the published numbers", beside)
    parts += _folded("Device and time", [evidence.cost(found)])
    for column in found.columns:
        drawing = figures.FIGURES["convergence"].prepare(_few(found.only(column), DEFAULTS[suite]))
        name = re.sub(r"\W+", "_", f"{suite} {column}")
        picture = figures.encode(figures.drawn("convergence", drawing), ".svg")
        parts.append(_figure(page, made, name, picture, f"Learning curves, {column}"))
    return parts


def margins(suite: str, found: Found, page: Path, made: dict[Path, bytes]) -> list[str]:
    """Does a margin help, and who says so?"""
    some = chosen.changes(found, METHOD, ("margin", "mild cap", "cap"))
    table = chosen.table(some)
    if table is None:
        return []
    png = _png(draw_forest, some)
    words = f"{table.title}: mean and 95 % interval over pairs of runs"
    shown = [f"### {table.title}\n", _figure(page, made, f"margin_{suite}", png, words, "png")]
    return [*shown, _folding("In numbers", _untitled(table))]


def card(whole: Found, frozen: Found) -> render.Table:
    """The bar by what fit does on a card: a frozen network where a class has two labels.

    A frozen network's runs are paired by their draw of labels.
    """
    groups = []
    for column in (NAMES["eurosat_pack_40"], NAMES["eurosat_pack_20"], NAMES["cifar10_pack_40"]):
        few = column == NAMES["eurosat_pack_20"]
        fitted = frozen.at(FITTED, column) if few else whole.at(CAPPED, column)
        if (plain := whole.at(METHOD, column)) and fitted:
            runs = {(draw, draw): run for (_, draw), run in fitted.runs.items()}
            groups += [plain, fitted._replace(row="calmatch fit", runs=runs)]
    title = "The bar, the way calmatch fit goes on a card, %"
    return evidence.bar(Found(groups, []), METHOD, ["calmatch fit"], title, brief=True)


def _folded(title: str, some: list[render.Table]) -> list[str]:
    """Tables that a click opens."""
    if not some:
        return []
    return [_folding(title, render.markdown(some))]


def _folding(title: str, text: str) -> str:
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n</details>\n'


def _untitled(table: render.Table) -> str:
    return render.markdown([table]).split("\n", 2)[2].lstrip("\n")


def _few(found: Found, default: str) -> Found:
    """The plain methods and the default, as many as a picture bears."""
    if len(found.groups) <= LINES:
        return found
    kept = [group for group in found.groups if group.row.isalnum() or group.row == default]
    return found._replace(groups=kept)


def trust(suite: str, found: Found, page: Path, made: dict[Path, bytes]) -> list[str]:
    """The bar, and what a practitioner may believe."""
    shown = [(METHOD, [evidence.PLAIN], "FreeMatch, as the paper judges it")]
    shown += [(DEFAULTS[suite], evidence.CHOSEN, SAID[DEFAULTS[suite]])]
    png = _png(draw_trust, prepare_trust(found, shown))
    words = "Confidence and the share that is right"
    others = list(dict.fromkeys([MILDER, CAPPED, LOOKED, CLOSER, FITTED, DEFAULTS[suite]]))
    return [
        _figure(page, made, f"trust_{suite}", png, words, "png"),
        render.markdown([evidence.bar(found, METHOD, others)]),
        *_folded("What sure predictions are worth", [evidence.sure(found, [METHOD, *others])]),
    ]


def _png(draw: Callable[[Figure, Any], None], content: Any) -> bytes:
    with mpl.rc_context(LOOK):
        drawn = Figure(layout="constrained")
        draw(drawn, content)
    return figures.encode(drawn, ".png")


def _last(text: str) -> str:
    """Tables of last weights say so in their titles."""
    return re.sub(r"^### ", "### Last weights: ", text, flags=re.MULTILINE)


def _figure(
    page: Path, made: dict[Path, bytes], name: str, content: bytes, words: str, kind: str = "svg"
) -> str:
    made[page.parent / "assets" / "results" / f"{name}.{kind}"] = content
    return f"![{words}](assets/results/{name}.{kind})\n"


def _there(*found: render.Table | None) -> list[render.Table]:
    return [table for table in found if table is not None]


def readme(text: str, files: list[Path]) -> str:
    """The README with its table of sure predictions made anew."""
    found = evidence.named(compact.read(files, "draws"), NAMES)
    table = _untitled(evidence.short(found, METHOD, FITTED)).strip()
    pattern = r"(<!-- evidence -->\n).*?(<!-- /evidence -->)"
    return re.sub(pattern, lambda part: f"{part[1]}{table}\n{part[2]}", text, flags=re.DOTALL)


def write(files: list[Path], page: Path, check: bool) -> int:
    """Write what changed, or say that something would."""
    made = pages(files, page)
    if page.parent == ROOT / "docs":
        path = ROOT / "README.md"
        made[path] = readme(path.read_text("utf-8"), files).encode()
    if check:
        texts = {path: content for path, content in made.items() if path.suffix == ".md"}
        stale = [p for p, content in texts.items() if not p.exists() or p.read_bytes() != content]
        print("\n".join(f"{path} is not what results/*.jsonl give" for path in stale))
        return int(bool(stale))
    for path, content in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write(path, content)
    print(f"{page}: {len(made[page]):,} bytes, {len(made) - 1} other files")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("runs", nargs="+", type=Path)
    collecting.add_argument("--out", type=Path, required=True)
    collecting.add_argument("--suite")
    writing = commands.add_parser("write")
    writing.add_argument("files", nargs="*", type=Path)
    writing.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    writing.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.command == "collect":
        collect(given.runs, given.out, given.suite)
        return 0
    files = given.files or sorted((ROOT / "results").glob("*.jsonl"))
    return write(files, given.page, given.check)


if __name__ == "__main__":
    sys.exit(main())
