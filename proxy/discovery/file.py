"""Replicas in a file: one URL a line; what follows a `#` is a comment, and lines without a URL say nothing.

Who edits it in place leaves it half written for moments. So it is read twice, an empty file is taken for one that is
being written (a comment says that there are no replicas), and so is one whose last line has no end.
"""

from __future__ import annotations

import asyncio

from proxy.discovery.listing import Listing, LookupFailed
from proxy.settings import base_url
from proxy.sources import FileSource
from proxy.threads import in_daemon_thread

SETTLE_S = 0.2
"""What has changed must stay the same for so long: writing a list of replicas takes milliseconds."""


class FileLookup:
    """Reads the file by its name, so that it may be replaced as well as edited."""

    def __init__(self, source: FileSource) -> None:
        self._path = source.path
        self._believed: bytes | None = None

    async def __call__(self) -> Listing:
        """Return the replicas in the file."""
        content = await in_daemon_thread(self._read)
        urls = urls_in(content)
        if content != self._believed:
            await asyncio.sleep(SETTLE_S)
            if await in_daemon_thread(self._read) != content:
                raise LookupFailed(f"{self._path} is being written")
            self._believed = content
        return Listing(dict.fromkeys(urls, ""))

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError as error:
            raise LookupFailed(f"{self._path} cannot be read: {error.strerror}") from None


def urls_in(content: bytes) -> list[str]:
    """Return the URLs in a file's content, each once. Raises LookupFailed if it is not whole or has something else."""
    if not content.endswith(b"\n"):
        raise LookupFailed("its last line has no end, as if it were half written" if content else "it is empty")
    urls: list[str] = []
    for number, line in enumerate(content.decode(errors="replace").split("\n"), 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        try:
            urls.append(base_url(text))
        except ValueError as error:
            raise LookupFailed(f"line {number} {error}") from None
    return list(dict.fromkeys(urls))
