"""What broke peers in production (tests/FIELD.md), where no test of another name shows that it cannot here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest

from proxy.contract import RELOAD_PATH
from proxy.simulator.checkpoints import write_checkpoint
from tests.simulated.checks import TOKENS, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import LONG, InFlight, SimulatedReplica, simulators, wait_until
from tests.support.wire import Wire


@pytest.fixture
def whole(pair: list[SimulatedReplica]) -> Iterator[list[SimulatedReplica]]:
    """The pair, without faults before and after."""
    yield pair
    for replica in pair:
        replica.clear_faults()


def test_sglang_25811_clients_that_name_unknown_policies_shut_nobody_out(
    proxy: RunningProxy, pair: list[SimulatedReplica]
) -> None:
    assert {proxy.completion(f"nobody-v{number}").status_code for number in range(40)} == {404}
    assert all(proxy.complete("sim") == right_tokens("base:sim") for _ in range(12))
    assert proxy.states() == ["ready", "ready"]


@pytest.mark.parametrize("status", [429, 503])
def test_sglang_39464_a_busy_replica_is_not_a_broken_one(whole: list[SimulatedReplica], status: int) -> None:
    with RunningProxy(*(replica.url for replica in whole)) as proxy:
        for replica in whole:
            replica.set_faults(generations_status=status)
        assert {proxy.completion("sim").status_code for _ in range(40)} == {status}
        assert proxy.states() == ["ready", "ready"] and proxy.inflight() == 0
        for replica in whole:
            replica.clear_faults()
        assert proxy.complete("sim") == right_tokens("base:sim"), "at once, not after a breaker's time"


def test_vllm_router_197_probes_leave_the_counts_of_what_is_in_flight_alone(
    proxy: RunningProxy, pair: list[SimulatedReplica]
) -> None:
    def probes() -> int:
        counts: list[int] = [replica.state()["calls"].get("GET /health", 0) for replica in pair]
        return min(counts)

    def still_counted() -> bool:
        assert proxy.inflight() == 1 and not rollout.done()
        return probes() > before + 3

    rollout = InFlight(proxy.url, {"model": "sim", "prompt": [1, 2], **LONG})
    wait_until(lambda: proxy.inflight() == 1, what="it is in flight")
    before = probes()
    wait_until(still_counted, what="several probes of each replica")
    rollout.close()
    wait_quiet(proxy, *pair)


def test_verl_7846_a_second_resume_reaches_no_replica() -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.client.post("/pause?mode=abort").status_code == 200
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: proxy.client.post("/resume").status_code, range(4)))
        assert answers == [200] * 4
        assert [replica.state()["calls"].get("POST /resume", 0) for replica in replicas] == [1, 1]


def test_nemo_rl_4018_new_base_weights_meet_no_kv_of_the_old_ones(tmp_path: Path) -> None:
    old, new = (write_checkpoint(tmp_path / f"run-v{version}", seed=version) for version in (1, 2))
    with simulators(2, model=str(old)) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        answer = proxy.client.post(RELOAD_PATH, json={"name": new.name, "path": str(new)})
        assert answer.status_code == 200, answer.text
        for replica in replicas:
            asked = [str(call) for call in replica.state()["control"]]
            resets = [place for place, call in enumerate(asked) if "reset_running_requests" in call]
            reads = [place for place, call in enumerate(asked) if "collective_rpc" in call]
            assert resets and reads and max(resets) > max(reads), "after the weights were read, and running ones too"


def test_production_stack_448_a_thousand_rollouts_at_once(
    proxy: RunningProxy, pair: list[SimulatedReplica], adapter: Adapters
) -> None:
    assert proxy.load("field-v1", adapter(1)).status_code == 200
    body = json.dumps({"model": "field-v1", "prompt": [100, 200, 300], "max_tokens": TOKENS, "return_token_ids": True})
    right = right_tokens(adapter(1))

    async def all_at_once() -> list[bool]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one() -> bool:
                headers = {"content-type": "application/json"}
                async with session.post(f"{proxy.url}/v1/completions", data=body, headers=headers) as answer:
                    told = await answer.json()
                    return bool(answer.status == 200 and told["choices"][0]["token_ids"] == right)

            return await asyncio.gather(*(one() for _ in range(1000)))

    assert all(asyncio.run(all_at_once()))
    assert proxy.client.get("/health").status_code == 200
    wait_quiet(proxy, *pair)


def test_miles_1334_a_repeated_rollout_keeps_its_id(whole: list[SimulatedReplica]) -> None:
    with (
        Wire(whole[0].url) as one,
        Wire(whole[1].url) as other,
        RunningProxy(one.url, other.url) as proxy,
    ):
        for replica in whole:
            replica.set_faults(generations_status=503)
        one.forget()
        other.forget()
        body = {"model": "sim", "prompt": [5], "max_tokens": 1}
        assert proxy.client.post("/v1/completions", json=body).status_code == 503
        ids = [[dict(sent.headers)["x-request-id"] for sent in wire.requests()] for wire in (one, other)]
        assert ids[0] == ids[1] and len(ids[0]) == 1
