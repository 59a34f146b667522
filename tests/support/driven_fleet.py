"""The proxy's control plane, whole and real, over model replicas and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from proxy.contract import LoadRequest
from proxy.controlplane.announcing import Seen
from proxy.controlplane.changes import Changes
from proxy.controlplane.loading import Loading
from proxy.controlplane.members import Members
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.reconciler import Reconciler
from proxy.controlplane.replica_api import ReplicaApi
from proxy.controlplane.storage import NoGate
from proxy.fleet.pool import Fleet
from proxy.metrics.loads import LoadMetrics
from proxy.settings import ControlSettings
from tests.support.model_replica import ModelApi, ModelReplica
from tests.support.virtual_time import VirtualTime

EPOCH = 1_000_000_000.0
"""The wall clock when virtual time begins."""


class DrivenFleet:
    """One process of the proxy. `servers` (by URL) outlive it. `sees`: it can read the `files` (path -> content)."""

    def __init__(
        self,
        loop: VirtualTime,
        servers: Mapping[str, ModelReplica],
        urls: tuple[str, ...],
        control: ControlSettings,
        *,
        files: Mapping[str, int],
        sees: bool,
    ) -> None:
        self.fleet = Fleet(urls, clock=loop.time, wall_clock=lambda: EPOCH + loop.time())
        self.members: Members
        self._servers = servers
        self._control = control
        self.registry = CollectorRegistry()
        self._apis: dict[int, ReplicaApi] = {}
        self._changes = Changes(self.fleet)
        self._pausing = Pausing(self.fleet, self._apis, control)
        self.loading = _Loading(
            self.fleet, self._changes, NoGate(), control, LoadMetrics(self.registry), files=files if sees else {}
        )
        self.running = loop.create_task(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self.members = Members(
                self.fleet, self._apis, self._api, self._pausing, self._changes, self._control, tasks
            )
            for replica in self.fleet.replicas:
                self.members.watch(replica)
            await Reconciler(self.fleet, self._control).run()

    def _api(self, url: str) -> ReplicaApi:
        control = self._control
        return ModelApi(self._servers[url], call_timeout_s=control.call_timeout_s, stall_s=control.stall_s)


def digest_of(content: int) -> str:
    """Return the digest of an adapter whose files hold `content`."""
    return f"{content:x}" * 64


class _Loading(Loading):
    """Looks at the model's files instead of the disk."""

    def __init__(self, *rooms: Any, files: Mapping[str, int]) -> None:
        super().__init__(*rooms)
        self._files = files

    async def _seen(self, request: LoadRequest, deadline: float, *, landed: bool) -> Seen:
        await asyncio.sleep(0)
        if (content := self._files.get(request.lora_path)) is not None:
            return Seen(digest_of(content), checked=True)
        return Seen(request.policy.digest if request.policy else None, checked=False)
