"""The weights of an adapter: names and shapes in the header of the safetensors file, and whether every value is finite.

Tensors are streamed piece by piece, once, and hashed on the way; the file is never held in memory whole.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from proxy.artifacts.config import HEAD_AND_EMBEDDINGS, AdapterConfig
from proxy.artifacts.digest import WEIGHTS_FILE
from proxy.artifacts.verdict import Fault
from proxy.errors import ArtifactError

MAX_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors library reads; an adapter's is a few hundred kB at most."""

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


@dataclass(frozen=True)
class Scan:
    """What one pass over the weights tells."""

    faults: tuple[Fault, ...]
    size: int
    """Bytes of the file."""
    sha256: str
    """Hex digest of the file."""


def scan_weights(file: BinaryIO, *, config: AdapterConfig, source: str) -> Scan:
    """Read a safetensors file once, from where it is open to its end, and hold it to the adapter's config.

    `source` names the file in the ArtifactError for one that is no whole safetensors file.
    """
    size = _size_of(file)
    reader = _HashingReader(file, source)
    tensors = _read_header(reader, size=size, source=source)
    values = list(_value_faults(reader, tensors))
    faults = (*_name_faults(tensors, config), *_shape_faults(tensors, config), *values)
    return Scan(faults, size=size, sha256=reader.sha256.hexdigest())


def read_header(file: BinaryIO, *, source: str) -> tuple[Tensor, ...]:
    """Read the header of a safetensors file, its tensors in the order of their bytes; no values are read.

    Raises ArtifactError when the tensors do not cover the file exactly, which is what a file looks like that is still
    being written.
    """
    return _read_header(_HashingReader(file, source), size=_size_of(file), source=source)


class _HashingReader:
    """Reads a file front to back and hashes what it reads."""

    def __init__(self, file: BinaryIO, source: str) -> None:
        self._file = file
        self._source = source
        self.sha256 = hashlib.sha256()

    def read(self, count: int) -> bytes:
        piece = self._file.read(count)
        if len(piece) < count:
            raise ArtifactError(f"{self._source} became shorter while it was read: something else writes to it")
        self.sha256.update(piece)
        return piece


def _size_of(file: BinaryIO) -> int:
    start = file.tell()
    size = file.seek(0, io.SEEK_END) - start
    file.seek(start)
    return size


def _read_header(reader: _HashingReader, *, size: int, source: str) -> tuple[Tensor, ...]:
    length = int.from_bytes(reader.read(min(_LENGTH_BYTES, size)), "little")
    if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
        raise ArtifactError(f"{source} ends within its header ({size} bytes): truncated, or not safetensors")
    tensors = sorted(_parse_header(reader.read(length), source), key=lambda tensor: (tensor.start, tensor.end))
    _check_coverage(tensors, size=size, data_start=_LENGTH_BYTES + length, source=source)
    return tuple(tensors)


def _parse_header(raw: bytes, source: str) -> Iterator[Tensor]:
    try:
        header: Any = json.loads(raw)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (int(offset) + _LENGTH_BYTES + len(raw) for offset in entry["data_offsets"])
            yield Tensor(name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), start, end)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{source} has a header that is not safetensors: {error}") from error


def _check_coverage(tensors: Iterable[Tensor], *, size: int, data_start: int, source: str) -> None:
    expected = data_start
    for tensor in tensors:
        if tensor.start != expected or tensor.end < tensor.start:
            raise ArtifactError(f"{source}: {tensor.name} does not begin where the tensor before it ends")
        expected = tensor.end
    if expected != size:
        raise ArtifactError(f"{source} has {size} bytes, but its header describes {expected}: truncated or damaged")


def _name_faults(tensors: tuple[Tensor, ...], config: AdapterConfig) -> Iterator[Fault]:
    sides: dict[str, set[str]] = {}
    foreign: list[str] = []
    for tensor in tensors:
        if parsed := _parse_name(tensor.name):
            sides.setdefault(parsed[0], set()).add(parsed[1])
        else:
            foreign.append(tensor.name)
    if not tensors:
        yield _broken("it holds no tensors")
    if foreign:
        which = f"{foreign[0]} is" if len(foreign) == 1 else f"{foreign[0]} and {len(foreign) - 1} more are"
        yield _without_a_place(f"{which} neither a lora_A nor a lora_B tensor")
    for module, found in sides.items():
        for missing in sorted({"A", "B"} - found):
            yield _broken(f"{module} has no lora_{missing}")
        last = module.rpartition(".")[2]
        if last in HEAD_AND_EMBEDDINGS and last not in config.special_targets:
            yield _without_a_place(f"{module} is adapted, which vLLM does not serve faithfully")


def _shape_faults(tensors: tuple[Tensor, ...], config: AdapterConfig) -> Iterator[Fault]:
    for tensor in tensors:
        if (parsed := _parse_name(tensor.name)) and (rank := config.rank_of(parsed[0])):
            side = 0 if parsed[1] == "A" else 1
            if len(tensor.shape) != 2 or tensor.shape[side] != rank:
                wanted = f"[{rank}, inputs]" if side == 0 else f"[outputs, {rank}]"
                yield _broken(f"{tensor.name} has shape {list(tensor.shape)}, but its rank asks for {wanted}")


def _value_faults(reader: _HashingReader, tensors: tuple[Tensor, ...]) -> Iterator[Fault]:
    for tensor in tensors:
        fault = _layout_fault(tensor)
        # read in any case: what is not judged is hashed all the same
        finite = [bool(fault) or _is_finite(piece, tensor.dtype) for piece in _pieces(reader, tensor)]
        if fault or not all(finite):
            yield _broken(fault or f"{tensor.name} has values that are NaN or infinite")


def _layout_fault(tensor: Tensor) -> str:
    size = tensor.end - tensor.start
    if tensor.dtype not in _EXPONENT_BITS:
        return f"{tensor.name} has dtype {tensor.dtype}; vLLM serves {', '.join(sorted(_EXPONENT_BITS))}"
    if size != math.prod(tensor.shape) * _word(tensor.dtype).itemsize:
        return f"{tensor.name} has {size} bytes, which is not {list(tensor.shape)} values"
    return ""


def _pieces(reader: _HashingReader, tensor: Tensor) -> Iterator[bytes]:
    for start in range(tensor.start, tensor.end, _CHUNK_BYTES):
        yield reader.read(min(_CHUNK_BYTES, tensor.end - start))


def _is_finite(piece: bytes, dtype: str) -> bool:
    mask = _EXPONENT_BITS[dtype][1]
    return not ((np.frombuffer(piece, _word(dtype)) & mask) == mask).any()


def _word(dtype: str) -> np.dtype[Any]:
    return np.dtype(_EXPONENT_BITS[dtype][0])


def _parse_name(name: str) -> tuple[str, str] | None:
    """Split a tensor's name into the module and A or B, or return None for what vLLM would not take as LoRA."""
    found = _LORA_NAME.fullmatch(name)
    return (found["module"], found["linear"] or found["embedding"]) if found else None


def _broken(text: str) -> Fault:
    return Fault(WEIGHTS_FILE, text, merging_helps=False)


def _without_a_place(text: str) -> Fault:
    return Fault(WEIGHTS_FILE, text, merging_helps=True)
