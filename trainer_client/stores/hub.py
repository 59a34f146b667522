"""A store in a bucket of the Hub, over its API: real errors, and no mount that would hide them.

A batch is not a transaction and a bucket has no rename, so that a policy is two batches: the files, and, once the Hub
lists them all whole, the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx2

from proxy.artifacts.bucket import BucketFolder, HubFile
from proxy.artifacts.hub_listing import HubAccess, Landing, client_options, is_closed, no_bucket, wait_landed
from proxy.contract import PolicyFile
from proxy.errors import ArtifactError, SettingsError
from trainer_client.errors import StoreError
from trainer_client.stores.files import Content, Sent, nobody, size_of

if TYPE_CHECKING:
    from huggingface_hub import BucketFile, HfApi

FIRST_RETRY = "50ms"
"""hf_xet repeats a call that failed after 3 s, which is longer than a whole publication takes."""

_FIRST_RETRY_VARIABLE = "HF_XET_CLIENT_RETRY_BASE_DELAY"

TOO_OLD = "it does not tell of files in a batch that failed; upgrade it to 2.4 (1.31 does not, 2.4 does)"

READ_TIMEOUT_S = 30.0
"""A manifest has about a kilobyte."""


class HubFiles:
    """The files of one run below a folder of a bucket. A file is there whole or not at all; there is no lock.

    huggingface_hub repeats what failed (five times, after 1 to 8 s, or as long as the Hub asks for); who calls sets a
    deadline around it all.
    """

    def __init__(self, url: str, *, run: str, endpoint: str | None = None) -> None:
        try:
            self._root = BucketFolder.parse(url).child(run)
        except ValueError as error:
            raise SettingsError(f"store {error}.") from error
        self._endpoint = endpoint
        self._written: dict[str, dict[str, int]] = {}
        """Sizes of what has been written here, by folder and name, until the Hub lists it."""
        self._tried: dict[str, set[str]] = {}
        """Names that may have been written here, by folder: a listing may show them later."""
        # before hf_xet is asked for anything, and only where the user has not said otherwise
        os.environ.setdefault(_FIRST_RETRY_VARIABLE, FIRST_RETRY)

    @property
    def location(self) -> str:
        """The URL of the run's folder."""
        return str(self._root)

    def prepare(self) -> None:
        """See whether the bucket is there, and may be used with this token."""
        from huggingface_hub import errors

        if not hasattr(errors, "BucketBatchError"):
            raise StoreError(f"huggingface_hub is too old for {self._root}: {TOO_OLD}")
        self.list()

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Keep nobody out: a bucket knows no conditions."""
        yield False

    def list(self) -> dict[str, dict[str, int]]:
        """Ask for all files below the run's folder at once, and add what was written here and is not listed yet."""
        sizes: dict[str, dict[str, int]] = {}
        for file in self._listed(self._root):
            folder, _, name = file.path.removeprefix(f"{self._root.path}/").partition("/")
            if name:
                sizes.setdefault(folder, {})[name] = file.size
                self._written.get(folder, {}).pop(name, None)
        for folder, names in self._written.items():
            if names:
                sizes.setdefault(folder, {}).update(names)
        return sizes

    def age_s(self, folder: str) -> float:
        """Return the seconds since the newest file in the folder was uploaded, 0 while none is listed."""
        uploaded = [file.uploaded_at for file in self._listed(self._root.child(folder)) if file.uploaded_at]
        return (datetime.now(UTC) - max(uploaded)).total_seconds() if uploaded else 0.0

    def read(self, folder: str, name: str) -> bytes:
        """Download a file."""
        from huggingface_hub.utils import hf_raise_for_status, http_backoff

        path = self._root.child(folder).file(name)
        with self._errors_named(f"reading {self._root.child(folder, name)}"):
            url = f"{self._hub.endpoint}/buckets/{self._root.bucket}/resolve/{quote(path)}"
            answer = http_backoff("GET", url, headers=dict(self._hub.headers), timeout=READ_TIMEOUT_S)
            hf_raise_for_status(answer)
            return answer.content

    def described(self, files: tuple[PolicyFile, ...], contents: Mapping[str, Content]) -> tuple[PolicyFile, ...]:
        """Return the files with their Xet hashes, which the Hub will list them with."""
        with self._errors_named(f"hashing files for {self._root}"):
            return tuple(file.model_copy(update={"xet_hash": _xet_hash(contents[file.path])}) for file in files)

    def add(self, folder: str, contents: Mapping[str, Content], *, sent: Sent = nobody) -> None:
        """Upload the files as one batch. Raises StoreError that names those that failed; the others may be there."""
        path = self._root.child(folder)
        self._tried.setdefault(folder, set()).update(contents)
        with self._errors_named(f"writing {path}"), _no_bars():
            self._api.batch_bucket_files(
                self._root.bucket, add=[(content, path.file(name)) for name, content in contents.items()]
            )
        sizes = {name: size_of(content) for name, content in contents.items()}
        self._written.setdefault(folder, {}).update(sizes)
        sent(sum(sizes.values()))  # huggingface_hub tells only bars of its own what goes up meanwhile

    def settle(self, folder: str, files: tuple[PolicyFile, ...], *, deadline: float) -> None:
        """Wait until the Hub lists the files with their sizes and hashes. A mount shows nothing wrong from then on."""
        path = self._root.child(folder)
        expected = [HubFile.announced(file) for file in files]
        try:
            with httpx2.Client(**client_options()) as client:
                wait_landed(Landing(path, expected, hub=self._hub, deadline=deadline), client)
        except ArtifactError as error:
            raise StoreError(f"{path} is not published: {error}") from error

    def write(self, folder: str, name: str, content: bytes) -> None:
        """Upload one file. The Hub may list it later."""
        self.add(folder, {name: content})

    def remove(self, folder: str, name: str) -> None:
        """Remove one file, listed or not."""
        self._delete(folder, [name])

    def remove_folder(self, folder: str) -> None:
        """Remove every file in the folder that is listed, or may have been written here."""
        path = self._root.child(folder)
        listed = {file.path.removeprefix(f"{path.path}/") for file in self._listed(path)}
        self._delete(folder, listed | self._tried.get(folder, set()))
        self._tried.pop(folder, None)
        self._written.pop(folder, None)

    def fetch(self, names: Iterable[str], directory: Path) -> None:
        """Download files from the folder itself, as far as they are there."""
        wanted = {self._root.file(name): directory / name for name in names}
        found = [(file, wanted[file.path]) for file in self._listed(self._root) if file.path in wanted]
        with self._errors_named(f"reading {self._root}"), _no_bars():
            self._api.download_bucket_files(self._root.bucket, list(found))

    def _delete(self, folder: str, names: Iterable[str]) -> None:
        path = self._root.child(folder)
        if not (paths := sorted(map(path.file, names))):
            return
        try:
            with self._errors_named(f"removing {path}"):
                self._api.batch_bucket_files(self._root.bucket, delete=paths)
        except StoreError:
            there = {file.path for file in self._listed(path)}
            if there.union(map(path.file, self._tried.get(folder, ()))) & set(paths):
                raise  # else they were gone before
        for name in names:
            self._written.get(folder, {}).pop(name, None)
            self._tried.get(folder, set()).discard(name)

    def _listed(self, folder: BucketFolder) -> tuple[BucketFile, ...]:
        from huggingface_hub import BucketFile

        with self._errors_named(f"listing {folder}"):
            # the prefix is lexical: without a slash at its end `v1` would find `v10` as well
            prefix = f"{folder.path}/" if folder.path else None
            entries = self._api.list_bucket_tree(folder.bucket, prefix, recursive=True)
            return tuple(entry for entry in entries if isinstance(entry, BucketFile))

    @cached_property
    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self._endpoint, library_name="lora-sync-proxy")

    @property
    def _hub(self) -> HubAccess:
        return HubAccess.usual(self._endpoint)

    @contextmanager
    def _errors_named(self, doing: str) -> Iterator[None]:
        # huggingface_hub, httpx and hf_xet each raise their own, hf_xet among them ConnectionError and RuntimeError
        try:
            yield
        except Exception as error:
            raise StoreError(f"{doing} failed: {self._told(error)}") from error

    def _told(self, error: Exception) -> str:
        if failures := getattr(error, "failures", None):  # of a BucketBatchError
            return "; ".join(f"{failure['path']}: {failure['error']}" for failure in failures)
        if (answer := getattr(error, "response", None)) is not None and is_closed(answer):
            return no_bucket(self._root.bucket, self._hub.endpoint, answer.status_code)
        told = " ".join(f"{type(error).__name__}: {error}".split())  # huggingface_hub's have several lines
        if "ConnectError" in told or "Timeout" in told:
            return f"{told}; see whether this machine reaches {self._hub.endpoint} (HF_ENDPOINT)"
        return told


def download(url: str, names: Iterable[str], directory: Path) -> None:
    """Download files of a folder in a bucket, as far as they are there. Raises StoreError, and SettingsError for a URL
    that names no bucket."""
    HubFiles(url, run="").fetch(names, directory)


def _xet_hash(content: Content) -> str:
    """Return the Hub's name for a content. hf_xet hashes files only: bytes become one in memory, that has no name."""
    from hf_xet import hash_files

    if isinstance(content, Path):
        return str(hash_files([str(content)])[0].hash)
    with os.fdopen(os.memfd_create("lora-sync"), "wb") as file:
        file.write(content)
        file.flush()
        (found,) = hash_files([f"/proc/self/fd/{file.fileno()}"])
    return str(found.hash)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep huggingface_hub's own progress bars out of a training's output, three for each publication."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
