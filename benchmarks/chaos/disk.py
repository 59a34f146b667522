"""A small disk for the trainer to publish on, which can be filled to its last byte."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE = "24m"
"""Enough for a window of policies, twice."""

_PIECE = bytes(64 * 1024)


class Disk:
    """A file system of its own at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / ".filler"

    def fill(self) -> None:
        """Take all the room that is left, down to the last byte."""
        for piece in (_PIECE, b"0"):
            with suppress(OSError), self._filler.open("ab", buffering=0) as filler:
                while filler.write(piece):
                    pass

    def free(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk | None]:
    """Make `folder` a small file system while the block lasts; None, and a plain folder, without the right to mount."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "chaos", folder], capture_output=True)
    if mounted.returncode != 0:
        yield None
        return
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)
