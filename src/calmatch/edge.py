"""What becomes of an error at the edge: one sentence and exit code 2, or our own traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from calmatch import memory


def guarded(act: Callable[[], int], command: str = "") -> int:
    """Do it; mistakes are one sentence, our own faults a traceback."""
    try:
        return act()
    except KeyboardInterrupt:
        print("calmatch: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, `| head` for example
        return 0
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if full := memory.advice(error, command):
            print(f"calmatch: {full}", file=sys.stderr)
            return 2
        if code is None and not (isinstance(error, ValueError) and ours(error)):
            traceback.print_exc()
            return 1
        print(f"calmatch: {error}", file=sys.stderr)
        return int(code or 2)


def ours(error: ValueError) -> bool:
    """Whether calmatch itself raised it, as a sentence for the user."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename).is_relative_to(Path(__file__).parent)
