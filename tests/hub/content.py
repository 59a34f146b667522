"""What the offline Hub keeps of files: xorbs on disk, the recipe of every file in memory. No HTTP here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.hub.shard import Term, XorbRecord, read_shard
from tests.hub.xorb import Chunk, Malformed, chunks_of, unpack

EMPTY_FILE = "0" * 64
"""The hash that hf_xet gives a file without bytes; no xorb holds it."""


class Content:
    """The content-addressed store of one offline Hub, with its xorbs under `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._files: dict[str, tuple[Term, ...]] = {EMPTY_FILE: ()}
        self._owners: dict[str, XorbRecord] = {}
        """Chunk -> a xorb that holds it."""

    def __repr__(self) -> str:
        return f"Content(files={len(self._files) - 1}, xorbs={len(self._chunks)}, bytes={self.stored_bytes})"

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all xorbs as they were uploaded."""
        return sum(chunks[-1].end for chunks in self._chunks.values())

    def add_xorb(self, name: str, body: bytes) -> bool:
        """Keep a xorb; False if it was there already. Raises Malformed."""
        if name in self._chunks:
            return False
        chunks = chunks_of(body)
        self.xorb_path(name).write_bytes(body)
        self._chunks[name] = chunks
        return True

    def add_shard(self, body: bytes) -> bool:
        """Keep the recipes of a shard; False if all were known. Raises Malformed when a xorb of them is missing."""
        shard = read_shard(body)
        for file, terms in shard.files.items():
            for term in terms:
                if term.end > len(self._chunks.get(term.xorb, ())):
                    raise Malformed(f"file {file} needs chunk {term.end - 1} of xorb {term.xorb}, which is not there")
        new = shard.files.keys() - self._files.keys()
        self._files.update(shard.files)
        for record in shard.xorbs:
            self._owners.update(dict.fromkeys(record.chunks, record))
        return bool(new)

    def owner(self, chunk: str) -> XorbRecord | None:
        """Return a xorb that holds the chunk."""
        return self._owners.get(chunk)

    def size(self, file: str) -> int | None:
        """Return the bytes of a file, or None if nobody has uploaded it."""
        terms = self._files.get(file)
        return None if terms is None else sum(term.size for term in terms)

    def terms(self, file: str, start: int, end: int) -> tuple[int, list[Term]]:
        """Return the terms that hold bytes `start` to `end` of a file, and how many bytes of the first to skip."""
        found: list[Term] = []
        at = skip = 0
        for term in self._files[file]:
            if at < end and at + term.size > start:
                skip = skip if found else max(0, start - at)
                found.append(term)
            at += term.size
        return skip, found

    def xorb_path(self, name: str) -> Path:
        """Return where the bytes of a xorb lie, or would."""
        return self._root / name

    def stored_range(self, xorb: str, first: int, end: int) -> tuple[int, int]:
        """Return the first and the last byte of chunks `first` to `end` within their xorb."""
        chunks = self._chunks[xorb]
        return chunks[first].start, chunks[end - 1].end - 1

    def read(self, file: str, start: int, end: int) -> Iterator[bytes]:
        """Yield bytes `start` to `end` of a file, chunk by chunk."""
        skip, terms = self.terms(file, start, end)
        left = end - start
        for term in terms:
            with self.xorb_path(term.xorb).open("rb") as xorb:
                for chunk in self._chunks[term.xorb][term.first : term.end]:
                    if skip < chunk.size and left > 0:
                        xorb.seek(chunk.start)
                        piece = unpack(chunk, xorb.read(chunk.end - chunk.start))[skip : skip + left]
                        left -= len(piece)
                        yield piece
                    skip = max(0, skip - chunk.size)
