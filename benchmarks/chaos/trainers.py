"""Pretend training runs: new weights every few seconds, announced as TRL does it or by TrainerClient."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections import Counter, deque
from pathlib import Path

import httpx2

from benchmarks.chaos.rollouts import Rollouts, Target
from benchmarks.chaos.scale import MAX_STALENESS
from proxy.demo.run import wait
from proxy.simulator.adapters import write_adapter
from proxy.simulator.tokens import adapter_weights
from tests.support.mounts import MOUNT
from trainer_client import ProxyError, StoreError, TrainerClient

NEXT_RUN_S = 1.0
"""Seconds from the end of a run to the beginning of the next."""

CONTROL_LIMIT_S = 120.0
"""TRL waits half an hour for a control call; one that takes as long as this is stuck."""

RANK = 8


class Syncs:
    """What the trainers have seen, and the weights that they have made."""

    def __init__(self, folder: Path, *, base_model: str) -> None:
        self.seconds: list[float] = []
        """Of every policy that became live."""
        self.ends: Counter[str] = Counter()
        """Why runs ended, or announcements failed."""
        self.stuck = 0
        """Control calls without an answer."""
        self.made: dict[str, Path] = {}
        """Digest -> a directory with these weights that nobody touches."""
        self._folder = folder
        self._base_model = base_model

    async def new_weights(self) -> tuple[str, Path]:
        """Make weights that there have never been; return digest and directory."""
        number = len(self.made) + 1
        directory = self._folder / f"{number:04d}"
        await asyncio.to_thread(write_adapter, directory, seed=number, rank=RANK, base_model=self._base_model)
        digest = adapter_weights(directory)
        self.made[digest] = directory
        return digest, directory


class RunEndedError(Exception):
    """A control call has failed. TRL repeats none: its run is over."""


class Trl:
    """Pause, load, resume, unload, as TRL 1.16 does; every run starts at v1, in the same directories.

    Replicas see what is published in `folder` under its name in their mounts.
    """

    def __init__(self, url: str, http: httpx2.AsyncClient, rollouts: Rollouts, syncs: Syncs, folder: Path) -> None:
        self._url = url
        self._http = http
        self._rollouts = rollouts
        self._syncs = syncs
        self._folder = folder
        self._seen_as = MOUNT / folder.name

    async def train(self, stop: asyncio.Event, *, every_s: float) -> None:
        """Train until `stop`, one run after the other, nobody cleaning up between them."""
        while not stop.is_set():
            try:
                await self._run(stop, every_s)
            except RunEndedError as error:
                self._syncs.ends[str(error)] += 1
                self._rollouts.run_ends()
                await wait(stop, NEXT_RUN_S)

    async def _run(self, stop: asyncio.Event, every_s: float) -> None:
        await self._healthy(stop)
        published: dict[int, Target] = {}
        for version in itertools.count(1):
            began = time.monotonic()
            published[version] = await self._sync(version, published)
            self._syncs.seconds.append(time.monotonic() - began)
            self._rollouts.target = published[version]
            if await wait(stop, every_s):
                return

    async def _sync(self, version: int, published: dict[int, Target]) -> Target:
        name = _name(version)
        await self._control("/pause?mode=keep")
        digest, made = await self._syncs.new_weights()
        try:
            await asyncio.to_thread(_replace, self._folder / name, made)
        except OSError:
            raise RunEndedError("the adapter could not be saved") from None
        await self._control("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self._seen_as / name)})
        await self._control("/resume")
        stale = version - (MAX_STALENESS + 1)
        if stale > 0:
            published[stale].given_up = True
            await self._control("/v1/unload_lora_adapter", {"lora_name": _name(stale)}, checked=False)
        if stale > 1:
            await asyncio.to_thread(shutil.rmtree, self._folder / _name(stale - 1), ignore_errors=True)
        return Target(name, digest)

    async def _control(self, target: str, body: dict[str, str] | None = None, *, checked: bool = True) -> None:
        try:
            answer = await self._http.post(self._url + target, json=body, timeout=CONTROL_LIMIT_S)
        except httpx2.TimeoutException:
            self._syncs.stuck += 1
            raise RunEndedError(f"{_path(target)}: stuck") from None
        except httpx2.HTTPError:
            raise RunEndedError(f"{_path(target)}: the proxy died") from None
        if checked and answer.status_code != 200:
            reason = answer.headers.get("X-Proxy-Error", "of a replica")
            raise RunEndedError(f"{_path(target)}: {answer.status_code} {reason}")

    async def _healthy(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                if (await self._http.get(f"{self._url}/health", timeout=5)).status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            await wait(stop, 0.5)


class Client:
    """One long run over TrainerClient, which publishes again what was not taken. `folder`: as for `Trl`."""

    def __init__(self, url: str, rollouts: Rollouts, syncs: Syncs, folder: Path) -> None:
        self._rollouts = rollouts
        self._syncs = syncs
        self._client = TrainerClient(
            url,
            store=folder.parent,
            mount=MOUNT,
            run=folder.name,
            max_staleness=MAX_STALENESS,
            timeout_s=CONTROL_LIMIT_S,
            retry_timeout_s=CONTROL_LIMIT_S / 2,
        )

    async def train(self, stop: asyncio.Event, *, every_s: float) -> None:
        """Publish until `stop`."""
        window: deque[Target] = deque()
        with self._client:
            for step in itertools.count(1):
                digest, made = await self._syncs.new_weights()
                if len(window) > MAX_STALENESS:
                    window.popleft().given_up = True  # it is unloaded once the next one is live
                began = time.monotonic()
                name = await self._published(made, step, stop)
                if name is None:
                    return
                self._syncs.seconds.append(time.monotonic() - began)
                window.append(Target(name, digest))
                self._rollouts.target = window[-1]
                if await wait(stop, every_s):
                    return

    async def _published(self, adapter: Path, step: int, stop: asyncio.Event) -> str | None:
        while not stop.is_set():
            try:
                return (await asyncio.to_thread(self._client.publish, adapter, step)).model
            except ProxyError as error:
                self._syncs.stuck += "ReadTimeout" in str(error)
                self._syncs.ends[f"publish: {error.status or 'no answer'}"] += 1
                await wait(stop, NEXT_RUN_S)
            except StoreError as error:
                self._syncs.ends[f"publish: {'no room' if 'No space' in str(error) else 'store'}"] += 1
                await wait(stop, NEXT_RUN_S)
        return None


def _name(version: int) -> str:
    return f"trl-policy-v{version}"


def _path(target: str) -> str:
    return target.partition("?")[0]


def _replace(directory: Path, weights: Path) -> None:
    """Put the weights where TRL puts them: written beside, then moved into the place of what was there."""
    beside = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(weights, beside)
    shutil.rmtree(directory, ignore_errors=True)
    beside.rename(directory)
