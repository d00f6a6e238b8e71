"""The paper: its experiments as suites of runs, each with its source, and its published numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
TEXT = ("stl10_text_40", "stl10_text_100")
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


def main() -> list[Cell]:
    """Tables 1 and 2: eleven rows on CIFAR-100, EuroSAT and STL-10, error and ECE."""
    return _cells("main", COLUMNS, _main_rows)


def supplement() -> list[Cell]:
    """The supplement's table: nine further methods beside those of main."""
    return _cells("supplement", COLUMNS, lambda c: [*map(SuiteRow, SUPPLEMENT), *_main_rows(c)])


def simmatch() -> list[Cell]:
    """The penalty on soft pseudo-labels: SimMatch on CIFAR-100 with 200, 400 and 1,000 labels."""
    columns = (*COLUMNS[:2], "cifar100_1000")
    return _cells("simmatch", columns, lambda c: [SuiteRow("simmatch"), _margin("simmatch", c)])


def bam() -> list[Cell]:
    """FixMatch against BaM and against the margin on CIFAR-100."""
    theirs = SuiteRow(
        "bam", source="BaM on USB's network: no code is published (docs/paper.md#bam)"
    )
    fixmatch = SuiteRow("fixmatch")
    return _cells("bam", COLUMNS[:2], lambda c: [fixmatch, theirs, _margin("fixmatch", c)])


def where() -> list[Cell]:
    """Where the penalty acts: on agreeing pictures (U''), on disagreeing ones (U'), on both."""

    def rows(column: str) -> Iterable[SuiteRow]:
        for method in PSEUDO:
            yield SuiteRow(method)
            yield from (_margin(method, column, on=on) for on in ("", "disagree", "all"))

    return _cells("where", COLUMNS[:2], rows)


def losses() -> list[Cell]:
    """Label smoothing, focal loss or the margin on FreeMatch; ECE, CECE and AECE (radar plots)."""
    source = "its strength is published nowhere (docs/paper.md#the-penalty); the usual one"
    others = [
        SuiteRow(f"freematch + {text.partition('(')[0]}", {"unlabelled_loss": text}, source)
        for text in ("smoothing(alpha=0.1)", "focal(gamma=2)")
    ]
    rows = [SuiteRow("freematch"), *others]
    return _cells("losses", COLUMNS, lambda c: [*rows, _margin("freematch", c)])


def longtail() -> list[Cell]:
    """Three long-tailed CIFAR-100 settings, with ViT-S and with WRN-28-2."""
    return _cells("longtail", LONG_TAILED + LONG_TAILED_WRN, _pairs)


def margin() -> list[Cell]:
    """How m and the weight act on EuroSAT with 40 labels: nothing the paper shows."""

    def rows(column: str) -> Iterable[SuiteRow]:
        for method in PSEUDO:
            yield SuiteRow(method)
            yield from (_margin(method, column, m=m) for m in (4, 6, 8, 10, 12))
        for weight in (0.01, 0.03, 0.3, 1.0):
            yield _margin("freematch", column, m=8, weight=weight)

    return _cells("margin", ["eurosat_40"], rows)


def wrn() -> list[Cell]:
    """The main rows on CIFAR-10 with WRN-28-2 from scratch, the field's classic protocol."""
    return _cells("wrn", ["cifar10_40", "cifar10_250"], _main_rows)


def text() -> list[Cell]:
    """STL-10 as the paper's text has it: ViT-S/16 at 96 px, layer decay 0.95."""
    return _cells("text", TEXT, _pairs)


def digits() -> list[Cell]:
    """Supervised and three methods with and without margin: minutes on two cores."""
    return _cells("digits", ["digits_40"], lambda c: [SuiteRow("supervised"), *_pairs(c)])


PARTS = ("main", "supplement", "simmatch", "bam", "where", "losses", "longtail")


def paper() -> list[Cell]:
    """All of the paper's experiments; what several tables share is run once."""
    runs: dict[Path, Cell] = {}
    for part in PARTS:
        for cell in SUITES[part]():
            runs.setdefault(cell.folder, cell)
    return list(runs.values())


_SUITES = (paper, main, supplement, simmatch, bam, where, losses, longtail, text)
SUITES: dict[str, Callable[[], list[Cell]]] = {
    suite.__name__: suite for suite in (*_SUITES, margin, wrn, digits)
}


