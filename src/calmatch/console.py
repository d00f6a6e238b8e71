"""The console: messages, the progress bar, and how a command ends: signals, mistakes, memory."""

import errno
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(stderr=True, highlight=False)
LONGEST_STEP = 8.0  # seconds after a signal at which a step is no longer waited for
REPEAT_AFTER = 3.0  # seconds after which a signal is repeated that an import has swallowed
# Faults of disks and rights, not of ours: a sentence, because a traceback would not help.
OUTSIDE_NAMES = "ENOSPC EDQUOT EFBIG EROFS EACCES EPERM EIO ESTALE"
OUTSIDE_ERRORS = {getattr(errno, name) for name in OUTSIDE_NAMES.split()}
# what torch says in a plain RuntimeError where it has no class of its own for it
MEMORY_ERRORS = ["DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"]
MEMORY_ERRORS += ["DefaultCPUAllocator: not enough memory", "CUDA error: out of memory"]
MEMORY_ERRORS += ["MPS backend out of memory"]
TRAINING_SETTINGS = (
    "--batch, --ratio, --chunk (steps augmented at once), --eval-batch (pictures predicted at "
    "once) or --memory (the share of it that pictures may take)"
)
MEMORY_SETTINGS = {
    "train": TRAINING_SETTINGS,
    "replay": "--steps, or repeat it on a larger device",
    "predict": "--batch (pictures computed at once)",
    "bench": "--jobs (runs at once on a device)",
}
ALARM = getattr(signal, "SIGALRM", None)  # Windows has none: there a signal is not repeated
HANGUP = getattr(signal, "SIGHUP", None)  # the terminal, or the connection to it, has gone
_silenced = False
T = TypeVar("T")


def message(text: str | Iterable[str], quiet: bool = False) -> None:
    """A line, or several, for the person at the console."""
    for line in [text] if isinstance(text, str) else text:
        if not quiet and not _silenced:
            warn(line)


def warn(text: str) -> None:
    """A line that is never left out: something was lost."""
    if is_first_rank():
        console.print(visible(text), markup=False, soft_wrap=True)


