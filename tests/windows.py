"""`python tests/windows.py WORDS`: calmatch on a Python that lacks what Windows lacks.

What is missing there is taken away, and what fails there fails, as far as Linux can tell it.
"""

import errno
import fcntl as real
import io
import mmap
import multiprocessing
import os
import signal
import subprocess  # noqa: F401  before fcntl goes: it looks at what there is
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

POSIX_ONLY = "register_at_fork posix_fallocate fork sched_getaffinity sysconf sysconf_names".split()
real_open, real_sync, real_replace = os.open, os.fsync, os.replace


def open_no_folder(path, flags, *rest, **named):
    if not isinstance(path, int) and Path(os.fsdecode(path)).is_dir():
        raise PermissionError(errno.EACCES, "Permission denied", path)
    return real_open(path, flags, *rest, **named)


def sync_writable(number):
    if real.fcntl(number, real.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    real_sync(number)


def replace_closed(source, target, **named):
    """No file that is open or mapped in this process can be renamed or replaced."""
    mapped = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    held = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    names = {str(path.readlink()) for path in held if path.is_symlink()}
    for path in map(str, (Path(source).resolve(), Path(target).resolve())):
        if path in names or path in mapped:
            raise PermissionError(errno.EACCES, "It is being used by another process", path)
    real_replace(source, target, **named)


def lock_bytes(number, mode, length):
    assert (mode, length) == (1, 1)
    try:
        real.flock(number, real.LOCK_EX | real.LOCK_NB)
    except BlockingIOError as error:
        raise PermissionError(errno.EACCES, "Permission denied") from error


def kill_nobody(process, number):
    raise AssertionError("os.kill ends a process on Windows, whatever the signal")


def take_away():
    for name in ("fcntl", "resource"):
        sys.modules[name] = None
    for name in ("SIGALRM", "setitimer", "ITIMER_REAL", "SIGKILL"):
        delattr(signal, name)
    for name in POSIX_ONLY:
        if hasattr(os, name):
            delattr(os, name)
    del mmap.MADV_DONTNEED
    os.open, os.fsync, os.replace, os.kill = (
        open_no_folder,
        sync_writable,
        replace_closed,
        kill_nobody,
    )
    from calmatch import files

    files.WINDOWS, files.msvcrt = True, SimpleNamespace(LK_NBLCK=1, locking=lock_bytes)
    assert files.fcntl is None


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    import torch  # noqa: F401  it is not ours, and its own way on Windows is not this one

    take_away()
    # a text file without an encoding is another text on each system
    warnings.filterwarnings("error", category=EncodingWarning, module="calmatch")
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="cp1252")
    from calmatch.cli import main

    sys.exit(main())
