"""An unload is promised at once and carried out when its rollouts are done; nothing is pulled from under one (P4)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.simulated.checks import (
    Traffic,
    assert_held_by_none,
    assert_served_by_all,
    held,
    models_of,
    right_tokens,
    unloads_of,
    wait_quiet,
)
from tests.simulated.conftest import Adapters
from tests.simulated.flaky import FlakyReplica
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until


def _wait_state(proxy: RunningProxy, name: str, state: str) -> None:
    wait_until(lambda: proxy.policy(name).get("state") == state, what=f"{name} is {state}")


def test_rollouts_in_flight_finish_first(pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters) -> None:
    assert proxy.load("old-v1", adapter(1)).status_code == 200
    with ThreadPoolExecutor(6) as pool:
        pending = [pool.submit(proxy.complete, "old-v1", seed=seed, max_tokens=300) for seed in range(6)]
        wait_until(lambda: proxy.policy("old-v1")["leases"] == 6, what="six leases")
        answer = proxy.unload("old-v1")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'old-v1' removed successfully.")
        policy = proxy.policy("old-v1")
        assert (policy["state"], policy["files_deletable"]) == ("retiring", False)
        assert "old-v1" not in models_of(proxy)
        # A rollout that names it still gets it, as long as the others keep it there.
        assert proxy.complete("old-v1", seed=99) == right_tokens(adapter(1), seed=99)
        assert proxy.unload("old-v1").status_code == 200
        assert all("old-v1" in held(replica) for replica in pair)
        for seed, one in enumerate(pending):
            assert one.result() == right_tokens(adapter(1), seed=seed, count=300)
    _wait_state(proxy, "old-v1", "retired")
    wait_until(lambda: proxy.policy("old-v1")["files_deletable"], what="its files may go")
    assert_held_by_none(pair, "old-v1")
    late = proxy.completion("old-v1")
    assert late.status_code == 404
    assert "retired" in late.json()["error"]["message"]
    assert [unloads_of(replica, "old-v1") for replica in pair] == [1, 1]
    assert proxy.unload("old-v1").status_code == 404
    wait_quiet(proxy, *pair)


def test_an_unknown_policy_is_a_404_in_vllms_words(proxy: RunningProxy) -> None:
    answer = proxy.unload("nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The lora adapter 'nobody' cannot be found."
    assert proxy.client.post("/v1/unload_lora_adapter", json={}).status_code == 400


def test_the_wait_has_a_limit(adapter: Adapters) -> None:
    with simulators(2) as pair, RunningProxy(*(replica.url for replica in pair), PROXY_UNLOAD_WAIT_S="0.3") as proxy:
        assert proxy.load("limit-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(proxy.complete, "limit-v1", max_tokens=500)
            wait_until(lambda: proxy.inflight() == 1, what="the rollout is in flight")
            proxy.unload("limit-v1")
            _wait_state(proxy, "limit-v1", "retired")
            assert not pending.done()
            wait_until(lambda: not any("limit-v1" in held(replica) for replica in pair), what="it is unloaded")
            assert not proxy.policy("limit-v1")["files_deletable"]
            # vLLM lets what is running finish on its weights.
            assert pending.result() == right_tokens(adapter(1), count=500)
        assert proxy.policy("limit-v1")["files_deletable"]
        wait_quiet(proxy, *pair)


def test_a_name_may_come_back_with_other_weights(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    # The unload was answered with 200, so the client believes that the name is free, though rollouts still use it.
    assert proxy.load("again-v1", adapter(1)).status_code == 200
    with ThreadPoolExecutor(2) as pool:
        pending = pool.submit(proxy.complete, "again-v1", max_tokens=80)
        wait_until(lambda: proxy.inflight() == 1, what="the rollout is in flight")
        assert proxy.unload("again-v1").status_code == 200
        loading = pool.submit(proxy.load, "again-v1", adapter(2))
        assert pending.result() == right_tokens(adapter(1), count=80)
        answer = loading.result()
    assert answer.status_code == 200, answer.text
    assert_served_by_all(pair, "again-v1", adapter(2))
    assert proxy.complete("again-v1") == right_tokens(adapter(2))
    assert proxy.policy("again-v1")["state"] == "live"
    assert proxy.unload("again-v1").status_code == 200


def test_load_and_unload_of_one_name_in_turn(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    for turn in range(8):
        directory = adapter(1 + turn % 3)
        assert proxy.load("turns", directory).status_code == 200
        assert proxy.complete("turns", seed=turn) == right_tokens(directory, seed=turn)
        assert proxy.unload("turns").status_code == 200
    wait_until(lambda: proxy.policy("turns")["files_deletable"], what="the last one is gone")
    assert_held_by_none(pair, "turns")


def test_a_window_of_policies_moves_on_under_traffic(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    assert proxy.load("window-v1", adapter(1)).status_code == 200
    with Traffic(proxy, {"window-v1": adapter(1)}, threads=8) as traffic:
        for version in range(2, 9):
            assert proxy.load(f"window-v{version}", adapter(version)).status_code == 200
            traffic.serve(f"window-v{version}", adapter(version))
            traffic.wait_more(6)
            # As a trainer does: nobody begins a rollout of the old one any more; those under way are still there.
            del traffic.weights[f"window-v{version - 1}"]
            traffic.wait_more(1)
            assert proxy.unload(f"window-v{version - 1}").status_code == 200
    assert models_of(proxy) == ["sim", "window-v8"]
    wait_quiet(proxy, *pair)
    wait_until(lambda: [held(r).keys() for r in pair] == [{"sim", "window-v8"}] * 2, what="only the last is held")
    assert proxy.unload("window-v8").status_code == 200


@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_an_unload_that_a_replica_did_not_carry_out_is_made_up_for(adapter: Adapters, how: str) -> None:
    with FlakyReplica() as replica, RunningProxy(replica.url, PROXY_CALL_TIMEOUT_S="0.5") as proxy:
        assert proxy.load("left-v1", adapter(1)).status_code == 200
        replica.spoil("POST /v1/unload_lora_adapter", how)
        assert proxy.unload("left-v1").status_code == 200
        _wait_state(proxy, "left-v1", "retired")
        wait_until(lambda: "did not unload it" in proxy.log(), what="it failed")
        assert not proxy.policy("left-v1")["files_deletable"]
        replica.heal()
        wait_until(lambda: not replica.adapters, what="it is unloaded after all")
        wait_until(lambda: proxy.policy("left-v1")["files_deletable"], what="its files may go")


@pytest.mark.parametrize("wait_s", ["0.3", "60"], ids=["already unloaded", "still retiring"])
def test_a_rollout_that_loses_its_replica_after_the_unload_cannot_be_repeated(adapter: Adapters, wait_s: str) -> None:
    count = 2 if wait_s == "0.3" else 1
    with simulators(count) as replicas, RunningProxy(*(r.url for r in replicas), PROXY_UNLOAD_WAIT_S=wait_s) as proxy:
        assert proxy.load("old-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(proxy.completion, "old-v1", max_tokens=1500)
            wait_until(lambda: proxy.inflight() == 1, what="it is in flight")
            assert proxy.unload("old-v1").status_code == 200
            if count == 2:
                wait_until(lambda: not any("old-v1" in held(replica) for replica in replicas), what="it is unloaded")
            next(replica for replica in replicas if replica.state()["in_flight"]).kill()
            answer = pending.result()
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (404, "retired"), answer.text
        assert "does not exist any more" in answer.json()["error"]["message"]
        wait_until(lambda: proxy.inflight() == 0, what="no lease is left")
        wait_until(lambda: proxy.policy("old-v1")["files_deletable"], what="its files may go")
