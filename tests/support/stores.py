"""Policies put into a store by hand, and stores that fail at a chosen call."""

from __future__ import annotations

import io
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from proxy.artifacts.check import Inspection, inspect
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE
from proxy.artifacts.manifest import Manifest
from proxy.contract import managed_name
from proxy.simulator.adapters import write_adapter
from trainer_client.stores import open_store
from trainer_client.stores.files import Files
from trainer_client.stores.policy_store import PolicyStore


def store_at(location: str, *, run: str = "run") -> PolicyStore:
    """Open a store that can be used; a URL is seen under /lora."""
    store = open_store(location, run=run, mount="/lora" if "://" in location else None)
    store.prepare()
    return store


def files_of(store: PolicyStore) -> Files:
    """Return what lies below a store, to leave there what no publisher would."""
    return store._files


def put(store: PolicyStore, *, version: int, deadline: float | None = None) -> Manifest:
    """Publish an adapter whose weights follow from the version."""
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), seed=version)
        contents = {name: (Path(folder) / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    found = inspect(contents[CONFIG_FILE], io.BytesIO(contents[WEIGHTS_FILE]), source="adapter")
    files = store.described(found.files, contents)
    manifest = manifest_of(found, run=store.run, version=version).model_copy(update={"files": files})
    store.put(manifest, contents, deadline=deadline or time.monotonic() + 60)
    return manifest


def manifest_of(found: Inspection, *, run: str, version: int) -> Manifest:
    """Return the manifest of an adapter."""
    return Manifest(
        run=run,
        version=version,
        step=version,
        name=managed_name(run, version, found.digest),
        base_model=found.config.base_model,
        digest=found.digest,
        config_digest=found.config_digest,
        files=found.files,
        created=datetime.now(UTC),
    )


class FaultyFiles:
    """Let the first use of one call below a store fail, from entering to leaving the context."""

    def __init__(self, store: PolicyStore, call: str) -> None:
        self._store, self._files, self._call, self._failed = store, store._files, call, False

    def __enter__(self) -> Self:
        self._store._files = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store._files = self._files

    def __getattr__(self, name: str) -> Any:
        if name == self._call and not self._failed:
            self._failed = True
            raise OSError("broken")
        return getattr(self._files, name)
