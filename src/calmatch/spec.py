"""Spec strings: `name(literal, key=literal)`, chained by `|` or added by `+`; never evaluated."""

import ast
import difflib
import functools
import importlib
import inspect
import sys
import types
import typing
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

LONGEST = 2000  # characters; a spec is a line, not a program
UNREADABLE = "{!r} is not a spec: write name or name(key=value) with plain values."
NESTED = ("on",)  # arguments that are specs themselves
# timm's arguments that read files or addresses of their own, or change what a model gives
FORBIDDEN = (
    "checkpoint_path cache_dir pretrained_cfg pretrained_cfg_overlay pretrained_strict "
    "features_only scriptable exportable no_jit"
).split()


class Spec(NamedTuple):
    """A component's name and its literal arguments."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class SpecError(ValueError):
    """A spec string that names nothing, or names it wrongly."""


class Lookup(UserDict[str, Any]):
    """Names and what they stand for; a dotted text is imported when its name is looked up."""

    def __getitem__(self, name: str) -> Any:
        item = self.data[name]
        if isinstance(item, str):
            module, _, attribute = item.rpartition(".")
            item = self[name] = getattr(importlib.import_module(f"calmatch.{module}"), attribute)
        return item


def parse(text: str) -> Spec:
    """One component.

    >>> parse("margin(m=8)")
    Spec(name='margin', args=(), kwargs={'m': 8})
    """
    parts = chain(text)
    if len(parts) != 1:
        raise SpecError(f"Expected one component, but {text!r} chains {len(parts)}.")
    return parts[0]


def write(item: Spec) -> str:
    """The text that is parsed to this component.

    >>> write(Spec("margin", (8,), {"where": "all"}))
    "margin(8, where='all')"
    """
    words = [*map(repr, item.args), *(f"{key}={value!r}" for key, value in item.kwargs.items())]
    return f"{item.name}({', '.join(words)})" if words else item.name


def chain(text: str, joint: type[ast.operator] = ast.BitOr) -> list[Spec]:
    """Components joined by `|`, as transforms are."""
    return [_component(part, text) for part in _operands(_syntax_tree(text), joint)]


def added(text: str) -> list[Spec]:
    """Components joined by `+`, as losses are."""
    return chain(text, ast.Add)


def from_file(text: str, where: object, trust: bool, harmless: str = "") -> str:
    """The one door for a spec that a file (`where`) names: data passes, code only with `trust`.

    `harmless` is a package whose names stand in a table, so that nothing is imported by them.
    """
    for item in () if trust else components(text):
        if "." in item.name and not (harmless and item.name.startswith(f"{harmless}.")):
            code = f"{where} names the code {item.name!r}, which is not imported from a file"
            raise SpecError(f"{code}; add --trust if it is yours.")
        unsafe = [key for key in item.kwargs if key in FORBIDDEN]
        if unsafe or item.name == harmless:
            what = unsafe[0] if unsafe else f"{item.name}(...)"
            raise SpecError(f"{where} sets {what!r}, which a file must not; add --trust.")
    return text


def components(text: str) -> list[Spec]:
    """All components of a spec, added or chained, and those within their arguments."""
    sums = _operands(_syntax_tree(text), ast.Add)
    items = [_component(part, text) for each in sums for part in _operands(each, ast.BitOr)]
    inner = [item.kwargs[key] for item in items for key in NESTED if key in item.kwargs]
    return items + [one for text in inner if isinstance(text, str) for one in components(text)]


def _syntax_tree(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise SpecError(f"A spec is at most {LONGEST} characters long; this one has {len(text)}.")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(UNREADABLE.format(text)) from error


def _operands(node: ast.expr, joint: type[ast.operator]) -> list[ast.expr]:
    nodes: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, joint):
        nodes.append(node.right)
        node = node.left
    return [node, *reversed(nodes)]


def _component(node: ast.expr, text: str) -> Spec:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    names, node = [], call.func
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise SpecError(f"{text!r} is not a spec: a component starts with its name.")
    if any(key.arg is None for key in call.keywords):
        raise SpecError(f"{text!r} is not a spec: ** is not allowed.")
    try:
        args = tuple(map(ast.literal_eval, call.args))
        kwargs = {str(key.arg): ast.literal_eval(key.value) for key in call.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise SpecError(UNREADABLE.format(text)) from error
    return Spec(".".join([node.id, *reversed(names)]), args, kwargs)


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """A sentence that lists the known names and suggests the nearest."""
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(known)}."


def first_names(names: Sequence[str], most: int) -> str:
    """At most so many, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def find(name: str, table: Mapping[str, Callable[..., Any]], kind: str) -> Callable[..., Any]:
    """Look a name up; a dotted one is imported and must be callable."""
    if name in table:
        return table[name]
    if "." not in name:
        raise SpecError(f"There is no {kind} called {name!r}.{nearest(name, table)}")
    module, _, attribute = name.rpartition(".")
    here = str(Path.cwd())
    sys.path.append(here)  # a person's own code may stand in the folder they work in
    try:
        target = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(f"Cannot import the {kind} {name!r}: {error}.") from error
    finally:
        sys.path.remove(here)
    if not callable(target):
        raise SpecError(f"{name!r} is not a {kind}.")
    return typing.cast(Callable[..., Any], target)


