"""How a replica ends: a dead engine, SIGTERM. Each test uses up a replica, so each shows several things."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.support.adapters import write_broken
from tests.support.replicas import Replica, wait_until

CLOSED_WITHIN_S = 5
ANSWERED_WITHIN_S = 5
GONE_WITHIN_S = 30

ENGINE_DEAD = {
    "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}


def test_an_evicted_adapter_whose_directory_is_gone_kills_the_engine(
    own_replica: Callable[..., Replica], adapter: Callable[..., Path], tmp_path: Path
) -> None:
    replica = own_replica()

    # Before the end: NaN weights load and answer, but their log-probabilities cannot be told.
    replica.load("nan", write_broken(tmp_path / "nan", "nan"))
    assert replica.completion("nan").status_code == 200
    answer = replica.completion("nan", logprobs=0)
    error = {
        "message": "Out of range float values are not JSON compliant",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    assert (answer.status_code, answer.json()) == (400, {"error": error})
    replica.unload("nan")

    path = adapter()
    replica.load("gone", path)
    for seed in range(4):  # max_cpu_loras
        replica.load(f"other-{seed}", adapter(seed))
    shutil.rmtree(path)
    assert replica.completion("other-0").status_code == 200
    assert "gone" in replica.models()
    answer = replica.completion("gone")
    assert (answer.status_code, answer.json()) == (500, {"error": ENGINE_DEAD})
    wait_until(lambda: not replica.accepts(), limit_s=GONE_WITHIN_S, what="the port is closed")
    replica.wait_exit(limit_s=GONE_WITHIN_S)


def test_a_killed_engine_fails_what_is_in_flight(
    own_replica: Callable[..., Replica], adapter: Callable[..., Path]
) -> None:
    replica = own_replica()
    replica.load("slow", adapter())
    with replica.in_flight("slow") as sent, replica.opened_stream(max_tokens=1900) as stream:
        lines = stream.iter_lines()
        next(lines)
        replica.kill_engine()
        *_, last, done = [line for line in lines if line]
        answer = sent.result()
    assert stream.status_code == 200
    assert json.loads(last.removeprefix("data: ")) == {"error": ENGINE_DEAD}
    assert done == "data: [DONE]"
    assert (answer.status_code, answer.text) == (500, json.dumps({"error": ENGINE_DEAD}, separators=(",", ":")))
    wait_until(lambda: not replica.accepts(), limit_s=GONE_WITHIN_S, what="the port is closed")
    replica.wait_exit(limit_s=GONE_WITHIN_S)


def test_sigterm_closes_the_port_at_once_and_aborts_what_is_in_flight_or_leaves_it_hanging(
    own_replica: Callable[..., Replica],
) -> None:
    replica = own_replica()
    with replica.in_flight(n=1) as sent:
        replica.terminate()
        wait_until(lambda: not replica.accepts(), limit_s=CLOSED_WITHIN_S, what="the port is closed")
        if not becomes(sent.done, within_s=ANSWERED_WITHIN_S):
            # vLLM 0.32 loses a race about every second time: its API server drops the engine before the aborts have
            # arrived, then waits for ever for connections that nobody will finish. The simulator has a fault for it.
            assert replica.kind == "vllm"
            return
        answer = sent.result()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    replica.wait_exit(limit_s=GONE_WITHIN_S)


def becomes(condition: Callable[[], bool], *, within_s: float) -> bool:
    try:
        wait_until(condition, limit_s=within_s)
    except AssertionError:
        return False
    return True
