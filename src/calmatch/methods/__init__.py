"""Who teaches whom: one file per method, one line here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from calmatch import spec
from calmatch.core import Method, Task
from calmatch.methods.adamatch import AdaMatch
from calmatch.methods.bam import BAM
from calmatch.methods.comatch import CoMatch
from calmatch.methods.crmatch import CRMatch
from calmatch.methods.dash import Dash
from calmatch.methods.defixmatch import DeFixMatch
from calmatch.methods.fixmatch import FixMatch
from calmatch.methods.flexmatch import FlexMatch
from calmatch.methods.freematch import FreeMatch
from calmatch.methods.meanteacher import MeanTeacher
from calmatch.methods.mixmatch import MixMatch
from calmatch.methods.pimodel import PiModel
from calmatch.methods.pseudolabel import PseudoLabel
from calmatch.methods.refixmatch import ReFixMatch
from calmatch.methods.remixmatch import ReMixMatch
from calmatch.methods.shrinkmatch import ShrinkMatch
from calmatch.methods.simmatch import SimMatch
from calmatch.methods.softmatch import SoftMatch
from calmatch.methods.supervised import Supervised
from calmatch.methods.uda import UDA
from calmatch.methods.vat import VAT

METHODS: Mapping[str, type[Method]] = {
    "supervised": Supervised,
    "pseudolabel": PseudoLabel,
    "pimodel": PiModel,
    "meanteacher": MeanTeacher,
    "vat": VAT,
    "mixmatch": MixMatch,
    "remixmatch": ReMixMatch,
    "uda": UDA,
    "fixmatch": FixMatch,
    "flexmatch": FlexMatch,
    "dash": Dash,
    "crmatch": CRMatch,
    "comatch": CoMatch,
    "simmatch": SimMatch,
    "adamatch": AdaMatch,
    "freematch": FreeMatch,
    "softmatch": SoftMatch,
    "defixmatch": DeFixMatch,
    "shrinkmatch": ShrinkMatch,
    "refixmatch": ReFixMatch,
    "bam": BAM,
}


def find(text: str) -> type[Method]:
    """The class a spec names."""
    found = spec.find(spec.parse(text).name, METHODS, "method")
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise spec.SpecError(f"{text!r} is not a Method.")
    return found


def build(text: str, task: Task) -> Method:
    """The method a spec names, `"freematch(momentum=0.99)"` for example."""
    find(text)
    method: Method = spec.bind(spec.parse(text), METHODS, "method", given=1)(task)
    if any(True for _ in method.parameters()):
        raise spec.SpecError(f"{text!r} owns parameters; a method returns them from heads().")
    return method


def paced(text: str, steps: int) -> str:
    """The spec of a method whose moving averages fit the run: a fiftieth of it, ten steps at least.

    The published 0.999 is made for hundreds of thousands of steps. In 2,000 a threshold that begins
    near zero rises too late, and every guess is believed (docs/log.md).

    >>> paced("freematch", 2000)
    'freematch(momentum=0.975)'
    """
    item = spec.parse(text)
    own = inspect.signature(find(text)).parameters.get("momentum")
    memory = round(max(0.9, 1 - 50 / steps), 6)
    if own is None or item.name not in METHODS or item.args or "momentum" in item.kwargs:
        return text
    if memory >= own.default:
        return text
    return spec.write(item._replace(kwargs={**item.kwargs, "momentum": memory}))
