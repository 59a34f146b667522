"""What a store of policies needs of a place to keep files: the seam between the rules and a file system.

Paths are relative to the run's folder. Every method may raise OSError or StoreError; none waits for ever by itself,
and who calls sets a deadline around it all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from proxy.contract import PolicyFile

STAGING = ".staging-"
"""How folders begin that are still being written."""


Content = bytes | Path
"""Of a file: in memory, or in another file of this machine, which may be larger than memory."""


Sent = Callable[[int], None]
"""Is told how many bytes more are written."""


def nobody(_: int) -> None:
    """Be told, and do nothing."""


def size_of(content: Content) -> int:
    """Return the bytes of a content."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


class Files(Protocol):
    """The folders of one run, each with a few files."""

    @property
    def location(self) -> str:
        """Where the run's folder is, for messages."""

    def prepare(self) -> None:
        """Make the run's folder usable, or fail early. Safe to call again, and by several processes."""

    def lock(self) -> AbstractContextManager[bool]:
        """Keep other publishers of the run out; False where that is not possible. Raises StoreError if one is in."""

    def list(self) -> dict[str, dict[str, int]]:
        """Return the size of every file, by folder and name, as everyone sees them now."""

    def age_s(self, folder: str) -> float:
        """Return the seconds since a folder last changed."""

    def read(self, folder: str, name: str) -> bytes:
        """Return a file's content."""

    def described(self, files: tuple[PolicyFile, ...], contents: Mapping[str, Content]) -> tuple[PolicyFile, ...]:
        """Return `files` with what this place calls their `contents`, before they are written: a manifest tells it."""

    def add(self, folder: str, contents: Mapping[str, Content], *, sent: Sent = nobody) -> None:
        """Write a new folder, and tell `sent` of the bytes on their way. At the return its files are durable."""

    def settle(self, folder: str, files: tuple[PolicyFile, ...], *, deadline: float) -> None:
        """Return once everyone sees the files of a new folder whole. `deadline` in `time.monotonic` seconds."""

    def write(self, folder: str, name: str, content: bytes) -> None:
        """Write one file into a folder; a reader sees all of it or nothing, whenever the writer is killed."""

    def remove(self, folder: str, name: str) -> None:
        """Remove one file, durably. It may be gone already."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it. It may be gone already."""
