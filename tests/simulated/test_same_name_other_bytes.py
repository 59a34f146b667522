"""A name comes again with other bytes (P1): every token from its own weights, and a fight over a name is told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.simulator.adapters import write_adapter
from tests.simulated.checks import Traffic, assert_served_by_all, held, models_of, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

LONG_PROMPT = list(range(1000, 1064))
"""Four blocks of KV: what a replica kept of them under the old weights must not be used again."""


@pytest.fixture
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(2) as replicas:
        yield replicas


def _rewritten(directory: Path, seed: int) -> Path:
    """Put other bytes where the old ones were, as a resumed run does."""
    fresh = write_adapter(directory.with_name(f"{directory.name}-{seed}"), seed=seed)
    for file in fresh.iterdir():
        file.replace(directory / file.name)
    return directory


def test_a_resumed_run_announces_the_same_version_from_the_same_path(
    replicas: list[SimulatedReplica], tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path / "trl-policy-v41", seed=1)
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        for seed in (1, 2, 3):
            _rewritten(directory, seed)
            assert proxy.load("trl-policy-v41", directory).status_code == 200
            assert_served_by_all(replicas, "trl-policy-v41", directory)
            for _ in range(4):  # on both replicas, with and without a block in their caches
                assert proxy.complete("trl-policy-v41", prompt=LONG_PROMPT) == right_tokens(
                    directory, prompt=LONG_PROMPT
                )
        assert models_of(proxy) == ["sim", "trl-policy-v41"]
        wait_until(lambda: all(len(replica.models()) == 2 for replica in replicas), what="one generation is left")
        loads = [replica.state()["loads"] for replica in replicas]
        assert proxy.load("trl-policy-v41", directory).status_code == 200
        assert [replica.state()["loads"] for replica in replicas] == loads, "the same bytes again are no load"
        wait_quiet(proxy, *replicas)


def test_also_when_the_proxy_was_killed_in_between(replicas: list[SimulatedReplica], tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "trl-policy-v41", seed=1)
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("trl-policy-v41", directory).status_code == 200
        right = right_tokens(directory, prompt=LONG_PROMPT)
        assert proxy.complete("trl-policy-v41", prompt=LONG_PROMPT) == right
        proxy.kill()
        proxy.start()
        assert proxy.complete("trl-policy-v41", prompt=LONG_PROMPT) == right, "what was loaded stays what it was"
        _rewritten(directory, 2)
        assert proxy.load("trl-policy-v41", directory).status_code == 200
        right = right_tokens(directory, prompt=LONG_PROMPT)
        assert [proxy.complete("trl-policy-v41", prompt=LONG_PROMPT) for _ in range(4)] == [right] * 4
        wait_quiet(proxy, *replicas)


def test_a_second_run_begins_at_version_1_again(replicas: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        for run in (0, 10):  # the first one ends in the middle of a sync, and nobody cleans up
            assert proxy.client.get("/health").status_code == 200
            assert proxy.client.get("/server_info?config_format=json").status_code == 200
            for version in (1, 2, 3):
                name = f"trl-policy-v{version}"
                assert proxy.client.post("/pause?mode=keep").status_code == 200
                assert proxy.load(name, adapter(run + version)).status_code == 200
                if (run, version) == (0, 3):
                    break
                assert proxy.client.post("/resume").status_code == 200
                with Traffic(proxy, {name: adapter(run + version)}) as traffic:
                    traffic.wait_more(5)
        assert_served_by_all(replicas, "trl-policy-v3", adapter(13))
        assert proxy.client.get("/is_paused").json() == {"is_paused": False}
        wait_quiet(proxy, *replicas)


def test_rollouts_in_flight_finish_before_the_name_means_something_else(
    replicas: list[SimulatedReplica], adapter: Adapters
) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy, ThreadPoolExecutor(8) as pool:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        old = [pool.submit(proxy.complete, "policy-v1", prompt=[seed], max_tokens=100) for seed in range(4)]
        wait_until(lambda: proxy.inflight() == 4, what="they are in flight")
        loading = pool.submit(proxy.load, "policy-v1", adapter(2))
        wait_until(lambda: "announced again" in proxy.log(), what="the announcement waits")
        assert not loading.done()
        for seed, one in enumerate(old):
            assert one.result() == right_tokens(adapter(1), prompt=[seed], count=100)
        assert loading.result().status_code == 200
        assert proxy.complete("policy-v1") == right_tokens(adapter(2))
        assert_served_by_all(replicas, "policy-v1", adapter(2))
        wait_quiet(proxy, *replicas)


def test_two_live_runs_that_fight_over_a_name_are_told_who_has_it(
    replicas: list[SimulatedReplica], adapter: Adapters
) -> None:
    with (
        RunningProxy(*(replica.url for replica in replicas), PROXY_LORA_LOAD_TIMEOUT_S="1") as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        rollout = pool.submit(proxy.complete, "policy-v1", max_tokens=300)
        wait_until(lambda: proxy.inflight() == 1, what="the first run has a rollout")
        answer = proxy.load("policy-v1", adapter(2))
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (409, "name_in_use")
        message = answer.json()["error"]["message"]
        assert str(adapter(1)) in message and str(adapter(2)) in message
        assert "127.0.0.1:" in message
        assert rollout.result() == right_tokens(adapter(1), count=300)
        assert_served_by_all(replicas, "policy-v1", adapter(1))
        # Once nobody uses it, the name is free for whoever announces it.
        assert proxy.load("policy-v1", adapter(2)).status_code == 200
        assert_served_by_all(replicas, "policy-v1", adapter(2))
        wait_quiet(proxy, *replicas)


def _announce(proxy: RunningProxy, name: str, directory: Path) -> socket.socket:
    """Send a load over a connection of its own, so that it can be broken off."""
    body = f'{{"lora_name": "{name}", "lora_path": "{directory}"}}'
    head = f"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: p\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
    connection.sendall((head + body).encode())
    return connection


@pytest.mark.parametrize("seed", [1, 2], ids=["the same bytes", "other bytes"])
def test_a_client_leaves_in_the_middle_of_a_load_and_another_announces_the_name_anew(
    replicas: list[SimulatedReplica], adapter: Adapters, seed: int
) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy, ThreadPoolExecutor(1) as pool:
        replicas[1].set_faults(late={"seconds": 60})
        with _announce(proxy, "policy-v1", adapter(1)):
            wait_until(lambda: "policy-v1" in held(replicas[0]), what="half of the fleet holds it")
            if seed == 2:
                contender = pool.submit(proxy.load, "policy-v1", adapter(2))
                wait_until(lambda: "announced again" in proxy.log(), what="it waits while the first client does")
                assert not contender.done()
        replicas[1].clear_faults()
        answer = contender.result() if seed == 2 else proxy.load("policy-v1", adapter(1))
        assert answer.status_code == 200, answer.text
        with Traffic(proxy, {"policy-v1": adapter(seed)}) as traffic:
            traffic.wait_more(10)
        wait_until(lambda: all(len(replica.models()) == 2 for replica in replicas), what="one generation is left")
        assert_served_by_all(replicas, "policy-v1", adapter(seed))
        wait_quiet(proxy, *replicas)


def test_of_two_clients_that_wait_for_one_load_one_leaves(replicas: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy, ThreadPoolExecutor(1) as pool:
        replicas[1].set_faults(late={"seconds": 60})
        with _announce(proxy, "policy-v1", adapter(1)):
            wait_until(lambda: "policy-v1" in held(replicas[0]), what="half of the fleet holds it")
            upstream = proxy.policy("policy-v1")["upstream"]
            staying = pool.submit(proxy.load, "policy-v1", adapter(1))
            # What it asks next is answered after its announcement has been taken.
            wait_until(lambda: proxy.client.get("/proxy/live").status_code == 200, what="the proxy lives")
        replicas[1].clear_faults()
        assert staying.result().status_code == 200
        assert proxy.complete("policy-v1") == right_tokens(adapter(1))
        assert proxy.policy("policy-v1")["name"] == "policy-v1" and upstream
        wait_quiet(proxy, *replicas)
