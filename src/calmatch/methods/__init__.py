"""Who teaches whom: one file per method, one line here."""

from __future__ import annotations

from collections.abc import Mapping

from calmatch import spec
from calmatch.core import Method, Task
from calmatch.methods.fixmatch import FixMatch
from calmatch.methods.flexmatch import FlexMatch
from calmatch.methods.freematch import FreeMatch
from calmatch.methods.supervised import Supervised

METHODS: Mapping[str, type[Method]] = {
    "supervised": Supervised,
    "fixmatch": FixMatch,
    "flexmatch": FlexMatch,
    "freematch": FreeMatch,
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
