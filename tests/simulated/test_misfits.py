"""A replica that serves something else than the others stays out and says why; what merely differs is warned of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulated.checks import BASE, Traffic, WaitingProxy, held, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.replicas import SimulatedReplica, wait_until


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"model": "other"}, "it serves other"), ({"dtype": "torch.float32"}, "torch.float32")],
    ids=["model", "dtype"],
)
def test_it_stays_out(adapter: Adapters, settings: dict[str, Any], said: str) -> None:
    # It comes second, so the first has set what the fleet serves.
    with SimulatedReplica() as first, WaitingProxy(first.url, PROXY_START_WAIT_S="0") as proxy:
        proxy.wait_states("ready")
        with SimulatedReplica(**settings) as misfit, Traffic(proxy, {"sim": BASE}) as traffic:
            answer = proxy.client.post("/proxy/replicas?wait=false", json={"url": misfit.url})
            assert answer.status_code == 202
            wait_until(lambda: said in proxy.replicas()[1]["reason"], what="it says why it stays out")
            assert "--dtype" in proxy.replicas()[1]["reason"] and first.url in proxy.replicas()[1]["reason"]
            assert proxy.load("policy-v1", adapter(1)).status_code == 200
            traffic.serve("policy-v1", adapter(1))
            traffic.wait_more(20)
            assert proxy.states() == ["ready", "joining"]
            assert set(traffic.by_replica) == {"0"}
        wait_quiet(proxy, first)


def test_of_two_at_the_start_one_sets_what_is_served(adapter: Adapters) -> None:
    with (
        SimulatedReplica() as first,
        SimulatedReplica(dtype="torch.float16") as second,
        WaitingProxy(first.url, second.url) as proxy,
    ):
        wait_until(lambda: sorted(proxy.states()) == ["joining", "ready"], what="one stays out")
        assert proxy.client.get("/health").status_code == 503
        assert proxy.load("policy-v1", adapter(1)).status_code == 200


def test_a_cache_too_small_for_its_slots_is_warned_of(adapter: Adapters) -> None:
    with (
        SimulatedReplica(max_loras=4, max_cpu_loras=6) as enough,
        SimulatedReplica(max_loras=4, max_cpu_loras=5) as small,
        WaitingProxy(enough.url, small.url) as proxy,
    ):
        proxy.wait_states("ready", "ready")
        first, second = (replica["lacks"] for replica in proxy.replicas())
        assert first == []
        assert len(second) == 1 and "--max-cpu-loras 8" in second[0]
        assert proxy.log().count("--max-cpu-loras 8") == 1
        answer = proxy.load("policy-v1", adapter(1))
        assert answer.status_code == 200
        assert f"Warning: {small.url}" in answer.text and enough.url not in answer.text
        assert "policy-v1" in held(small)


def test_the_smallest_of_what_differs_counts() -> None:
    with (
        SimulatedReplica(max_model_len=4096, max_loras=4) as large,
        SimulatedReplica(max_model_len=2048, max_loras=3) as small,
        WaitingProxy(large.url, small.url) as proxy,
    ):
        proxy.wait_states("ready", "ready")
        assert proxy.client.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
        info = proxy.client.get("/server_info?config_format=json").json()["vllm_config"]
        assert info["lora_config"]["max_loras"] == 3
