"""The policies of one run in a store: what is published, what is half-written, and how the one becomes the other.

A policy is published by its manifest, which is written last and removed first. Whatever a killed publisher leaves has
no manifest, or is a whole policy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from proxy.artifacts.manifest import MANIFEST_FILE, Manifest, parse_manifest
from proxy.contract import PolicyFile
from proxy.errors import ArtifactError
from trainer_client.errors import StoreError
from trainer_client.policies import version_in
from trainer_client.progress import Progress, Sending, Tell, tell_nobody
from trainer_client.stores.files import STAGING, Content, Files, size_of

ORPHAN_AGE_S = 3600.0
"""A folder without a manifest is garbage only when it is this old: a mount may show a manifest minutes late."""

_UNLOADED_FILE = ".unloaded"


@dataclass(frozen=True)
class Contents:
    """What one look at a store found."""

    manifests: tuple[Manifest, ...]
    """Of every published policy, the oldest version first."""
    unfinished: tuple[str, ...]
    """Folders of this run without a manifest: being written, or left by a publisher that was killed."""
    versions: frozenset[int]
    """Every version that a folder has in its name, published or not."""
    unloaded: frozenset[str]
    """Policies whose unload the proxy has acknowledged."""
    sizes: Mapping[str, int]
    """Bytes by folder."""

    @property
    def newest(self) -> Manifest | None:
        """The published policy with the highest version."""
        return self.manifests[-1] if self.manifests else None


class PolicyStore:
    """The policies of one run. Never touches what another run owns.

    Its methods raise StoreError, and OSError outside of `claim`. They may take as long as the store does.
    """

    def __init__(self, files: Files, *, run: str, seen_under: Path) -> None:
        self.run = run
        self._files = files
        self._seen_under = seen_under
        self._exclusive = False
        self._known: dict[str, Manifest] = {}
        """Manifests never change, so that each is read once."""

    def __repr__(self) -> str:
        return f"<PolicyStore {self.location}>"

    @property
    def location(self) -> str:
        """Where the run's policies are, for messages."""
        return self._files.location

    def prepare(self) -> None:
        """See whether the store can be used. Raises StoreError."""
        try:
            self._files.prepare()
        except OSError as error:
            raise StoreError(f"store {self.location} cannot be used: {error}") from error

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keep other publishers of this run out, where the store has locks. Raises StoreError if one is at work.

        An OSError from within becomes a StoreError that names the store.
        """
        try:
            with self._files.lock() as self._exclusive:
                yield
        except OSError as error:
            raise StoreError(f"store {self.location} cannot be used: {error}") from error

    def contents(self) -> Contents:
        """Look at the store. Raises StoreError for a manifest that cannot be understood."""
        listed = self._files.list()
        ours = {folder: version for folder in listed if (version := version_in(self.run, folder)) is not None}
        published = [folder for folder in ours if MANIFEST_FILE in listed[folder]]
        self._known = {folder: self._known.get(folder) or self._read(folder) for folder in published}
        return Contents(
            manifests=tuple(sorted(self._known.values(), key=lambda manifest: manifest.version)),
            unfinished=tuple(
                sorted(
                    folder
                    for folder in listed
                    if folder.startswith(STAGING) or (folder in ours and folder not in self._known)
                )
            ),
            versions=frozenset(ours.values()),
            unloaded=frozenset(folder for folder in published if _UNLOADED_FILE in listed[folder]),
            sizes={folder: sum(sizes.values()) for folder, sizes in listed.items()},
        )

    def described(self, files: tuple[PolicyFile, ...], contents: Mapping[str, Content]) -> tuple[PolicyFile, ...]:
        """Return `files` as a manifest in this store tells of them; `contents` by name."""
        return self._files.described(files, contents)

    def put(
        self, manifest: Manifest, contents: Mapping[str, Content], *, deadline: float, tell: Tell = tell_nobody
    ) -> None:
        """Publish a policy: its files, a look at how everyone sees them, then the manifest.

        After `deadline` (in `time.monotonic` seconds) nothing is published any more. After an error nothing of the
        policy is left, or it is a whole one.
        """
        total = sum(map(size_of, contents.values()))
        try:
            self._files.add(manifest.name, contents, sent=Sending(tell, doing="writing to the store", total=total))
            tell(Progress("waiting until the store shows it", total, total))
            self._files.settle(manifest.name, manifest.files, deadline=deadline)
            self._confirm(manifest)
            if time.monotonic() > deadline:
                raise StoreError(f"writing {manifest.name} into {self.location} took too long, so it is not published")
            self._files.write(manifest.name, MANIFEST_FILE, manifest.content())
            self._known[manifest.name] = manifest  # a store may not show it yet
        except BaseException:
            with suppress(StoreError, OSError):  # what cannot be cleared away now is an orphan for later
                if MANIFEST_FILE not in self._files.list().get(manifest.name, {}):
                    self.delete(manifest.name)
            raise

    def path_of(self, name: str) -> Path:
        """Return the directory of a policy as replicas see it."""
        return self._seen_under / self.run / name

    def mark_unloaded(self, name: str) -> None:
        """Remember, beyond a restart, that the proxy acknowledged the unload."""
        self._files.write(name, _UNLOADED_FILE, b"")

    def delete(self, name: str) -> None:
        """Remove a policy, or what is left of one. The manifest goes first: half a policy is not a published one."""
        self._files.remove(name, MANIFEST_FILE)
        self._files.remove_folder(name)

    def orphans(self, contents: Contents, *, min_age_s: float = ORPHAN_AGE_S) -> list[str]:
        """Return the unfinished folders that nobody works on any more: older than `min_age_s`.

        Where the lock keeps others out, staging is nobody's, whatever its age. Call it inside `claim()`.
        """
        return [
            folder
            for folder in contents.unfinished
            if (self._exclusive and folder.startswith(STAGING)) or self._files.age_s(folder) >= min_age_s
        ]

    def _read(self, folder: str) -> Manifest:
        source = f"{self.location}/{folder}/{MANIFEST_FILE}"
        try:
            manifest = parse_manifest(self._files.read(folder, MANIFEST_FILE), source=source)
        except ArtifactError as error:
            raise StoreError(str(error)) from error
        if (manifest.run, manifest.name) != (self.run, folder):
            raise StoreError(f"{source} is the manifest of {manifest.name} (run {manifest.run}): move the folder away")
        return manifest

    def _confirm(self, manifest: Manifest) -> None:
        """Hold the store to what was written, and see that no other publisher has come in between."""
        listed = self._files.list()
        for file in manifest.files:
            if (size := listed.get(manifest.name, {}).get(file.path)) != file.size:
                seen = "not there" if size is None else f"of {size} bytes"
                raise StoreError(
                    f"{self.location}/{manifest.name}/{file.path} is {seen} after {file.size} bytes were written; "
                    "something else writes there, or the store loses data"
                )
        for folder in listed:
            if folder != manifest.name and (version_in(self.run, folder) or 0) >= manifest.version:
                raise StoreError(
                    f"another publisher has written {folder} in {self.location} meanwhile; give each run a name of its "
                    "own, or try again when the other one is done"
                )
