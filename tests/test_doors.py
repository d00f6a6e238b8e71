"""The doors that every file passes: one opener, one decoder, one check of what would be code."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import signal
import subprocess
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import calmatch
from calmatch import cli, files, options
from calmatch.data.images import FORMATS, decode
from calmatch.model import load_model
from calmatch.training.config import Config
from conftest import write_random_model
from folders import made

SOURCE = Path(calmatch.__file__).parent
TREES = {path: ast.parse(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}
READING = {"read_bytes", "read_text", "load", "load_file", "safe_open", "ZipFile", "memmap"}


def calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Owner, name and node of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield ast.unparse(node.func.value), node.func.attr, node
            elif isinstance(node.func, ast.Name):
                yield "", node.func.id, node


def test_pictures_are_decoded_by_one_call_with_a_list_of_formats():
    opened = [
        (path.name, [keyword.arg for keyword in node.keywords])
        for path, tree in TREES.items()
        for owner, name, node in calls(tree)
        if name == "open" and owner.rpartition(".")[2] == "Image"
    ]
    assert opened == [("images.py", ["formats"])]
    assert not set(FORMATS) & {"EPS", "PS", "FPX", "MIC", "WMF", "FITS", "HDF5", "GRIB", "BUFR"}


def _reads(owner: str, name: str, node: ast.Call) -> bool:
    """Whether a call opens a file for reading, other than by `files`."""
    if name == "open" and owner not in ("os", "Image", "console", "wave"):
        mode = node.args[0 if owner else 1 :][:1]
        text = mode[0].value if mode and isinstance(mode[0], ast.Constant) else "r"
        return isinstance(text, str) and not set(text) & set("wax+")
    return name in READING and owner not in ("files", "json", "archive", "yaml")


def test_files_are_opened_by_one_function():
    """A pipe hangs and a device never ends, so libraries get a path that was looked at."""
    doors = ("files.regular(", "files.open_file(", "files.read_bytes(", "regular(", "io.BytesIO(")
    wrong = []
    for path, tree in TREES.items():
        if path.name == "files.py":
            continue
        kept = {  # variables that hold a path which was looked at
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(doors)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for owner, name, node in calls(tree):
            first = ast.unparse(node.args[0]) if node.args else ""
            own = isinstance(node.func, ast.Name) and name in ("read_bytes", "read_text")
            if _reads(owner, name, node) and not (own or first.startswith(doors) or first in kept):
                wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)[:60]}")
    allowed = ("load(options.", "(HERE /", "bench/ray.py", "archive.open(", "open(number")
    allowed += ("Path(__file__)",)  # models, a queue of Ray's, members, descriptors, our own files
    assert not [line for line in wrong if not any(word in line for word in allowed)]


def test_a_process_that_is_started_does_not_look_for_modules_where_it_is(tmp_path):
    """`-m` and `-c` put the current folder first: a calmatch.py or torch.py among pictures."""
    commands = [
        [ast.unparse(word) for word in node.elts[:2]]
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.List)
        and node.elts
        and "sys.executable" in ast.unparse(node.elts[0])
    ]
    assert len(commands) > 2
    assert all(words == ["sys.executable", "'-P'"] for words in commands)
    for name in ("calmatch", "torch", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text("open('trap', 'w').close()")
    words = [sys.executable, "-P", "-m", "calmatch", "--version"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / "trap").exists()


WALL_CLOCK = {  # who may look at a clock that a person can set: dates for people, ages of files
    "checkpoint.py": 1, "files.py": 1, "images.py": 1, "labelfiles.py": 1, "engine.py": 1,
}  # fmt: skip


def test_no_span_of_time_is_measured_by_a_clock_that_can_be_set():
    """--minutes, rates and waits go by the monotonic clock: a jump of the other changes nothing."""
    calls_of: Counter[str] = Counter()
    for path, tree in TREES.items():
        for owner, name, _ in calls(tree):
            wall = (owner, name) == ("time", "time") or name in (
                "now",
                "today",
                "utcnow",
                "time_ns",
            )
            calls_of[path.name] += wall
    assert +calls_of == WALL_CLOCK


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "x.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        import socket

        with socket.socket(socket.AF_UNIX) as one:
            os.chdir(tmp_path)
            one.bind("x.png")
    for read in (files.open_file, files.regular, files.read_bytes, files.read_text):
        with pytest.raises(OSError, match=r"regular|No such device"):
            read(path)
    with pytest.raises(ValueError, match=r"regular|No such device"):
        files.read_json(path)
    with pytest.raises(ValueError, match=r"regular|No such device"):
        files.read_arrays(path)


def test_an_empty_file_is_read_without_room_for_the_largest(tmp_path):
    (tmp_path / "log").touch()
    assert files.read_bytes(tmp_path / "log", 1 << 60) == b""  # was a MemoryError


@pytest.mark.parametrize("format", ["EPS", "PPM", "PCX", "ICO", "TGA", "PDF"])
def test_other_formats_are_not_decoded_whatever_their_name(tmp_path, format):
    path = tmp_path / "x.png"
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path, format)
    with pytest.raises(OSError, match="identify"):
        decode(path.read_bytes(), 8)


# Poison -------------------------------------------------------------------------------------

POISON = (
    "poison.Thing(cmd='x')",
    "embedded(on='poison.Thing')",
    "crop(1)|poison.Thing",
    "cross_entropy + poison.Thing",
)
# every command that is given a folder or file of a run, a model or a config; {} stands for it
COMMANDS = {
    "fit": [
        "fit pictures --from {} --out new --steps 2 --quiet --device cpu",
        "fit pictures --out {} --steps 2 --size 8 --net tiny --quiet --device cpu --no-frozen",
    ],
    "train": ["train {}/config.json --steps 2 --out new --quiet --device cpu"],
    "evaluate": ["evaluate {} --resamples 0"],
    "report": ["report {} --out page.html"],
    "predict": ["predict {} pictures --out new.csv --quiet --device cpu"],
    "export": ["export {} --to pt2 --out new.pt2 --quiet"],
    "serve": ["serve {} --quiet --device cpu"],
    "label": ["label pictures --first {} --net tiny --no-browser --quiet --device cpu"],
    "table": ["table {}"],
    "figure": ["figure reliability {}"],
    "replay": ["replay {} --quiet --steps 2"],
    "push": ["push {} somebody/something"],
}
NO_FOLDER_OF_A_RUN = {"demo", "bench", "datasets"}


def test_every_command_that_takes_a_path_is_poisoned():
    hints = {name: _options(name) for name in cli.COMMANDS}
    paths = {name for name, kind in hints.items() if kind and "Path" in str(kind)}
    assert paths <= COMMANDS.keys() | NO_FOLDER_OF_A_RUN, "add it to COMMANDS above"


def _options(command: str) -> str:
    name = cli.COMMANDS[command][1] or f"{command.capitalize()}Options"
    kind = getattr(options, name, None)
    return str([field.type for field in dataclasses.fields(kind)]) if kind else ""


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all entries in a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield (*path, key)
        if isinstance(inner, dict | list) and len(inner) < 40:
            yield from fields(inner, (*path, key))


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return value


@pytest.fixture
def poisoned(tmp_path, monkeypatch) -> types.SimpleNamespace:
    """A folder that is a run, a model and a fit at once, and a module that leaves a trace."""
    monkeypatch.chdir(tmp_path)
    nobody = types.SimpleNamespace(HfApi=lambda **_: (_ for _ in ()).throw(OSError("no network")))
    monkeypatch.setitem(sys.modules, "huggingface_hub", nobody)
    for server in ("label", "serve"):  # all is read before they listen
        monkeypatch.setattr(f"calmatch.web.{server}.listen", _refuse_to_listen)
    trace = tmp_path / "trace"
    (tmp_path / "poison.py").write_text(f"open({str(trace)!r}, 'w').close()\nThing = str\n")
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for k in range(4):
            pixels = np.random.default_rng(k).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{k}.png")
    folder = made(tmp_path / "run", pictures=40, classes=["cat", "dog"]).folder
    write_random_model(folder, "tiny", 2, 8)
    note = json.loads((folder / "model.json").read_text())
    files.write_json(folder / "model.json", {**note, "classes": ["cat", "dog"]})
    config = Config(net="tiny", weak="crop(1)", strong="crop(2)", steps=2, device="cpu")
    files.write_json(folder / "config.json", config.dump())
    files.write_json(folder / "environment.json", {"threads": 1, "versions": {"torch": "2"}})
    given = options.FitOptions(
        Path("pictures"), steps=2, size=8, net="tiny", no_frozen=True, device="cpu"
    )
    plan = {
        **{"net": "tiny", "size": 8, "mean": None, "std": None, "steps": 2, "alone_steps": 2},
        **{"batch": 4, "ratio": 1, "lr": 0.01, "ema": 0.9, "weak": "crop(1)", "strong": "crop(2)"},
        **{"hold": 0.0, "most": 0, "notes": []},
    }
    from calmatch.data.folder import read_folder
    from calmatch.fit import _digest

    digest = _digest(read_folder(tmp_path / "pictures"))
    content = {"options": given.dump(), "plan": plan, "digest": digest}
    files.write_json(folder / "fit.json", content)
    texts = {path.name: path.read_text() for path in folder.glob("*.json")}
    return types.SimpleNamespace(folder=folder, trace=trace, texts=texts)


def _refuse_to_listen(host: str, port: int) -> None:
    files.read_json(Path("nowhere"))  # a sentence


def readers() -> Iterator[tuple[str, Any]]:
    """Functions of calmatch that read or load and take a path first, found by looking at them."""
    for info in pkgutil.walk_packages(calmatch.__path__, "calmatch."):
        if info.name.rpartition(".")[2] in ("__main__", "cuda_graph"):
            continue
        module = importlib.import_module(info.name)
        for name, item in inspect.getmembers(module, inspect.isfunction):
            if item.__module__ != info.name or "write" in name or "save" in name:
                continue
            first = next(iter(inspect.signature(item).parameters.values()), None)
            source = inspect.getsource(item)
            if (
                first
                and "Path" in str(first.annotation)
                and ("read_" in source or "load_" in source)
            ):
                yield f"{info.name}.{name}", item


def arguments(item: Any, first: Path) -> list[Any] | None:
    """What it is called with; None where that is more than a path and a few plain things."""
    plain = {"Config": Config(), "int": 2, "bool": False, "str": "x"}
    values: list[Any] = [first]
    for parameter in list(inspect.signature(item).parameters.values())[1:]:
        if parameter.default is parameter.empty:
            if (
                str(parameter.annotation) not in plain
                or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD
            ):
                return None
            values.append(plain[str(parameter.annotation)])
    return values


def test_there_are_readers_to_be_found():
    names = {name.rpartition(".")[2] for name, _ in readers()}
    assert {"load_model", "load_run", "load_config", "read_result", "read_json"} <= names


def test_no_reader_runs_what_a_file_names(poisoned):
    """Every entry of every JSON file of a run folder, into every function that reads one."""
    folder, ways = poisoned.folder, list(readers())
    for file, text in poisoned.texts.items():
        content = json.loads(text)
        for place in fields(content):
            (folder / file).write_text(json.dumps(put(content, place, POISON[0])))
            for name, item in ways:
                for first in (folder, folder / file):
                    values = arguments(item, first)
                    if values is None:
                        continue
                    signal.alarm(20)
                    try:
                        item(*values)
                    except Exception:  # others test that it is a sentence
                        pass
                    finally:
                        signal.alarm(0)
                    assert not poisoned.trace.exists(), f"{name} ran {file} {place}"
        (folder / file).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for lines in COMMANDS.values() for line in lines])
def test_no_command_runs_what_a_file_names(poisoned, capsys, line):
    """Every text in every JSON file, as code; and nothing ends in a traceback."""
    for file, text in poisoned.texts.items():
        content = json.loads(text)
        for place in fields(content):
            inner: Any = content
            for key in place:
                inner = inner[key]
            if not isinstance(inner, str):
                continue
            for poison in (
                POISON if place[-1] in ("net", "method", "weak", "strong") else POISON[:1]
            ):
                (poisoned.folder / file).write_text(json.dumps(put(content, place, poison)))
                code = cli.main(line.format(poisoned.folder.name).split())
                said = capsys.readouterr()
                assert not poisoned.trace.exists(), f"{line} ran {file} {place}"
                assert code in (0, 2), (line, file, place, said.err[-800:])
                assert "Traceback" not in said.err
        (poisoned.folder / file).write_text(text)


def test_trust_alone_imports_what_a_model_names(poisoned):
    note = json.loads(poisoned.texts["model.json"])
    (poisoned.folder / "model.json").write_text(json.dumps({**note, "net": "poison.Thing"}))
    with pytest.raises(ValueError, match="--trust"):
        load_model(poisoned.folder)
    assert not poisoned.trace.exists()
    sys.modules.pop("poison", None)
    with pytest.raises(ValueError, match="cannot be built"):
        load_model(poisoned.folder, trust=True)
    assert poisoned.trace.exists()


def test_an_argument_that_is_a_spec_is_known_to_the_door():
    """Whoever builds a network or method from an argument lets `spec.NESTED` know its name."""
    from calmatch.nets import NETS
    from calmatch.spec import NESTED

    built = set()
    for path in (*(SOURCE / "nets").glob("*.py"), *(SOURCE / "methods").glob("*.py")):
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
                for owner, name, call in calls(node):
                    builds = owner in ("nets", "methods", "spec") and name in (
                        "build",
                        "find",
                        "parse",
                    )
                    if builds and call.args and ast.unparse(call.args[0]) in names:
                        built.add(ast.unparse(call.args[0]))
    assert built <= set(NESTED)
    assert "on" in typing.get_type_hints(NETS["embedded"].__init__)
