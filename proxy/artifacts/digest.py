"""The digest of an adapter: one 64-digit name for its config and weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from proxy.errors import ArtifactError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_SETS = {"target_modules", "modules_to_save", "exclude_modules"}
"""peft keeps these as sets and writes them in whatever order the process hashes strings."""

_CHUNK_BYTES = 1 << 20


def adapter_digest(directory: Path) -> str:
    """Return the sha256 (hex) over the canonical config and the bytes of the weights in `directory`.

    The config counts by value, not by layout: neither white space nor the order of keys and module names matters.
    Raises ArtifactError when a file is missing or the config is not a JSON object.
    """
    digest = hashlib.sha256(canonical_config(directory))
    weights = directory / WEIGHTS_FILE
    try:
        with weights.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ArtifactError(f"{weights} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def canonical_config(directory: Path) -> bytes:
    """Return adapter_config.json with sorted keys and module names and no white space."""
    path = directory / CONFIG_FILE
    try:
        config: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ArtifactError(f"{path} is not a JSON object")
    for name in _SETS & config.keys():
        if isinstance(config[name], list):
            config[name] = sorted(config[name], key=str)
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
