"""A load fails on one replica and cannot be taken back from the other: that policy alone is tainted there (P2, P3)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulated.checks import (
    Traffic,
    assert_held_by_none,
    assert_served_by_all,
    held,
    models_of,
    right_tokens,
    wait_quiet,
)
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until


@pytest.mark.parametrize("fault", [{"unload_status": 500}, {"unload_delay_s": 1.5}], ids=["refused", "timed out"])
def test_the_replica_goes_on_serving_what_it_is_known_to_hold(adapter: Adapters, fault: dict[str, Any]) -> None:
    with (
        simulators(2) as (stuck, refusing),
        RunningProxy(stuck.url, refusing.url, PROXY_CALL_TIMEOUT_S="0.4") as proxy,
    ):
        assert proxy.load("steady-v1", adapter(1)).status_code == 200
        stuck.set_faults(**fault)
        refusing.set_faults(load_error={"status": 500, "name": "bad-v2"})
        with Traffic(proxy, {"steady-v1": adapter(1)}) as traffic:
            traffic.wait_more(5)
            answer = proxy.load("bad-v2", adapter(2))
            assert answer.status_code == 500, answer.text
            told = {result["replica"]: result for result in answer.json()["replicas"]}
            assert told[stuck.url]["status"] == "unknown"
            assert told[refusing.url]["status"] == "failed"
            assert stuck.url in answer.json()["error"]["message"]
            assert "bad-v2" in held(stuck)
            wait_until(lambda: "did not unload it" in proxy.log(), what="the log says so")
            # Nobody is served by what it holds still, and its other policies are as good as before.
            assert proxy.completion("bad-v2").status_code == 404
            assert models_of(proxy) == ["sim", "steady-v1"]
            policy = proxy.policy("bad-v2")
            assert (policy["held_by"], policy["files_deletable"]) == ([stuck.url], False)
            assert proxy.load("next-v3", adapter(3)).status_code == 200
            traffic.serve("next-v3", adapter(3))
            traffic.by_replica.clear()
            wait_until(lambda: set(traffic.by_replica) == {"0", "1"}, what="both are used")
            assert [(replica["state"], replica["joins"]) for replica in proxy.replicas()] == [("ready", 1)] * 2
            # The same name, announced anew, is another generation: what is left of the first is not in its way.
            refusing.clear_faults()
            assert proxy.load("bad-v2", adapter(4)).status_code == 200
            traffic.serve("bad-v2", adapter(4))
            stuck.clear_faults()
            wait_until(lambda: len(stuck.models()) == 4, what="the first generation is unloaded after all")
            traffic.wait_more(10)
        assert_served_by_all([stuck, refusing], "bad-v2", adapter(4))
        wait_quiet(proxy, stuck, refusing)


def test_a_load_without_an_answer_taints_only_its_policy(adapter: Adapters) -> None:
    with (
        simulators(2) as replicas,
        RunningProxy(*(r.url for r in replicas), PROXY_CALL_TIMEOUT_S="0.3", PROXY_LORA_LOAD_TIMEOUT_S="1") as proxy,
    ):
        assert proxy.load("steady-v1", adapter(1)).status_code == 200
        replicas[1].set_faults(load_delay_s=1.5)
        with Traffic(proxy, {"steady-v1": adapter(1)}) as traffic:
            answer = proxy.load("slow-v2", adapter(2))
            assert answer.status_code == 500, answer.text
            assert [result["status"] for result in answer.json()["replicas"]] == ["rolled_back", "failed"]
            traffic.wait_more(10)
            assert [(replica["state"], replica["joins"]) for replica in proxy.replicas()] == [("ready", 1)] * 2
            replicas[1].clear_faults()
            # The calls that got no answer may take effect late: what they leave is taken away again.
            wait_until(lambda: proxy.policy("slow-v2")["files_deletable"], what="nobody holds it")
            assert_held_by_none(replicas, "slow-v2")
        assert proxy.load("slow-v2", adapter(2)).status_code == 200
        assert proxy.complete("slow-v2") == right_tokens(adapter(2))
        assert_served_by_all(replicas, "slow-v2", adapter(2))
        wait_quiet(proxy, *replicas)
