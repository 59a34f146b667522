"""From an adapter's bytes to a published policy in the store: judge, number, commit. Knows nothing of the proxy."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from proxy.artifacts.check import Inspection, inspect
from proxy.artifacts.manifest import Manifest
from proxy.artifacts.verdict import Way
from proxy.contract import PolicyFile, managed_name
from proxy.errors import ArtifactError, SettingsError
from trainer_client.adapters import Payload
from trainer_client.errors import RewindError, UnservableError
from trainer_client.policies import is_checkpoint, next_version
from trainer_client.progress import Progress, Tell, tell_nobody
from trainer_client.stores.policy_store import Contents, PolicyStore

OnUnservable = Literal["raise", "merge"]


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
    on_unservable: OnUnservable
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
    payload: Payload,
    terms: Terms,
    *,
    store: PolicyStore,
    max_lora_rank: int | None,
    deadline: float,
    tell: Tell = tell_nobody,
) -> Published:
    """Publish an adapter in the store, or return the newest policy if it is that again.

    Before that, what killed publishers have left is removed. Raises UnservableError, RewindError and StoreError; after
    any of them the store holds what it held before. Nothing is published after `deadline` (`time.monotonic`).
    """
    began = time.perf_counter()
    tell(Progress("checking the adapter"))
    adapter = _judge(payload, terms, max_lora_rank)
    checked = time.perf_counter()
    with store.claim():
        contents = store.contents()
        for orphan in store.orphans(contents):
            store.delete(orphan)
        if contents.newest and _is_again(contents.newest, adapter, terms):
            manifest = contents.newest
        else:
            _refuse_rewind(terms, contents, store)
            files = store.described(adapter.files, payload.files())
            version = next_version(contents.versions)
            manifest = _manifest(terms, adapter, files, run=store.run, version=version)
            store.put(manifest, payload.files(), deadline=deadline, tell=tell)
    stored = time.perf_counter()
    return Published(manifest, store.path_of(manifest.name), check_s=checked - began, store_s=stored - checked)


def _judge(payload: Payload, terms: Terms, max_lora_rank: int | None) -> Inspection:
    what = f"{payload.source} (step {terms.step})"
    try:
        adapter = inspect(payload.config, io.BytesIO(payload.weights), source="adapter", max_lora_rank=max_lora_rank)
    except ArtifactError as error:
        raise UnservableError(f"{what} cannot be served: {str(error).removeprefix('adapter/')}") from error
    if adapter.verdict.way is Way.MERGED and terms.on_unservable == "merge":
        raise SettingsError(f"{what} needs merged weights, and on_unservable='merge' is not there yet.")
    if adapter.verdict.way is not Way.ADAPTER:
        hint = "; it could be served merged into the base model" if adapter.verdict.way is Way.MERGED else ""
        raise UnservableError(f"{what} cannot be served as an adapter: {adapter.verdict}{hint}")
    return adapter


def _is_again(newest: Manifest, adapter: Inspection, terms: Terms) -> bool:
    """Whether it is the newest policy: the same bytes, and no other alias, of which a policy has but one."""
    return newest.digest == adapter.digest and terms.alias in (None, newest.alias)


def _refuse_rewind(terms: Terms, contents: Contents, store: PolicyStore) -> None:
    newest = contents.newest
    if newest and terms.step < newest.step and not terms.allow_rewind:
        raise RewindError(
            f"step {terms.step} is before step {newest.step} of {newest.name}, the newest policy in {store.location}; "
            "allow_rewind (--allow-rewind) publishes it all the same"
        )


def _manifest(terms: Terms, adapter: Inspection, files: tuple[PolicyFile, ...], *, run: str, version: int) -> Manifest:
    return Manifest(
        run=run,
        version=version,
        step=terms.step,
        name=managed_name(run, version, adapter.digest),
        base_model=terms.base_model or adapter.config.base_model,
        digest=adapter.digest,
        config_digest=adapter.config_digest,
        files=files,
        alias=terms.alias,
        checkpoint=is_checkpoint(version, keep_every=terms.keep_every),
        created=datetime.now(UTC),
    )
