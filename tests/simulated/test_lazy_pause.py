"""A sync stops nothing (P9): a pause is a note until something needs it, and what is paused by others is found."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.simulator.checkpoints import write_checkpoint
from tests.simulated.checks import BASE, Traffic, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.simulated.flaky import FlakyReplica
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until


@pytest.fixture
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(2) as replicas:
        yield replicas


def _pauses(replicas: list[SimulatedReplica]) -> list[int]:
    return [replica.state()["calls"].get("POST /pause", 0) for replica in replicas]


def _preemptions(replicas: list[SimulatedReplica]) -> list[int]:
    return [replica.state()["preemptions"] for replica in replicas]


def test_a_sync_as_trl_makes_it_stops_no_rollout(replicas: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            traffic.wait_more(10)
            answer = proxy.client.post("/pause?mode=keep")
            assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
            assert proxy.client.get("/is_paused").json() == {"is_paused": True}
            assert proxy.load("policy-v2", adapter(2)).status_code == 200
            traffic.wait_more(20)
            answer = proxy.client.post("/resume")
            assert (answer.status_code, answer.json()) == (200, {"status": "resumed"})
        assert proxy.client.get("/is_paused").json() == {"is_paused": False}
        assert (_pauses(replicas), _preemptions(replicas)) == ([0, 0], [0, 0])


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_the_other_modes_are_always_real(replicas: list[SimulatedReplica], mode: str) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.client.post(f"/pause?mode={mode}").status_code == 200
        assert [replica.state()["paused"] for replica in replicas] == [mode] * 2
        assert proxy.client.post("/resume").status_code == 200
        assert [replica.state()["paused"] for replica in replicas] == [None] * 2


def test_a_replica_found_paused_gets_no_rollouts_until_it_is_resumed(
    replicas: list[SimulatedReplica], adapter: Adapters
) -> None:
    # What a run that died in the middle of a sync leaves behind.
    replicas[0].client.post("/pause?mode=keep").raise_for_status()
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        proxy.wait_states("ready", "ready")
        assert proxy.client.get("/is_paused").json() == {"is_paused": True}
        assert "POST /resume" in proxy.log()
        with Traffic(proxy, {"sim": BASE}) as traffic:
            traffic.wait_more(20)
            assert set(traffic.by_replica) == {"1"}
            # Then the next run makes its first sync.
            assert proxy.client.post("/pause?mode=keep").status_code == 200
            assert proxy.load("policy-v1", adapter(1)).status_code == 200
            assert proxy.client.post("/resume").status_code == 200
            wait_until(lambda: "0" in traffic.by_replica, what="it is used again")
        assert proxy.client.get("/is_paused").json() == {"is_paused": False}
        wait_quiet(proxy, *replicas)


def test_all_found_paused_hold_rollouts_until_they_are_resumed(replicas: list[SimulatedReplica]) -> None:
    for replica in replicas:
        replica.client.post("/pause?mode=keep").raise_for_status()
    with RunningProxy(*(r.url for r in replicas)) as proxy, ThreadPoolExecutor(1) as pool:
        assert proxy.client.get("/health").status_code == 200
        held = pool.submit(proxy.complete, "sim")
        wait_until(lambda: proxy.client.get("/proxy/live").status_code == 200, what="it goes on living")
        assert [replica.state()["in_flight"] for replica in replicas] == [0, 0]
        assert proxy.client.post("/resume").status_code == 200
        assert held.result() == right_tokens(BASE)


def test_one_paused_behind_the_proxys_back_is_noticed(replicas: list[SimulatedReplica]) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        replicas[1].client.post("/pause?mode=keep").raise_for_status()
        wait_until(lambda: proxy.client.get("/is_paused").json()["is_paused"], what="it is noticed")
        for _ in range(6):
            assert proxy.completion("sim").headers["X-Proxy-Upstream"] == "0"
        replicas[1].client.post("/resume").raise_for_status()
        wait_until(lambda: not proxy.client.get("/is_paused").json()["is_paused"], what="its resume is noticed")


def test_a_replica_that_joins_a_paused_fleet_is_paused(replicas: list[SimulatedReplica]) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.client.post("/pause?mode=wait").status_code == 200
        replicas[1].kill()
        proxy.wait_states("ready", "down")
        replicas[1].restart()
        proxy.wait_states("ready", "ready")
        assert [replica.state()["paused"] for replica in replicas] == ["wait", "wait"]
        assert proxy.client.post("/resume").status_code == 200
        assert [replica.state()["paused"] for replica in replicas] == [None, None]


def test_a_pause_without_an_answer_quarantines_its_replica_until_it_is_read_back(
    replicas: list[SimulatedReplica],
) -> None:
    with (
        FlakyReplica() as flaky,
        RunningProxy(replicas[0].url, flaky.url, PROXY_CALL_TIMEOUT_S="0.4", PROXY_PROBE_S="0.05") as proxy,
    ):
        flaky.spoil("POST /pause", "hangs")
        flaky.spoil("GET /is_paused", "hangs")
        answer = proxy.client.post("/pause?mode=wait")
        assert answer.status_code == 502
        assert flaky.url in answer.json()["error"]["message"]
        assert replicas[0].state()["paused"] is None, "undone"
        assert proxy.states()[1] in ("quarantined", "down")
        assert proxy.complete("sim") == right_tokens(BASE)
        flaky.heal()
        proxy.wait_states("ready", "ready")


def test_what_may_change_base_weights_makes_the_pause_real_first(
    replicas: list[SimulatedReplica], tmp_path: Path
) -> None:
    path = str(write_checkpoint(tmp_path / "model", seed=1))
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": path}}
    urls = [replica.url for replica in replicas]
    with RunningProxy(*urls, PROXY_FORWARD_PATHS="/collective_rpc=all,/weight_info=one") as proxy:
        assert proxy.client.post("/pause?mode=keep&clear_cache=false").status_code == 200
        assert proxy.client.get("/weight_info").status_code == 200
        assert _pauses(replicas) == [0, 0], "asking changes nothing"
        assert proxy.client.post("/collective_rpc", json=rpc).status_code == 200
        for replica in replicas:
            paths = [call["path"] for call in replica.state()["control"]]
            assert paths[-2:] == ["/pause?mode=keep&clear_cache=false", "/collective_rpc"], paths
            assert replica.state()["paused"] == "keep"
        assert proxy.client.get("/weight_info").json() == {"weight_version": "default"}
        assert proxy.client.post("/resume").status_code == 200
        assert [replica.state()["paused"] for replica in replicas] == [None, None]
        assert proxy.client.post("/sleep", json={}).status_code == 404
