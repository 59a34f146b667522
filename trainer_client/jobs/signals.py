"""Ctrl-C, SIGTERM and a closed terminal, noted instead of obeyed: Jobs have to be canceled first."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SHOW_CURSOR = "\x1b[?25h"
"""A live table hides it."""


class Stopped:
    """Whether a signal has come: `event` for who waits, `by` is its number or 0."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.by = 0


@contextmanager
def stopping() -> Iterator[Stopped]:
    """Note SIGINT, SIGTERM and SIGHUP; a second one ends the process at once."""
    stopped = Stopped()

    def note(number: int, frame: FrameType | None) -> None:
        if stopped.by:
            cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
            text = f"{cursor}lora-sync: ended before every Job was canceled; run `lora-sync jobs down`\n"
            os.write(sys.stderr.fileno(), text.encode())
            os._exit(128 + number)
        stopped.by = number
        stopped.event.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
