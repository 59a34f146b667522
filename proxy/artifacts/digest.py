"""The digest of an adapter: one 64-digit name for its config and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from proxy.errors import ArtifactError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_SETS = {"target_modules", "modules_to_save", "exclude_modules"}
"""peft keeps these as sets and writes them in whatever order the process hashes strings."""


def adapter_digest(directory: Path) -> str:
    """Return the digest of the adapter in `directory`: over its canonical config and the bytes of its weights.

    The config counts by value, not by layout: neither white space nor the order of keys and module names matters.
    Raises ArtifactError when a file is missing or the config is not a JSON object.
    """
    path, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    config = canonical_config(load_config(read_file(path), source=str(path)))
    try:
        with weights.open("rb") as file:
            return digest_of(config, hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise ArtifactError(f"{weights} cannot be read: {error.strerror}") from error


def digest_of(config: bytes, weights_sha256: str) -> str:
    """Return sha256 (hex) over a canonical config and the hex sha256 of the weights, which a manifest holds as well.

    So the weights are hashed once for both, and a manifest can be checked against itself.
    """
    return hashlib.sha256(config + weights_sha256.encode()).hexdigest()


def checkpoint_digest(config: bytes, weights_sha256: Iterable[str]) -> str:
    """Return the digest of a whole model: over its canonical config and the hex sha256 of its files, in order."""
    return digest_of(config, hashlib.sha256("".join(weights_sha256).encode()).hexdigest())


def canonical_config(fields: Mapping[str, Any]) -> bytes:
    """Return the fields of adapter_config.json with sorted keys and module names and no white space."""
    ordered = {
        name: sorted(value, key=str) if name in _SETS and isinstance(value, list) else value
        for name, value in fields.items()
    }
    return json.dumps(ordered, sort_keys=True, separators=(",", ":")).encode()


def load_config(content: bytes, *, source: str) -> dict[str, Any]:
    """Read the content of adapter_config.json; `source` names the file in the ArtifactError when it is no object."""
    try:
        fields: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{source} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ArtifactError(f"{source} is not a JSON object")
    return fields


def read_file(path: Path) -> bytes:
    """Read a file whole. Raises ArtifactError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
