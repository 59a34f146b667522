"""Judge an adapter, and describe its bytes, in one pass over them. Proxy and trainer client both judge by this.

vLLM answers 200 to tensors that are too small and to NaN, and then serves garbage to this and other requests; it
answers 500 to what it refuses. Both are found here, before a replica hears of the adapter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from proxy.artifacts.config import AdapterConfig, parse_config, unservable
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE, canonical_config, digest_of, load_config, read_file
from proxy.artifacts.verdict import Verdict, Way
from proxy.artifacts.weights import scan_weights
from proxy.contract import PolicyFile
from proxy.errors import ArtifactError


@dataclass(frozen=True)
class Inspection:
    """What one reading of an adapter tells."""

    verdict: Verdict
    config: AdapterConfig
    files: tuple[PolicyFile, ...]
    """Both files with size and sha256."""
    digest: str
    """`adapter_digest` of the same bytes."""
    config_digest: str
    """sha256 (hex) of the canonical config alone."""


def inspect(config: bytes, weights: BinaryIO, *, source: str, max_lora_rank: int | None = None) -> Inspection:
    """Read an adapter once and tell how it can be served. lora_B may be all zero, as in the first version of a run.

    `config` is the content of adapter_config.json, `weights` the safetensors file, open at its start. `source` names
    the adapter in errors; `max_lora_rank` is the fleet's limit, None if unknown. Raises ArtifactError when a file is
    too damaged to judge.
    """
    fields = load_config(config, source=f"{source}/{CONFIG_FILE}")
    parsed = parse_config(fields, source=f"{source}/{CONFIG_FILE}")
    scan = scan_weights(weights, config=parsed, source=f"{source}/{WEIGHTS_FILE}")
    canonical = canonical_config(fields)
    return Inspection(
        verdict=Verdict.on([*unservable(parsed, max_lora_rank=max_lora_rank), *scan.faults]),
        config=parsed,
        files=(
            PolicyFile(path=CONFIG_FILE, size=len(config), sha256=hashlib.sha256(config).hexdigest()),
            PolicyFile(path=WEIGHTS_FILE, size=scan.size, sha256=scan.sha256),
        ),
        digest=digest_of(canonical, scan.sha256),
        config_digest=hashlib.sha256(canonical).hexdigest(),
    )


def inspect_directory(directory: Path, *, max_lora_rank: int | None = None) -> Inspection:
    """Read the adapter in `directory` once; the weights are streamed. Raises ArtifactError as `inspect` does."""
    config, path = read_file(directory / CONFIG_FILE), directory / WEIGHTS_FILE
    try:
        with path.open("rb") as weights:
            return inspect(config, weights, source=str(directory), max_lora_rank=max_lora_rank)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error


def judge(directory: Path, *, max_lora_rank: int | None = None) -> Verdict:
    """Return how the adapter in `directory` can be served. What is missing or damaged is a reason, not an error."""
    try:
        return inspect_directory(directory, max_lora_rank=max_lora_rank).verdict
    except ArtifactError as error:
        return Verdict(Way.BROKEN, (str(error).removeprefix(f"{directory}/"),))


def check_adapter(directory: Path, *, max_lora_rank: int | None = None) -> Inspection:
    """Return what is in `directory` if vLLM can serve it as an adapter, else raise ArtifactError with every reason."""
    inspection = inspect_directory(directory, max_lora_rank=max_lora_rank)
    if inspection.verdict.way is not Way.ADAPTER:
        raise ArtifactError(f"{directory} cannot be served as an adapter: {inspection.verdict}")
    return inspection
