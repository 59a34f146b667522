"""vLLM has --max-loras slots: a new policy gets one that nobody misses, or waits, or is told who has them (P4)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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
from tests.support.replicas import SimulatedReplica, simulators, wait_until


@contextmanager
def never_above(replicas: Sequence[SimulatedReplica], slots: int) -> Iterator[None]:
    """Watch the replicas and fail if one of them ever registers more adapters than it has slots for."""
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            most[0] = max(most[0], *(len(held(replica)) - 1 for replica in replicas))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    assert most[0] <= slots


def test_a_full_fleet_refuses_and_says_who_has_the_slots(adapter: Adapters) -> None:
    with (
        simulators(2, max_loras=2) as replicas,
        RunningProxy(*(replica.url for replica in replicas), PROXY_LORA_LOAD_TIMEOUT_S="2") as proxy,
    ):
        assert proxy.client.get("/proxy/policies").json()["slots"] == 2
        for seed in (1, 2):
            assert proxy.load(f"policy-v{seed}", adapter(seed)).status_code == 200
        with never_above(replicas, 2):
            answer = proxy.load("policy-v3", adapter(3))
            assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (409, "no_slot")
            message = answer.json()["error"]["message"]
            assert "policy-v1 (live, 0 rollouts), policy-v2 (live, 0 rollouts)" in message
            assert "--max-loras 3" in message
            assert proxy.unload("policy-v1").status_code == 200
            assert proxy.load("policy-v3", adapter(3)).status_code == 200
        assert models_of(proxy) == ["sim", "policy-v2", "policy-v3"]
        assert_served_by_all(replicas, "policy-v3", adapter(3))


def test_the_smallest_replica_counts(adapter: Adapters) -> None:
    with (
        SimulatedReplica(max_loras=4) as large,
        SimulatedReplica(max_loras=1) as small,
        RunningProxy(large.url, small.url, PROXY_LORA_LOAD_TIMEOUT_S="2") as proxy,
    ):
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        assert proxy.load("policy-v2", adapter(2)).status_code == 409
        lora = proxy.client.get("/server_info?config_format=json").json()["vllm_config"]["lora_config"]
        assert lora["max_loras"] == 1


def test_a_retiring_policy_gives_up_its_slot_and_its_rollouts_finish(adapter: Adapters) -> None:
    with simulators(2, max_loras=2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        for seed in (1, 2):
            assert proxy.load(f"policy-v{seed}", adapter(seed)).status_code == 200
        with ThreadPoolExecutor(4) as pool, never_above(replicas, 2):
            for replica in replicas:
                replica.set_faults(slow=50)  # the rollouts last until that ends
            pending = [pool.submit(proxy.complete, "policy-v1", seed=seed, max_tokens=80) for seed in range(4)]
            wait_until(lambda: proxy.inflight() == 4, what="they are in flight")
            assert proxy.unload("policy-v1").status_code == 200
            assert proxy.policy("policy-v1")["state"] == "retiring"
            assert proxy.load("policy-v3", adapter(3)).status_code == 200
            assert_held_by_none(replicas, "policy-v1")
            assert not any(one.done() for one in pending)
            assert proxy.completion("policy-v1").status_code == 404
            for replica in replicas:
                replica.clear_faults()
            for seed, one in enumerate(pending):
                assert one.result() == right_tokens(adapter(1), seed=seed, count=80)
        wait_quiet(proxy, *replicas)


def test_an_abandoned_policy_gives_up_its_slot_but_never_the_newest(adapter: Adapters) -> None:
    with simulators(1, max_loras=2) as replicas, RunningProxy(replicas[0].url, PROXY_POLICY_IDLE_S="0.2") as proxy:
        with never_above(replicas, 2):
            for seed in range(1, 6):
                assert proxy.load(f"policy-v{seed}", adapter(seed)).status_code == 200
                assert proxy.complete(f"policy-v{seed}") == right_tokens(adapter(seed))
        assert models_of(proxy) == ["sim", "policy-v4", "policy-v5"]
        assert proxy.policy("policy-v1")["reason"] == "its slot is needed for policy-v3"


def test_many_loads_and_unloads_at_once_never_exceed_the_slots(adapter: Adapters) -> None:
    with (
        simulators(2, max_loras=3, max_cpu_loras=4) as replicas,
        RunningProxy(*(replica.url for replica in replicas)) as proxy,
    ):
        assert proxy.load("steady", adapter(0)).status_code == 200

        def churn(worker: int) -> None:
            for turn in range(5):
                name = f"churn-{worker}-{turn}"
                assert proxy.load(name, adapter(1 + worker)).status_code == 200
                assert proxy.complete(name) == right_tokens(adapter(1 + worker))
                assert proxy.unload(name).status_code == 200

        replicas[1].set_faults(load_delay_s=0.01)
        with never_above(replicas, 3), Traffic(proxy, {"steady": adapter(0)}, threads=2), ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(churn, worker) for worker in range(4)]:
                done.result()
        wait_until(lambda: all(len(held(replica)) == 2 for replica in replicas), what="only one policy is left")
        wait_quiet(proxy, *replicas)


def test_seven_policies_on_six_slots_that_all_have_rollouts(adapter: Adapters) -> None:
    with (
        simulators(2, max_loras=6) as replicas,
        # A seventh adapter waits in vLLM while six are at work, and so does its probe.
        RunningProxy(*(r.url for r in replicas), PROXY_LORA_LOAD_TIMEOUT_S="2", PROXY_VERIFY_S="0.3") as proxy,
        ThreadPoolExecutor(20) as pool,
        never_above(replicas, 6),
    ):
        pending = []
        for replica in replicas:
            replica.set_faults(slow=100)  # the rollouts last until that ends
        for seed in range(1, 7):
            assert proxy.load(f"run-v{seed}", adapter(seed)).status_code == 200
            for turn in (1, 2):
                rollout = pool.submit(proxy.complete, f"run-v{seed}", prompt=[seed, turn], max_tokens=100)
                pending.append((rollout, seed, turn))
        wait_until(lambda: proxy.inflight() == 12, what="all six have rollouts")
        # Nobody has given one up: the seventh waits, and is told who has the slots.
        refused = proxy.load("run-v7", adapter(7))
        assert (refused.status_code, refused.headers["X-Proxy-Error"]) == (409, "no_slot")
        message = refused.json()["error"]["message"]
        assert all(f"run-v{seed} (live, 2 rollouts)" in message for seed in range(1, 7))
        assert "--max-loras 7" in message
        # TRL gives up its oldest, whose rollouts run on: the seventh gets that slot at once.
        assert proxy.unload("run-v1").status_code == 200
        answer = proxy.load("run-v7", adapter(7))
        assert answer.status_code == 200, answer.text
        assert not any(rollout.done() for rollout, _, _ in pending)
        pending.append((pool.submit(proxy.complete, "run-v7", prompt=[7, 1], max_tokens=100), 7, 1))
        for replica in replicas:
            replica.clear_faults()
        for rollout, seed, turn in pending:
            assert rollout.result() == right_tokens(adapter(seed), prompt=[seed, turn], count=100)
        assert models_of(proxy) == ["sim", *(f"run-v{seed}" for seed in range(2, 8))]
        wait_quiet(proxy, *replicas)
