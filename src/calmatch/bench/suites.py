"""The paper's experiments as lists of runs: every cell a whole Config with its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calmatch import spec
from calmatch.config import Config
from calmatch.recipes import RECIPES

SEEDS = (0, 1, 2)
FIVE = (0, 1, 2, 3, 4)
PSEUDO = ("fixmatch", "flexmatch", "freematch")  # the methods the paper adds its penalty to
THRESHOLDED = (*PSEUDO, "softmatch", "adamatch", "simmatch", "mixmatch")
OTHERS = ("mixmatch", "dash", "adamatch", "defixmatch")
SUPPLEMENT = (
    "pimodel",
    "meanteacher",
    "vat",
    "remixmatch",
    "uda",
    "crmatch",
    "comatch",
    "simmatch",
    "softmatch",
)
COLUMNS = ("cifar100_200", "cifar100_400", "eurosat_20", "eurosat_40", "stl10_40", "stl10_100")
SETS = {"disagree": "U'", "all": "both"}
TAILS = ("10_-10", "10_10", "15_15")


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
        config = self.config
        loss = config.unlabelled_loss
        words = [config.method, *(["only", loss] if loss else []), config.penalty]
        words += [f"aware={config.aware:g}"] if config.aware else []
        name = "+".join(_slug(word) for word in words if word)
        return Path(self.column) / name / f"seed{self.seed}"


class Row(NamedTuple):
    """A line of a table: its name, its method, what it changes in the recipe, and who says so."""

    name: str
    method: str
    changes: Mapping[str, Any] = {}
    source: str = ""


def margin(method: str, column: str) -> tuple[int, str]:
    """The published margin of a cell, and where it stands."""
    if column.startswith("eurosat"):
        return 8, "m = 8 by the supplement; its configurations have none (FACTS 1.5 j)"
    if method == "freematch" and column.startswith("stl10"):
        m = 4 if column.endswith("_40") else 6
        return m, f"m = {m} by the supplement, chosen on the test set (FACTS 1.5 j)"
    return 10, "m = 10 (FACTS 1.2)"


def main() -> list[Cell]:
    """Tables 1 and 2: eleven rows on CIFAR-100, EuroSAT and STL-10, error and ECE."""
    return _suite("main", COLUMNS, _main_rows)


def supplement() -> list[Cell]:
    """The supplement's table: nine further methods beside those of main."""
    return _suite("supplement", COLUMNS, lambda c: [*map(_plain, SUPPLEMENT), *_main_rows(c)])


def simmatch() -> list[Cell]:
    """The penalty on soft pseudo-labels: SimMatch on CIFAR-100 with 200, 400 and 1,000 labels."""
    columns = ("cifar100_200", "cifar100_400", "cifar100_1000")
    return _suite("simmatch", columns, lambda c: [_plain("simmatch"), _margin("simmatch", c)])


def bam() -> list[Cell]:
    """FixMatch against BaM and against the margin on CIFAR-100."""
    source = "BaM on USB's network: no code is published (FACTS 4)"
    return _suite(
        "bam",
        COLUMNS[:2],
        lambda c: [_plain("fixmatch"), Row("bam", "bam", {}, source), _margin("fixmatch", c)],
    )


def where() -> list[Cell]:
    """Where the penalty acts: on agreeing pictures (U''), on disagreeing ones (U'), on both."""
    return _suite(
        "where", COLUMNS[:2], lambda c: [row for method in PSEUDO for row in _where(method, c)]
    )


def losses() -> list[Cell]:
    """Label smoothing, focal loss or the margin on FreeMatch; ECE, CECE and AECE (radar plots)."""
    return _suite("losses", COLUMNS, _loss_rows)


def longtail() -> list[Cell]:
    """Three long-tailed CIFAR-100 settings, with ViT-S and with WRN-28-2."""
    columns = [f"cifar100_lt_{kind}{tail}" for kind in ("", "wrn_") for tail in TAILS]
    return _suite("longtail", columns, _pairs)


