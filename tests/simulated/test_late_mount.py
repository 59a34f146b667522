"""The mount shows a policy's files late on some replicas: the load waits for them, and so do rollouts that name it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.simulated.checks import assert_held_by_none, assert_served_by_all, held, models_of, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(3, max_loras=16, max_cpu_loras=32) as replicas:
        yield replicas


@pytest.fixture(autouse=True)
def clean(replicas: list[SimulatedReplica]) -> Iterator[None]:
    yield
    for replica in replicas:
        replica.clear_faults()


@pytest.fixture(scope="module")
def proxy(replicas: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in replicas), PROXY_LORA_LOAD_TIMEOUT_S="2.5") as proxy:
        yield proxy


def test_every_replica_is_asked_until_it_sees_the_files(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    replicas[0].set_faults(late={"attempts": 2})
    replicas[2].set_faults(late={"seconds": 0.5})
    answer = proxy.load("late-v1", adapter(1))
    assert answer.status_code == 200, answer.text
    assert answer.text == "Success: LoRA adapter 'late-v1' added successfully."
    assert [replica.state()["calls"]["POST /v1/load_lora_adapter"] for replica in replicas[:2]] == [3, 1]
    assert_served_by_all(replicas, "late-v1", adapter(1))
    wait_quiet(proxy, *replicas)


def test_nobody_sees_it_before_everybody_has_it(
    replicas: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    replicas[1].set_faults(late={"seconds": 1})
    with ThreadPoolExecutor(5) as pool:
        loading = pool.submit(proxy.load, "late-v2", adapter(2))
        wait_until(lambda: "late-v2" in held(replicas[0]), what="the first replica holds it")
        early = [pool.submit(proxy.complete, "late-v2", seed=seed) for seed in range(4)]
        assert "late-v2" not in models_of(proxy)
        assert proxy.policy("late-v2")["state"] == "loading"
        wait_until(lambda: "late-v2" in held(replicas[2]), what="the third replica holds it")
        wait_until(lambda: not any(r.state()["in_flight"] for r in replicas), what="the proofs of those two have ended")
        assert not any(rollout.done() for rollout in early)
        assert loading.result().status_code == 200
        for seed, rollout in enumerate(early):
            assert rollout.result() == right_tokens(adapter(2), seed=seed)
    assert "late-v2" in models_of(proxy)
    wait_quiet(proxy, *replicas)


def test_too_late_is_rolled_back_and_never_a_404(
    replicas: list[SimulatedReplica], proxy: RunningProxy, tmp_path: Path, adapter: Adapters
) -> None:
    missing = tmp_path / "never"
    held = ThreadPoolExecutor(1)
    loading = held.submit(proxy.load, "late-v3", missing)
    wait_until(lambda: proxy.policy("late-v3").get("state") == "loading", what="it is loading")
    early = proxy.completion("late-v3")
    answer = loading.result()
    held.shutdown()
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert all(replica.url in message for replica in replicas)
    assert "No adapter found" in message
    assert early.status_code == 404
    assert "failed" in early.json()["error"]["message"]
    assert_held_by_none(replicas, "late-v3")
    shutil.copytree(adapter(3), missing)
    assert proxy.load("late-v3", missing).status_code == 200
    assert proxy.complete("late-v3") == right_tokens(adapter(3))
    wait_quiet(proxy, *replicas)


def test_files_that_arrive_meanwhile_on_the_real_disk(
    replicas: list[SimulatedReplica], proxy: RunningProxy, tmp_path: Path, adapter: Adapters
) -> None:
    directory = tmp_path / "policy"
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(proxy.load, "late-v4", directory)
        wait_until(
            lambda: all(r.state()["calls"]["POST /v1/load_lora_adapter"] > 1 for r in replicas), what="all were asked"
        )
        # Torn on purpose: the config is there before the weights.
        directory.mkdir()
        shutil.copy(adapter(4) / "adapter_config.json", directory)
        shutil.copy(adapter(4) / "adapter_model.safetensors", directory)
        assert loading.result().status_code == 200
    assert proxy.complete("late-v4") == right_tokens(adapter(4))
    wait_quiet(proxy, *replicas)
