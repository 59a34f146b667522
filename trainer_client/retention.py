"""Unload what fell out of the window, and delete only what nobody needs and nobody else owns.

Of merged policies one is served at a time, and a replica that restarts reads it again: the newest one's files stay, and
those of whatever the proxy says that replicas have or may be told to read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from proxy.artifacts.manifest import Manifest
from proxy.contract import PolicyStatus
from trainer_client.policies import Fate, fallen_out, fate
from trainer_client.proxy_api import ProxyApi
from trainer_client.stores.policy_store import Contents, PolicyStore


@dataclass(frozen=True)
class Garbage:
    """A folder in the store that nobody needs any more."""

    folder: str
    size: int
    """Bytes."""
    why: str
    removed: bool


class Retention:
    """The window of one run: max_staleness + 1 policies live, older ones unloaded, checkpoints kept."""

    def __init__(self, store: PolicyStore, proxy: ProxyApi, *, max_staleness: int) -> None:
        self._store = store
        self._proxy = proxy
        self._max_staleness = max_staleness

    def retire(self) -> int:
        """Unload what fell out of the window, and delete what nobody needs. Return how many policies within are live.

        Raises StoreError and ProxyError.
        """
        with self._store.claim():
            contents = self._store.contents()
            known = {status.name: status for status in self._proxy.statuses()}
            out = list(self._fallen_out(contents))
            needed = self._needed(contents)
            for manifest in out:
                if manifest.merged:
                    if _is_garbage(manifest, needed):
                        self._store.delete(manifest.name)
                    continue
                # asked for at every publish: a proxy that restarted may have found the policy on a replica again
                if _fate(manifest, contents, known.get(manifest.name)) is Fate.UNLOAD:
                    self._proxy.unload(manifest.name)
                elif manifest.checkpoint:
                    continue
                status = self._proxy.status(manifest.name)
                if _fate(manifest, contents, status) is Fate.DELETE:
                    self._store.delete(manifest.name)
                elif status is None and manifest.name not in contents.unloaded:
                    self._store.mark_unloaded(manifest.name)
        within = {manifest.name for manifest in contents.manifests} - {manifest.name for manifest in out}
        live = {status.name for status in known.values() if status.state == "live"}
        return len(within & (live | (needed or set())))

    def unload_adapters(self) -> None:
        """Ask for the unload of the run's adapters, which merged weights replace. Raises StoreError and ProxyError."""
        with self._store.claim():
            for manifest in self._store.contents().manifests:
                if not manifest.merged:
                    self._proxy.unload(manifest.name)

    def collect(self, *, dry_run: bool, min_age_s: float) -> list[Garbage]:
        """Return what nobody needs in the run's folder, removed unless `dry_run`. Raises StoreError and ProxyError."""
        with self._store.claim():
            found = list(self._garbage(min_age_s))
            if dry_run:
                return found
            for garbage in found:
                self._store.delete(garbage.folder)
        return [replace(garbage, removed=True) for garbage in found]

    def _garbage(self, min_age_s: float) -> Iterator[Garbage]:
        contents = self._store.contents()
        for folder in self._store.orphans(contents, min_age_s=min_age_s):
            yield Garbage(folder, contents.sizes.get(folder, 0), "left by a publisher that was interrupted", False)
        needed = self._needed(contents)
        for manifest in self._fallen_out(contents):
            if manifest.merged:
                if _is_garbage(manifest, needed):
                    yield Garbage(manifest.name, contents.sizes[manifest.name], "no replica needs it", False)
            elif _fate(manifest, contents, self._proxy.status(manifest.name)) is Fate.DELETE:
                yield Garbage(manifest.name, contents.sizes[manifest.name], "unloaded, and nobody needs it", False)

    def _fallen_out(self, contents: Contents) -> Iterator[Manifest]:
        """Yield what is no longer to be served. The newest one, if it is merged, is all that is served."""
        newest = contents.newest
        if newest and newest.merged:
            return (manifest for manifest in contents.manifests if manifest is not newest)
        published = [manifest.version for manifest in contents.manifests]
        versions = fallen_out(published, max_staleness=self._max_staleness)
        return (manifest for manifest in contents.manifests if manifest.version in versions)

    def _needed(self, contents: Contents) -> set[str] | None:
        """Return the merged policies whose files replicas have read or may be told to read, None if that is unknown."""
        if not any(manifest.merged for manifest in contents.manifests):
            return set()
        told = self._proxy.fleet().checkpoints
        return None if told is None else set(told)


def _is_garbage(merged: Manifest, needed: set[str] | None) -> bool:
    return needed is not None and merged.name not in needed and not merged.checkpoint


def _fate(manifest: Manifest, contents: Contents, status: PolicyStatus | None) -> Fate:
    return fate(status, unloaded=manifest.name in contents.unloaded, checkpoint=manifest.checkpoint)
