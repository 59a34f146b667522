"""What a mounted bucket shows of the Hub: lookups with the memory that hf-mount has, which is what makes it late.

A name that was not there is "not there" for `negative_ttl_s`, whatever happens on the Hub meanwhile; a file that was
there keeps its size and content for `KNOWN_S`; a directory that was listed keeps its entries for `LISTED_S`.
Source: hf-mount 0.9.2, `src/virtual_fs` and its README.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import BucketFile, HfApi
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError

KNOWN_S = 10.0
"""`--metadata-ttl-ms`."""
LISTED_S = 30.0
"""The poll for changes."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on the Hub."""

    size: int
    xet_hash: str


class Directory:
    """A directory, on the Hub or only here."""


class Remote:
    """One bucket as a mount sees it. Every method raises OSError (EIO) when the Hub fails."""

    def __init__(self, api: HfApi, bucket: str, *, negative_ttl_s: float, cache: Path) -> None:
        self.api = api
        self.bucket = bucket
        self._negative_ttl_s = negative_ttl_s
        self._cache = cache
        self._missing: dict[str, float] = {}
        self._known: dict[str, tuple[RemoteFile | Directory, float]] = {}
        self._listed: dict[str, tuple[dict[str, bool], float]] = {}

    def find(self, path: str) -> RemoteFile | Directory | None:
        """Return what is at a path, from memory while it lasts."""
        now = time.monotonic()
        entry, until = self._known.get(path, (None, 0.0))
        if entry is not None and now < until:
            return entry
        if now < self._missing.get(path, 0.0):
            return None
        with failing_as_eio():
            entry = self._file(path) or self._directory(path)
        if entry is None:
            self._known.pop(path, None)
            self._missing[path] = time.monotonic() + self._negative_ttl_s
        else:
            self._known[path] = entry, time.monotonic() + KNOWN_S
        return entry

    def children(self, path: str) -> dict[str, bool]:
        """Return the names in a directory, and whether each is one itself."""
        names, until = self._listed.get(path, ({}, 0.0))
        if time.monotonic() < until:
            return names
        prefix = f"{path}/" if path else ""
        names = {}
        with failing_as_eio():
            for entry in self.api.list_bucket_tree(self.bucket, prefix or None, recursive=False):
                names[entry.path.removeprefix(prefix)] = not isinstance(entry, BucketFile)
        self._listed[path] = names, time.monotonic() + LISTED_S
        return names

    def below(self, path: str) -> dict[str, RemoteFile]:
        """Return all files below a directory."""
        with failing_as_eio():
            entries = list(self.api.list_bucket_tree(self.bucket, f"{path}/", recursive=True))
        files = [entry for entry in entries if isinstance(entry, BucketFile)]
        return {file.path: RemoteFile(file.size, file.xet_hash) for file in files}

    def content(self, file: RemoteFile, path: str) -> Path:
        """Return a local copy of a file's content, downloaded when it is not here yet."""
        local = self._cache / file.xet_hash
        if not local.exists():
            entry = BucketFile(type="file", path=path, size=file.size, xetHash=file.xet_hash)  # type: ignore[no-untyped-call]
            partial = local.with_suffix(".part")
            with failing_as_eio():
                self.api.download_bucket_files(self.bucket, [(entry, partial)])
            partial.rename(local)
        return local

    def move(self, moves: list[tuple[str, str, RemoteFile]]) -> None:
        """Rename files on the Hub: a copy of each, then the old ones deleted."""
        copies = [("bucket", self.bucket, file.xet_hash, new) for _, new, file in moves]
        with failing_as_eio():
            self.api.batch_bucket_files(self.bucket, copy=copies, delete=[old for old, _, _ in moves])
        for old, new, file in moves:
            self.forget(old)
            self.learn(new, file)

    def learn(self, path: str, file: RemoteFile) -> None:
        """Remember a file that came from here."""
        self.forget(path)
        self._known[path] = file, time.monotonic() + KNOWN_S

    def forget(self, path: str) -> None:
        """Forget what is known of a path, and the listings that show it."""
        self._known.pop(path, None)
        self._missing.pop(path, None)
        self._listed.pop(path.rpartition("/")[0], None)

    def _file(self, path: str) -> RemoteFile | None:
        try:
            found = self.api.get_bucket_file_metadata(self.bucket, path)
        except RemoteEntryNotFoundError:
            return None
        return RemoteFile(found.size, found.xet_file_data.file_hash)

    def _directory(self, path: str) -> Directory | None:
        for _ in self.api.list_bucket_tree(self.bucket, f"{path}/", recursive=False):
            return Directory()
        return None


@contextmanager
def failing_as_eio() -> Iterator[None]:
    """Turn every failure of the Hub into the one that a file system has for it."""
    try:
        yield
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        raise OSError(errno.EIO, str(error)) from error