def import_extra(sentence: str, *names: str) -> list[Any]:
    """Optional packages; where one is missing, the sentence that names the extra."""
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise ValueError(sentence) from error


def bind(
    spec: Spec, table: Mapping[str, Callable[..., Any]], kind: str, given: int = 0
) -> functools.partial[Any]:
    """The component with its arguments bound and checked.

    `given` leading parameters (a task, a term) are supplied later by the caller; positional
    arguments of the spec follow them.
    """
    target = find(spec.name, table, kind)
    parameters = list(inspect.signature(target).parameters.values())[given:]
    allowed = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in allowed]
    open_ended = len(allowed) < len(parameters)
    if len(spec.args) > len(names):
        raise SpecError(f"{kind} {spec.name!r} takes at most {len(names)} arguments.")
    values = dict(zip(names, spec.args, strict=False))
    for key, value in spec.kwargs.items():
        if key not in names and not open_ended:
            raise SpecError(f"{kind} {spec.name!r} has no argument {key!r}.{nearest(key, names)}")
        if key in values:
            raise SpecError(f"{kind} {spec.name!r} got the argument {key!r} twice.")
        values[key] = value
    hints: dict[str, Any] = {}
    with suppress(NameError, TypeError):
        plain: Any = getattr(target, "func", target)
        hints = typing.get_type_hints(plain.__init__ if inspect.isclass(plain) else plain)
    for key, value in values.items():
        if not fits(value, hint := hints.get(key, Any)):
            raise SpecError(f"{spec.name}({key}=...) is {value!r}, but it takes {describe(hint)}.")
    if missing := [p.name for p in allowed if p.default is p.empty and p.name not in values]:
        raise SpecError(f"{kind} {spec.name!r} needs the argument {missing[0]!r}.")
    return functools.partial(target, **values)


def describe(hint: Any) -> str:
    """A type in words.

    >>> describe(float | None), describe(typing.Literal["a", "b"])
    ('a number or nothing', "'a' or 'b'")
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType, typing.Literal):
        say = repr if origin is typing.Literal else describe
        return " or ".join(map(say, typing.get_args(hint)))
    words = {float: "a number", int: "a whole number", str: "a text", bool: "True or False"}
    return words.get(hint, "nothing" if hint is types.NoneType else str(hint))


def read_as(value: Any, hint: Any) -> Any:
    """A JSON value as the type says, a mapping as the tuple it names; or a TypeError."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(read_as(item, parts[0]) for item in value)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {read_as(key, str): read_as(item, parts[1]) for key, item in value.items()}
    if origin is types.UnionType or origin is typing.Union:
        return None if value is None else read_as(value, parts[0])
    if hasattr(hint, "_fields"):
        kinds = {k: v for k, v in field_types(hint).items() if k in value}  # or its default
        return hint(**{name: read_as(value[name], kind) for name, kind in kinds.items()})
    plain = origin in (None, typing.Literal) and fits(value, hint)
    if not plain or (hint is int and not 0 <= value < 1 << 62):
        raise TypeError(f"{value!r} is no {hint}")
    if hint is str and value.encode("utf-8", "ignore").decode() != value:
        raise TypeError("it is no valid Unicode")
    return value


field_types = functools.cache(typing.get_type_hints)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; other types than plain ones are not checked."""
    if isinstance(value, int) and abs(value) >= 1 << 63:  # no tensor holds it
        return False
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if hint in (float, int):
        return isinstance(value, hint | int) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, types.NoneType) else True
