"""The suites of our own evidence: real pictures, five seeds, a network that can be had offline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from calmatch.bench.rows import Cell, Row, loss_rows, once, plain, suite_of, with_margin
from calmatch.config import LOOKS
from calmatch.data.split import FOLDS
from calmatch.recipes import METHOD, MILD, PENALTY

FIVE = (0, 1, 2, 3, 4)
TEN = tuple(range(10))
TWENTY = tuple(range(20))
THRESHOLDED = (
    "fixmatch",
    "flexmatch",
    "freematch",
    "softmatch",
    "adamatch",
    "simmatch",
    "mixmatch",
)


LAYERED = ("simmatch", "bam")  # have layers of their own


def eurosat() -> list[Cell]:
    """EuroSAT: eight methods without margin, with the published one and a cap of 0.98; losses."""
    return suite_of("eurosat", ("eurosat_pack_40", "eurosat_pack_20"), _evidence_rows, FIVE)


def cifar10() -> list[Cell]:
    """The same on CIFAR-10 with 40 and 250 labels, which chose nothing: it confirms or does not."""
    return suite_of("cifar10", ("cifar10_pack_40", "cifar10_pack_250"), _evidence_rows, FIVE)


def beyond() -> list[Cell]:
    """Beyond the paper: aware thresholds, margins by rule, soft labels, mixup (docs/beyond.md)."""
    columns = ("eurosat_pack_40", "eurosat_pack_20", "cifar10_pack_40")
    return suite_of("beyond", columns, _beyond_rows, FIVE)


def evidence() -> list[Cell]:
    """The most telling cells of these three first: what fit does, folds of its labels, others."""
    parts = [suite_of("evidence", [column], rows, FIVE) for column, rows in _TELLING]
    rest = [cell._replace(suite="evidence") for cell in (*eurosat(), *cifar10(), *beyond())]
    return once([*itertools.chain(*parts), *rest])


def longer() -> list[Cell]:
    """FreeMatch without and with caps, three times as long: does it change what evidence says?"""
    columns, kinds = ("eurosat_long_40", "cifar10_long_40"), (_default, _mild, _held_long)
    return once(cell for rows in kinds for cell in suite_of("longer", columns, rows, FIVE))


def scratch() -> list[Cell]:
    """No ImageNet: WRN-28-2 from scratch on CIFAR-10-250, FreeMatch without and with a margin."""
    return suite_of("scratch", ["cifar10_scratch_250"], _bare, FIVE)


CAP = {"penalty": PENALTY}
LOOKED = f"{METHOD}, looks"
CLOSER = f"{METHOD} + cap, looks"  # the full cap, which with looks is too unsure
FITTED = f"{METHOD} + mild cap, looks"  # the row of what `calmatch fit` does on a CPU
MILDER = f"{METHOD} + mild cap"
LABELS = "margin(m='labels')"
_LOOKS = "the mean of five looks (docs/beyond.md)"
_SHOWN = "its cap is what the labels can show (docs/beyond.md)"


def _evidence_rows(column: str) -> list[Row]:
    found = [plain("supervised")]
    for method in THRESHOLDED:
        found += [plain(method), with_margin(method, column), _own(method, "cap", **CAP)]
    return [*found, *_rivals(column)]


def _rivals(column: str) -> list[Row]:
    """What else is said to keep confidence honest."""
    return [*loss_rows(column)[1:3], Row("bam", "bam")]


def _beyond_rows(column: str) -> list[Row]:
    """A hypothesis a row; what it is compared with stands in the evidence suites or here."""
    aware = {"penalty": LABELS, "aware": 0.7}
    pairs = [("soft", "hard=False"), ("mixup", "mixup=0.5"), ("both", "hard=False, mixup=0.5")]
    found = [plain("freematch"), _own("freematch", "labels", penalty=LABELS)]
    for name, settings in pairs:
        method = f"freematch({settings})"
        found += [
            Row(f"freematch, {name}", method),
            _own(method, f"{name}, labels", penalty=LABELS),
        ]
    found.append(_own("freematch", "gate", penalty="margin(m=2, gate=True)"))
    for method in ("fixmatch", "uda"):
        found += [plain(method), _own(method, "labels", penalty=LABELS)]
        found.append(_own(method, "cap, aware", **CAP, aware=0.7))
        found.append(_own(method, "labels, aware", **aware))
    return found


def frozen() -> list[Cell]:
    """What fit does on a CPU, and all others that a frozen network can do: five draws of labels."""
    kinds = (_default, _held, _looked, _headed, _held_too, _beyond_rows, _slow, _held_each)
    return once(cell for rows in kinds for cell in suite_of("frozen", FROZEN, rows, FIVE))


def draws() -> list[Cell]:
    """The bar of a frozen network on twenty draws of labels: FreeMatch, what fit does, between."""
    kinds, judged = (_default, _looked), FROZEN[:3]  # the bar asks for no other setting
    return once(cell for rows in kinds for cell in suite_of("draws", judged, rows, TWENTY))


def network() -> list[Cell]:
    """The bar with another frozen network, EfficientNet-Lite2, that chose nothing: ten draws."""
    columns = ("eurosat_lite2_40", "eurosat_lite2_20", "cifar10_lite2_40")
    return suite_of("network", columns, _second, TEN)


FROZEN = ("eurosat_frozen_40", "eurosat_frozen_20", "cifar10_frozen_40", "cifar10_frozen_250")


def _headed(column: str) -> list[Row]:
    return [*_compared(column), *_fixed(column), *_evidence_rows(column), *_capped(column)]


def _default(column: str) -> list[Row]:
    """The bar: plain FreeMatch and fit's margin."""
    return [plain(METHOD), _own(METHOD, "cap", **CAP)]


