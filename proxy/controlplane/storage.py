"""Wait until what is announced is whole in its store, before any replica looks for it.

A replica that looks too early may remember for half a minute that nothing is there. Where the proxy knows no store for
a path, there is nothing to wait for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Protocol

import httpx2

from proxy.artifacts.bucket import BucketFolder, HubFile, measured
from proxy.artifacts.hub_listing import HubAccess, Landing, client_options
from proxy.contract import PolicyFile
from proxy.controlplane.looking import look
from proxy.errors import NO_ANSWER, ApiError, ArtifactError
from proxy.settings import ControlSettings

ReadToken = Callable[[], str | None]
"""Returns the token as it is now: it may change while the proxy runs."""


class Gate(Protocol):
    """Knows whether files have landed."""

    def covers(self, path: str) -> bool:
        """Return whether there is a store to ask for `path`."""

    async def wait(self, path: str, files: tuple[PolicyFile, ...], *, least: tuple[str, ...], timeout_s: float) -> None:
        """Return once the store lists all of `files` below `path`; `least`: what has to be there if none are known.

        Raises ApiError when `timeout_s` has passed, or if it never will.
        """


class NoGate:
    """For fleets whose storage everybody sees directly."""

    def covers(self, path: str) -> bool:
        """Know no store."""
        return False

    async def wait(self, path: str, files: tuple[PolicyFile, ...], *, least: tuple[str, ...], timeout_s: float) -> None:
        """Return at once."""


@asynccontextmanager
async def gate_to(settings: ControlSettings, read_token: ReadToken) -> AsyncIterator[Gate]:
    """Give the gate that the settings ask for."""
    if not settings.storage:
        yield NoGate()
        return
    async with httpx2.AsyncClient(**client_options()) as client:
        yield HubGate(settings.storage, client, read_token)


class HubGate:
    """Asks the Hub about paths below the mounts of its buckets (PROXY_STORAGE)."""

    def __init__(self, storage: Iterable[tuple[str, str]], client: httpx2.AsyncClient, read_token: ReadToken) -> None:
        mounts = ((PurePosixPath(mount), BucketFolder.parse(url)) for url, mount in storage)
        self._mounts = sorted(mounts, key=lambda pair: len(pair[0].parts), reverse=True)  # the innermost one counts
        self._client = client
        self._read_token = read_token

    def __repr__(self) -> str:
        return f"<HubGate {', '.join(f'{folder}={mount}' for mount, folder in self._mounts)}>"

    def covers(self, path: str) -> bool:
        """Return whether `path` is below one of the mounts."""
        return self._folder(path) is not None

    async def wait(self, path: str, files: tuple[PolicyFile, ...], *, least: tuple[str, ...], timeout_s: float) -> None:
        """Return once the Hub lists the files whole: sizes and hashes as announced, else as they are on this side.

        Where neither is known, it has to list `least`. Returns at once for a path without a store. Raises ApiError when
        `timeout_s` has passed, or if it never will.
        """
        if (folder := self._folder(path)) is None:
            return
        deadline = time.monotonic() + timeout_s
        try:
            expected = await look(timeout_s, _expected, Path(path), files, least)
            hub = await look(deadline - time.monotonic(), self._access)
            landing = Landing(folder, expected, hub=hub, deadline=deadline)
            while not landing.whole:
                await self._ask(landing)
        except (ArtifactError, TimeoutError) as error:
            # Never 404 for what is only late: TRL takes it for "runtime LoRA is disabled".
            message = f"{path} was not loaded, and no replica was asked for it: {str(error) or 'its mount hangs'}"
            raise ApiError(500, message, reason="not_landed", param="lora_path") from error

    async def _ask(self, landing: Landing) -> None:
        try:
            answer = await self._client.request(**landing.request())
        except NO_ANSWER as error:
            landing.failed(error)
        else:
            landing.learn(answer)
        await asyncio.sleep(landing.pause_s)

    def _access(self) -> HubAccess:
        token = None
        with suppress(OSError, ValueError):  # then huggingface_hub looks where it usually does
            token = self._read_token()
        return HubAccess.usual(token=token)

    def _folder(self, path: str) -> BucketFolder | None:
        asked = PurePosixPath(path)
        for mount, folder in self._mounts:
            if asked.is_relative_to(mount):
                return folder.child(*asked.relative_to(mount).parts)
        return None


def _expected(directory: Path, files: tuple[PolicyFile, ...], least: tuple[str, ...]) -> tuple[HubFile, ...]:
    announced = tuple(HubFile.announced(file) for file in files)
    if announced and all(file.xet_hash for file in announced):
        return announced
    known = {file.name: file for file in (*announced, *measured(directory))}
    return tuple(known.values()) or tuple(HubFile(name) for name in least)
