"""PROXY_LOAD_QUORUM: replicas that are only late leave the set and catch up; the others serve meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated.checks import Traffic, assert_held_by_none, assert_served_by_all, held, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until


@pytest.fixture
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(3) as replicas:
        yield replicas


@pytest.mark.parametrize("fault", ["late", "torn"])
def test_a_late_replica_catches_up(replicas: list[SimulatedReplica], adapter: Adapters, fault: str) -> None:
    with RunningProxy(*(replica.url for replica in replicas), PROXY_LOAD_QUORUM="2") as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        replicas[2].set_faults(**{fault: {"seconds": 60}})
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            answer = proxy.load("policy-v2", adapter(2))
            assert answer.status_code == 200, answer.text
            assert "policy-v2" not in held(replicas[2])
            proxy.wait_states("ready", "ready", "joining")
            assert "policy-v2" in proxy.replicas()[2]["reason"]
            traffic.serve("policy-v2", adapter(2))
            routed = proxy.replicas()[2]["routed"]
            traffic.wait_more(20)
            assert proxy.replicas()[2]["routed"] == routed, "it serves nothing before it holds everything (P3)"
            traffic.by_replica.clear()
            replicas[2].clear_faults()
            proxy.wait_states("ready", "ready", "ready")
            wait_until(lambda: "2" in traffic.by_replica, what="it is used again")
        assert_served_by_all(replicas, "policy-v2", adapter(2))
        wait_quiet(proxy, *replicas)


def test_a_refusal_fails_the_load_all_the_same(replicas: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(*(replica.url for replica in replicas), PROXY_LOAD_QUORUM="1") as proxy:
        replicas[1].set_faults(late={"seconds": 0.3})
        replicas[2].set_faults(load_error={"status": 500})
        answer = proxy.load("policy-v1", adapter(1))
        assert answer.status_code == 500, answer.text
        assert_held_by_none(replicas, "policy-v1")
        assert proxy.states() == ["ready"] * 3


def test_without_a_quorum_of_holders_the_load_fails(replicas: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(
        *(replica.url for replica in replicas), PROXY_LOAD_QUORUM="2", PROXY_LORA_LOAD_TIMEOUT_S="1"
    ) as proxy:
        for replica in replicas[1:]:
            replica.set_faults(late={"seconds": 60})
        answer = proxy.load("policy-v1", adapter(1))
        assert answer.status_code == 500, answer.text
        assert_held_by_none(replicas, "policy-v1")
        assert proxy.states() == ["ready"] * 3
