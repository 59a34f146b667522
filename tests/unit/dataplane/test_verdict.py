"""What follows from a replica's whole answer, case by case."""

from __future__ import annotations

import json

import pytest

from proxy.dataplane.verdict import Verdict, judge


def error(status: int, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": status}}).encode()


def completion(reason: str, text: str = "") -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason, "token_ids": [1]}
    return json.dumps({"id": "cmpl-1", "choices": [choice]}, separators=(",", ":")).encode()


DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (200, completion("length"), Verdict.DELIVER),
        (200, completion("stop"), Verdict.DELIVER),
        (200, completion("abort"), Verdict.ABORTED),
        (400, error(400, "max_tokens must be at least 1"), Verdict.DELIVER),
        (400, error(400, "Out of range float values are not JSON compliant"), Verdict.NOT_FINITE),
        (401, b'{"error":"Unauthorized"}', Verdict.SHUT_OUT),
        (403, b"", Verdict.SHUT_OUT),
        (404, error(404, "The model `p` does not exist. Valid aliases: base."), Verdict.LOST_POLICY),
        (404, b'{"detail":"Not Found"}', Verdict.DELIVER),
        (429, b"", Verdict.DELIVER),
        (500, error(500, DIED), Verdict.ENGINE_DIED),
        (500, error(500, "list index out of range"), Verdict.FAILED_INSIDE),
        (502, b"", Verdict.BUSY),
        (503, error(503, "The engine is currently busy"), Verdict.BUSY),
        (504, b"", Verdict.BUSY),
    ],
)
def test_what_follows(status: int, body: bytes, verdict: Verdict) -> None:
    assert judge(status, body, client_aborted=False) is verdict


def test_an_abort_that_a_client_asked_for_is_delivered() -> None:
    assert judge(200, completion("abort"), client_aborted=True) is Verdict.DELIVER


def test_a_text_that_speaks_of_aborts_is_not_one() -> None:
    body = completion("stop", text='{"finish_reason":"abort"}')
    assert judge(200, body, client_aborted=False) is Verdict.DELIVER
