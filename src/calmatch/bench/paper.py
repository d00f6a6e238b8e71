"""The paper: its experiments as suites of runs, each with its source, and its published numbers."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from calmatch import spec
from calmatch.training.config import Config
from calmatch.training.recipes import RECIPES

SEEDS = (0, 1, 2)
PSEUDO = ("fixmatch", "flexmatch", "freematch")  # the methods the paper adds its penalty to
OTHERS = ("mixmatch", "dash", "adamatch", "defixmatch")
SUPPLEMENT = "pimodel meanteacher vat remixmatch uda crmatch comatch simmatch softmatch".split()
COLUMNS = ("cifar100_200", "cifar100_400", "eurosat_20", "eurosat_40", "stl10_40", "stl10_100")
SIMMATCH = (*COLUMNS[:2], "cifar100_1000")
TEXT, CLASSIC = ("stl10_text_40", "stl10_text_100"), ("cifar10_40", "cifar10_250")
TAILS = ("10_-10", "10_10", "15_15")
LONG_TAILED, LONG_TAILED_WRN = (
    tuple(f"cifar100_lt_{net}{tail}" for tail in TAILS) for net in ("", "wrn_")
)


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


class SuiteRow(NamedTuple):
    """A line of a table: a method, what it changes in the recipe, and who says so."""

    name: str  # the method, and what is added to it
    changes: Mapping[str, Any] = {}
    source: str = ""


def suite_cells(suite: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """The runs of a suite, rows in the order of its table, the seeds of a row together."""
    if suite not in SUITES:
        raise ValueError(f"There is no suite {suite!r}.{spec.nearest(suite, SUITES)}")
    if seeds is not None and (not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds)):
        raise ValueError("Seeds are different whole numbers from 0 on, one at least.")
    cells: dict[Path, Cell] = {}
    for part in PARTS if suite == "paper" else (suite,):
        columns, rows = SUITES[part]
        for column in columns:
            for name, changes, note in rows(column):
                recipe = RECIPES[column](name.partition(" + ")[0], **changes)
                source = "; ".join(filter(None, (SOURCES[column], note)))
                for seed in SEEDS if seeds is None else seeds:
                    config = recipe.replace(seed=seed, split_seed=seed)  # as USB
                    cell = Cell(part, name, column, seed, config, source)
                    cells.setdefault(cell.folder, cell)  # what tables share is run once
    return list(cells.values())


def _main_rows(column: str) -> list[SuiteRow]:
    return [SuiteRow("supervised"), *map(SuiteRow, OTHERS), *_pairs(column)]


def _pairs(column: str) -> list[SuiteRow]:
    return [row for method in PSEUDO for row in (SuiteRow(method), _margin(method, column))]


def _bam_rows(column: str) -> list[SuiteRow]:
    source = "BaM on USB's network: no code is published (docs/paper.md#bam)"
    return [SuiteRow("fixmatch"), SuiteRow("bam", source=source), _margin("fixmatch", column)]


def _where_rows(column: str) -> Iterator[SuiteRow]:
    for method in PSEUDO:
        yield SuiteRow(method)
        yield from (_margin(method, column, on=on) for on in ("", "disagree", "all"))


def _loss_rows(column: str) -> Iterator[SuiteRow]:
    source = "its strength is published nowhere (docs/paper.md#the-penalty); the usual one"
    yield SuiteRow("freematch")
    for text in ("smoothing(alpha=0.1)", "focal(gamma=2)"):
        name = f"freematch + {text.partition('(')[0]}"
        yield SuiteRow(name, {"unlabelled_loss": text}, source)
    yield _margin("freematch", column)


def _margin_rows(column: str) -> Iterator[SuiteRow]:
    for method in PSEUDO:
        yield SuiteRow(method)
        yield from (_margin(method, column, m=m) for m in (4, 6, 8, 10, 12))
    yield from (_margin("freematch", column, m=8, weight=w) for w in (0.01, 0.03, 0.3, 1.0))


def _margin(
    method: str, column: str, *, on: str = "", m: int | None = None, weight: float = 0.1
) -> SuiteRow:
    """A method with the penalty; what differs from the published setting stands in the name."""
    published, source = _published_margin(method, column)
    name, text = f"{method} + margin", f"m={m or published}"
    if weight != 0.1:
        text += f", weight={weight:g}"
    if m:
        name, source = f"{name}({text})", "sweep"
    if on:
        name, text = f"{name} on {SETS[on]}", f"{text}, where='{on}'"
    return SuiteRow(name, {"penalty": f"margin({text})"}, f"weight {weight:g}, {source}")


def _published_margin(method: str, column: str) -> tuple[int, str]:
    """The published margin of a cell, and where it stands."""
    if column.startswith("eurosat"):
        return 8, "m = 8 by the supplement; its configurations have none (docs/paper.md#margins)"
    if method == "freematch" and column.startswith("stl10"):
        m = 4 if column.endswith("_40") else 6
        return m, f"m = {m} by the supplement, chosen on the test set (docs/paper.md#margins)"
    return 10, "m = 10 (docs/paper.md#margins)"


SUITES: dict[str, tuple[Sequence[str], Callable[[str], Iterable[SuiteRow]]]] = {
    "paper": ((), _pairs),  # all of PARTS
    "main": (COLUMNS, _main_rows),
    "supplement": (COLUMNS, lambda c: [*map(SuiteRow, SUPPLEMENT), *_main_rows(c)]),
    "simmatch": (SIMMATCH, lambda c: [SuiteRow("simmatch"), _margin("simmatch", c)]),
    "bam": (COLUMNS[:2], _bam_rows),
    "where": (COLUMNS[:2], _where_rows),
    "losses": (COLUMNS, _loss_rows),
    "longtail": (LONG_TAILED + LONG_TAILED_WRN, _pairs),
    "text": (TEXT, _pairs),
    "margin": (["eurosat_40"], _margin_rows),
    "wrn": (CLASSIC, _main_rows),
    "digits": (["digits_40"], lambda c: [SuiteRow("supervised"), *_pairs(c)]),
}  # columns, and the rows of each
SUITE_LINES = {
    "paper": "All of the paper's experiments; what several tables share is run once.",
    "main": "Tables 1 and 2: eleven rows on CIFAR-100, EuroSAT and STL-10, error and ECE.",
    "supplement": "The supplement's table: nine further methods beside those of main.",
    "simmatch": "The penalty on soft pseudo-labels: SimMatch on CIFAR-100, 200 to 1,000 labels.",
    "bam": "FixMatch against BaM and against the margin on CIFAR-100.",
    "where": "Where the penalty acts: on agreeing pictures (U''), disagreeing ones (U'), on both.",
    "losses": "Label smoothing, focal loss or the margin on FreeMatch; ECE, CECE, AECE (radar).",
    "longtail": "Three long-tailed CIFAR-100 settings, with ViT-S and with WRN-28-2.",
    "text": "STL-10 as the paper's text has it: ViT-S/16 at 96 px, layer decay 0.95.",
    "margin": "How m and the weight act on EuroSAT with 40 labels: nothing the paper shows.",
    "wrn": "The main rows on CIFAR-10 with WRN-28-2 from scratch, the field's classic protocol.",
    "digits": "Supervised and three methods with and without margin: minutes on two cores.",
}
PARTS = ("main", "supplement", "simmatch", "bam", "where", "losses", "longtail")
SETS = {"disagree": "U'", "all": "both"}
_USB_CV = "USB's usb_cv configuration (docs/paper.md#protocol)"
_STL10 = f"{_USB_CV}; the paper's text names ViT-S and layer decay 0.95 (suite text)"
_TEXT = "the paper's text; timm's weights, as it names none (docs/paper.md#text-and-configurations)"
_TAIL_VIT = (
    "USB's long tail with ViT-S: the only network that explains the table "
    "(docs/paper.md#long-tails)"
)
_TAIL_WRN = (
    "USB's classic_cv_imb configuration (docs/paper.md#long-tails), as the paper's text says"
)
_CLASSIC = "USB's classic_cv protocol (docs/paper.md#long-tails), weight decay 5e-4 as in FixMatch"
SOURCES: Mapping[str, str] = {
    **dict.fromkeys(COLUMNS, _USB_CV),
    "cifar100_1000": f"{_USB_CV}; there is no configuration for 1,000 labels",
    **dict.fromkeys(("stl10_40", "stl10_100"), _STL10),
    **dict.fromkeys(LONG_TAILED, _TAIL_VIT),
    **dict.fromkeys(LONG_TAILED_WRN, _TAIL_WRN),
    **dict.fromkeys(CLASSIC, _CLASSIC),
    **dict.fromkeys(TEXT, _TEXT),
    "digits_40": "calmatch's own recipe (docs/bench.md)",
}


class Published(NamedTuple):
    """A printed number; `doubt` says what speaks against it."""

    value: float
    sd: float | None
    doubt: str = ""


PUBLISHED_NOTES = (
    "ECE deviations of Table 2 are population ones (ddof 0) for FreeMatch, those of the radar and "
    "subset tables sample ones (ddof 1): ratios of 0.816 = sqrt(2/3).",
    "The published runs were chosen by their error on the test set: compare them with our "
    "test-selected numbers; the first line of ours is held-out.",
)


def find_published(
    row: str, column: str, metric: str, suite: str = ""
) -> tuple[str, Published] | None:
    """The table and the number of a cell: the suite's own table first, then in the order below."""
    for table in (suite, *PUBLISHED_TABLES):
        if number := PUBLISHED_TABLES.get(table, {}).get((row, column, metric)):
            return table, number
    return None


CellKey = tuple[str, str, str]  # row, column, metric (as in `calmatch metrics`)


def _read_published() -> dict[str, dict[CellKey, Published]]:
    """The printed tables of published.txt, which says how to read it."""
    tables: dict[str, dict[CellKey, Published]] = {}
    text = Path(__file__).with_name("published.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
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