def _bare(column: str) -> list[Row]:
    return [plain(METHOD), with_margin(METHOD, column)]


def _mild(column: str) -> list[Row]:
    """The cap that fit takes with several looks, without them."""
    return [_own(METHOD, "mild cap", penalty=MILD)]


def _held_long(column: str) -> list[Row]:
    """Folds of the labels for runs that train long."""
    return _folds(column, [plain(METHOD), *_mild(column)])


def _held(column: str) -> list[Row]:
    """The bar's rows without each fold of the labels, for a temperature that the labels choose."""
    return _folds(column, _default(column)[::-1])


def _looked(column: str) -> list[Row]:
    """The bar with five looks at a picture that is predicted, last as `calmatch fit` does it."""
    closer = Row(CLOSER, METHOD, {**CAP, "looks": LOOKS}, _LOOKS)
    looked, *fitted = _fitted(column)
    return [looked, closer, *fitted]


def _fitted(column: str) -> list[Row]:
    """Looks alone, and what `calmatch fit` does with the folds of its labels."""
    looked = Row(LOOKED, METHOD, {"looks": LOOKS}, _LOOKS)
    fit = Row(FITTED, METHOD, {"penalty": MILD, "looks": LOOKS}, _LOOKS)
    return [looked, fit, *_folds(column, [fit])]


def _second(column: str) -> list[Row]:
    """The bar by another network."""
    return [plain(METHOD), *_fitted(column)]


def _held_too(column: str) -> list[Row]:
    return _folds(column, [plain("fixmatch"), plain("supervised")])


def _held_each(column: str) -> list[Row]:
    """So that labels choose every row's temperature, where a fold is a quarter of them."""
    rows = [row for row in _evidence_rows(column) if row.method not in LAYERED]
    return _folds(column, rows) if column.endswith("_40") else []


