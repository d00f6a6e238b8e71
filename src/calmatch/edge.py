"""How a command ends: signals answered, one sentence for mistakes, a traceback for our faults."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from calmatch import memory

LATEST = 8.0  # seconds after a signal at which a step is no longer waited for
AGAIN = 3.0  # seconds after which a signal is repeated that an import has swallowed
# Faults of disks and rights, not of ours: a sentence, because a traceback would not help.
OUTSIDE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
}


def guarded(act: Callable[[], int], command: str = "") -> int:
    """Do it; mistakes are one sentence, our own faults a traceback."""
    try:
        with _stoppable():
            return act()
    except KeyboardInterrupt:
        print("calmatch: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, `| head` for example
        return 0
    except Exception as error:
        said = _sentence(error, command)
        if said is None:
            traceback.print_exc()
            return 1
        print(f"calmatch: {said}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))


def _sentence(error: Exception, command: str) -> str | None:
    """What to say of an error that is not a fault of ours."""
    if full := memory.advice(error, command):
        return full
    if isinstance(error, OSError) and error.errno in OUTSIDE:
        place = f" ({error.filename})" if error.filename else ""
        whole = "What was written before is whole; the same command continues."
        return f"{error.strerror}{place}. {whole}"
    known = hasattr(error, "exit_code") or (isinstance(error, ValueError) and ours(error))
    return str(error) if known else None


def ours(error: ValueError) -> bool:
    """Whether calmatch itself raised it, as a sentence for the user."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename).is_relative_to(Path(__file__).parent)


class Stopped(Exception):
    """A signal asked the run to end; its checkpoint is written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Stopped by signal {number}; the same command continues.")
        self.exit_code = 128 + number


class Asked(list[int]):
    """Signals that came; `patient` while steps go on, for then they are answered in between."""

    patient = False

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Signals are collected inside; those that nobody has answered end it."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False
        if self:
            raise Stopped(self[0])


@contextmanager
def signals(*, collect: bool = False) -> Iterator[Asked]:
    """Answer SIGINT and SIGTERM with `Stopped`: between steps, and elsewhere at once.

    A second signal ends at once too, and so does a step or an evaluation that takes too long: a
    cluster that preempts does not wait, and the checkpoint before it is whole.

    Args:
        collect: never raise; for a caller with processes of its own to end first.
    """
    asked, owner, alarm = Asked(), os.getpid(), signal.getsignal(signal.SIGALRM)

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a worker that was forked from us
            os._exit(128 + number)
        if number == signal.SIGALRM and not asked:  # it was set before we came
            if callable(alarm):
                alarm(number, frame)
            return
        again = bool(asked)
        if number != signal.SIGALRM:
            asked.append(number)
            signal.setitimer(signal.ITIMER_REAL, 0 if collect else LATEST, 1.0)
        if not collect and (again or not asked.patient):
            raise Stopped(asked[0])

    with _answered(note, asked):
        yield asked


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM end any command, with exit code 130 or 143, half-written files removed."""
    asked: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM:
            asked.append(number)
            signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
        if asked and asked[-1] == signal.SIGINT:
            raise KeyboardInterrupt
        if asked:
            raise SystemExit(128 + asked[-1])

    with _answered(end, asked):
        yield


@contextmanager
def _answered(answer: Callable[[int, FrameType | None], None], asked: list[int]) -> Iterator[None]:
    """Let signals and the alarm be answered; only a process's main thread may ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = {number: signal.signal(number, answer) for number in numbers}
    try:
        yield
    finally:
        if asked:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in before.items():
            signal.signal(number, old)
