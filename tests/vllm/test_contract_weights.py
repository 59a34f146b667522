"""Calls that change base weights: what a replica without --weight-transfer-config says, the label it keeps, and how it
reads a checkpoint in place of what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from proxy.controlplane.answer import Answer
from proxy.controlplane.replica_api import needs_restart, sees_no_checkpoint
from proxy.simulator.checkpoints import write_checkpoint
from tests.support.base_model import BaseModel
from tests.support.replicas import Replica, wait_until
from tests.support.tiny_model import tiny_model
from tests.vllm.conftest import Pool

Reload = Callable[[Path], httpx2.Response]

CLOSE = {"Connection": "close"}
"""vLLM's server closes the connection on which a worker's failure was answered: the next call would be cut off."""

SENT = {
    "/init_weight_transfer_engine": {"init_info": {}},
    "/start_weight_update": {"is_checkpoint_format": True},
    "/update_weights": {"update_info": {}},
    "/finish_weight_update": {},
}


@pytest.mark.parametrize("path", SENT)
def test_without_its_flag_every_call_fails_in_the_worker(replica: Replica, path: str) -> None:
    answer = replica.client.post(path, json=SENT[path], headers=CLOSE)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "Call to collective_rpc method failed: Worker failed with error 'Weight transfer not configured. "
        "Please set weight_transfer_config to enable weight transfer.', please check the stack trace above for the "
        "root cause",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert replica.complete() == replica.complete(), "and the replica is as it was"


@pytest.mark.parametrize(
    ("path", "field"), [("/init_weight_transfer_engine", "init_info"), ("/update_weights", "update_info")]
)
def test_what_is_missing_is_named(replica: Replica, path: str, field: str) -> None:
    answer = replica.client.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"body.{field}")


def test_finish_needs_no_body(replica: Replica) -> None:
    assert replica.client.post("/finish_weight_update", headers=CLOSE).status_code == 500


def test_weight_version_is_what_was_last_set(replica: Replica) -> None:
    answer = replica.client.post("/update_weight_version", json={"new_version": "7"})
    assert answer.json() == {"success": True, "new_version": "7"}
    assert replica.client.get("/weight_info").json() == {"weight_version": "7"}


def test_weight_version_needs_a_version(replica: Replica) -> None:
    answer = replica.client.post("/update_weight_version", json={})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body.new_version"


@pytest.fixture
def checkpoint(kind: str, tmp_path: Path) -> Callable[[int], Path]:
    """A factory of whole models with other weights, in several files."""

    def write(seed: int) -> Path:
        if kind == "simulator":
            return write_checkpoint(tmp_path / f"model-{seed}", seed=seed, shards=3)
        model = BaseModel()
        model.change(seed)
        return model.save(tmp_path / f"model-{seed}", shard_size="400KB")

    return write


@pytest.fixture
def reload(replica: Replica, kind: str, pool: Pool) -> Iterator[Reload]:
    """Read a checkpoint in place of the base weights. The replica that is shared gets its own ones back."""

    def read(path: Path) -> httpx2.Response:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        return replica.client.post("/collective_rpc", json=body, headers=CLOSE)

    yield read
    if kind == "vllm":
        read(tiny_model()).raise_for_status()
        replica.client.post("/reset_prefix_cache").raise_for_status()
    else:
        pool.spoiled.add(kind)


def test_a_reload_as_the_proxy_does_it(
    replica: Replica, reload: Reload, checkpoint: Callable[[int], Path], prompt: list[int]
) -> None:
    original = replica.complete(prompt=prompt)
    label = replica.client.get("/weight_info").json()
    with replica.in_flight(n=2, max_tokens=400) as sent:
        assert replica.client.post("/pause?mode=keep").json() == {"status": "paused"}
        answer = reload(checkpoint(1))
        assert (answer.status_code, answer.json()) == (200, {"results": [None]})
        assert replica.client.get("/weight_info").json() == label, "the label is another call's"
        reset = replica.client.post("/reset_prefix_cache?reset_running_requests=true")
        assert reset.json() == {"success": True}, "although rollouts stand still in it"
        replica.client.post("/update_weight_version", json={"new_version": "1~run-v1"}).raise_for_status()
        assert not sent.done()
        assert replica.client.post("/resume").json() == {"status": "resumed"}
        assert [choice["finish_reason"] for choice in sent.result().json()["choices"]] == ["length"] * 2
    assert replica.client.get("/weight_info").json() == {"weight_version": "1~run-v1"}
    assert replica.cached_tokens(prompt=prompt) == 0
    assert replica.complete(prompt=prompt) != original


def test_adapters_stay_through_a_reload(
    replica: Replica, reload: Reload, checkpoint: Callable[[int], Path], loaded: Callable[[], str]
) -> None:
    name = loaded()
    assert reload(checkpoint(1)).status_code == 200
    assert name in replica.models()
    replica.complete(name)


def _nothing(path: Path) -> Path:
    return path.parent / "nowhere"


def _no_weights(path: Path) -> Path:
    for file in path.glob("*.safetensors"):
        file.unlink()
    return path


def _no_second_shard(path: Path) -> Path:
    sorted(path.glob("*.safetensors"))[1].unlink()
    return path


@pytest.mark.parametrize("lose", [_nothing, _no_weights, _no_second_shard])
def test_what_is_not_there_yet_can_be_read_later(
    replica: Replica, reload: Reload, checkpoint: Callable[[int], Path], lose: Callable[[Path], Path]
) -> None:
    before = replica.complete()
    replica.client.post("/pause?mode=keep").raise_for_status()
    answer = reload(lose(checkpoint(1)))
    assert answer.status_code == 500 and sees_no_checkpoint(Answer(500, answer.text)), answer.text
    assert reload(checkpoint(2)).status_code == 200
    replica.client.post("/resume").raise_for_status()
    assert replica.complete() != before


def test_a_generation_after_nothing_was_found_kills_the_engine(
    own_replica: Callable[..., Replica], tmp_path: Path
) -> None:
    replica = own_replica()
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "nowhere")}}
    answer = replica.client.post("/collective_rpc", json=body, headers=CLOSE)
    assert answer.status_code == 500
    assert replica.completion().status_code == 500
    replica.wait_exit(limit_s=30)


def test_a_checkpoint_that_breaks_off_tears_the_model_for_good(
    own_replica: Callable[..., Replica], checkpoint: Callable[[int], Path]
) -> None:
    replica = own_replica()
    whole, torn = checkpoint(1), checkpoint(2)
    file = sorted(torn.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])
    replica.client.post("/pause?mode=keep").raise_for_status()
    answers = []
    for path in (torn, whole):
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        answers.append(replica.client.post("/collective_rpc", json=body, headers=CLOSE))
    assert [answer.status_code for answer in answers] == [500, 500]
    assert "Error while deserializing header" in answers[0].text
    assert not sees_no_checkpoint(Answer(500, answers[0].text))
    assert needs_restart(Answer(500, answers[1].text)), answers[1].text
    replica.client.post("/resume").raise_for_status()
    assert replica.completion().status_code == 500
    replica.wait_exit(limit_s=30)


def test_nobody_asks_the_engine_anything_while_it_reads(
    replica: Replica, reload: Reload, checkpoint: Callable[[int], Path]
) -> None:
    path = checkpoint(1)
    replica.client.post("/pause?mode=keep").raise_for_status()
    replica.hang()
    try:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(reload, path)
            wait_until(lambda: not replica.answers("/is_paused", within_s=1.5), what="it has begun")
            assert not replica.answers("/weight_info", within_s=1.5)
            assert replica.answers("/health", within_s=5)
            replica.unhang()
            assert pending.result().status_code == 200
    finally:
        replica.unhang()
    assert replica.client.get("/is_paused").json() == {"is_paused": True}


def test_another_method_fails_in_the_worker_and_none_is_refused(replica: Replica) -> None:
    answer = replica.client.post("/collective_rpc", json={"method": "no_such_thing"}, headers=CLOSE)
    assert answer.status_code == 500 and "has no attribute 'no_such_thing'" in answer.json()["error"]["message"]
    answer = replica.client.post("/collective_rpc", json={}, headers=CLOSE)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "Missing 'method' in request body")
