"""Calls that change base weights: what a replica without --weight-transfer-config says, and the label it keeps."""

from __future__ import annotations

import pytest

from tests.support.replicas import Replica

SENT = {
    "/init_weight_transfer_engine": {"init_info": {}},
    "/start_weight_update": {"is_checkpoint_format": True},
    "/update_weights": {"update_info": {}},
    "/finish_weight_update": {},
}


@pytest.mark.parametrize("path", SENT)
def test_without_its_flag_every_call_fails_in_the_worker(replica: Replica, path: str) -> None:
    answer = replica.client.post(path, json=SENT[path])
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
    assert replica.client.post("/finish_weight_update").status_code == 500


def test_weight_version_is_what_was_last_set(replica: Replica) -> None:
    answer = replica.client.post("/update_weight_version", json={"new_version": "7"})
    assert answer.json() == {"success": True, "new_version": "7"}
    assert replica.client.get("/weight_info").json() == {"weight_version": "7"}


def test_weight_version_needs_a_version(replica: Replica) -> None:
    answer = replica.client.post("/update_weight_version", json={})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body.new_version"