def sweep() -> list[Cell]:
    """How m and the weight act on EuroSAT with 40 labels: nothing the paper shows."""

    def rows(column: str) -> list[Row]:
        found = []
        for method in PSEUDO:
            found.append(_plain(method))
            found += [_margin(method, column, m=m) for m in (4, 6, 8, 10, 12)]
        weights = (0.01, 0.03, 0.3, 1.0)
        return found + [_margin("freematch", column, m=8, weight=w) for w in weights]

    return _suite("margin", ("eurosat_40",), rows)


def eurosat() -> list[Cell]:
    """EuroSAT: eight methods without margin, with the published one and the labels' cap; losses."""
    return _suite("eurosat", ("eurosat_pack_40", "eurosat_pack_20"), _evidence_rows, FIVE)


def cifar10() -> list[Cell]:
    """The same on CIFAR-10 with 40 and 250 labels, which chose nothing: it confirms or does not."""
    return _suite("cifar10", ("cifar10_pack_40", "cifar10_pack_250"), _evidence_rows, FIVE)


def beyond() -> list[Cell]:
    """Beyond the paper: aware thresholds, margins by rule, soft labels, mixup (docs/beyond.md)."""
    columns = ("eurosat_pack_40", "eurosat_pack_20", "cifar10_pack_40")
    return _suite("beyond", columns, _beyond_rows, FIVE)


def wrn() -> list[Cell]:
    """The main rows on CIFAR-10 with WRN-28-2 from scratch, the field's classic protocol."""
    return _suite("wrn", ("cifar10_40", "cifar10_250"), _main_rows)


def digits() -> list[Cell]:
    """Supervised and three methods with and without margin: minutes on two cores."""
    return _suite("digits", ("digits_40",), lambda c: [_plain("supervised"), *_pairs(c)])


def paper() -> list[Cell]:
    """All of the paper's experiments; what several tables share is run once."""
    parts = (main, supplement, simmatch, bam, where, losses, longtail)
    found: dict[Path, Cell] = {}
    for cell in (cell for part in parts for cell in part()):
        found.setdefault(cell.folder, cell)
    return list(found.values())


SUITES: Mapping[str, Callable[[], list[Cell]]] = {
    "paper": paper,
    "main": main,
    "supplement": supplement,
    "simmatch": simmatch,
    "bam": bam,
    "where": where,
    "losses": losses,
    "longtail": longtail,
    "margin": sweep,
    "eurosat": eurosat,
    "cifar10": cifar10,
    "beyond": beyond,
    "wrn": wrn,
    "digits": digits,
}


