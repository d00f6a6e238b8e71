"""What suites are made of: a cell is a whole Config with its source, a row a line of a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calmatch.config import Config
from calmatch.recipes import RECIPES

SEEDS = (0, 1, 2)
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
        words += [f"looks={config.looks}"] if config.looks > 1 else []
        words += [f"fold={config.fold}"] if config.fold else []
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


def seeded(cell: Cell, seed: int) -> Cell:
    """The cell with another seed; USB draws the labelled pictures anew with each (FACTS 2.4)."""
    own = 0 if cell.config.frozen else seed  # stored views are shared, only labels drawn anew
    return cell._replace(seed=seed, config=cell.config.replace(seed=own, split_seed=seed))


def suite_of(
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
            found += [seeded(first, seed) for seed in seeds]
    return found


def once(cells: Iterable[Cell]) -> list[Cell]:
    """Cells that share a run by the first of them."""
    found: dict[Path, Cell] = {}
    for cell in cells:
        found.setdefault(cell.folder, cell)
    return list(found.values())


def plain(method: str) -> Row:
    return Row(method, method)


def with_margin(
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


def loss_rows(column: str) -> list[Row]:
    source = "its strength is published nowhere (FACTS 1.2); the usual one"
    others = [
        Row(f"freematch + {name}", "freematch", {"unlabelled_loss": text}, source)
        for name, text in (("smoothing", "smoothing(alpha=0.1)"), ("focal", "focal(gamma=2)"))
    ]
    return [plain("freematch"), *others, with_margin("freematch", column)]


def _slug(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", text.replace("'", "")).strip("-")


_USB = "USB's usb_cv configuration (FACTS 2.1, 2.2)"
_STL = f"{_USB}; the paper's text names ViT-S and layer decay 0.95 (FACTS 1.5 d, e)"
_LT = "USB's long tail (FACTS 2.5) with ViT-S: the only network that explains the table (1.5 i)"
_LT_WRN = "USB's classic_cv_imb configuration (FACTS 2.5), as the paper's text says"
_CLASSIC = "USB's classic_cv protocol (FACTS 2.5), weight decay 5e-4 as in FixMatch's paper"
_LITE = "first experiments (EVIDENCE): EfficientNet-Lite0 at 64 px, but 2,000 steps"
_HEAD = "what `calmatch fit` does on a CPU (plan.head): EfficientNet-Lite0 frozen, 4 + 4 views"
_SECOND = f"{_HEAD}, but EfficientNet-Lite2"
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
    **{f"eurosat_pack_{n}": f"{_LITE}; EMA 0.995, packed pictures" for n in (20, 40)},
    **{f"cifar10_pack_{n}": f"as {_LITE}; EMA 0.995, packed pictures" for n in (40, 250)},
    **{f"{name}_long_40": f"as {name}_pack_40, 6,000 steps" for name in ("eurosat", "cifar10")},
    "cifar10_scratch_250": f"{_CLASSIC}, but 6,000 steps of 64 + 128 packed pictures, bf16",
    **{f"eurosat_frozen_{n}": _HEAD for n in (20, 40)},
    **{f"cifar10_frozen_{n}": _HEAD for n in (40, 250)},
    **{f"eurosat_lite2_{n}": _SECOND for n in (20, 40)},
    "cifar10_lite2_40": _SECOND,
    "cifar10_40": _CLASSIC,
    "cifar10_250": _CLASSIC,
    "digits_40": "the demo's recipe",
}
