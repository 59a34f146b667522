"""A store in a directory, plain or mounted, that every replica sees."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from proxy.artifacts.durable import sync, write_whole
from proxy.contract import PolicyFile
from trainer_client.errors import StoreError
from trainer_client.stores.files import STAGING, Content, Sent, nobody

_LOCK_FILE = ".lock"
_PIECE_BYTES = 8 << 20
"""Written between two looks at how far it is."""

_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)


class DirectoryFiles:
    """The files of one run below a directory. What is under its final name has been flushed to the disk (fsync)."""

    def __init__(self, root: Path, *, run: str) -> None:
        self._directory = root / run
        self._run = run

    @property
    def location(self) -> str:
        """The run's directory."""
        return str(self._directory)

    def prepare(self) -> None:
        """Make the run's directory."""
        if not self._directory.exists():
            self._directory.mkdir(parents=True, exist_ok=True)
            sync(self._directory.parent)

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the lock file. A file system without locks keeps nobody out."""
        self.prepare()
        with (self._directory / _LOCK_FILE).open("a") as file:
            exclusive = self._try_lock(file.fileno())
            try:
                yield exclusive
            finally:
                if exclusive:
                    fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked child may hold the file open

    def list(self) -> dict[str, dict[str, int]]:
        """Look at every folder and the files in it."""
        return {folder.name: _sizes(folder) for folder in self._directory.iterdir() if folder.is_dir()}

    def age_s(self, folder: str) -> float:
        """Return the seconds since a name in the folder changed."""
        return time.time() - (self._directory / folder).stat().st_mtime

    def read(self, folder: str, name: str) -> bytes:
        """Return a file's content."""
        return (self._directory / folder / name).read_bytes()

    def described(self, files: tuple[PolicyFile, ...], contents: Mapping[str, Content]) -> tuple[PolicyFile, ...]:
        """Return the files as they are."""
        return files

    def add(self, folder: str, contents: Mapping[str, Content], *, sent: Sent = nobody) -> None:
        """Write the files under a dot name, flush them, and rename."""
        staged = self._directory / f"{STAGING}{os.getpid()}-{secrets.token_hex(4)}"
        staged.mkdir()
        try:
            for name, content in contents.items():
                with (staged / name).open("wb") as file, _opened(content) as source:
                    while piece := source.read(_PIECE_BYTES):
                        sent(file.write(piece))
                sync(staged / name)
            sync(staged)
            staged.rename(self._directory / folder)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        sync(self._directory)

    def settle(self, folder: str, files: tuple[PolicyFile, ...], *, deadline: float) -> None:
        """Return at once: the rename has shown them."""

    def write(self, folder: str, name: str, content: bytes) -> None:
        """Write under another name, flush, and rename."""
        write_whole(self._directory / folder / name, content)

    def remove(self, folder: str, name: str) -> None:
        """Remove a file and flush the directory."""
        with suppress(FileNotFoundError):
            (self._directory / folder / name).unlink()
            sync(self._directory / folder)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and flush the directory."""
        shutil.rmtree(self._directory / folder, ignore_errors=True)
        if (self._directory / folder).exists():
            raise StoreError(f"{self._directory / folder} cannot be removed; see who owns its files")
        sync(self._directory)

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if error.errno == errno.EWOULDBLOCK:
                raise StoreError(
                    f"another publisher is writing run {self._run} in {self._directory.parent}; give each run a name "
                    "of its own, or try again when the other one is done"
                ) from error
            raise
        return True


def _opened(content: Content) -> BinaryIO:
    return BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def _sizes(folder: Path) -> dict[str, int]:
    try:
        return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    except FileNotFoundError:
        return {}  # removed while it was looked at
