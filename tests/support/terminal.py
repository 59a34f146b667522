"""A pseudo-terminal of eighty columns: run a command in it, read its screen as a person would, press Ctrl-C.

with Terminal([sys.executable, "-m", "trainer_client.cli", "top"]) as terminal:
    terminal.wait("2 of 2")
    assert terminal.interrupt() == 0
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.support.replicas import own_code, wait_until

_STOP_S = 10

_HOME = "\x1b[H"
"""A full-screen program begins each picture in the upper left corner."""

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """One command with a terminal of its own."""

    def __init__(self, command: list[str], *, columns: int = 80, rows: int = 24) -> None:
        self._command = command
        self._size = struct.pack("HHHH", rows, columns, 0, 0)
        self._written = b""

    def __enter__(self) -> Self:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, self._size)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        # setsid makes the terminal the command's own, so that Ctrl-C in it reaches the command.
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *self._command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color", **own_code()},
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed when the command has ended
            while piece := os.read(self._ours, 1 << 16):
                self._written += piece

    @property
    def raw(self) -> str:
        """All that was written, with its control sequences."""
        return self._written.decode(errors="replace")

    def lines(self) -> list[str]:
        """Return the last whole picture, without colours."""
        pictures = self.raw.split(_HOME)
        return _CONTROL.sub("", pictures[-2] if len(pictures) > 2 else pictures[-1]).split("\n")

    def wait(self, *texts: str) -> list[str]:
        """Wait until one picture shows all of these texts, and return its lines."""
        seen: list[str] = []

        def shows() -> bool:
            seen[:] = self.lines()
            return all(any(text in line for line in seen) for text in texts)

        try:
            wait_until(shows, what=f"the screen shows {texts}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(seen)) from None
        return seen

    def interrupt(self) -> int:
        """Press Ctrl-C, and return the exit status."""
        os.write(self._ours, b"\x03")
        return self._process.wait(_STOP_S)
