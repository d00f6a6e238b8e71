"""Files: atomic writes, locks, and the one opener of files that a stranger may have sent."""

import errno
import functools
import glob
import importlib
import importlib.util
import io
import json
import os
import stat
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

LARGEST_BYTES = {"json": 1 << 26, "npz": 1 << 32}  # bytes, of arrays when they are unpacked
LARGEST_TEXT = 1 << 28  # bytes of any other file that is read whole
MOST_ENTRIES = 1 << 21  # lists and mappings in a JSON file: each takes much more than its letters
UNPACKED = (1 << 28, 100)  # bytes that a small .npz may unpack to, and how often its own size
WINDOWS = os.name == "nt"
LITTER_SECONDS = 24 * 3600  # after which a half-written file is left over, where one cannot ask
fcntl, msvcrt = (
    importlib.import_module(name) if importlib.util.find_spec(name) else None
    for name in ("fcntl", "msvcrt")
)  # of two systems; each has one


def open_file(path: Path | str) -> io.BufferedReader:
    """Open for reading; an OSError where it is no regular file: a pipe hangs, a device never ends.

    Every file that calmatch reads is opened here; libraries that want a path get `regular(path)`.
    """
    odd = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, os.O_RDONLY | odd)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(number, "rb")


def regular(path: Path | str) -> Path:
    """The path, if it leads to a regular file that can be opened."""
    open_file(path).close()
    return Path(path)


def read_bytes(path: Path | str, most: int = LARGEST_TEXT) -> bytes:
    """A whole file, if it is a regular one and not too large; an OSError else."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        room = max(size, 1 << 20) + 1  # what a file that says 0 may hold all the same
        if size <= most and len(data := file.read(room)) <= most:
            return data
    raise OSError(errno.EINVAL, f"it is larger than {most >> 20} MiB", str(path))


def read_text(path: Path | str) -> str:
    """A whole file of UTF-8; an OSError or a UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8")


@functools.cache
def template(path: Path, **filters: Any) -> Any:
    """A Jinja template beside the code, read once; in plain text nothing is escaped."""
    import jinja2

    page = jinja2.Environment(autoescape=path.suffix != ".txt", undefined=jinja2.StrictUndefined)
    page.trim_blocks = page.lstrip_blocks = True
    page.keep_trailing_newline, page.filters = path.suffix == ".txt", {**page.filters, **filters}
    # tojson escapes <, >, & and ', and ASCII alone leaves no U+2028: safe inside a script element
    page.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return page.from_string(read_text(path))


def reason(error: BaseException) -> str:
    """Why, in few words: without number and path, which the caller's sentence names."""
    text = error.strerror if isinstance(error, OSError) else ""
    return (text or str(error)).strip().rstrip(".") or type(error).__name__


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """Another name to write to; it becomes `path` when the block ends well, and vanishes else."""
    if path.exists() and not path.is_file():  # /dev/null would become a file
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    other = path.with_name(f".{path.name}.{os.getpid()}.part")
    other.unlink(missing_ok=True)  # a link somebody left there would be followed
    sweep(path.parent.glob(f".{glob.escape(path.name)}.[0-9]*.part"))
    try:
        yield other
        _sync(other)
        other.replace(path)
    finally:
        with suppress(PermissionError):  # still mapped, on Windows: swept later
            other.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait for the disk; Windows syncs no folders, and files only through a handle that writes."""
    folder = path.is_dir()
    if folder and WINDOWS:
        return
    number = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write(path: Path, *pieces: bytes | str | memoryview) -> None:
    """Write a file so that its name never shows half of it, even across a power cut."""
    with draft(path) as other, other.open("wb") as file:
        for piece in pieces:
            file.write(piece.encode() if isinstance(piece, str) else piece)


def write_json(path: Path, content: Any) -> None:
    """Write JSON that a person can read, whole or not at all."""
    write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_npz(path: Path, /, **arrays: Any) -> None:
    """Write compressed arrays, whole or not at all."""
    with draft(path) as other, other.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_json(path: Path) -> dict[str, Any]:
    """A mapping from a JSON file; a ValueError in one sentence."""
    try:
        data = read_bytes(path, LARGEST_BYTES["json"])
        if data.count(b"[") + data.count(b"{") > MOST_ENTRIES:
            raise ValueError("it has too many entries")
        content = json.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold one mapping of names to values.")
    return content


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz without running code, and without unpacking a bomb."""
    try:
        with zipfile.ZipFile(regular(path)) as archive:
            least, times = UNPACKED
            most = min(max(least, times * path.stat().st_size), LARGEST_BYTES["npz"])
            if sum(item.file_size for item in archive.infolist()) > most:
                raise ValueError("it is too large")
            for item in archive.infolist():
                check_member(item)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _plain_array(arrays[name]) for name in arrays.files}
    except Exception as error:  # whatever zip, zlib and numpy make of a broken or hostile file
        raise ValueError(f"{path} is not a .npz file of plain arrays: {reason(error)}.") from error


