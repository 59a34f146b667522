"""A run of a thousand policies makes no more series than a short one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest

from proxy.contract import LoadRequest
from proxy.metrics.rollouts import MOST_STALE, RolloutMetrics, staleness_label
from proxy.routing.router import Router
from proxy.settings import ControlSettings
from proxy.telemetry.registry import observe
from tests.support.driven_fleet import DrivenFleet
from tests.support.metrics import Scrape
from tests.support.model_replica import ModelReplica
from tests.support.virtual_time import VirtualTime, virtual_time

REPLICAS = 2
SLOTS = 6


@pytest.fixture
def loop() -> Iterator[VirtualTime]:
    with virtual_time() as loop:
        yield loop


class Run:
    """A run over model replicas: each policy is announced, named by rollouts for as long as it lives, and unloaded."""

    def __init__(self, loop: VirtualTime) -> None:
        self.loop = loop
        files: dict[str, int] = {}
        self.files = files
        servers = {
            url: ModelReplica(url, max_loras=SLOTS, files=files, alarm=pytest.fail, on_unload=lambda *_: None)
            for url in (f"http://{number}" for number in range(REPLICAS))
        }
        self.proxy = DrivenFleet(loop, servers, tuple(servers), ControlSettings(), files=files, sees=True)
        self.fleet, self.registry = self.proxy.fleet, self.proxy.registry
        observe(self.fleet, Router(max_tracked_blocks=1000), self.registry)
        self.rollouts = RolloutMetrics(self.registry)
        loop.advance(1)

    def sync(self, version: int) -> None:
        name = f"trl-policy-v{version}"
        self.files[f"/lora/{name}"] = version
        request = LoadRequest(lora_name=name, lora_path=f"/lora/{name}")
        loading = self.loop.create_task(self.proxy.loading.load(request))
        self.loop.advance(0.5)
        assert loading.done() and loading.result().status == "live"
        for policy in self.fleet.live():
            for replica in range(REPLICAS):
                stale = self.fleet.staleness(policy)
                lease = self.fleet.lease(replica, policy)
                self.rollouts.tried(replica, "affinity", "answered", staleness=stale)
                self.rollouts.stale(stale or 0, stale or 0)
                self.fleet.release(lease)
        if len(live := self.fleet.live()) == SLOTS - 1:
            self.fleet.retire(live[0], "unloaded", deadline=0.0)
            self.loop.advance(0.1)

    def series(self) -> int:
        return len(Scrape(generate_latest(self.registry).decode()).samples)


@pytest.mark.timeout(120)
def test_a_thousand_policies_make_no_more_series_than_twenty(loop: VirtualTime) -> None:
    run = Run(loop)
    for version in range(1, 21):
        run.sync(version)
    before = run.series()
    for version in range(21, 1001):
        run.sync(version)
    seen = Scrape(generate_latest(run.registry).decode())
    assert seen.sum("lora_sync_current_version") == 1000
    assert seen.sum("lora_sync_announcements_total", outcome="live") == 1000
    assert seen.sum("lora_sync_rollouts_total") > 1000
    assert run.series() == before


def test_the_staleness_of_any_version_is_one_of_ten() -> None:
    labels = {staleness_label(versions) for versions in [None, *range(10_000)]}
    assert len(labels) == MOST_STALE + 2