def cells(suite: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """The runs of a suite, rows in the order of its table, the seeds of a row together."""
    if suite not in SUITES:
        raise ValueError(f"There is no suite {suite!r}.{spec.nearest(suite, SUITES)}")
    found = SUITES[suite]()
    if seeds is None:
        return found
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError("Seeds are different whole numbers from 0 on, one at least.")
    return [_seeded(cell, seed) for cell in found if cell.seed == SEEDS[0] for seed in seeds]


def _seeded(cell: Cell, seed: int) -> Cell:
    """The cell with another seed; USB draws the labelled pictures anew with each (FACTS 2.4)."""
    return cell._replace(seed=seed, config=cell.config.replace(seed=seed, split_seed=seed))


def _suite(
    suite: str,
    columns: Iterable[str],
    rows: Callable[[str], Iterable[Row]],
    seeds: Sequence[int] = SEEDS,
) -> list[Cell]:
    found = []
    for column in columns:
        for row in rows(column):
            config = RECIPES[column](row.method, **row.changes)
            source = "; ".join(part for part in (SOURCES[column], row.source) if part)
            first = Cell(suite, row.name, column, SEEDS[0], config, source)
            found += [_seeded(first, seed) for seed in seeds]
    return found


def _plain(method: str) -> Row:
    return Row(method, method)


def _margin(
    method: str,
    column: str,
    *,
    on: str = "",
    m: int | None = None,
    weight: float = 0.1,
) -> Row:
    """A method with the penalty; what differs from the published setting stands in the name."""
    published, source = margin(method, column)
    name = f"{method} + margin"
    if m is not None:
        name, source = f"{name}(m={m})", "sweep"
    text = f"m={published if m is None else m}"
    if weight != 0.1:
        name, text = f"{name[:-1]}, weight={weight:g})", f"{text}, weight={weight:g}"
    if on:
        name, text = f"{name} on {SETS[on]}", f"{text}, where='{on}'"
    return Row(name, method, {"penalty": f"margin({text})"}, f"weight {weight:g}, {source}")


def _pairs(column: str) -> list[Row]:
    return [row for method in PSEUDO for row in (_plain(method), _margin(method, column))]


def _main_rows(column: str) -> list[Row]:
    return [_plain("supervised"), *map(_plain, OTHERS), *_pairs(column)]


def _where(method: str, column: str) -> list[Row]:
    penalties = [_margin(method, column, on=on) for on in ("", "disagree", "all")]
    return [_plain(method), *penalties]


def _loss_rows(column: str) -> list[Row]:
    source = "its strength is published nowhere (FACTS 1.2); the usual one"
    others = [
        Row(f"freematch + {name}", "freematch", {"unlabelled_loss": text}, source)
        for name, text in (("smoothing", "smoothing(alpha=0.1)"), ("focal", "focal(gamma=2)"))
    ]
    return [_plain("freematch"), *others, _margin("freematch", column)]


LABELS = "margin(m='labels')"
_SHOWN = "its cap is what the labels can show (docs/beyond.md)"


def _evidence_rows(column: str) -> list[Row]:
    found = [_plain("supervised")]
    for method in THRESHOLDED:
        found += [_plain(method), _margin(method, column), _own(method, "labels", penalty=LABELS)]
    return [*found, *_loss_rows(column)[1:3], Row("bam", "bam")]


def _beyond_rows(column: str) -> list[Row]:
    """A hypothesis a row; what it is compared with stands in the evidence suites or here."""
    aware = {"penalty": LABELS, "aware": 0.7}
    pairs = [("soft", "hard=False"), ("mixup", "mixup=0.5"), ("both", "hard=False, mixup=0.5")]
    found = [_plain("freematch"), _own("freematch", "labels", penalty=LABELS)]
    for name, settings in pairs:
        method = f"freematch({settings})"
        found += [
            Row(f"freematch, {name}", method),
            _own(method, f"{name}, labels", penalty=LABELS),
        ]
    found.append(_own("freematch", "gate", penalty="margin(m=2, gate=True)"))
    for method in ("fixmatch", "uda"):
        found += [_plain(method), _own(method, "labels", penalty=LABELS)]
        found.append(_own(method, "labels, aware", **aware))
    return found


def _own(method: str, name: str, **changes: Any) -> Row:
    return Row(f"{method.split('(')[0]} + {name}", method, changes, _SHOWN)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", text.replace("'", "")).strip("-")


_USB = "USB's usb_cv configuration (FACTS 2.1, 2.2)"
_STL = f"{_USB}; the paper's text names ViT-S and layer decay 0.95 (FACTS 1.5 d, e)"
_LT = "USB's long tail (FACTS 2.5) with ViT-S: the only network that explains the table (1.5 i)"
_LT_WRN = "USB's classic_cv_imb configuration (FACTS 2.5), as the paper's text says"
_CLASSIC = "USB's classic_cv protocol (FACTS 2.5), weight decay 5e-4 as in FixMatch's paper"
_LITE = "first experiments (EVIDENCE): EfficientNet-Lite0 at 64 px, 5,000 steps"
SOURCES: Mapping[str, str] = {
    "cifar100_200": _USB,
    "cifar100_400": _USB,
    "cifar100_1000": f"{_USB}; there is no configuration for 1,000 labels",
    "eurosat_20": _USB,
    "eurosat_40": _USB,
    "stl10_40": _STL,
    "stl10_100": _STL,
    **{f"cifar100_lt_{tail}": _LT for tail in TAILS},
    **{f"cifar100_lt_wrn_{tail}": _LT_WRN for tail in TAILS},
    **{f"eurosat_pack_{n}": f"{_LITE}; EMA 0.999, packed pictures" for n in (20, 40)},
    **{f"cifar10_pack_{n}": f"as {_LITE}; EMA 0.999, packed pictures" for n in (40, 250)},
    "cifar10_40": _CLASSIC,
    "cifar10_250": _CLASSIC,
    "digits_40": "the demo's recipe",
}
