"""/pause, /resume and /abort_requests, idle and with requests in flight."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.replicas import InFlight, Replica, wait_until

SHORT: dict[str, Any] = {"n": 2, "max_tokens": 1500}
"""In flight for a few seconds: for tests that wait for the end."""


def paused(replica: Replica) -> bool:
    answer: bool = replica.client.get("/is_paused").json()["is_paused"]
    return answer


def pause(replica: Replica, query: str = "mode=keep") -> None:
    answer = replica.client.post(f"/pause?{query}")
    assert (answer.status_code, answer.json()) == (200, {"status": "paused"})


def resume(replica: Replica) -> None:
    answer = replica.client.post("/resume")
    assert (answer.status_code, answer.json()) == (200, {"status": "resumed"})


def reasons(sent: Future[httpx2.Response] | InFlight) -> list[str]:
    answer = sent.result()
    assert answer.status_code == 200, answer.text
    return [choice["finish_reason"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pausing_twice_and_resuming_twice_is_fine(replica: Replica, mode: str) -> None:
    for _ in range(2):
        pause(replica, f"mode={mode}")
        assert paused(replica)
    for _ in range(2):
        resume(replica)
        assert not paused(replica)


def test_a_body_is_ignored(replica: Replica) -> None:
    assert replica.client.post("/pause", json={"mode": "keep"}).json() == {"status": "paused"}


def test_an_unknown_mode(replica: Replica) -> None:
    answer = replica.client.post("/pause?mode=foo")
    found = (
        "{'type': 'literal_error', 'loc': 'query.mode', 'msg': \"Input should be 'abort', 'wait' or 'keep'\", "
        "'input': 'foo', 'ctx': {'expected': \"'abort', 'wait' or 'keep'\"}}"
    )
    error = {"message": f"1 validation error:\n  {found}", "type": "Bad Request", "param": "query.mode", "code": 400}
    assert (answer.status_code, answer.json()) == (400, {"error": error})
    assert not paused(replica)


def test_a_flag_that_is_none(replica: Replica) -> None:
    answer = replica.client.post("/pause?mode=keep&clear_cache=foo")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "query.clear_cache")
    assert not paused(replica)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_new_requests_are_held_while_paused(replica: Replica, mode: str) -> None:
    pause(replica, f"mode={mode}")
    with ThreadPoolExecutor(1) as threads, replica.opened_stream(max_tokens=5) as stream:
        assert stream.status_code == 200  # the headers come at once, the tokens do not
        sent = threads.submit(replica.completion, max_tokens=5)
        assert replica.client.get("/health").status_code == 200
        assert not sent.done()
        resume(replica)
        assert reasons(sent) == ["length"]
        assert stream.read().endswith(b"data: [DONE]\n\n")


def test_loading_and_unloading_work_while_paused(replica: Replica, adapter: Callable[..., Path], name: str) -> None:
    pause(replica)
    assert replica.load(name, adapter()).status_code == 200
    assert name in replica.models()
    assert replica.unload(name).status_code == 200


def test_abort_ends_what_is_in_flight_with_200_and_the_tokens_so_far(replica: Replica) -> None:
    with replica.in_flight(logprobs=0, return_token_ids=True) as sent:
        pause(replica, "mode=abort")
        answer = sent.result()
    assert answer.status_code == 200
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) < 1900
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])


def test_abort_ends_a_stream_with_the_reason_and_done(replica: Replica) -> None:
    for _ in range(5):  # on a busy machine the engine may be through before its server hears of the pause
        with replica.in_flight(), replica.opened_stream(max_tokens=1900) as stream:
            lines = stream.iter_lines()
            next(lines)
            pause(replica, "mode=abort")
            *_, last, done = [line for line in lines if line]
        resume(replica)
        assert done == "data: [DONE]"
        reason = json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"]
        if reason == "abort":
            return
        assert reason == "length"
    pytest.fail("five streams ended by themselves before the pause")


def test_abort_ends_what_is_held_with_no_tokens(replica: Replica) -> None:
    pause(replica)
    held = InFlight(replica.url, {"prompt": [5, 6, 7], "max_tokens": 8, "logprobs": 0, "return_token_ids": True})
    with replica.opened_stream() as stream:  # opened after the other was sent, so the other has arrived
        pause(replica, "mode=abort")
        assert stream.read() == b"data: [DONE]\n\n"
    (choice,) = held.result().json()["choices"]
    held.close()
    assert (choice["finish_reason"], choice["text"], choice["token_ids"]) == ("abort", "", [])
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["logprobs"] == {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    assert paused(replica)


def test_keep_freezes_and_goes_on(replica: Replica) -> None:
    with replica.in_flight(**SHORT) as sent:
        pause(replica)
        assert paused(replica)
        before = replica.metric("vllm:generation_tokens_total")
        assert not sent.done()
        resume(replica)
        assert reasons(sent) == ["length", "length"]
    wait_until(lambda: replica.metric("vllm:generation_tokens_total") > before, what="tokens after the pause")


def test_keep_does_not_change_the_answer(replica: Replica) -> None:
    undisturbed = replica.complete(max_tokens=1900)
    with replica.in_flight(n=1, max_tokens=1900, temperature=0, return_token_ids=True) as sent:
        pause(replica, "mode=keep&clear_cache=false")
        resume(replica)
        assert sent.result().json()["choices"][0]["token_ids"] == undisturbed


@pytest.mark.parametrize(("query", "preempted"), [("mode=keep", 2), ("mode=keep&clear_cache=false", 0)])
def test_keep_drops_the_kv_of_what_runs_unless_told_not_to(replica: Replica, query: str, preempted: int) -> None:
    before = replica.metric("vllm:num_preemptions_total")
    with replica.in_flight(**SHORT) as sent:
        pause(replica, query)
        resume(replica)
        assert reasons(sent) == ["length", "length"]
    wait_until(lambda: replica.metric("vllm:num_preemptions_total") == before + preempted, what="they are counted")


def test_wait_answers_once_everything_has_finished(replica: Replica) -> None:
    with ThreadPoolExecutor(2) as threads, replica.in_flight(**SHORT) as sent:
        pausing = threads.submit(pause, replica, "mode=wait")
        wait_until(lambda: paused(replica) or sent.done(), what="paused")
        held = threads.submit(replica.completion, max_tokens=2)
        assert reasons(sent) == ["length", "length"]
        pausing.result()
        assert paused(replica)
        assert not held.done()
        resume(replica)
        assert reasons(held) == ["length"]


def test_wait_while_frozen_lets_them_finish(replica: Replica) -> None:
    with replica.in_flight(**SHORT) as sent:
        pause(replica, "mode=keep&clear_cache=false")
        pause(replica, "mode=wait")
        assert reasons(sent) == ["length", "length"]
    assert paused(replica)


def test_abort_while_frozen_aborts_what_was_kept(replica: Replica) -> None:
    with replica.in_flight() as sent:
        pause(replica, "mode=keep&clear_cache=false")
        pause(replica, "mode=abort")
        assert reasons(sent) == ["abort"] * 4
    assert paused(replica)


def test_abort_requests(replica: Replica) -> None:
    assert replica.client.post("/abort_requests", json={}).json() == {"status": "aborted", "aborted": 0}
    with replica.in_flight(n=1) as sent:
        answer = replica.client.post("/abort_requests", json={"request_ids": ["nope"]})
        assert answer.json() == {"status": "aborted", "aborted": 1}  # it counts ids, known or not
        assert not sent.done()
        assert replica.client.post("/abort_requests", json={}).json() == {"status": "aborted", "aborted": 1}
        assert reasons(sent) == ["abort"]
    assert not paused(replica)


def test_abort_requests_needs_a_body(replica: Replica) -> None:
    answer = replica.client.post("/abort_requests")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "Invalid JSON format"
