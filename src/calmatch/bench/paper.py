"""The paper: its experiments as suites of runs, each with its source, and its published numbers."""

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from calmatch import spec
from calmatch.training.config import Config
from calmatch.training.recipes import RECIPES

SEEDS = (0, 1, 2)
STRENGTHS = {"smoothing": "smoothing(alpha=0.1)", "focal": "focal(gamma=2)"}
SETS = {"U'": "disagree", "both": "all"}
_LISTED = json.loads(Path(__file__).with_name("suites.json").read_text(encoding="utf-8"))
SUITES: dict[str, Mapping[str, Any]] = _LISTED["suites"]  # a line, columns and rows, or parts
SUITE_LINES: Mapping[str, str] = {name: suite["line"] for name, suite in SUITES.items()}
PARTS: Sequence[str] = SUITES["paper"]["parts"]
SOURCES = {column: source for source, columns in _LISTED["sources"].items() for column in columns}


class Cell(NamedTuple):
    """One run of a suite."""

    suite: str
    row: str  # "freematch + margin"
    column: str  # the recipe, "eurosat_40"
    seed: int
    config: Config  # the whole protocol, seed included
    source: str  # where the protocol stands

    @property
    def folder(self) -> Path:
        """Relative and readable; suites that share a run share its folder."""
        loss = self.config.unlabelled_loss
        words = [self.config.method, *(["only", loss] if loss else []), self.config.penalty]
        slugs = [re.sub(r"[^\w.=-]+", "-", word.replace("'", "")).strip("-") for word in words]
        return Path(self.column) / "+".join(filter(None, slugs)) / f"seed{self.seed}"


def suite_cells(suite: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """The runs of a suite, rows in the order of its table, the seeds of a row together."""
    if suite not in SUITES:
        raise ValueError(f"There is no suite {suite!r}.{spec.nearest(suite, SUITES)}")
    if seeds is not None and (not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds)):
        raise ValueError("Seeds are different whole numbers from 0 on, one at least.")
    cells: dict[Path, Cell] = {}
    for part in SUITES[suite].get("parts", [suite]):
        columns, rows = SUITES[part]["columns"], SUITES[part]["rows"]
        for column, row in [(column, row) for column in columns for row in rows]:
            changes, note = _row_changes(row, column)
            recipe = RECIPES[column](row.partition(" + ")[0], **changes)
            source = "; ".join(filter(None, (SOURCES[column], note)))
            for seed in SEEDS if seeds is None else seeds:
                config = recipe.replace(seed=seed, split_seed=seed)  # as USB
                cell = Cell(part, row, column, seed, config, source)
                cells.setdefault(cell.folder, cell)  # what tables share is run once
    return list(cells.values())


def _row_changes(row: str, column: str) -> tuple[dict[str, str], str]:
    """What a row's name says that it changes in its column's recipe, and where that stands.

    A margin has the published settings, but for those that the name has; `on U'` and `on both` say
    where it acts.
    """
    method, _, added = row.partition(" + ")
    loss, _, where = added.partition(" on ")
    if method == "bam":
        return {}, "BaM on USB's network: no code is published (docs/paper.md#bam)"
    if not loss:
        return {}, ""
    if loss in STRENGTHS:
        source = "its strength is published nowhere (docs/paper.md#the-penalty); the usual one"
        return {"unlabelled_loss": STRENGTHS[loss]}, source
    item = spec.parse(loss)
    m, source = _published_margin(method, column)
    settings = {"m": m, **item.kwargs} | ({"where": SETS[where]} if where else {})
    source = "sweep" if item.kwargs else source
    text = spec.write(item._replace(kwargs=settings))
    return {"penalty": text}, f"weight {settings.get('weight', 0.1):g}, {source}"


def _published_margin(method: str, column: str) -> tuple[int, str]:
    """The published margin of a cell, and where it stands."""
    if column.startswith("eurosat"):
        return 8, "m = 8 by the supplement; its configurations have none (docs/paper.md#margins)"
    if method == "freematch" and column.startswith("stl10"):
        m = 4 if column.endswith("_40") else 6
        return m, f"m = {m} by the supplement, chosen on the test set (docs/paper.md#margins)"
    return 10, "m = 10 (docs/paper.md#margins)"


class Published(NamedTuple):
    """A printed number; `doubt` says what speaks against it."""

    value: float
    sd: float | None
    doubt: str = ""


def find_published(
    row: str, column: str, metric: str, suite: str = ""
) -> tuple[str, Published] | None:
    """The table and the number of a cell: the suite's own table first, then in the order below."""
    for table in (suite, *PUBLISHED_TABLES):
        if number := PUBLISHED_TABLES.get(table, {}).get((bare_row(row), column, metric)):
            return table, number
    return None


def bare_row(row: str) -> str:
    """Without what tells it apart from rows of its name: "bam (steps=20)"."""
    return row.partition(" (")[0]


CellKey = tuple[str, str, str]  # row, column, metric (as in `calmatch metrics`)


def _read_published() -> dict[str, dict[CellKey, Published]]:
    """The printed tables of published.txt, which says how to read it."""
    tables: dict[str, dict[CellKey, Published]] = {}
    for line in Path(__file__).with_name("published.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name, metrics, columns = re.split(r"[\[\]|]", line)[1:]
            places = [(column, metric) for metric in metrics.split() for column in columns.split()]
            table = tables.setdefault(name, {})
        elif line.startswith("?"):
            *wanted, reason = line[1:].split(" | ")
            for key, number in table.items():
                if all(map(fnmatchcase, key, map(str.strip, wanted))):
                    doubt = "; ".join(filter(None, (number.doubt, reason)))
                    table[key] = number._replace(doubt=doubt)
        elif line and not line.startswith("#"):
            words = line.split()
            row, numbers = " ".join(words[: -len(places)]), words[-len(places) :]
            for place, word in zip(places, numbers, strict=True):
                if word != "-":
                    value, _, sd = word.partition("±")
                    table[row, *place] = Published(float(value), float(sd) if sd else None)
    return tables


PUBLISHED_TABLES = _read_published()
