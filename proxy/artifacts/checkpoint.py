"""A whole model in a directory: complete, readable, and of the shape that the servers have.

vLLM tears its model when it is told to read anything else, and the next request kills the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.artifacts.weights import read_header
from proxy.errors import ArtifactError

MODEL_CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Names that transformers gives: one file, or an index of several."""

_FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")

NAMED = 3
"""So many differences are named, the others counted."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's headers tell. No values are read."""

    architectures: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """By tensor."""
    bytes: int
    """Of all weights files."""


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read config and headers. Raises ArtifactError for what is missing, truncated, or says something else."""
    config = _json(directory / MODEL_CONFIG)
    index = directory / INDEX
    wanted = _weight_map(index) if index.exists() else {}
    shapes: dict[str, tuple[int, ...]] = {}
    size = 0
    for name in sorted(set(wanted.values())) if wanted else [WHOLE]:
        found = _shapes(directory / name)
        if wanted and (lost := sorted(t for t, file in wanted.items() if file == name and t not in found)):
            raise ArtifactError(f"{directory / name} lacks {_some(lost)}, which {INDEX} promises")
        shapes |= found
        size += (directory / name).stat().st_size
    return Checkpoint(_architectures(config), shapes, size)


def differences(found: Checkpoint, expected: Checkpoint) -> Iterator[str]:
    """Yield in which ways a checkpoint cannot take the place of another one."""
    if found.architectures != expected.architectures:
        yield f"it is a {', '.join(found.architectures)}, not a {', '.join(expected.architectures)}"
    if missing := sorted(expected.shapes.keys() - found.shapes.keys()):
        yield f"it lacks {_some(missing)}"
    if foreign := sorted(found.shapes.keys() - expected.shapes.keys()):
        yield f"it has {_some(foreign)}, which the model has not"
    for name in sorted(found.shapes.keys() & expected.shapes.keys()):
        if found.shapes[name] != expected.shapes[name]:
            yield f"{name} has shape {list(found.shapes[name])}, not {list(expected.shapes[name])}"
            break


def _weight_map(index: Path) -> dict[str, str]:
    """Return which file each tensor is in. Raises ArtifactError unless the files lie beside the index."""
    wanted = _json(index).get("weight_map")
    if not isinstance(wanted, dict):
        raise ArtifactError(f"{index} has no weight_map")
    for name in wanted.values():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise ArtifactError(f"{index} names {name!r:.200}, which is no file in its own directory")
    return wanted


def _architectures(config: dict[str, Any]) -> tuple[str, ...]:
    told = config.get("architectures")
    return tuple(str(name) for name in told) if isinstance(told, list) else ()


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path} is not a JSON object")
    return content


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with path.open("rb") as file:
            return {tensor.name: tensor.shape for tensor in read_header(file, source=str(path))}
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error


def _some(names: Iterable[str]) -> str:
    known = list(names)
    rest = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return ", ".join(known[:NAMED]) + rest
