"""A replica dies: no rollout is lost while another holds the policy, and it comes back only when whole (P3, P6)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.simulated.checks import Traffic, assert_served_by_all, held, models_of, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until


@pytest.mark.parametrize("how", ["process", "engine"])
def test_under_traffic(adapter: Adapters, how: str) -> None:
    with simulators(3) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        policies = {f"policy-v{seed}": adapter(seed) for seed in (1, 2)}
        for name, directory in policies.items():
            assert proxy.load(name, directory).status_code == 200
        with Traffic(proxy, policies, threads=12) as traffic:
            traffic.wait_more(25)
            if how == "process":
                replicas[1].kill()
            else:
                replicas[1].kill_engine()
            proxy.wait_states("ready", "down", "ready")
            traffic.wait_more(25)
            assert proxy.load("policy-v3", adapter(3)).status_code == 200
            traffic.serve("policy-v3", adapter(3))
            traffic.wait_more(25)
            replicas[1].restart()
            proxy.wait_states("ready", "ready", "ready")
            wait_until(lambda: bool(replicas[1].state()["rollouts"]), what="the replica gets rollouts again")
            traffic.wait_more(25)
        for name, directory in {**policies, "policy-v3": adapter(3)}.items():
            assert_served_by_all(replicas, name, directory)
        wait_quiet(proxy, *replicas)
        assert proxy.replicas()[1]["joins"] == 2


def test_a_rollout_in_flight_goes_to_the_other_replica(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(8) as pool:
            pending = [pool.submit(proxy.completion, "policy-v1", max_tokens=100, seed=seed) for seed in range(8)]
            wait_until(lambda: sum(r.state()["in_flight"] for r in replicas) == 8, what="all run")
            victim = max(replicas, key=lambda replica: int(replica.state()["in_flight"]))
            victim.kill()
            answers = [one.result() for one in pending]
        for seed, answer in enumerate(answers):
            assert answer.status_code == 200, answer.text
            tokens = answer.json()["choices"][0]["token_ids"]
            assert tokens == right_tokens(adapter(1), seed=seed, count=100)
            assert answer.headers["X-Proxy-Upstream"] == str(1 - replicas.index(victim))
        assert proxy.stats()["router"]["retried"] > 0
        wait_quiet(proxy, replicas[1 - replicas.index(victim)])


def test_all_replicas_die_and_one_comes_back(adapter: Adapters) -> None:
    with (
        simulators(2) as replicas,
        RunningProxy(*(replica.url for replica in replicas), PROXY_WAIT_READY_S="0.5", PROXY_START_WAIT_S="0") as proxy,
    ):
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(6) as pool:
            pending = [pool.submit(proxy.completion, "policy-v1", max_tokens=400, seed=seed) for seed in range(6)]
            wait_until(lambda: sum(r.state()["in_flight"] for r in replicas) == 6, what="all run")
            for replica in replicas:
                replica.kill()
            answers = [one.result() for one in pending]
        assert {answer.status_code for answer in answers} <= {502, 503}
        assert all("X-Proxy-Error" in answer.headers for answer in answers)
        proxy.wait_states("down", "down")
        refused = proxy.completion("policy-v1")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert all(replica.url in refused.json()["error"]["message"] for replica in replicas)
        assert proxy.load("policy-v2", adapter(2)).status_code == 503
        assert proxy.client.get("/health").status_code == 503
        assert proxy.client.post("/pause?mode=keep").status_code == 503
        assert proxy.client.get("/proxy/live").status_code == 200
        wait_quiet(proxy)
        replicas[0].restart()
        proxy.wait_states("ready", "down")
        assert proxy.client.get("/health").status_code == 200
        assert proxy.complete("policy-v1") == right_tokens(adapter(1))
        assert proxy.completion("policy-v2").status_code == 404


def test_a_rollout_held_for_a_dead_fleet_is_served_when_it_is_back(adapter: Adapters) -> None:
    with simulators(1) as (replica,), RunningProxy(replica.url) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        replica.kill()
        proxy.wait_states("down")
        with ThreadPoolExecutor(4) as pool:
            pending = [pool.submit(proxy.complete, "policy-v1", seed=seed) for seed in range(4)]
            replica.restart()
            for seed, one in enumerate(pending):
                assert one.result() == right_tokens(adapter(1), seed=seed)
        wait_quiet(proxy, replica)


def test_a_load_whose_replica_dies_goes_on_with_the_others(adapter: Adapters) -> None:
    for how in ("process", "engine"):
        with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
            replicas[0].set_faults(load_delay_s=0.5)
            replicas[1].set_faults(load_delay_s=0.5)
            with ThreadPoolExecutor(1) as pool:
                pending = pool.submit(proxy.load, "policy-v1", adapter(1))
                wait_until(
                    lambda r=replicas[1]: r.state()["calls"].get("POST /v1/load_lora_adapter", 0) == 1,  # type: ignore[misc]
                    what="the load has arrived",
                )
                if how == "process":
                    replicas[1].kill()
                else:
                    replicas[1].kill_engine()
                answer = pending.result()
            assert answer.status_code == 200, answer.text
            assert proxy.complete("policy-v1") == right_tokens(adapter(1))
            replicas[1].restart()
            proxy.wait_states("ready", "ready")
            assert_served_by_all(replicas, "policy-v1", adapter(1))


def test_a_load_that_loses_every_replica_may_be_tried_again(adapter: Adapters) -> None:
    with simulators(1) as (replica,), RunningProxy(replica.url) as proxy:
        replica.set_faults(load_delay_s=5)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(proxy.load, "policy-v1", adapter(1))
            wait_until(lambda: proxy.policy("policy-v1").get("state") == "loading", what="it is loading")
            replica.kill()
            answer = pending.result()
        assert answer.status_code == 503, answer.text
        assert replica.url in answer.json()["error"]["message"]
        assert "policy-v1" not in models_of(proxy)
        replica.restart()
        proxy.wait_states("ready")
        assert held(replica).keys() == {"sim"}
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        assert proxy.complete("policy-v1") == right_tokens(adapter(1))


def test_a_replica_that_takes_no_connections_is_left_at_once(adapter: Adapters) -> None:
    # The probe comes too late to tell: the rollouts themselves must find out, and cost nothing.
    with (
        simulators(2) as replicas,
        RunningProxy(*(replica.url for replica in replicas), PROXY_PROBE_S="30", PROXY_START_WAIT_S="0") as proxy,
    ):
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        replicas[0].kill()
        began = time.monotonic()
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            traffic.wait_more(20)
        assert time.monotonic() - began < 8
        assert proxy.states()[1] == "ready"
        assert proxy.states()[0] != "ready"
