"""The replicas and the proxy in front of them, each a process of its own that ends with the block."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.chaos.faults import Site
from benchmarks.chaos.scale import MAX_LORAS, Scale
from benchmarks.chaos.views import View
from benchmarks.chaos.wire import Wire
from tests.support.proxies import RunningProxy
from tests.support.replicas import Replica, SimulatedReplica, VllmReplica

SETTINGS = {
    "PROXY_PROBE_S": "0.5",
    "PROXY_STALL_S": "2",
    "PROXY_CALL_TIMEOUT_S": "5",
    "PROXY_CALL_STALL_S": "3",
    "PROXY_LORA_RETRY_S": "0.5",
    "PROXY_LORA_LOAD_TIMEOUT_S": "60",
    "PROXY_POLICY_IDLE_S": "5",
    "PROXY_SHUTDOWN_S": "5",
    "PROXY_STATS_EVERY_S": "0",
}
"""A fault comes every second instead of every few hours: so the proxy's patience is shorter by about five."""

VLLM_SETTINGS = {
    **SETTINGS,
    "PROXY_STALL_S": "10",
    "PROXY_CALL_TIMEOUT_S": "30",
    "PROXY_CALL_STALL_S": "30",
    "PROXY_LORA_LOAD_TIMEOUT_S": "120",
    "PROXY_POLICY_IDLE_S": "20",
}
"""A real engine on two cores needs seconds for an answer."""

_ASK_S = 15.0
"""A busy engine on few cores takes seconds for its page of metrics."""
_IN_FLIGHT = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Standing:
    """One replica as the proxy sees it."""

    state: str
    since: float
    """Seconds since 1970."""
    held: dict[str, float]
    """Upstream name of what it holds -> since when."""
    inflight: int


class Fleet:
    """Everything that can break. `http` asks without limits of its own."""

    def __init__(self, sites: Sequence[Site], proxy: RunningProxy, http: httpx2.AsyncClient) -> None:
        self.sites = sites
        self.proxy = proxy
        self.http = http

    async def standings(self) -> dict[str, Standing]:
        """Return what the proxy says of every replica, by its wire's URL. Raises httpx2.HTTPError while it is away."""
        answer = (await self._ask(f"{self.proxy.url}/proxy/replicas")).json()
        return {
            entry["url"]: Standing(
                state=entry["state"],
                since=entry["since"],
                held={name: held["since"] for name, held in entry["policies"].items()},
                inflight=entry["inflight"],
            )
            for entry in answer["replicas"]
        }

    async def _in_flight_in(self, replica: Replica) -> int:
        """Return how many requests run or wait in an engine."""
        page = (await self._ask(f"{replica.url}/metrics")).text
        return int(sum(float(count) for count in _IN_FLIGHT.findall(page)))

    async def left_in_flight(self) -> dict[str, int]:
        """Return what is in flight by the proxy's count, and in every engine. Raises httpx2.HTTPError."""
        policies: dict[str, Any] = (await self._ask(f"{self.proxy.url}/proxy/policies")).json()
        standings = await self.standings()
        return {
            "proxy": sum(standing.inflight for standing in standings.values()),
            "leases": sum(policy["leases"] for policy in policies["policies"]),
            **{site.replica.url: await self._in_flight_in(site.replica) for site in self.sites},
        }

    async def _ask(self, url: str) -> httpx2.Response:
        return (await self.http.get(url, timeout=_ASK_S)).raise_for_status()


@asynccontextmanager
async def running(scale: Scale, published: Path, folder: Path) -> AsyncIterator[Fleet]:
    """Start everything, and end everything whatever happens.

    Each replica has a view of its own of what is `published`, below `folder`; the proxy sees it as it is.
    """
    views = [View(folder / f"replica-{number}", published) for number in range(scale.replicas)]
    replicas = [_replica(scale, view.cwd) for view in views]
    async with AsyncExitStack() as stack:
        for replica in replicas:
            stack.callback(replica.stop)
        with ThreadPoolExecutor(scale.replicas if scale.vllm else 2) as threads:
            starts = [asyncio.wrap_future(threads.submit(replica.start)) for replica in replicas]
            await asyncio.gather(*starts)
        settings = VLLM_SETTINGS if scale.vllm else SETTINGS
        wires = [await stack.enter_async_context(Wire(replica.url)) for replica in replicas]
        proxy = RunningProxy(*(wire.url for wire in wires), cwd=View(folder / "proxy", published).cwd, **settings)
        stack.callback(proxy.end)
        await asyncio.to_thread(proxy.start)
        limits = httpx2.Limits(max_connections=4 * scale.in_flight)
        async with httpx2.AsyncClient(trust_env=False, limits=limits, timeout=None) as http:
            yield Fleet([Site(*around) for around in zip(replicas, wires, views, strict=True)], proxy, http)


def _replica(scale: Scale, cwd: Path) -> Replica:
    kind = VllmReplica if scale.vllm else SimulatedReplica
    return kind(max_loras=MAX_LORAS, max_cpu_loras=2 * MAX_LORAS, cwd=cwd)
