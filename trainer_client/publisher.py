"""From an adapter's bytes, or a checkpoint, to a published policy in the store. Knows nothing of the proxy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from proxy.artifacts.manifest import Manifest
from proxy.contract import PolicyFile, managed_name
from trainer_client.adapters import Payload
from trainer_client.errors import RewindError, UnservableError
from trainer_client.fleet import FleetLimits
from trainer_client.policies import is_checkpoint, next_version
from trainer_client.progress import Progress, Tell, tell_nobody
from trainer_client.ready import Ready, as_adapter
from trainer_client.stores.policy_store import Contents, PolicyStore


@dataclass(frozen=True)
class Terms:
    """On which terms an adapter is published."""

    step: int
    """The optimizer step that the weights come from."""
    base_model: str | None
    """Goes into the manifest; None takes what the adapter's config names."""
    keep_every: int | None
    """Every so many versions one becomes a checkpoint; None makes none."""
    allow_rewind: bool
    alias: str | None = None
    """The client's own name for the policy, beside that which it gets."""
    on_live: Callable[[], None] | None = None
    """Called as soon as it is live, before anything is retired."""


@dataclass(frozen=True)
class Published:
    """A policy that is in the store, new or found there."""

    manifest: Manifest
    path: Path
    """Its directory as replicas see it."""
    check_s: float
    store_s: float


def publish_files(
    weights: Payload | Ready,
    terms: Terms,
    *,
    store: PolicyStore,
    limits: FleetLimits,
    deadline: float,
    tell: Tell = tell_nobody,
) -> Published:
    """Publish an adapter, or what is ready, in the store, or return the newest policy if it is that again.

    Before that, what killed publishers have left is removed. Raises UnservableError, RewindError and StoreError; after
    any of them the store holds what it held before. Nothing is published after `deadline` (`time.monotonic`).
    """
    began = time.perf_counter()
    tell(Progress("checking the adapter"))
    ready = weights if isinstance(weights, Ready) else as_adapter(weights, step=terms.step, limits=limits)
    checked = time.perf_counter()
    with store.claim():
        contents = store.contents()
        for orphan in store.orphans(contents):
            store.delete(orphan)
        if contents.newest and _is_again(contents.newest, ready, terms):
            manifest = contents.newest
        else:
            _refuse_rewind(terms, contents, store)
            _refuse_beside_merged(ready, terms, contents)
            files = store.described(ready.files, ready.contents)
            version = next_version(contents.versions)
            manifest = _manifest(terms, ready, files, run=store.run, version=version)
            store.put(manifest, ready.contents, deadline=deadline, tell=tell)
    stored = time.perf_counter()
    return Published(manifest, store.path_of(manifest.name), check_s=checked - began, store_s=stored - checked)


def _is_again(newest: Manifest, ready: Ready, terms: Terms) -> bool:
    """Whether it is the newest policy: the same bytes, and no other alias, of which a policy has but one."""
    return newest.digest == ready.digest and terms.alias in (None, newest.alias)


def _refuse_beside_merged(ready: Ready, terms: Terms, contents: Contents) -> None:
    """Replicas would apply the adapter to the merged weights that they have, and not to the base model."""
    newest = contents.newest
    if newest and newest.merged and not ready.merged:
        raise UnservableError(
            f"step {terms.step} would be served beside the base model, but since {newest.name} that is the policy "
            "itself, merged; on_unservable='merge' merges this one as well"
        )


def _refuse_rewind(terms: Terms, contents: Contents, store: PolicyStore) -> None:
    newest = contents.newest
    if newest and terms.step < newest.step and not terms.allow_rewind:
        raise RewindError(
            f"step {terms.step} is before step {newest.step} of {newest.name}, the newest policy in {store.location}; "
            "allow_rewind (--allow-rewind) publishes it all the same"
        )


def _manifest(terms: Terms, ready: Ready, files: tuple[PolicyFile, ...], *, run: str, version: int) -> Manifest:
    return Manifest(
        run=run,
        version=version,
        step=terms.step,
        name=managed_name(run, version, ready.digest),
        base_model=terms.base_model or ready.base_model,
        digest=ready.digest,
        config_digest=ready.config_digest,
        files=files,
        alias=terms.alias,
        merged=ready.merged,
        checkpoint=is_checkpoint(version, keep_every=terms.keep_every),
        created=datetime.now(UTC),
    )
