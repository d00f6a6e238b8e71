"""Real `calmatch` processes, cheaply: a server imports everything once and forks one per start."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ALONE = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
FEW = 20  # resamples of the bootstrap in forked processes, which would spend most time there
ALL_RIGHTS = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: root ignores read-only folders


class Process:
    """One start of the command line, forked or plain, with its output in a file."""

    def __init__(self, pid: int, output: Path, plain: subprocess.Popen[bytes] | None) -> None:
        self.pid, self.output, self.plain = pid, output, plain
        self.code: int | None = None
        self.took = 0.0  # seconds of the last wait

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def send(self, number: int) -> None:
        os.kill(self.pid, number)


class Watch:
    """Seconds of an idle machine since then: that others use the cores is no fault of ours."""

    def __init__(self) -> None:
        self.began, self.before = time.monotonic(), self._stalled()

    def seconds(self) -> float:
        """Without the time in which somebody waited for a core, but for a tenth of all."""
        spent = time.monotonic() - self.began
        return max(spent / 10, spent - (self._stalled() - self.before))

    @staticmethod
    def _stalled() -> float:
        path = Path("/proc/pressure/cpu")
        return int(path.read_text().partition("total=")[2].split()[0]) / 1e6 if path.exists() else 0


class Forks:
    """Starts processes; `poll` and `wait` tell how they ended."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # `&` and nohup let it be ignored
        self.server: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ALONE,
        )
        self.codes: dict[int, int] = {}
        self.pending = b""
        assert self._line() == b"ready"

    def _line(self) -> bytes:
        """The next line; read by hand, because what Python has buffered `select` does not see."""
        assert self.server.stdout is not None
        while b"\n" not in self.pending:
            more = os.read(self.server.stdout.fileno(), 65536)
            assert more, "the server has ended"
            self.pending += more
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def start(self, words: list[str], output: Path, *, plain: bool = False, **how: Any) -> Process:
        """`how`: `clock`, a seed of jumps of the wall clock; `meek`, without root's rights."""
        if plain:
            command = [sys.executable, "-m", "calmatch", *words]
            with output.open("wb") as file:
                child = subprocess.Popen(
                    command, stdout=file, stderr=file, env=ALONE, start_new_session=True
                )
            return Process(child.pid, output, child)
        assert self.server.stdin is not None
        order = json.dumps({"words": words, "output": str(output), **how}) + "\n"
        self.server.stdin.write(order.encode())
        self.server.stdin.flush()
        while (line := json.loads(self._line())).get("started") is None:
            self.codes[line["pid"]] = line["code"]
        return Process(line["started"], output, None)

    def poll(self, process: Process) -> int | None:
        if process.code is None:
            if process.plain is not None:
                process.code = process.plain.poll()
            else:
                while self.pending or select.select([self.server.stdout], [], [], 0)[0]:
                    line = json.loads(self._line())
                    self.codes[line["pid"]] = line["code"]
                process.code = self.codes.pop(process.pid, None)
        return process.code

    def wait(self, process: Process, seconds: float = 180) -> int:
        """Its exit code; an AssertionError where it takes longer, other programs apart."""
        watch = Watch()
        while (code := self.poll(process)) is None:
            if watch.seconds() > seconds:
                process.send(signal.SIGKILL)
                raise AssertionError(f"no end within {seconds} s; it said: {process.text()[-500:]}")
            time.sleep(0.005)
        process.took = watch.seconds()
        return code

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(30)
        assert self.server.stdout is not None
        self.server.stdout.close()


def serve() -> list[str] | None:
    """Fork a child for each line of stdin; in the child, the words of its command line."""
    import scipy.optimize
    import tyro
    from PIL import Image

    import calmatch.bench
    import calmatch.cli
    import calmatch.fit
    import calmatch.options
    import calmatch.report.text
    import calmatch.training.loop

    assert tyro
    assert Image
    assert scipy.optimize
    calmatch.training.loop.RESAMPLES = FEW
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, "threads do not survive a fork"
    gc.freeze()  # a collection in a child would copy every page of ours
    print("ready", flush=True)
    pending = b""
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                print(json.dumps({"pid": ended[0], "code": code}), flush=True)
        if not select.select([0], [], [], 0.005)[0]:
            continue
        got = os.read(0, 65536)
        if not got:
            return None
        pending += got
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            asked = json.loads(line)
            if (pid := os.fork()) == 0:
                return _become(asked)
            print(json.dumps({"started": pid}), flush=True)


def _become(asked: dict[str, Any]) -> list[str]:
    os.setsid()
    out = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (out, 1), (out, 2)):
        os.dup2(old, new)
    if asked.get("meek") and os.geteuid() == 0:
        _drop_rights()
    if asked.get("clock") is not None:
        jump(random.Random(asked["clock"]))
    return list(asked["words"])


def jump(chance: random.Random) -> None:
    """Let the wall clock leap by years, to and fro, every few times it is read."""
    real, off = time.time, [0.0]

    def leaping() -> float:
        if chance.random() < 0.3:
            off[0] = chance.uniform(-1e9, 1e9)
        return real() + off[0]

    time.time = leaping


def _drop_rights() -> None:
    """Give up root's right to write into folders that are read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    keep = 0xFFFFFFFF & ~sum(1 << right for right in ALL_RIGHTS)
    for place in (0, 1, 2):
        data[place] &= keep
    assert libc.capset(header, data) == 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = serve()
    if words is None:
        os._exit(0)
    from calmatch.cli import main

    code: object = 1
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)  # taking the copy of it all apart is slow