def visible(text: str) -> str:
    """Control characters, and what is no Unicode, as escapes: a file's name may hold any.

    >>> visible("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks, before, during and after a run."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def silence() -> Iterator[None]:
    """Within it `message` is silent, bars are not: for a run that is a part of something larger."""
    global _silenced
    before, _silenced = _silenced, True
    try:
        yield
    finally:
        _silenced = before


class ProgressBar:
    """A progress bar with rate and time left; silent when quiet, piped, or not the first rank."""

    def __init__(self, title: str, steps: int, done: int, quiet: bool, unit: str = "steps") -> None:
        self.show = not quiet and console.is_terminal and is_first_rank()
        self.start = self.done = done
        self.began, self.unit = time.monotonic(), unit
        self.words: dict[str, str] = {}
        rate, note = TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[note]}")
        start = (TextColumn("{task.description}"), BarColumn(18), MofNCompleteColumn())
        columns = (*start, rate, TimeRemainingColumn(), note)
        self.progress = Progress(*columns, console=console, disable=not self.show)
        short = title if len(title) < 25 else f"{title[:23]}…"  # 80 columns hold all but the note
        self.task = self.progress.add_task(short, total=steps, completed=done, rate="", note="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, step: int) -> None:
        self.done = step
        self._draw()

    def advance(self, number: int) -> None:
        self.update(self.done + number)

    def note(self, line: Mapping[str, Any]) -> None:
        """The words a person wants beside the bar: of a training line, or of an evaluation."""
        if line.get("accepted") is not None:
            self.words["use"] = f"pseudo-labels in use {line['accepted']:.0%}"
        if line.get("error") is not None and not _silenced:  # a part's own numbers are no result
            self.words["error"] = f"error about {line['error']:.0%}"
            self.words["ece"] = f"confidence off by {line['ece']:.0%}"
        self._draw()

    def _draw(self) -> None:
        if self.show:
            rate = (self.done - self.start) / max(1e-9, time.monotonic() - self.began)
            speed = f"{rate:.0f} {self.unit}/s"
            note = ", ".join(self.words.values()) if console.width > 110 else ""
            self.progress.update(self.task, completed=self.done, rate=speed, note=note)


def run_guarded(act: Callable[[], int], command: str = "") -> int:
    """Do it; mistakes are one sentence, our own faults a traceback."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):  # an ASCII console shows other letters as escapes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _stoppable():
            code = act()
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        more = "; the same command continues" if command == "fit" else ""
        print(f"calmatch: interrupted{more}.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, `| head` for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        sentence = _sentence(error, command)
        if sentence is None:
            traceback.print_exc()
            return 1
        print(f"calmatch: {visible(sentence)}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))


def _open_standard_streams() -> None:
    """Where one is closed (`2>&-`): nothing, or a file of ours would get its number, and words."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _sentence(error: Exception, command: str) -> str | None:
    """What to say of an error that is not a fault of ours."""
    if is_out_of_memory(error):
        settings = MEMORY_SETTINGS.get(command, TRAINING_SETTINGS)
        return f"There is not enough memory on the device; lower {settings}."
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "The system gives no more threads (ulimit -u); end other programs, or allow more."
    if isinstance(error, OSError) and error.errno in OUTSIDE_ERRORS:
        place = f" ({error.filename})" if error.filename else ""
        whole = "What was written before is whole; the same command continues."
        return f"{error.strerror}{place}. {whole}"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}."
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    ours = isinstance(error, ValueError) and raised_in.is_relative_to(Path(__file__).parent)
    return str(error) if ours or hasattr(error, "exit_code") else None


@contextmanager
def say_why(start: str, login: str = "") -> Iterator[None]:
    """Whatever another program's client raises, in a sentence; of an HTTP status, a hint too."""
    try:
        yield
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = login if {"401", "403", "404"} & set(why.split()) else ""
        raise ValueError(f"{start}: {why}{hint}") from error


def is_out_of_memory(error: BaseException) -> bool:
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_ERRORS)
    room = isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM
    return named or said or room


def unless_out_of_memory(act: Callable[[], T], line: str = "") -> T | None:
    """What it gives; None, after a line, where memory is too small for it, which is free again."""
    try:
        return act()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    free_device_memory()  # the error, which held tensors, is gone
    if line:
        message(line)
    return None


def caused_by_memory(error: BaseException | None) -> bool:
    """Whether too little memory led to it: ending a capture hides the error that broke it."""
    return error is not None and (
        is_out_of_memory(error) or caused_by_memory(error.__cause__ or error.__context__)
    )


def free_device_memory() -> None:
    """Give back what a failed step held on the device."""
    import gc

    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


class Failed(Exception):
    """A result and no mistake, said by the exit code: runs failed, a replay is not its run."""

    exit_code = 1


class Stopped(Exception):
    """A signal asked the run to end; its checkpoint is written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Stopped by signal {number}; the same command continues.")
        self.exit_code = 128 + number


class SignalQueue(list[int]):
    """Signals that came; `patient` while steps go on, for then they are answered in between."""

    patient = False
    postponed = 0  # times that an import was waited for
    early = False  # it came in an import before the steps, which answer it now

    def wait_for_import(self, frame: FrameType | None, *alarm: float) -> bool:
        """Whether a module is being imported: some abort, or swallow what is raised in them."""
        while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
            frame = frame.f_back
        wait = bool(ALARM and frame) and self.postponed < 10 * REPEAT_AFTER
        self.postponed += wait
        if self.postponed:
            _set_alarm(*((0.1, 0.1) if wait else alarm))
        return wait

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
def catch_signals(*, collect: bool = False) -> Iterator[SignalQueue]:
    """Answer SIGINT and SIGTERM with `Stopped`: between steps, and elsewhere at once.

    A second signal ends at once too, and so does a step or an evaluation that takes too long: a
    cluster that preempts does not wait, and the checkpoint before it is whole. With `collect`
    nothing is raised: for a caller with processes of its own to end first.
    """
    signals, owner, alarm = SignalQueue(), os.getpid(), ALARM and signal.getsignal(ALARM)
    signals += getattr(alarm, "signals", ())  # of `_stoppable`, which waits for an import
    signals.early = bool(signals)

    def answer(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a worker that was forked from us
            os._exit(128 + number)
        if number == ALARM and not signals:  # it was set before we came
            if callable(alarm):
                alarm(number, frame)
            return
        again = bool(signals)
        if number != ALARM:
            signals.append(number)
            _set_alarm(0 if collect else LONGEST_STEP, 1.0)
        if number == ALARM and signals.patient and signals.early:
            signals.early = False
            _set_alarm(LONGEST_STEP, 1.0)
        elif not collect and (again or not signals.patient):
            if not signals.wait_for_import(frame, LONGEST_STEP, 1.0):
                raise Stopped(signals[0])
            signals.early = not signals.patient

    with _handle_signals(answer, signals):
        yield signals


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM end any command, with exit code 130 or 143, half-written files removed."""
    signals = SignalQueue()

    def end(number: int, frame: FrameType | None) -> None:
        if number != ALARM:
            signals.append(number)
            _set_alarm(REPEAT_AFTER, REPEAT_AFTER)
        if not signals or signals.wait_for_import(frame, REPEAT_AFTER, REPEAT_AFTER):
            return
        raise KeyboardInterrupt if signals[-1] == signal.SIGINT else SystemExit(128 + signals[-1])

    end.signals = signals  # type: ignore[attr-defined]  # for who takes its place
    with _handle_signals(end, signals):
        yield


@contextmanager
def _handle_signals(
    answer: Callable[[int, FrameType | None], None], signals: list[int]
) -> Iterator[None]:
    """Let signals and the alarm be answered; only a process's main thread may ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, HANGUP, ALARM) if n is not None]
    if HANGUP and signal.getsignal(HANGUP) == signal.SIG_IGN:  # nohup
        numbers.remove(HANGUP)
    before = {number: signal.signal(number, answer) for number in numbers}
    try:
        yield
    finally:
        if signals:
            _set_alarm(0)
        for number, old in before.items():
            signal.signal(number, old)


def _set_alarm(first: float, then: float = 0.0) -> None:
    if ALARM is not None:
        signal.setitimer(signal.ITIMER_REAL, first, then)