def _folds(column: str, rows: Sequence[Row]) -> list[Row]:
    source = "held-out labels choose a temperature (docs/beyond.md)"
    return [
        Row(f"{row.name}, fold {k}", row.method, {**row.changes, "fold": k}, source)
        for row in rows
        for k in range(1, min(FOLDS, int(column.rpartition("_")[2]) // 10) + 1)
    ]


def _slow(column: str) -> list[Row]:
    """The bar with the published memory, which in a short run believes every guess."""
    source, method = "what `methods.paced` changes (docs/log.md)", f"{METHOD}(momentum=0.999)"
    cap = f"{METHOD} + cap, memory 0.999"
    return [Row(f"{METHOD}, memory 0.999", method, {}, source), Row(cap, method, CAP, source)]


def _fixed(column: str) -> list[Row]:
    """A fixed threshold, with and without knowing the margin."""
    rows = [plain("fixmatch"), _own("fixmatch", "cap", **CAP)]
    return [
        *rows,
        _own("fixmatch", "cap, aware", **CAP, aware=0.7),
        with_margin("fixmatch", column),
    ]


def _compared(column: str) -> list[Row]:
    rows = [with_margin(METHOD, column), plain("supervised")]
    return [*rows, _own(METHOD, "labels", penalty=LABELS)] if column.endswith("_20") else rows


def _capped(column: str) -> list[Row]:
    """A lower cap: a head that learns for few steps stays far from a high one."""
    return [_own(METHOD, "cap 0.95", penalty="margin(cap=0.95)")]


def _adaptive(column: str) -> list[Row]:
    return _with_cap("softmatch", "flexmatch", "adamatch")


def _others(column: str) -> list[Row]:
    return [*_with_cap("simmatch", "mixmatch"), *_rivals(column)]


def _margins(column: str) -> list[Row]:
    """The published margin on every method."""
    return [row for row in _evidence_rows(column) if row.name.endswith(" + margin")]


def _layered(column: str) -> list[Row]:
    """Methods with layers of their own, which a frozen network trains slowly."""
    return [row for row in _evidence_rows(column) if row.method in LAYERED]


def _with_cap(*methods: str) -> list[Row]:
    return [row for name in methods for row in (plain(name), _own(name, "cap", **CAP))]


def _softened(column: str) -> list[Row]:
    """What soft labels and mixup give without a margin, alone and together."""
    return [row for row in _beyond_rows(column) if row.name.startswith("freematch, ")]


def _mixed(column: str) -> list[Row]:
    """Mixup of strong views, without and with a margin."""
    return [row for row in _beyond_rows(column) if "mixup" in row.name]


_TELLING: Sequence[tuple[str, Callable[[str], list[Row]]]] = (
    ("eurosat_pack_40", _default),
    ("eurosat_pack_20", _default),
    ("eurosat_pack_40", _compared),
    ("eurosat_pack_20", _compared),
    ("eurosat_pack_40", _fixed),
    ("eurosat_pack_40", _mixed),
    ("eurosat_pack_20", _mixed),
    ("eurosat_pack_40", _held),
    ("eurosat_pack_40", _adaptive),
    ("eurosat_pack_40", _others),
    ("eurosat_pack_40", _margins),
    ("cifar10_pack_40", _default),
    ("cifar10_pack_40", _mixed),
    ("cifar10_pack_40", _compared),
    ("cifar10_pack_40", _fixed),
    ("cifar10_pack_40", _held),
    ("cifar10_pack_250", _default),
    ("cifar10_pack_250", _compared),
    ("cifar10_pack_250", _fixed),
    ("cifar10_pack_250", _layered),
    ("cifar10_pack_40", _layered),
    ("eurosat_pack_20", _layered),
    ("cifar10_pack_40", _adaptive),
    ("eurosat_pack_20", _fixed),
    ("eurosat_pack_20", _adaptive),
    ("cifar10_pack_250", _adaptive),
    ("cifar10_pack_40", _others),
    ("eurosat_pack_20", _others),
    ("cifar10_pack_250", _others),
    ("eurosat_pack_20", _held),
    ("eurosat_pack_40", _softened),
    ("eurosat_pack_40", _mild),
    ("cifar10_pack_40", _mild),
    ("eurosat_pack_20", _mild),
    ("cifar10_pack_250", _mild),
)


def _own(method: str, name: str, **changes: Any) -> Row:
    source = _SHOWN if changes["penalty"] == LABELS else "ours (docs/beyond.md)"
    return Row(f"{method.split('(')[0]} + {name}", method, changes, source)
