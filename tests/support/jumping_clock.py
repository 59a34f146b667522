"""Run a module of this checkout with a wall clock that jumps: `python -m tests.support.jumping_clock FILE MODULE`.

FILE holds the seconds by which `time.time` is off, read at every call. The monotonic clock is left alone, as the kernel
leaves it when somebody sets the time.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    """Put the clock in place before anything else is imported, then run the module."""
    offset, module = Path(sys.argv[1]), sys.argv[2]
    true = time.time
    time.time = lambda: true() + float(offset.read_text())
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
