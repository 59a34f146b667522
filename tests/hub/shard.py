"""Shards: in them a Xet client says of which chunks its files are made, and the server which chunks are there already.

The format is that of the public Xet protocol specification, https://huggingface.co/docs/xet/shard: a header, a section
of files, a section of xorbs (each ended by an entry whose hash is all ones) and, in an answer, a footer. Everything is
little endian and in entries of 48 bytes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.hub.xorb import Malformed

_TAG = b"HFRepoMetaData\0" + bytes((85, 105, 103, 69, 106, 123, 129, 87, 131, 165, 189, 217, 92, 205, 209, 74, 169))
_HEADER = struct.Struct("<32sQQ")
_VERSION = 2
_ENTRY = struct.Struct("<32s4I")
_END = b"\xff" * 32
_HAS_VERIFICATION, _HAS_METADATA = 1 << 31, 1 << 30
_FOOTER = struct.Struct("<9Q32s2Q48x4Q")
_FOOTER_VERSION = 1
_LOOKUP_XORB, _LOOKUP_CHUNK = struct.Struct("<QI"), struct.Struct("<Q2I")
_ANSWER_LIVES_S = 3600


@dataclass(frozen=True)
class Term:
    """A run of chunks of one xorb that is part of a file."""

    xorb: str
    first: int
    end: int
    """The chunk after the last one."""
    size: int
    """Bytes when unpacked."""


@dataclass(frozen=True)
class XorbRecord:
    """What a shard says of one xorb."""

    hash: str
    chunks: tuple[str, ...]
    entries: bytes
    """As they stand in the shard, the xorb's own entry first."""


@dataclass(frozen=True)
class Shard:
    """What a client has uploaded."""

    files: dict[str, tuple[Term, ...]]
    xorbs: tuple[XorbRecord, ...]


def hash_text(raw: bytes) -> str:
    """Return a hash as it is written in URLs and JSON: four little endian numbers of 8 bytes, in hexadecimal."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", raw))


def read_shard(body: bytes) -> Shard:
    """Return the content of an uploaded shard. Raises Malformed when it is none, or is cut short."""
    try:
        tag, version, _ = _HEADER.unpack_from(body)
        if tag != _TAG or version != _VERSION:
            raise Malformed("the body is not a shard of version 2")
        entries = _ENTRY.iter_unpack(body[_HEADER.size : _HEADER.size + _whole_entries(body)])
        files = dict(_files(entries))
        return Shard(files, tuple(_xorbs(entries)))
    except (struct.error, StopIteration, RuntimeError) as error:
        raise Malformed(f"the shard of {len(body)} bytes is cut short") from error


def answer_shard(record: XorbRecord) -> bytes:
    """Return the shard that tells a client of the chunks of one xorb, valid for an hour."""
    end = _ENTRY.pack(_END, 0, 0, 0, 0)
    files = end
    xorbs = record.entries + end
    lookup_xorb = _LOOKUP_XORB.pack(_short(record.hash), 0)
    positions = sorted((_short(chunk), index) for index, chunk in enumerate(record.chunks))
    lookup_chunks = b"".join(_LOOKUP_CHUNK.pack(chunk, 0, index) for chunk, index in positions)
    at_xorbs = _HEADER.size + len(files)
    at_lookup = at_xorbs + len(xorbs)
    at_lookup_chunks = at_lookup + len(lookup_xorb)
    at_footer = at_lookup_chunks + len(lookup_chunks)
    now = int(time.time())
    _, _, _, unpacked, stored = _ENTRY.unpack_from(record.entries)
    footer = _FOOTER.pack(
        *(_FOOTER_VERSION, _HEADER.size, at_xorbs, at_lookup, 0, at_lookup, 1, at_lookup_chunks, len(positions)),
        *(bytes(32), now, now + _ANSWER_LIVES_S, stored, 0, unpacked, at_footer),
    )
    return _HEADER.pack(_TAG, _VERSION, _FOOTER.size) + files + xorbs + lookup_xorb + lookup_chunks + footer


_Entries = Iterator[tuple[bytes, int, int, int, int]]


def _whole_entries(body: bytes) -> int:
    return (len(body) - _HEADER.size) // _ENTRY.size * _ENTRY.size


def _files(entries: _Entries) -> Iterable[tuple[str, tuple[Term, ...]]]:
    while (header := next(entries))[0] != _END:
        file, flags, count, _, _ = header
        terms = [next(entries) for _ in range(count)]
        for _ in range(count * bool(flags & _HAS_VERIFICATION) + bool(flags & _HAS_METADATA)):
            next(entries)
        yield (
            hash_text(file),
            tuple(Term(hash_text(xorb), first, end, size) for xorb, _, size, first, end in terms),
        )


def _xorbs(entries: _Entries) -> Iterable[XorbRecord]:
    while (header := next(entries))[0] != _END:
        xorb, _, count, _, _ = header
        chunks = [next(entries) for _ in range(count)]
        raw = b"".join(_ENTRY.pack(*entry) for entry in [header, *chunks])
        yield XorbRecord(hash_text(xorb), tuple(hash_text(chunk[0]) for chunk in chunks), raw)


def _short(text: str) -> int:
    return int(text[:16], 16)
