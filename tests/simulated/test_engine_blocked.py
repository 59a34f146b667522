"""A load keeps an engine from answering: no alarm while that is the load's own time, and an alarm when it is not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.simulated.checks import Traffic, assert_served_by_all, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until

BLOCKED_S = 8


@pytest.mark.timeout(60)
def test_an_engine_that_reads_for_long_is_not_taken_for_a_hung_one(adapter: Adapters) -> None:
    with (
        SimulatedReplica() as quick,
        SimulatedReplica(load_s=BLOCKED_S) as slow,
        RunningProxy(quick.url, slow.url, PROXY_STALL_S="0.5") as proxy,
    ):
        with ThreadPoolExecutor(1) as pool, Traffic(proxy, {"sim": "base:sim"}) as traffic:
            traffic.wait_more(10)
            loading = pool.submit(proxy.load, "policy-v1", adapter(1))
            wait_until(lambda: slow.state()["loads"] == 1, what="it reads")
            assert not slow.answers("/is_paused", within_s=1), "its engine answers nobody"
            assert not loading.done()
            answer = loading.result()
            assert answer.status_code == 200, answer.text
            traffic.serve("policy-v1", adapter(1))
            wait_until(lambda: set(traffic.by_replica) == {"0", "1"}, what="both are used")
        assert [(replica["state"], replica["joins"]) for replica in proxy.replicas()] == [("ready", 1)] * 2
        assert proxy.policy("policy-v1")["phases"]["load"] > BLOCKED_S - 1
        assert_served_by_all([quick, slow], "policy-v1", adapter(1))
        wait_quiet(proxy, quick, slow)


def test_an_engine_that_hangs_in_a_load_leaves_after_the_stall_limit(adapter: Adapters) -> None:
    with (
        SimulatedReplica() as quick,
        SimulatedReplica() as hung,
        RunningProxy(quick.url, hung.url, PROXY_STALL_S="0.3", PROXY_CALL_STALL_S="1") as proxy,
    ):
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        hung.set_faults(load_delay_s=0.3)
        with ThreadPoolExecutor(1) as pool, Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            traffic.wait_more(10)
            loading = pool.submit(proxy.load, "policy-v2", adapter(2))
            wait_until(lambda: proxy.policy("policy-v2").get("state") == "loading", what="it is loading")
            hung.set_faults(hang=True)
            answer = loading.result()
            assert answer.status_code == 200, answer.text
            assert proxy.states() == ["ready", "down"]
            traffic.serve("policy-v2", adapter(2))
            traffic.wait_more(20)
            hung.clear_faults()
            proxy.wait_states("ready", "ready")
            wait_until(lambda: "1" in traffic.by_replica, what="it is used again")
        assert proxy.complete("policy-v2") == right_tokens(adapter(2))
        assert_served_by_all([quick, hung], "policy-v2", adapter(2))
        wait_quiet(proxy, quick, hung)
