"""Who teaches whom: one file per method, one line here."""

import inspect

from calmatch import spec
from calmatch.core import Method, Task

_NAMES = (
    "Supervised PseudoLabel PiModel MeanTeacher VAT MixMatch ReMixMatch UDA FixMatch "
    "FlexMatch Dash CRMatch CoMatch SimMatch AdaMatch FreeMatch SoftMatch DeFixMatch "
    "ShrinkMatch ReFixMatch BAM"
)
METHODS = spec.Lookup({name.lower(): f"methods.{name.lower()}.{name}" for name in _NAMES.split()})


def find(text: str) -> type[Method]:
    """The class a spec names."""
    kind = spec.find(spec.parse(text).name, METHODS, "method")
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise spec.SpecError(f"{text!r} is not a Method.")
    return kind


def build(text: str, task: Task) -> Method:
    """The method a spec names, `"freematch(momentum=0.99)"` for example."""
    find(text)
    method: Method = spec.bind(spec.parse(text), METHODS, "method", given=1)(task)
    if any(True for _ in method.parameters()):
        raise spec.SpecError(f"{text!r} owns parameters; a method returns them from heads().")
    return method


def adapt_momentum(text: str, steps: int) -> str:
    """The spec of a method whose moving averages fit the run: a fiftieth of it, ten steps at least.

    With 0.999 a threshold that begins near zero rises too late in 2,000 steps (research/log.md).

    >>> adapt_momentum("freematch", 2000)
    'freematch(momentum=0.975)'
    """
    item = spec.parse(text)
    own = inspect.signature(find(text)).parameters.get("momentum")
    memory = round(max(0.9, 1 - 50 / steps), 6)
    named = item.name not in METHODS or item.args or "momentum" in item.kwargs
    if own is None or named or memory >= own.default:
        return text
    return spec.write(item._replace(kwargs={**item.kwargs, "momentum": memory}))
