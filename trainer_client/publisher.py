"""From an adapter to a published policy in the store: write, check, number, commit. Knows nothing of the proxy.

Everything is staged first and judged there, so that the bytes that were checked are the bytes that are published.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from proxy.artifacts.config import read_config
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from proxy.artifacts.manifest import ADAPTER_FILES, Manifest, describe_files
from proxy.artifacts.weights import find_faults, list_faults
from proxy.contract import managed_name
from trainer_client.errors import RewindError, UnservableError
from trainer_client.policies import next_version
from trainer_client.slots import LARGEST_RANK
from trainer_client.stores import DirectoryStore


@runtime_checkable
class Saves(Protocol):
    """A peft PeftModel, as far as it is needed here."""

    def save_pretrained(self, save_directory: str, *, safe_serialization: bool) -> object:
        """Write adapter_config.json and adapter_model.safetensors into a directory."""


Adapter = str | Path | Saves | tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]
"""What can be published: a directory in peft's format, a PeftModel, or (tensors by peft's names, config)."""


@dataclass(frozen=True)
class Published:
    """A policy that is in the store, new or found there."""

    manifest: Manifest
    path: Path
    stage_s: float
    check_s: float


def publish_files(
    adapter: Adapter, *, store: DirectoryStore, step: int, base_model: str | None, allow_rewind: bool
) -> Published:
    """Publish an adapter in the store, or return the newest policy if it has the same bytes.

    Raises UnservableError, RewindError, StoreError for a broken manifest, and OSError from the disk. After any of them
    the store is as before. Call it inside `store.claim()`.
    """
    published = store.manifests()
    newest = published[-1] if published else None
    with store.staging() as staged:
        began = time.perf_counter()
        write_adapter(adapter, staged)
        written = time.perf_counter()
        if faults := find_faults(staged, max_lora_rank=LARGEST_RANK):
            raise UnservableError(f"{describe(adapter)} (step {step}) cannot be served: {list_faults(faults)}")
        checked = time.perf_counter()
        digest = adapter_digest(staged)
        if newest and newest.digest == digest:
            manifest, path = newest, store.path_of(newest.name)
        else:
            if newest and step < newest.step and not allow_rewind:
                raise RewindError(
                    f"step {step} is before step {newest.step} of {newest.name}, the newest policy of run "
                    f"{newest.run} in {store.root}; allow_rewind (--allow-rewind) publishes it all the same"
                )
            manifest = _manifest(staged, store=store, step=step, digest=digest, base_model=base_model)
            path = store.commit(staged, manifest)
    ended = time.perf_counter()
    return Published(manifest, path, stage_s=written - began + ended - checked, check_s=checked - written)


def write_adapter(adapter: Adapter, directory: Path) -> None:
    """Write the two files of an adapter into an empty directory, and nothing else."""
    if isinstance(adapter, str | Path):
        _copy(Path(adapter), directory)
    elif isinstance(adapter, Saves):
        adapter.save_pretrained(str(directory), safe_serialization=True)
        _keep_adapter_files(directory)
    else:
        _save(*adapter, directory)


def describe(adapter: Adapter) -> str:
    """Name an adapter in a message: the path of a directory, the class of a model."""
    if isinstance(adapter, str | Path):
        return f"adapter {adapter}"
    return f"the adapter of {type(adapter).__name__}" if isinstance(adapter, Saves) else "the given state dict"


def _copy(source: Path, directory: Path) -> None:
    for name in ADAPTER_FILES:
        try:
            shutil.copyfile(source / name, directory / name)
        except FileNotFoundError as error:
            raise UnservableError(
                f"{source / name} is missing; give the directory that peft saved the adapter to"
            ) from error


def _keep_adapter_files(directory: Path) -> None:
    """Remove the model card, and the other adapters of a model that has several (peft puts them into folders)."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in ADAPTER_FILES:
            path.unlink()


def _save(tensors: Mapping[str, NDArray[Any]], config: Mapping[str, Any], directory: Path) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, np.ndarray):
            raise UnservableError(
                f"{name} is a {type(tensor).__name__}; give numpy arrays, as from .float().cpu().numpy()"
            )
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(arrays, directory / WEIGHTS_FILE, {"format": "pt"})  # as peft writes it: the same bytes, the same digest
    # peft's configs hold sets, whose order changes from process to process: sorted, the digest stays the same
    (directory / CONFIG_FILE).write_text(json.dumps(dict(config), indent=2, default=sorted))


def _manifest(staged: Path, *, store: DirectoryStore, step: int, digest: str, base_model: str | None) -> Manifest:
    version = next_version(store.versions())
    return Manifest(
        run=store.run,
        version=version,
        step=step,
        name=managed_name(store.run, version, digest),
        base_model=base_model or read_config(staged).base_model,
        digest=digest,
        files=describe_files(staged),
        created=datetime.now(UTC),
    )