def suite_cells(suite: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """The runs of a suite, rows in the order of its table, the seeds of a row together."""
    if suite not in SUITES:
        raise ValueError(f"There is no suite {suite!r}.{spec.nearest(suite, SUITES)}")
    cells = SUITES[suite]()
    if seeds is None:
        return cells
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError("Seeds are different whole numbers from 0 on, one at least.")
    return [_with_seed(cell, seed) for cell in cells if cell.seed == SEEDS[0] for seed in seeds]


class SuiteRow(NamedTuple):
    """A line of a table: a method, what it changes in the recipe, and who says so."""

    name: str  # the method, and what is added to it
    changes: Mapping[str, Any] = {}
    source: str = ""


def _cells(
    suite: str, columns: Iterable[str], rows: Callable[[str], Iterable[SuiteRow]]
) -> list[Cell]:
    cells = []
    for column in columns:
        for name, changes, note in rows(column):
            config = RECIPES[column](name.partition(" + ")[0], **changes)
            source = "; ".join(filter(None, (SOURCES[column], note)))
            first = Cell(suite, name, column, SEEDS[0], config, source)
            cells += [_with_seed(first, seed) for seed in SEEDS]
    return cells


def _with_seed(cell: Cell, seed: int) -> Cell:
    """The cell with another seed; USB draws the labelled images anew with each."""
    return cell._replace(seed=seed, config=cell.config.replace(seed=seed, split_seed=seed))


def _main_rows(column: str) -> list[SuiteRow]:
    return [SuiteRow("supervised"), *map(SuiteRow, OTHERS), *_pairs(column)]


def _pairs(column: str) -> list[SuiteRow]:
    return [row for method in PSEUDO for row in (SuiteRow(method), _margin(method, column))]


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
    **dict.fromkeys(("cifar10_40", "cifar10_250"), _CLASSIC),
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


_ERROR = """
mixmatch             37.68±2.66  26.84±1.06  28.77±10.40 14.88±2.07  25.19±2.05  11.37±1.49
dash                 28.51±2.91  19.54±1.20  10.05±8.15  6.83±3.24   18.30±4.58  8.74±2.13
adamatch             19.26±1.83  17.13±0.92  12.01±4.16  6.07±2.26   13.31±3.75  8.14±1.48
defixmatch           30.44±0.82  20.93±1.42  14.27±9.05  5.42±2.69   25.36±4.40  10.97±1.75
fixmatch             31.28±1.58  19.42±1.56  11.88±6.32  6.64±5.03   16.13±2.36  8.06±2.15
fixmatch + margin    27.57±1.49  18.48±1.65  7.19±4.83   5.02±2.24   17.55±4.00  7.96±1.64
flexmatch            28.27±0.59  17.61±0.51  7.89±3.06   7.13±1.23   13.34±1.63  8.35±1.24
flexmatch + margin   26.49±0.52  18.15±0.47  3.69±0.81   5.00±0.98   12.87±4.32  7.53±1.32
freematch            23.92±2.02  16.18±0.38  4.74±1.77   4.48±0.73   14.88±0.72  8.83±0.14
freematch + margin   21.36±1.62  16.09±0.80  4.30±1.46   3.50±0.70   13.18±1.61  8.57±1.05
"""
_ECE = """
mixmatch             8.13±2.16   7.19±2.31   9.27±3.68   3.75±3.30   3.42±1.77   5.89±1.51
dash                 22.23±2.85  13.20±1.07  7.09±6.65   4.24±2.22   11.23±2.33  5.23±1.87
adamatch             12.96±1.76  11.17±0.72  8.55±4.83   2.66±0.67   8.80±3.01   4.96±1.25
defixmatch           24.54±1.37  14.89±0.97  10.46±8.71  2.90±1.29   12.89±1.73  6.62±1.87
fixmatch             27.77±1.49  13.45±1.45  8.36±5.29   4.72±4.45   10.27±2.4   5.83±2.25
fixmatch + margin    21.56±1.32  12.12±1.70  4.66±2.49   3.84±1.91   7.83±4.23   5.64±1.40
flexmatch            21.95±0.57  11.95±0.30  5.42±2.95   4.50±2.60   9.72±1.63   5.85±0.98
flexmatch + margin   19.74±0.50  11.61±0.29  2.26±1.13   3.21±1.79   8.89±3.39   4.97±1.19
freematch            18.27±1.60  11.56±0.44  3.49±1.39   3.22±0.55   10.49±1.87  5.24±0.90
freematch + margin   14.86±1.22  10.35±0.68  2.82±0.81   2.63±0.70   3.74±0.90   3.50±1.02
"""
# beside Table 1, two of whose numbers differ here
_SUPPLEMENT = """
pimodel              36.06±0.15  26.52±0.41  21.82±1.22  12.09±2.27  42.76±15.94 19.85±13.02
meanteacher          35.47±0.40  26.03±0.30  26.83±1.46  15.85±1.66  18.67±2.66  24.19±10.15
vat                  31.49±1.33  21.34±0.50  18.45±1.47  26.16±0.96  10.09±0.94  10.69±0.51
remixmatch           22.21±2.21  16.86±0.57  5.05±1.05   5.07±0.56   13.08±3.34  7.21±0.39
uda                  28.80±0.61  19.00±0.79  9.83±2.15   6.22±1.36   15.58±3.16  7.65±1.11
crmatch              25.70±1.75  18.03±0.20  13.24±1.69  8.35±1.71   10.17±0.00  -
comatch              35.08±0.69  25.35±0.50  5.75±0.43   4.81±1.05   15.12±1.88  9.56±1.35
simmatch             23.78±1.08  17.06±0.78  7.66±0.60   5.27±0.89   11.77±3.20  7.55±1.86
softmatch            22.67±1.32  16.84±0.66  5.75±0.62   5.90±1.42   13.55±3.16  7.84±1.72
fixmatch             31.28±1.58  19.73±0.56  11.88±6.32  6.64±5.03   16.13±2.36  8.06±2.15
fixmatch + margin    27.57±1.49  18.57±0.77  7.19±4.83   5.02±2.24   17.55±4.00  7.96±1.64
"""
# error 200, 400; ECE 200, 400, put back in their places (the paper swaps them for two methods)
_WHERE = """
fixmatch                   31.28±1.58  19.73±0.56  27.77±1.49  15.76±0.39
fixmatch + margin          27.57±1.49  18.57±0.77  21.56±1.32  13.49±0.80
fixmatch + margin on both  25.72±2.36  19.20±1.63  19.30±2.52  13.00±1.79
flexmatch                  28.27±0.59  17.61±0.51  21.95±0.57  11.95±0.30
flexmatch + margin         26.49±0.52  18.15±0.47  19.74±0.50  11.61±0.29
flexmatch + margin on both 27.57±3.37  19.62±0.44  20.98±3.05  13.41±0.51
freematch                  23.92±2.02  16.18±0.38  18.27±1.95  11.56±0.53
freematch + margin         21.36±1.62  16.09±0.80  14.86±1.48  10.35±0.83
freematch + margin on both 27.44±1.08  18.82±0.67  20.86±1.48  12.39±0.78
"""
_BAM = """
bam                  28.46±1.74  19.32±0.94  25.04±1.43  16.75±0.96
fixmatch + margin    27.57±1.49  18.42±1.65  21.56±1.32  12.12±1.70
"""
_SIMMATCH = """
simmatch             22.49±0.26  19.45±0.08  15.46±0.48  3.17±0.28   6.54±1.92   9.60±0.72
simmatch + margin    23.00±0.07  19.10±0.31  15.36±0.41  3.31±0.59   5.55±0.13   9.18±0.17
"""
# error of the three tails (10, -10), (10, 10), (15, 15), then their ECE
_LONGTAIL = """
fixmatch             15.05±0.13  15.01±0.18  16.45±0.11  8.58±0.82   10.51±1.82  10.22±2.01
fixmatch + margin    14.73±0.12  14.37±0.21  15.81±0.31  7.22±1.20   9.42±0.29   8.44±0.44
flexmatch            14.79±0.28  14.98±0.21  16.19±0.32  7.70±1.03   9.49±0.47   9.25±0.68
flexmatch + margin   14.72±0.23  14.6±0.05   16.08±0.49  7.33±1.49   7.44±0.40   8.85±0.47
freematch            14.93±0.20  15.04±0.09  16.26±0.35  8.52±0.95   9.99±0.52   8.68±0.84
freematch + margin   14.67±0.28  14.77±0.15  15.87±0.69  6.74±0.98   9.05±0.84   8.53±0.60
"""
# the radar plots' table: error of the six columns, then ECE, class-wise ECE, adaptive ECE
_LOSSES = {
    "error": """
freematch             23.92±2.02 16.18±0.38 4.74±1.82  4.48±0.73  14.88±0.72 7.62±1.25
freematch + focal     28.81±0.75 20.35±0.35 10.25±8.48 4.37±0.30  14.73±2.77 8.75±1.59
freematch + smoothing 29.14±2.46 19.01±1.90 5.94±4.21  15.84±3.57 15.59±2.74 8.25±2.05
freematch + margin    21.36±1.62 16.09±0.80 4.30±1.46  3.50±0.70  13.18±1.61 8.57±1.90
""",
    "ece": """
freematch             18.27±1.95 11.56±0.53 3.50±1.70  3.22±0.55  10.49±1.87 5.24±1.09
freematch + focal     24.42±0.85 15.63±0.54 8.54±8.29  3.10±0.10  11.16±3.13 6.07±1.40
freematch + smoothing 23.55±2.33 13.03±1.39 3.57±2.83  4.43±3.38  10.09±1.64 4.94±1.79
freematch + margin    14.86±1.48 10.35±0.83 2.82±1.00  2.63±0.70  3.74±5.64  3.50±1.54
""",
    "classwise_ece": """
freematch             0.41±0.04  0.27±0.01  0.82±0.32  0.74±0.11  2.45±0.40  1.15±0.21
freematch + focal     0.53±0.01  0.35±0.008 1.88±1.70  0.74±0.04  2.39±0.64  1.35±0.31
freematch + smoothing 0.52±0.04  0.31±0.02  0.95±0.67  1.02±0.70  2.20±0.28  1.13±0.35
freematch + margin    0.35±0.03  0.26±0.01  0.70±0.23  0.60±0.12  2.39±0.68  0.94±0.27
""",
    "adaptive_ece": """
freematch             18.27±1.95 11.54±0.52 3.38±1.82  3.15±0.61  9.40±1.81  5.19±1.03
freematch + focal     24.42±0.85 15.60±0.54 8.52±8.31  3.01±0.08  11.15±3.13 6.02±1.35
freematch + smoothing 23.54±2.34 13.02±1.39 3.45±2.81  4.37±3.31  10.04±1.58 4.94±1.79
freematch + margin    14.81±1.48 10.33±0.83 2.78±0.98  2.58±0.64  8.43±4.92  4.00±1.21
""",
}
# USB's own errors, no deviations at hand
_USB = """
supervised           35.88 26.76 26.49 16.12 19.0  10.87
fixmatch             29.6  19.56 13.44 5.91  16.15 8.11
flexmatch            26.76 18.24 5.17  5.58  14.40 8.17
freematch            21.4  15.65 6.5   5.78  12.73 8.52
"""
_SWAPPED = "error and ECE are swapped in the paper's table; put back here"
_FIX = "19.42±1.56 in Table 1, 19.73±0.56 in the subset and supplement tables"
_FIX_ECE = "13.45 in Table 2, 15.76 in the subset table"
_OURS = "18.48±1.65 in Table 1, 18.42 in the BaM table, 18.57±0.77 in subset and supplement"
_OURS_ECE = "12.12 in Table 2 and the BaM table, 13.49 in the subset table"
_STL = "8.83±0.14 in Table 1, 7.62±1.25 in the radar table; with 7.62 the margin makes it worse"
_STL_ECE = "±0.90 in Table 2, ±5.64 in the radar table; AECE there is 8.43, and ECE is near AECE "
_STL_ECE += "everywhere else: 3.74 is doubtful"
_DAGGER = "USB's number, not run by the authors"
_BOTH = "shaded as the proposed row, and better than U'' alone here: contradicts the text"
_TAIL = "cannot come from the WRN-28-2 that the text names (USB: 42 to 46 %); ViT-S is likely"

DOUBTS: Mapping[tuple[str, str, str, str], str] = {
    ("main", "fixmatch", "cifar100_400", "error"): _FIX,
    ("main", "fixmatch", "cifar100_400", "ece"): _FIX_ECE,
    ("main", "fixmatch + margin", "cifar100_400", "error"): _OURS,
    ("main", "fixmatch + margin", "cifar100_400", "ece"): _OURS_ECE,
    ("main", "freematch", "stl10_100", "error"): _STL,
    ("main", "freematch", "eurosat_20", "error"): "±1.77 here, ±1.82 in the radar table",
    ("main", "freematch", "eurosat_20", "ece"): "3.49 here, 3.50 in the radar table",
    ("main", "freematch + margin", "stl10_40", "ece"): _STL_ECE,
    ("main", "freematch + margin", "stl10_100", "ece"): "±1.02 here, ±1.54 in radar; AECE 4.00",
    ("main", "freematch + margin", "stl10_100", "error"): "±1.05 here, ±1.90 in the radar table",
    ("supplement", "fixmatch", "cifar100_400", "error"): _FIX,
    ("supplement", "fixmatch + margin", "cifar100_400", "error"): _OURS,
    ("supplement", "freematch", "stl10_100", "error"): _STL,
    ("supplement", "vat", "eurosat_20", "error"): "misplaced: USB has 26.16 here",
    ("supplement", "vat", "eurosat_40", "error"): "misplaced: USB has 10.09 here",
    ("supplement", "vat", "stl10_40", "error"): "misplaced: USB has 18.45 here",
    ("supplement", "crmatch", "stl10_40", "error"): "a single run (±0.00), yet marked as the best",
    ("supplement", "meanteacher", "stl10_40", "error"): "±1.69 in USB; " + _DAGGER,
    ("where", "fixmatch + margin on both", "cifar100_200", "error"): f"{_BOTH}; {_SWAPPED}",
    ("where", "fixmatch + margin on both", "cifar100_200", "ece"): f"{_BOTH}; {_SWAPPED}",
    ("where", "fixmatch + margin on both", "cifar100_400", "ece"): f"{_BOTH}; {_SWAPPED}",
    ("where", "fixmatch", "cifar100_400", "error"): f"{_FIX}; {_SWAPPED}",
    ("where", "fixmatch", "cifar100_400", "ece"): f"{_FIX_ECE}; {_SWAPPED}",
    ("where", "fixmatch + margin", "cifar100_400", "error"): f"{_OURS}; {_SWAPPED}",
    ("where", "fixmatch + margin", "cifar100_400", "ece"): f"{_OURS_ECE}; {_SWAPPED}",
    ("bam", "fixmatch + margin", "cifar100_400", "error"): _OURS,
    ("bam", "bam", "cifar100_400", "ece"): "worse than plain FixMatch's 13.45; no code published",
    ("losses", "freematch", "stl10_100", "error"): _STL,
    ("losses", "freematch + margin", "stl10_40", "ece"): _STL_ECE,
    ("losses", "freematch + smoothing", "eurosat_40", "error"): "ECE 4.43: a typo for 5.84?",
    ("losses", "freematch + smoothing", "stl10_40", "error"): "bold, though the worst of four",
    ("losses", "freematch + smoothing", "stl10_100", "error"): "bold, though the baseline has 7.62",
}


CellKey = tuple[str, str, str]  # row, column, metric (as in `calmatch metrics`)


def _parse(table: str, text: str, columns: Iterable[str], metrics: str) -> dict[CellKey, Published]:
    """Rows of a printed table: all columns of the first metric, then of the next."""
    numbers = {}
    places = [(column, metric) for metric in metrics.split() for column in columns]
    for line in filter(None, text.splitlines()):
        words = line.split()
        row = " ".join(words[: -len(places)])
        doubt = _DAGGER if table == "supplement" and row in SUPPLEMENT else ""
        doubt = _TAIL if table == "longtail" else doubt
        doubt = _SWAPPED if table == "where" and not row.startswith("freematch") else doubt
        for place, word in zip(places, words[-len(places) :], strict=True):
            if word != "-":
                value, _, sd = word.partition("±")
                reason = DOUBTS.get((table, row, *place), doubt)
                numbers[row, *place] = Published(float(value), float(sd) if sd else None, reason)
    return numbers


PUBLISHED_TABLES: dict[str, dict[CellKey, Published]] = {}
for _table, _text, _columns, _metrics in (
    ("main", _ERROR, COLUMNS, "error"),
    ("main", _ECE, COLUMNS, "ece"),
    ("supplement", _ERROR + _SUPPLEMENT, COLUMNS, "error"),
    ("where", _WHERE, COLUMNS[:2], "error ece"),
    ("bam", _BAM, COLUMNS[:2], "error ece"),
    ("simmatch", _SIMMATCH, (*COLUMNS[:2], "cifar100_1000"), "error ece"),
    ("longtail", _LONGTAIL, LONG_TAILED, "error ece"),
    *(("losses", text, COLUMNS, metric) for metric, text in _LOSSES.items()),
    ("usb", _USB, COLUMNS, "error"),
    ("usb", "fixmatch 42.44 42.24 45.71", LONG_TAILED_WRN, "error"),
):
    PUBLISHED_TABLES.setdefault(_table, {}).update(_parse(_table, _text, _columns, _metrics))
