"""Where policies are kept: a directory, plain or mounted, that every replica sees under the same path.

STORE/RUN/NAME/                    a policy: the adapter's files, and lora_sync_manifest.json once it is published
STORE/RUN/NAME/.unloaded           the proxy has acknowledged its unload
STORE/RUN/.staging-PID-RANDOM/     being written, or left by a publisher that was killed
STORE/RUN/.lock                    held while a publisher is at work
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.artifacts.durable import sync
from proxy.artifacts.manifest import MANIFEST_FILE, Manifest, read_manifest, write_manifest
from proxy.contract import version_of
from proxy.errors import ArtifactError
from trainer_client.errors import StoreError

ORPHAN_AGE_S = 3600.0
"""A directory without a manifest is garbage only when it is this old: a mount may show a manifest minutes late."""

_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
_UNLOADED_FILE = ".unloaded"
_STAGING = ".staging-"


class DirectoryStore:
    """The policies of one run in a directory. Never touches what another run owns."""

    def __init__(self, root: Path, *, run: str) -> None:
        root = root.expanduser().absolute()  # not resolved: replicas may know a mount by its symbolic link alone
        self.root = root.resolve() if ".." in root.parts else root
        self.run = run
        self.directory = self.root / run

    def __repr__(self) -> str:
        return f"<DirectoryStore {self.directory}>"

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keep other publishers of this run out, and remove what dead ones left.

        Raises StoreError if one is at work, and in place of an OSError from within. A file system without locks keeps
        nobody out; nothing is removed there.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / ".lock").open("a") as lock:
                if not self._lock(lock.fileno()):
                    yield
                    return
                try:
                    self._sweep()
                    yield
                finally:
                    fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a forked child may hold the file open
        except OSError as error:
            raise StoreError(f"store {self.root} cannot be used: {error}") from error

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Make a directory to write a policy into. What is left in it at the end is removed."""
        staged = self.directory / f"{_STAGING}{os.getpid()}-{secrets.token_hex(4)}"
        staged.mkdir()
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def commit(self, staged: Path, manifest: Manifest) -> Path:
        """Publish a staged directory and return its path: the files, the name, then the manifest, each flushed."""
        for file in manifest.files:
            sync(staged / file.path)
        sync(staged)
        path = self.path_of(manifest.name)
        staged.rename(path)
        try:
            sync(self.directory)
            write_manifest(path, manifest)
        except BaseException:
            if not (path / MANIFEST_FILE).exists():
                shutil.rmtree(path, ignore_errors=True)
            raise
        return path

    def manifests(self) -> list[Manifest]:
        """Return the manifest of every published policy, oldest version first. Raises StoreError for a broken one."""
        try:
            published = [read_manifest(path) for path in self._policies() if (path / MANIFEST_FILE).exists()]
        except ArtifactError as error:
            raise StoreError(str(error)) from error
        return sorted(published, key=lambda manifest: manifest.version)

    def versions(self) -> list[int]:
        """Return every version that a directory of this run has in its name, published or not."""
        return sorted(version_of(path.name) or 0 for path in self._policies())

    def path_of(self, name: str) -> Path:
        """Return the directory of a policy, absolute."""
        return self.directory / name

    def mark_unloaded(self, name: str) -> None:
        """Remember, beyond a restart, that the proxy acknowledged the unload."""
        (self.path_of(name) / _UNLOADED_FILE).touch()

    def is_unloaded(self, name: str) -> bool:
        """Tell whether the unload of a policy was acknowledged."""
        return (self.path_of(name) / _UNLOADED_FILE).exists()

    def delete(self, name: str) -> None:
        """Remove a policy. The manifest goes first, so that a half-deleted policy is not a published one."""
        path = self.path_of(name)
        (path / MANIFEST_FILE).unlink(missing_ok=True)
        sync(path)
        shutil.rmtree(path)

    def _policies(self) -> Iterator[Path]:
        prefix = f"{self.run}-v"
        for path in self.directory.iterdir():
            if path.name.startswith(prefix) and version_of(path.name) and path.is_dir():
                yield path

    def _sweep(self) -> None:
        for path in self.directory.glob(f"{_STAGING}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._policies():
            if not (path / MANIFEST_FILE).exists() and time.time() - path.stat().st_mtime > ORPHAN_AGE_S:
                shutil.rmtree(path, ignore_errors=True)

    def _lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if error.errno == errno.EWOULDBLOCK:
                raise StoreError(
                    f"another publisher is writing run {self.run} in {self.root}; give each run a name of its own, "
                    "or try again when the other one is done"
                ) from error
            raise
        return True
