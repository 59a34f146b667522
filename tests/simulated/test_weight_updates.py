"""Base weights over NCCL: one group, calls that reach all members or fail together, and no wrong weights afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from proxy.simulator.tokens import base_weights, updated_base_weights
from tests.simulated.checks import BASE, PROMPT, Traffic, right_tokens, wait_quiet
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

GROUP = {"master_address": "10.0.0.1", "master_port": 29501, "packed": True}


@pytest.fixture
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(2, weight_transfer=True, tensor_parallel_size=2) as replicas:
        yield replicas


@pytest.fixture
def proxy(replicas: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    urls = (replica.url for replica in replicas)
    with RunningProxy(*urls, PROXY_WAIT_READY_S="2", PROXY_STALL_S="2") as proxy:
        yield proxy


class Trainer:
    """Sends what TRL sends, and checks that it works unless it is told otherwise."""

    def __init__(self, proxy: RunningProxy) -> None:
        self.proxy = proxy
        self.client = proxy.client

    def init(self) -> httpx2.Response:
        size = self.client.get("/get_world_size").json()["world_size"] + 1
        body = {"init_info": {**GROUP, "rank_offset": 1, "world_size": size}}
        return self.client.post("/init_weight_transfer_engine", json=body)

    def start(self) -> httpx2.Response:
        return self.client.post("/start_weight_update", json={"is_checkpoint_format": True})

    def update(self, step: int) -> httpx2.Response:
        return self.client.post("/update_weights", json={"update_info": info(step)})

    def finish(self) -> httpx2.Response:
        return self.client.post("/finish_weight_update")

    def sync(self, step: int) -> None:
        """Bring the weights of a step to every member."""
        with self.paused():
            for answer in (self.start(), self.update(step), self.finish()):
                assert answer.status_code == 200, answer.text

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.client.post("/pause?mode=keep").raise_for_status()
        try:
            yield
        finally:
            self.client.post("/resume").raise_for_status()


def info(step: int) -> dict[str, Any]:
    return {"names": ["lm_head.weight"], "packed": True, "step": step}


def weights(step: int) -> str:
    return updated_base_weights("sim", info(step))


def weight_calls(replica: SimulatedReplica) -> list[tuple[str, Any]]:
    """Return the weight calls that a replica got, in order, with their bodies."""
    return [
        (call["path"], json.loads(call["body"]) if call["body"] else None)
        for call in replica.state()["control"]
        if "weight" in call["path"]
    ]


def error_of(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_every_replica_gets_its_own_ranks_of_one_world(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    trainer = Trainer(proxy)
    assert trainer.client.get("/get_world_size").json() == {"world_size": 4}
    assert trainer.init().json() == {"message": "Weight transfer initialized"}
    trainer.sync(1)
    for replica, offset in zip(replicas, (1, 3), strict=True):
        assert weight_calls(replica) == [
            ("/init_weight_transfer_engine", {"init_info": {**GROUP, "rank_offset": offset, "world_size": 5}}),
            ("/update_weight_version", {"new_version": "updating"}),
            ("/start_weight_update", {"is_checkpoint_format": True}),
            ("/update_weights", {"update_info": info(1)}),
            ("/finish_weight_update", None),
            ("/update_weight_version", {"new_version": "1"}),
        ]


def test_a_world_of_another_size_is_refused_before_anyone_waits_in_it(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    body = {"init_info": {**GROUP, "rank_offset": 1, "world_size": 4}}
    said = error_of(proxy.client.post("/init_weight_transfer_engine", json=body), 409)
    assert "world_size is 4" in said and "it is 5" in said and replicas[1].url in said
    for wrong in ({}, {"init_info": 3}, {"init_info": {**GROUP, "rank_offset": "1", "world_size": 5}}):
        assert "init_info" in error_of(proxy.client.post("/init_weight_transfer_engine", json=wrong), 400)
    assert [weight_calls(replica) for replica in replicas] == [[], []]


def test_rollouts_are_of_one_version_or_the_next_and_none_is_lost(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    assert proxy.complete("sim") == right_tokens(BASE)  # its prompt's KV is cached now
    for step in range(1, 4):
        trainer.sync(step)
        for replica in replicas:
            assert replica.complete(prompt=PROMPT) == right_tokens(weights(step)), "KV of the old weights was used"
        with Traffic(proxy, {"sim": weights(step)}) as traffic:
            traffic.wait_more(40)
    assert [replica.state()["weight_version"] for replica in replicas] == ["3", "3"]
    wait_quiet(proxy, *replicas)


def test_an_update_without_a_pause_stops_rollouts_for_its_time(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    assert trainer.start().status_code == 200
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(proxy.complete, "sim", seed=seed) for seed in range(4)]
        assert trainer.update(1).status_code == 200
        assert not any(one.done() for one in held)
        assert trainer.finish().status_code == 200
        assert [one.result() for one in held] == [right_tokens(weights(1), seed=seed) for seed in range(4)]
    assert [replica.state()["paused"] for replica in replicas] == [None, None]
    assert proxy.client.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("call", ["start", "update", "finish"])
def test_a_call_that_fails_on_one_fails_for_all_and_nobody_serves_what_is_left(
    replicas: list[SimulatedReplica], proxy: RunningProxy, call: str
) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.sync(1)
    calls = {"start": trainer.start, "update": lambda: trainer.update(2), "finish": trainer.finish}
    with trainer.paused():
        for name, send in calls.items():
            if name == call:
                replicas[1].set_faults(weights_error=True)
                said = error_of(send(), 500)
                assert replicas[1].url in said and "on 1 of 2 replicas" in said
                break
            assert send().status_code == 200
    replicas[1].clear_faults()
    proxy.wait_states("quarantined", "quarantined")
    assert "not finished" in proxy.replicas()[0]["reason"]
    assert proxy.completion("sim").status_code == 503
    assert proxy.client.get("/health").status_code == 200, "only the trainer can mend it"
    trainer.init().raise_for_status()
    trainer.sync(3)
    proxy.wait_states("ready", "ready")
    assert proxy.complete("sim") == right_tokens(weights(3))
    wait_quiet(proxy, *replicas)


def test_a_start_that_nobody_took_has_changed_nothing(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    for replica in replicas:
        replica.set_faults(weights_error=True)
    error_of(trainer.start(), 500)
    for replica in replicas:
        replica.clear_faults()
    assert proxy.states() == ["ready", "ready"]
    assert proxy.complete("sim") == right_tokens(BASE)
    assert [replica.state()["weight_version"] for replica in replicas] == ["default", "default"]


def test_a_member_that_died_fails_the_call_at_once(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    replicas[0].set_faults(weights_hang=True)  # as a member of a collective waits for one that does not come
    replicas[1].kill()
    said = error_of(trainer.start(), 409) if _is_down(proxy, 1) else error_of(trainer.start(), 502)
    assert replicas[1].url in said


def _is_down(proxy: RunningProxy, index: int) -> bool:
    wait_until(lambda: proxy.states()[index] == "down", what="it is seen")
    return True


def test_a_member_that_dies_within_a_call_frees_the_others(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.start().raise_for_status()
    for replica in replicas:
        replica.set_faults(weights_hang=True)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(trainer.update, 1)
        for replica in replicas:
            wait_until(lambda r=replica: "POST /update_weights" in r.state()["calls"], what="it has the call")  # type: ignore[misc]
        replicas[1].kill()
        said = error_of(pending.result(), 502)
    assert replicas[1].url in said
    replicas[0].clear_faults()
    proxy.wait_states("quarantined", "down")


def test_a_caller_that_leaves_has_failed_the_update(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.start().raise_for_status()
    replicas[0].set_faults(weights_hang=True)
    with pytest.raises(httpx2.ReadTimeout):
        trainer.client.post("/update_weights", json={"update_info": info(1)}, timeout=0.5)
    proxy.wait_states("quarantined", "quarantined")
    replicas[0].clear_faults()
    assert proxy.client.get("/is_paused").json() == {"is_paused": False}
    trainer.init().raise_for_status()
    trainer.sync(2)
    assert proxy.complete("sim") == right_tokens(weights(2))


def test_rollouts_of_a_failed_update_are_not_answered_by_what_is_left(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    with ThreadPoolExecutor(4) as pool:
        frozen = [pool.submit(proxy.completion, "sim", seed=seed, max_tokens=200) for seed in range(4)]
        wait_until(lambda: proxy.inflight() == 4, what="they are in flight")
        with trainer.paused():
            trainer.start().raise_for_status()
            replicas[1].set_faults(weights_error=True)
            error_of(trainer.update(1), 500)
        assert {one.result().status_code for one in frozen} <= {502, 503}
    wait_quiet(proxy, *replicas)


def test_a_replica_that_restarts_never_serves_the_original_weights(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.sync(1)
    with Traffic(proxy, {"sim": weights(1)}) as traffic:
        replicas[1].kill()
        replicas[1].restart()
        proxy.wait_states("ready", "quarantined")
        traffic.wait_more(20)
    assert "original base weights" in proxy.replicas()[1]["reason"]
    assert replicas[1].url in error_of(trainer.start(), 409)
    trainer.init().raise_for_status()
    trainer.sync(2)
    proxy.wait_states("ready", "ready")
    with Traffic(proxy, {"sim": weights(2)}) as traffic:
        traffic.wait_more(40)
        # room was kept on the other one for the rest of the groups that it has served alone
        wait_until(lambda: set(traffic.by_replica) == {"0", "1"}, what="both serve")


def test_a_replica_that_comes_later_serves_nothing_before_it_has_the_weights(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.sync(1)
    with simulators(1, weight_transfer=True) as [late]:
        proxy.client.post("/proxy/replicas?wait=false", json={"url": late.url}).raise_for_status()
        proxy.wait_states("ready", "ready", "quarantined")
        trainer.sync(2)
        assert proxy.states() == ["ready", "ready", "quarantined"]
        trainer.init().raise_for_status()
        trainer.sync(3)
        proxy.wait_states("ready", "ready", "ready")
        assert late.complete(prompt=PROMPT) == right_tokens(weights(3))
        proxy.client.request("DELETE", "/proxy/replicas", json={"url": late.url}).raise_for_status()


def test_a_restarted_proxy_serves_the_newest_version_alone(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.sync(1)
    trainer.sync(2)
    proxy.kill()
    replicas[0].kill()
    replicas[0].restart()  # has the original ones, and is the first that the proxy asks
    proxy.start()
    proxy.wait_states("quarantined", "ready")
    with Traffic(proxy, {"sim": weights(2)}) as traffic:
        traffic.wait_more(20)
    assert replicas[0].state()["calls"].get("POST /v1/completions", 0) == 0


def test_a_proxy_that_restarts_between_two_syncs_goes_on(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.sync(1)
    proxy.kill()
    proxy.start()
    trainer.client = proxy.client
    trainer.sync(2)
    assert [replica.state()["weight_version"] for replica in replicas] == ["2", "2"]
    assert proxy.complete("sim") == right_tokens(weights(2))


def test_two_calls_at_a_time_and_calls_out_of_order_are_refused(
    replicas: list[SimulatedReplica], proxy: RunningProxy
) -> None:
    trainer = Trainer(proxy)
    assert "/start_weight_update" in error_of(trainer.update(1), 409)
    assert "/start_weight_update" in error_of(trainer.finish(), 409)
    replicas[0].set_faults(weights_hang=True)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(trainer.init)
        wait_until(
            lambda: "POST /init_weight_transfer_engine" in replicas[0].state()["calls"], what="init is under way"
        )
        assert "still under way" in error_of(trainer.start(), 409)
        replicas[0].clear_faults()
        assert pending.result().status_code == 200
    assert proxy.complete("sim") == right_tokens(base_weights("sim"))


def test_nobody_is_removed_in_the_middle_of_an_update(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.start().raise_for_status()

    def remove(query: str = "") -> httpx2.Response:
        return proxy.client.request("DELETE", f"/proxy/replicas{query}", json={"url": replicas[1].url})

    assert "finish it first" in error_of(remove(), 409)
    trainer.update(1).raise_for_status()
    trainer.finish().raise_for_status()
    trainer.start().raise_for_status()
    assert remove("?force=true").status_code == 200
    assert replicas[1].url in error_of(trainer.update(2), 409), "the call does not wait for it"
    proxy.wait_states("quarantined")


def test_a_version_that_the_trainer_names_is_the_fleets(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.start().raise_for_status()
    trainer.update(1).raise_for_status()
    assert "weight_version" in error_of(trainer.client.post("/finish_weight_update", json={"weight_version": 7}), 400)
    trainer.client.post("/finish_weight_update", json={"weight_version": "step-7"}).raise_for_status()
    assert [replica.state()["weight_version"] for replica in replicas] == ["step-7", "step-7"]
    assert proxy.complete("sim") == right_tokens(weights(1))


def test_a_replica_that_was_only_away_serves_again(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    trainer = Trainer(proxy)
    trainer.init().raise_for_status()
    trainer.sync(1)
    replicas[1].hang()
    proxy.wait_states("ready", "down")
    replicas[1].unhang()
    proxy.wait_states("ready", "ready")
    assert replicas[1].complete(prompt=PROMPT) == right_tokens(weights(1))


def test_a_label_by_hand_is_the_fleets(replicas: list[SimulatedReplica], proxy: RunningProxy) -> None:
    answer = proxy.client.post("/update_weight_version", json={"new_version": "sft-checkpoint"})
    assert answer.json() == {"success": True, "new_version": "sft-checkpoint"}
    assert [replica.state()["weight_version"] for replica in replicas] == ["sft-checkpoint"] * 2
    assert proxy.states() == ["ready", "ready"]
    for wrong in ({}, {"new_version": "updating"}, {"new_version": 3}):
        assert "new_version" in error_of(proxy.client.post("/update_weight_version", json=wrong), 400)
