"""The paper's experiments as lists of runs: every cell a whole Config with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from calmatch import spec
from calmatch.bench import own
from calmatch.bench.rows import (
    SEEDS,
    TAILS,
    Cell,
    Row,
    loss_rows,
    once,
    plain,
    seeded,
    suite_of,
    with_margin,
)

PSEUDO = ("fixmatch", "flexmatch", "freematch")  # the methods the paper adds its penalty to
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


def main() -> list[Cell]:
    """Tables 1 and 2: eleven rows on CIFAR-100, EuroSAT and STL-10, error and ECE."""
    return suite_of("main", COLUMNS, _main_rows)


def supplement() -> list[Cell]:
    """The supplement's table: nine further methods beside those of main."""
    return suite_of("supplement", COLUMNS, lambda c: [*map(plain, SUPPLEMENT), *_main_rows(c)])


def simmatch() -> list[Cell]:
    """The penalty on soft pseudo-labels: SimMatch on CIFAR-100 with 200, 400 and 1,000 labels."""
    columns = ("cifar100_200", "cifar100_400", "cifar100_1000")
    return suite_of("simmatch", columns, lambda c: [plain("simmatch"), with_margin("simmatch", c)])


def bam() -> list[Cell]:
    """FixMatch against BaM and against the margin on CIFAR-100."""
    source = "BaM on USB's network: no code is published (FACTS 4)"
    return suite_of(
        "bam",
        COLUMNS[:2],
        lambda c: [plain("fixmatch"), Row("bam", "bam", {}, source), with_margin("fixmatch", c)],
    )


def where() -> list[Cell]:
    """Where the penalty acts: on agreeing pictures (U''), on disagreeing ones (U'), on both."""
    return suite_of(
        "where", COLUMNS[:2], lambda c: [row for method in PSEUDO for row in _where(method, c)]
    )


def losses() -> list[Cell]:
    """Label smoothing, focal loss or the margin on FreeMatch; ECE, CECE and AECE (radar plots)."""
    return suite_of("losses", COLUMNS, loss_rows)


def longtail() -> list[Cell]:
    """Three long-tailed CIFAR-100 settings, with ViT-S and with WRN-28-2."""
    columns = [f"cifar100_lt_{kind}{tail}" for kind in ("", "wrn_") for tail in TAILS]
    return suite_of("longtail", columns, _pairs)


def sweep() -> list[Cell]:
    """How m and the weight act on EuroSAT with 40 labels: nothing the paper shows."""

    def rows(column: str) -> list[Row]:
        found = []
        for method in PSEUDO:
            found.append(plain(method))
            found += [with_margin(method, column, m=m) for m in (4, 6, 8, 10, 12)]
        weights = (0.01, 0.03, 0.3, 1.0)
        return found + [with_margin("freematch", column, m=8, weight=w) for w in weights]

    return suite_of("margin", ("eurosat_40",), rows)


def wrn() -> list[Cell]:
    """The main rows on CIFAR-10 with WRN-28-2 from scratch, the field's classic protocol."""
    return suite_of("wrn", ("cifar10_40", "cifar10_250"), _main_rows)


def digits() -> list[Cell]:
    """Supervised and three methods with and without margin: minutes on two cores."""
    return suite_of("digits", ("digits_40",), lambda c: [plain("supervised"), *_pairs(c)])


def paper() -> list[Cell]:
    """All of the paper's experiments; what several tables share is run once."""
    parts = (main, supplement, simmatch, bam, where, losses, longtail)
    return once(cell for part in parts for cell in part())


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
    "eurosat": own.eurosat,
    "cifar10": own.cifar10,
    "beyond": own.beyond,
    "evidence": own.evidence,
    "longer": own.longer,
    "scratch": own.scratch,
    "frozen": own.frozen,
    "draws": own.draws,
    "network": own.network,
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
    return [seeded(cell, seed) for cell in found if cell.seed == SEEDS[0] for seed in seeds]


def _pairs(column: str) -> list[Row]:
    return [row for method in PSEUDO for row in (plain(method), with_margin(method, column))]


def _main_rows(column: str) -> list[Row]:
    return [plain("supervised"), *map(plain, OTHERS), *_pairs(column)]


def _where(method: str, column: str) -> list[Row]:
    penalties = [with_margin(method, column, on=on) for on in ("", "disagree", "all")]
    return [plain(method), *penalties]
