"""A replica restarts so fast that no probe sees it down: no rollout gets 404 or other weights while it is repaired."""

from __future__ import annotations

import re

import pytest

from tests.simulated.checks import Traffic, assert_served_by_all, held, right_tokens, upstream_of, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until


@pytest.mark.parametrize("count", [1, 2, 3])
def test_it_is_repaired_before_its_next_rollout(adapter: Adapters, count: int) -> None:
    # With probes this far apart, mostly the rollouts tell that the replica is empty.
    with simulators(count) as replicas, RunningProxy(*(r.url for r in replicas), PROXY_PROBE_S="0.5") as proxy:
        policies = {f"policy-v{seed}": adapter(seed) for seed in (1, 2)}
        for name, directory in policies.items():
            assert proxy.load(name, directory).status_code == 200
        replicas[-1].restart()
        with Traffic(proxy, policies, threads=6) as traffic:
            traffic.wait_more(30)
            proxy.wait_states(*["ready"] * count)
            traffic.wait_more(20)
        assert set(traffic.by_replica) == {str(index) for index in range(count)}
        for name, directory in policies.items():
            assert_served_by_all(replicas, name, directory)
        wait_quiet(proxy, *replicas)


def test_someone_else_unloads_a_live_policy(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            traffic.wait_more(10)
            assert replicas[0].unload(upstream_of(replicas[0], "policy-v1")).status_code == 200
            traffic.wait_more(30)
            proxy.wait_states("ready", "ready")
        assert_served_by_all(replicas, "policy-v1", adapter(1))


def test_someone_else_who_goes_on_unloading_is_answered_once_a_minute(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(*(r.url for r in replicas), PROXY_PROBE_S="0.1") as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        upstream = upstream_of(replicas[0], "policy-v1")
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            assert replicas[0].unload(upstream).status_code == 200
            wait_until(lambda: "policy-v1" in held(replicas[0]), what="it is repaired")
            proxy.wait_states("ready", "ready")
            assert replicas[0].unload(upstream).status_code == 200
            wait_until(lambda: proxy.log().count("somebody else has unloaded it") == 2, what="it is noticed again")
            assert re.search(r"It is loaded again in (5\d|60) s", proxy.log())
            asked = replicas[0].state()["calls"]["GET /v1/models"]
            loads = replicas[0].state()["loads"]
            wait_until(lambda: replicas[0].state()["calls"]["GET /v1/models"] > asked + 10, what="ten more looks")
            assert replicas[0].state()["loads"] == loads
            assert proxy.states() == ["joining", "ready"]
            assert (
                "lost policy-v1" in proxy.replicas()[0]["reason"] or "lacks policy-v1" in proxy.replicas()[0]["reason"]
            )
            traffic.wait_more(20)
        wait_quiet(proxy, *replicas)


def test_someone_else_loads_other_weights_under_a_live_name(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(*(r.url for r in replicas), PROXY_PROBE_S="0.1") as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        upstream = upstream_of(replicas[0], "policy-v1")
        replicas[0].unload(upstream)
        replicas[0].load(upstream, adapter(2))
        assert replicas[0].complete(upstream, prompt=[1]) == right_tokens(adapter(2), prompt=[1])
        # What was loaded behind the proxy's back can be told only by its path, at the next probe.
        wait_until(lambda: held(replicas[0]).get("policy-v1") == str(adapter(1)), what="it is repaired")
        proxy.wait_states("ready", "ready")
        assert_served_by_all(replicas, "policy-v1", adapter(1))