def check_member(item: zipfile.ZipInfo) -> None:
    """Refuse what Python's zip reader unpacks in one piece, whatever size it says it has."""
    if item.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it is compressed in another way than zip files usually are")


def _plain_array(array: NDArray[Any]) -> NDArray[Any]:
    """In this machine's byte order, and no longer numbers than torch has."""
    long = array.dtype.kind == "f" and array.dtype.itemsize > 8
    return array.astype(np.float64 if long else array.dtype.newbyteorder("="), copy=False)


def refuse_links(folder: Path) -> None:
    """Refuse a run folder in which a name leads out of it: writing there would follow it.

    So is one that is no file: a pipe in the place of a log or a lock would be waited for.
    """
    home, below = folder.resolve(), ("checkpoint", "work", "work/*", "work/*/*")
    for place in (folder, *(place for pattern in below for place in folder.glob(pattern))):
        for path in place.iterdir() if place.is_dir() else ():
            # nor may a link lead nowhere, or to itself
            if path.is_symlink() and not (path.exists() and path.resolve().is_relative_to(home)):
                raise ValueError(f"{path} is a link out of the run folder; remove it.")
            if not (path.is_file() or path.is_dir()) and path.exists():
                raise ValueError(f"{path} is neither a file nor a folder; remove it.")


def refuse_foreign(folder: Path) -> None:
    """Refuse to make a run in a folder with files in it that calmatch did not write."""
    if not folder.is_dir():
        return
    names = {path.name for path in folder.iterdir() if not path.match(".*.[0-9]*.part")}
    ours = bool(names & {".lock", "fit.json", "work"})
    if "config.json" in names and not ours:  # a suite writes it first
        with suppress(ValueError):
            ours = {"dataset", "method", "net"} <= read_json(folder / "config.json").keys()
    if names and not ours:
        why = f"{folder} holds {sorted(names)[0]!r}, which calmatch did not write"
        raise ValueError(f"{why}; choose another --out, or empty it.")


class Busy(ValueError):
    """Another process works in this run folder."""


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a run folder; the lock dies with the process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        refuse_foreign(folder)
        file = open_lock(folder / ".lock")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}.") from error
    with file:
        for patience in (0.02, 0.02, 0.02, 0.02, 0):  # somebody may look whether it is locked
            if locked := try_lock(file):
                break
            time.sleep(patience)
        if not locked:
            raise Busy(f"Another process is working in {folder}; wait or choose --out.")
        _held_locks.add(file)
        try:
            sweep((*folder.glob(".*.part"), *folder.glob("*/.*.part")))
            yield
        finally:
            _held_locks.discard(file)


def open_lock(path: Path) -> IO[bytes]:
    """A file to lock: a link in its place is not followed, nor a pipe waited for."""
    odd = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | odd, 0o666), "r+b", buffering=0)


def try_lock(file: IO[bytes], share: bool = False) -> bool:
    """Lock an open file until it is closed; False where another process holds it."""
    try:
        if fcntl is None:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[union-attr]
        else:
            fcntl.flock(file, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def sweep(litter: Iterable[Path]) -> None:
    """Remove what killed processes had not finished."""
    for path in litter:
        with suppress(OSError):
            if not _is_being_written(path):
                path.unlink()


def _is_being_written(litter: Path) -> bool:
    """Whether its process may still write: a run's page is made when its lock is free again."""
    if WINDOWS:  # where asking whether a process lives ends it
        return time.time() - litter.stat().st_mtime < LITTER_SECONDS
    number = litter.suffixes[-2][1:] if len(litter.suffixes) > 1 else ""
    if not number.isdecimal():
        return True
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return int(number) != os.getpid()


_held_locks: set[IO[bytes]] = set()


def _release_in_child() -> None:
    """In a forked process: a worker that outlives its killed parent must not keep the lock."""
    for file in _held_locks:
        os.close(file.fileno())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
