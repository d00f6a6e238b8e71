"""What a suite shows while it runs: a live table on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from calmatch import results
from calmatch.bench import job as jobs
from calmatch.bench.job import Job
from calmatch.log import console, tell

LAST = 5  # runs that were finished last, shown on a terminal
OPEN = ("waiting", "held", "running")


@dataclass
class Item:
    """A run and how it stands: waiting, held by others, running, finished, kept, failed, ..."""

    job: Job
    state: str = "waiting"
    where: str = ""
    began: float = 0.0
    first: int = 0  # the step it stood at when this command began
    step: int = 0
    note: str = ""


class Board:
    """How every run of a suite stands; engines move the items, this shows them."""

    def __init__(self, title: str, todo: Sequence[Job], quiet: bool = False) -> None:
        self.title, self.quiet = title, quiet
        self.items = {job: Item(job, first=jobs.saved(job.folder)) for job in todo}
        for item in self.items.values():
            item.step = item.first
        self.began = time.monotonic()
        self.drawn = 0.0
        self.done: list[Item] = []
        self.stopping = False
        live = console.is_terminal and not quiet
        self.live = Live(console=console, auto_refresh=False) if live else None

    def __enter__(self) -> Board:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update(self.table(), refresh=True)
            self.live.stop()

    def move(self, job: Job, state: str, where: str = "", note: str = "") -> None:
        """A run changes its state; in a pipe that is a line."""
        item = self.items[job]
        before, item.state, item.where, item.note = item.state, state, where, note
        if state == "running":
            item.began = time.monotonic()
            item.step = jobs.saved(job.folder)
            self._say(item, f"continues at step {item.step:,}" if item.step else "")
        elif state == "finished":
            item.step = job.config.steps
            item.note = f"{clock(time.monotonic() - item.began)}, {_values(job)}"
            self.done.append(item)
            self._say(item, f"finished in {item.note}{self._left()}")
        elif state == "kept":
            item.step = job.config.steps
            self._say(item, "kept: another process finished it" if before == "held" else "")
        elif state not in (before, "left"):  # what is left is counted at the end
            self._say(item, f"{state} {note}".strip())

    def tick(self) -> None:
        """Draw anew, twice a second at most."""
        if self.live and time.monotonic() - self.drawn > 0.5:
            self.drawn = time.monotonic()
            self.live.update(self.table(), refresh=True)

    def counts(self) -> Counter[str]:
        return Counter(item.state for item in self.items.values())

    def left(self) -> float | None:
        """Seconds to go, at the speed at which this command has advanced so far."""
        going = [item for item in self.items.values() if item.state in OPEN]
        done = sum(item.step - item.first for item in self.items.values() if item.state != "kept")
        ahead = sum(item.job.config.steps - item.step for item in going)
        return (time.monotonic() - self.began) * ahead / done if done > 0 else None

    def halt(self) -> None:
        """Say that everything is about to end."""
        if not (self.quiet or self.live or self.stopping):
            tell(f"{self.title}: stopping; running ones write their checkpoints.")
        self.stopping = True

    def _left(self) -> str:
        if self.stopping:
            return "; stopping, checkpoints are written (again: at once)"
        left = self.left()
        return f"; about {clock(left)} left" if left else ""

    def _say(self, item: Item, words: str) -> None:
        if words and not self.quiet and not self.live:
            closed = sum(item.state not in OPEN for item in self.items.values())
            line = f"[{closed}/{len(self.items)}] {item.job.name}: {words}"
            console.print(line, markup=False, soft_wrap=True)

    def table(self) -> Group:
        """Running runs, the last that ended and all that failed, under a line that counts all."""
        counts = self.counts()
        words = [f"{counts[state]} {state}" for state in _order(counts)]
        head = f"{self.title}: {len(self.items)} runs, {', '.join(words)}{self._left()}"
        table = Table.grid(padding=(0, 2))
        for item in self.items.values():
            if item.state == "running":
                step = f"{item.step:,} / {item.job.config.steps:,}"
                spent = clock(time.monotonic() - item.began)
                table.add_row(item.job.name, item.where, step, spent)
        ended = [(item, "dim", "done") for item in self.done[-LAST:]]
        ended += [(i, "red", "failed") for i in self.items.values() if i.state == "failed"]
        lines = [
            Text(f"{i.job.name}  {word}  {i.note}", style, no_wrap=True) for i, style, word in ended
        ]
        return Group(Text(head, style="bold"), table, *lines)


def _order(counts: Counter[str]) -> list[str]:
    every = ("finished", "kept", "running", "held", "failed", "stopped", "waiting")
    return [state for state in every if counts[state]]


def _values(job: Job) -> str:
    metrics = results.load(job.folder).result["metrics"]
    error, ece = (100 * metrics[key]["value"] for key in ("error", "ece"))
    return f"error {error:.1f} %, ECE {ece:.1f} %"


def clock(seconds: float) -> str:
    """A length of time a person can read.

    >>> clock(5), clock(200), clock(7300), clock(300_000)
    ('5 s', '3 min 20 s', '2 h 1 min', '3 d 11 h')
    """
    whole = round(seconds)
    for unit, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {small}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
