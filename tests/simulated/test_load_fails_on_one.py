"""One replica refuses a policy: it is taken back from the others, nobody sees it, and the caller learns why (P2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.simulator.adapters import write_adapter
from tests.simulated.checks import (
    Traffic,
    assert_held_by_none,
    assert_served_by_all,
    models_of,
    right_tokens,
    unloads_of,
    wait_quiet,
)
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until


@pytest.fixture(autouse=True)
def clean(pair: list[SimulatedReplica]) -> Iterator[None]:
    yield
    for replica in pair:
        replica.clear_faults()


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 503, "body": "busy"},
        {"status": 400, "body": {"detail": "no"}},
        {"status": 404, "body": {"detail": "Not Found"}},
        {"status": 200, "body": "Success, said the replica, and forgot it"},
        {"status": 302, "body": "elsewhere"},
    ],
)
def test_it_is_rolled_back(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters, fault: dict[str, Any]
) -> None:
    name = f"refused-{fault['status']}"
    pair[1].set_faults(load_error=fault)
    unloads = unloads_of(pair[0], name)
    answer = proxy.load(name, adapter(1))
    assert answer.status_code == 500, answer.text
    assert answer.headers["X-Proxy-Error"] == "load_failed"
    assert pair[1].url in answer.json()["error"]["message"]
    statuses = {result["replica"]: result["status"] for result in answer.json()["replicas"]}
    assert statuses == {pair[0].url: "rolled_back", pair[1].url: "failed"}
    assert unloads_of(pair[0], name) == unloads + 1
    assert_held_by_none(pair, name)
    assert name not in models_of(proxy)
    assert proxy.completion(name).status_code == 404
    assert proxy.policy(name)["files_deletable"]
    pair[1].clear_faults()
    assert proxy.load(name, adapter(2)).status_code == 200
    assert_served_by_all(pair, name, adapter(2))
    assert proxy.complete(name) == right_tokens(adapter(2))
    assert proxy.states() == ["ready", "ready"]
    wait_quiet(proxy, *pair)


def test_a_policy_that_no_replica_takes(pair: list[SimulatedReplica], proxy: RunningProxy, tmp_path: Path) -> None:
    answer = proxy.load("rank-128", write_adapter(tmp_path / "rank-128", seed=1, rank=128))
    assert answer.status_code == 400
    assert "rank 128 is above 64" in answer.json()["error"]["message"]
    assert_held_by_none(pair, "rank-128")


def test_a_late_replica_stops_waiting_when_another_refuses(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    pair[0].set_faults(late={"seconds": 60})
    pair[1].set_faults(load_error={"status": 500})
    answer = proxy.load("hopeless", adapter(1))
    assert answer.status_code == 500
    assert_held_by_none(pair, "hopeless")


def test_other_policies_are_served_meanwhile(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    assert proxy.load("steady", adapter(3)).status_code == 200
    pair[1].set_faults(load_error={"status": 500, "name": "shaky"})
    with Traffic(proxy, {"steady": adapter(3)}) as traffic:
        for _ in range(10):
            assert proxy.load("shaky", adapter(4)).status_code == 500
        traffic.wait_more(10)
    assert_held_by_none(pair, "shaky")


def test_a_replica_already_holds_the_name(pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters) -> None:
    # Someone loaded it on one replica by hand: whose weights these are is not known, so they must not be served.
    assert pair[1].load("by-hand", adapter(5)).status_code == 200
    assert proxy.load("by-hand", adapter(6)).status_code == 200
    wait_until(lambda: "by-hand" not in pair[1].models(), what="the other one is gone")
    assert_served_by_all(pair, "by-hand", adapter(6))
    with Traffic(proxy, {"by-hand": adapter(6)}) as traffic:
        traffic.wait_more(20)


def test_what_cannot_work_is_refused_before_a_replica_hears_of_it(
    pair: list[SimulatedReplica], proxy: RunningProxy, adapter: Adapters
) -> None:
    def loads() -> list[int]:
        return [replica.state()["calls"].get("POST /v1/load_lora_adapter", 0) for replica in pair]

    before, path = loads(), str(adapter(1))
    for body, said in [
        ({"lora_name": "x", "lora_path": path, "load_inplace": True}, "load_inplace"),
        ({"lora_name": "sim", "lora_path": path}, "base model"),
        ({"lora_name": "x", "lora_path": "policies/x"}, "absolute"),
        ({"lora_name": "x", "lora_path": f"{path}/../../x"}, ".."),
        ({"lora_name": "", "lora_path": path}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": 7, "lora_path": path}, "lora_name"),
        ([], "body"),
    ]:
        answer = proxy.client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400, (body, answer.text)
        assert said in answer.json()["error"]["message"]
    assert proxy.client.post("/v1/load_lora_adapter", content=b"{").status_code == 400
    assert proxy.client.post("/v1/load_lora_adapter", content=b"").status_code == 400
    assert loads() == before
