"""A store behind fsspec: an object store such as s3:// or gs://, of which replicas see a mount."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from proxy.contract import PolicyFile
from proxy.errors import SettingsError
from trainer_client.errors import StoreError
from trainer_client.stores.files import Content, Sent, nobody, size_of


class RemoteFiles:
    """The files of one run below a URL. An object is there whole or not at all; there is no lock and no rename."""

    def __init__(self, url: str, *, run: str) -> None:
        self._files, root = _connect(url)
        self._folder = f"{root.rstrip('/')}/{run}"
        self._url = f"{url.rstrip('/')}/{run}"

    @property
    def location(self) -> str:
        """The URL of the run's folder."""
        return self._url

    def prepare(self) -> None:
        """See whether the store answers; an object store has no folders to make."""
        self.list()

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Keep nobody out: object stores have no locks."""
        yield False

    def list(self) -> dict[str, dict[str, int]]:
        """Ask for all objects below the run's folder at once."""
        with self._errors_named("listing", ""):
            self._files.invalidate_cache()  # other processes write as well
            found: dict[str, dict[str, Any]] = self._files.find(self._folder, detail=True)
        sizes: dict[str, dict[str, int]] = {}
        for path, facts in found.items():
            folder, _, name = path.rpartition(f"{self._folder}/")[2].partition("/")
            if name:
                sizes.setdefault(folder, {})[name] = int(facts["size"])
        return sizes

    def age_s(self, folder: str) -> float:
        """Return the seconds since the newest object in the folder was written."""
        with self._errors_named("looking at", folder):
            paths = self._files.find(f"{self._folder}/{folder}")
            changed = [self._files.modified(path).timestamp() for path in paths]
        return time.time() - max(changed, default=0.0)

    def read(self, folder: str, name: str) -> bytes:
        """Return an object's content."""
        with self._errors_named("reading", f"{folder}/{name}"):
            content: bytes = self._files.cat_file(f"{self._folder}/{folder}/{name}")
        return content

    def described(self, files: tuple[PolicyFile, ...], contents: Mapping[str, Content]) -> tuple[PolicyFile, ...]:
        """Return the files as they are."""
        return files

    def add(self, folder: str, contents: Mapping[str, Content], *, sent: Sent = nobody) -> None:
        """Write the objects one by one: each is whole, and the folder counts only once its manifest is there."""
        for name, content in contents.items():
            self._write(folder, name, content)
            sent(size_of(content))

    def settle(self, folder: str, files: tuple[PolicyFile, ...], *, deadline: float) -> None:
        """Return at once: an object is there once it is written."""

    def write(self, folder: str, name: str, content: bytes) -> None:
        """Write one object."""
        self._write(folder, name, content)

    def remove(self, folder: str, name: str) -> None:
        """Remove one object."""
        with self._errors_named("removing", f"{folder}/{name}"):
            self._remove(f"{self._folder}/{folder}/{name}")

    def remove_folder(self, folder: str) -> None:
        """Remove every object in the folder."""
        with self._errors_named("removing", folder):
            self._files.invalidate_cache()
            for path in self._files.find(f"{self._folder}/{folder}"):
                self._remove(path)

    def _write(self, folder: str, name: str, content: Content) -> None:
        path = f"{self._folder}/{folder}/{name}"
        with self._errors_named("writing", f"{folder}/{name}"):
            if isinstance(content, bytes):
                self._files.pipe_file(path, content)
            else:
                self._files.put_file(str(content), path)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(path)

    @contextmanager
    def _errors_named(self, doing: str, what: str) -> Iterator[None]:
        # each of fsspec's implementations raises errors of the library below it, so that none can be named here
        try:
            yield
        except Exception as error:
            raise StoreError(f"{doing} {self._url}/{what} failed: {type(error).__name__}: {error}") from error


def _connect(url: str) -> tuple[Any, str]:
    try:
        from fsspec import url_to_fs

        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SettingsError(
            f"store {url} cannot be used: {error}; install lora-sync-proxy[fsspec] and fsspec's library for it "
            "(s3fs for s3://, gcsfs for gs://)."
        ) from error
    return files, str(root)
