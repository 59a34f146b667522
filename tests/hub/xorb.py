"""Xorbs, the containers in which Xet keeps the pieces ("chunks") of files: where each chunk lies, and how to unpack it.

The format is that of the public Xet protocol specification, https://huggingface.co/docs/xet/xorb. A chunk is a header
of 8 bytes (version, packed size in 3 bytes, scheme, size in 3 bytes, little endian) and its packed bytes; a footer that
begins with `XETBLOB` may follow the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import lz4.frame

_HEADER_BYTES = 8
_VERSION = 0
_FOOTER = b"XETBLOB"
_PLAIN, _LZ4, _GROUPED_LZ4 = 0, 1, 2
"""Schemes. Grouped: all first bytes of four, then all second bytes and so on, which packs floats better."""


class Malformed(ValueError):
    """The client sent bytes that are not what the specification asks for."""


@dataclass(frozen=True)
class Chunk:
    """One chunk of a xorb."""

    start: int
    """Offset of its header in the xorb."""
    end: int
    """Offset of the first byte after it."""
    scheme: int
    size: int
    """Bytes when unpacked."""


def chunks_of(xorb: bytes) -> tuple[Chunk, ...]:
    """Return the chunks of a whole xorb in order. Raises Malformed when headers and bytes do not agree."""
    found = []
    at = 0
    while at < len(xorb) and not xorb.startswith(_FOOTER, at):
        header = xorb[at : at + _HEADER_BYTES]
        if len(header) < _HEADER_BYTES or header[0] != _VERSION or header[4] > _GROUPED_LZ4:
            raise Malformed(f"the xorb has no chunk header at byte {at}")
        end = at + _HEADER_BYTES + int.from_bytes(header[1:4], "little")
        found.append(Chunk(start=at, end=end, scheme=header[4], size=int.from_bytes(header[5:8], "little")))
        at = end
    if not found or found[-1].end > len(xorb):
        raise Malformed(f"the xorb of {len(xorb)} bytes ends within a chunk or has none")
    return tuple(found)


def unpack(chunk: Chunk, stored: bytes) -> bytes:
    """Return the content of a chunk, given its bytes from `start` to `end`."""
    packed = stored[_HEADER_BYTES:]
    content = packed if chunk.scheme == _PLAIN else bytes(lz4.frame.decompress(packed))
    if chunk.scheme == _GROUPED_LZ4:
        content = _ungroup(content)
    if len(content) != chunk.size:
        raise Malformed(f"a chunk unpacks to {len(content)} bytes and its header says {chunk.size}")
    return content


def _ungroup(grouped: bytes) -> bytes:
    whole = bytearray(len(grouped))
    at = 0
    for position in range(4):
        size = len(range(position, len(grouped), 4))
        whole[position::4] = grouped[at : at + size]
        at += size
    return bytes(whole)
