"""The weights of an adapter: the header of the safetensors file, and whether every value in it is finite.

vLLM answers 200 to tensors that are too small and to NaN, and then serves garbage to this and other requests, so both
are found here. Tensors are streamed piece by piece; the file is never held in memory whole.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from proxy.artifacts.config import AdapterConfig, read_config, unservable
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE
from proxy.errors import ArtifactError

MAX_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors library reads; an adapter's is a few hundred kB at most."""

MAX_FAULTS_SHOWN = 8
"""A diverged run has NaN in every tensor: the first few tell the story."""

_CHUNK_BYTES = 1 << 20
_LENGTH_BYTES = 8

_EXPONENT_BITS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""Word type and exponent mask by dtype: a value is NaN or Inf when all bits of its exponent are set.

Looking at the bits treats bfloat16, which numpy does not know, like the others.
"""

_LORA_NAME = re.compile(r"(?P<module>.+)\.lora_(?:(?P<linear>[AB])\.weight|embedding_(?P<embedding>[AB]))")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    """In safetensors' words, such as F32 or BF16."""
    shape: tuple[int, ...]
    start: int
    """Byte of the file where it starts."""
    end: int
    """Byte after its last."""


def check_adapter(directory: Path, *, max_lora_rank: int | None = None) -> AdapterConfig:
    """Return the config of the adapter in `directory` if vLLM can serve it, else raise ArtifactError.

    The error lists every reason with its file and tensor. `max_lora_rank` is the fleet's limit, None if unknown.
    lora_B may be all zero, as in the first version of a run.
    """
    faults = find_faults(directory, max_lora_rank=max_lora_rank)
    if faults:
        raise ArtifactError(f"{directory} cannot be served as an adapter: {list_faults(faults)}")
    return read_config(directory)


def find_faults(directory: Path, *, max_lora_rank: int | None = None) -> list[str]:
    """Return every reason why the adapter in `directory` cannot be served, each beginning with the file's name."""
    path = directory / WEIGHTS_FILE
    try:
        config = read_config(directory)
        tensors = read_header(path)
        of_weights = [*_name_faults(tensors), *_shape_faults(tensors, config), *_value_faults(path, tensors)]
    except ArtifactError as error:
        return [str(error).removeprefix(f"{directory}/")]
    of_config = unservable(config, max_lora_rank=max_lora_rank)
    return [f"{CONFIG_FILE}: {fault}" for fault in of_config] + [f"{WEIGHTS_FILE}: {fault}" for fault in of_weights]


def list_faults(faults: list[str]) -> str:
    """Join faults into one line, the first MAX_FAULTS_SHOWN in full."""
    more = len(faults) - MAX_FAULTS_SHOWN
    return "; ".join(faults[:MAX_FAULTS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def read_header(path: Path) -> tuple[Tensor, ...]:
    """Read the header of a safetensors file, its tensors in the order of their bytes; no values are read.

    Raises ArtifactError when the file is missing, or when its tensors do not cover it exactly, which is what a file
    looks like that is still being written.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            size = path.stat().st_size
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
                raise ArtifactError(f"{path} ends within its header ({size} bytes): truncated, or not safetensors")
            raw = file.read(length)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    tensors = tuple(sorted(_parse_header(path, raw), key=lambda tensor: (tensor.start, tensor.end)))
    _check_coverage(path, tensors, size=size, data_start=_LENGTH_BYTES + length)
    return tensors


def _parse_header(path: Path, raw: bytes) -> Iterator[Tensor]:
    try:
        header: Any = json.loads(raw)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (int(offset) + _LENGTH_BYTES + len(raw) for offset in entry["data_offsets"])
            yield Tensor(name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), start, end)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{path} has a header that is not safetensors: {error}") from error


def _check_coverage(path: Path, tensors: tuple[Tensor, ...], *, size: int, data_start: int) -> None:
    expected = data_start
    for tensor in tensors:
        if tensor.start != expected or tensor.end < tensor.start:
            raise ArtifactError(f"{path}: {tensor.name} does not begin where the tensor before it ends")
        expected = tensor.end
    if expected != size:
        raise ArtifactError(f"{path} has {size} bytes, but its header describes {expected}: truncated or damaged")


def _name_faults(tensors: tuple[Tensor, ...]) -> Iterator[str]:
    sides: dict[str, set[str]] = {}
    for tensor in tensors:
        if parsed := _parse_name(tensor.name):
            module, side = parsed
            sides.setdefault(module, set()).add(side)
        else:
            yield f"{tensor.name} is neither a lora_A nor a lora_B tensor"
    if not tensors:
        yield "it holds no tensors"
    for module, found in sides.items():
        for missing in sorted({"A", "B"} - found):
            yield f"{module} has no lora_{missing}"


def _shape_faults(tensors: tuple[Tensor, ...], config: AdapterConfig) -> Iterator[str]:
    for tensor in tensors:
        if (parsed := _parse_name(tensor.name)) and (rank := config.rank_of(parsed[0])):
            side = 0 if parsed[1] == "A" else 1
            if len(tensor.shape) != 2 or tensor.shape[side] != rank:
                wanted = f"[{rank}, inputs]" if side == 0 else f"[outputs, {rank}]"
                yield f"{tensor.name} has shape {list(tensor.shape)}, but its rank asks for {wanted}"


def _value_faults(path: Path, tensors: tuple[Tensor, ...]) -> Iterator[str]:
    with path.open("rb") as file:
        for tensor in tensors:
            if tensor.dtype not in _EXPONENT_BITS:
                yield f"{tensor.name} has dtype {tensor.dtype}; vLLM serves {', '.join(sorted(_EXPONENT_BITS))}"
            elif tensor.end - tensor.start != math.prod(tensor.shape) * _word(tensor.dtype).itemsize:
                yield f"{tensor.name} has {tensor.end - tensor.start} bytes, which is not {list(tensor.shape)} values"
            elif not _is_finite(path, file, tensor):
                yield f"{tensor.name} has values that are NaN or infinite"


def _is_finite(path: Path, file: BinaryIO, tensor: Tensor) -> bool:
    mask = _EXPONENT_BITS[tensor.dtype][1]
    file.seek(tensor.start)
    for position in range(tensor.start, tensor.end, _CHUNK_BYTES):
        wanted = min(_CHUNK_BYTES, tensor.end - position)
        piece = file.read(wanted)
        if len(piece) < wanted:
            raise ArtifactError(f"{path} became shorter while it was read: something else writes to it")
        bits = np.frombuffer(piece, _word(tensor.dtype))
        if ((bits & mask) == mask).any():
            return False
    return True


def _word(dtype: str) -> np.dtype[Any]:
    return np.dtype(_EXPONENT_BITS[dtype][0])


def _parse_name(name: str) -> tuple[str, str] | None:
    """Split a tensor's name into the module and A or B, or return None for what vLLM would not take as LoRA."""
    found = _LORA_NAME.fullmatch(name)
    return (found["module"], found["linear"] or found["embedding"]) if found else None
