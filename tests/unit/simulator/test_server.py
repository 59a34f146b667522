"""The simulator as a process: its faults, what it remembers, how it ends. What it shares with vLLM is in tests/vllm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from proxy.simulator.adapters import write_adapter
from proxy.simulator.replica import fingerprint
from proxy.simulator.tokens import adapter_weights, base_weights, expected_tokens
from tests.support.replicas import SimulatedReplica, simulators, wait_until


@pytest.fixture(scope="module")
def shared() -> Iterator[SimulatedReplica]:
    with SimulatedReplica(decode_step_s=0.002) as replica:
        yield replica


@pytest.fixture
def replica(shared: SimulatedReplica) -> Iterator[SimulatedReplica]:
    yield shared
    shared.clear_faults()
    shared.client.post("/resume")
    for name in list(shared.models())[1:]:
        shared.unload(name)


@pytest.fixture
def own() -> Iterator[SimulatedReplica]:
    with SimulatedReplica(decode_step_s=0.002) as replica:
        yield replica


def statuses(replica: SimulatedReplica, path: Path, count: int) -> list[int]:
    return [replica.load("a", path).status_code for _ in range(count)]


def test_answers_can_be_foretold(replica: SimulatedReplica, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", seed=1)
    replica.load("a", path)
    prompt = [5, 6, 7]
    assert replica.complete("a", prompt=prompt, seed=9) == expected_tokens(adapter_weights(path), prompt, 9, 8)
    assert replica.complete(prompt=prompt) == expected_tokens(base_weights("sim"), prompt, None, 8)


def test_late(replica: SimulatedReplica, tmp_path: Path) -> None:
    replica.set_faults(late={"attempts": 2})
    assert statuses(replica, write_adapter(tmp_path / "a", seed=1), 3) == [404, 404, 200]


def test_late_answers_in_vllms_words(replica: SimulatedReplica) -> None:
    replica.set_faults(late={"seconds": 60})
    answer = replica.load("a", "/lora/run/a")
    assert answer.json()["error"]["message"] == "Loading lora a failed: No adapter found for /lora/run/a"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no_weights", "'/lora/a doesn't contain tensors'"),
        ("truncated", "file not fully covered"),
        ("empty_weights", "header too small"),
        ("bad_config", "Expecting ':' delimiter"),
        ("empty_config", "Expecting value"),
    ],
)
def test_torn(replica: SimulatedReplica, kind: str, words: str) -> None:
    replica.set_faults(torn={"attempts": 1, "kind": kind})
    answer = replica.load("a", "/lora/a")
    assert answer.status_code == 500
    assert words in answer.json()["error"]["message"]
    assert replica.load("a", "/lora/a").status_code == 404


def test_a_failing_load_with_a_body_of_its_own(replica: SimulatedReplica) -> None:
    for body, shown in [("plain", "plain"), ({"x": 1}, '{"x":1}')]:
        replica.set_faults(load_error={"status": 503, "body": body})
        answer = replica.load("a", "/lora/a")
        assert (answer.status_code, answer.text) == (503, shown)


def test_a_slow_load_holds_up_nobody_else(replica: SimulatedReplica, tmp_path: Path) -> None:
    replica.set_faults(load_delay_s=0.5)
    with ThreadPoolExecutor(1) as threads:
        start = time.monotonic()
        load = threads.submit(replica.load, "a", write_adapter(tmp_path / "a", seed=1))
        replica.complete()
        assert not load.done()
        assert load.result().status_code == 200
        assert time.monotonic() - start >= 0.5


def test_unloads_can_fail_and_take_long(replica: SimulatedReplica, tmp_path: Path) -> None:
    replica.load("a", write_adapter(tmp_path / "a", seed=1))
    replica.set_faults(unload_status=500)
    assert replica.unload("a").status_code == 500
    assert "a" in replica.models()
    replica.set_faults(unload_status=None, unload_delay_s=0.3)
    start = time.monotonic()
    assert replica.unload("a").status_code == 200
    assert time.monotonic() - start >= 0.3
    assert "a" not in replica.models()


def test_generations_can_be_refused(replica: SimulatedReplica) -> None:
    replica.set_faults(generations_status=503)
    answer = replica.completion()
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "Service Unavailable")


def test_answers_can_be_wrong_or_aborted(replica: SimulatedReplica) -> None:
    replica.set_faults(wrong_weights="other")
    assert replica.complete(prompt=[5, 6, 7]) == expected_tokens("other", [5, 6, 7], None, 8)
    replica.set_faults(wrong_weights=None, abort_answers=True)
    assert replica.completion().json()["choices"][0]["finish_reason"] == "abort"


def test_a_hang_and_its_end(replica: SimulatedReplica) -> None:
    replica.hang()
    assert not replica.answers("/is_paused", within_s=0.2)
    assert replica.answers("/health", within_s=5)
    replica.unhang()
    assert replica.answers("/is_paused", within_s=5)


def test_a_misspelt_fault_is_refused(replica: SimulatedReplica) -> None:
    assert replica.client.post("/sim/faults", json={"hagn": True}).status_code == 422


def test_faults_are_shown_and_cleared(replica: SimulatedReplica) -> None:
    replica.set_faults(slow=2, late={"attempts": 1})
    shown = replica.client.get("/sim/faults").json()
    assert (shown["slow"], shown["late"]["attempts"]) == (2, 1)
    replica.clear_faults()
    assert replica.client.get("/sim/faults").json()["late"] is None


def test_it_remembers_what_it_was_asked(own: SimulatedReplica, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", seed=1)
    own.client.post(
        "/v1/load_lora_adapter",
        json={"lora_name": "a", "lora_path": str(path)},
        headers={"authorization": "Bearer secret"},
    )
    own.client.post("/pause?mode=keep&clear_cache=false")
    own.client.post("/resume")
    own.complete("a", seed=3)
    own.unload("a")
    state = own.state()
    assert [call["path"] for call in state["control"]] == [
        "/v1/load_lora_adapter",
        "/pause?mode=keep&clear_cache=false",
        "/resume",
        "/v1/unload_lora_adapter",
    ]
    load = state["control"][0]
    assert load["method"] == "POST"
    assert str(path) in load["body"]
    assert load["headers"]["authorization"] == fingerprint("Bearer secret") != "Bearer secret"
    assert state["control"][1]["headers"]["authorization"] is None
    (rollout,) = state["rollouts"]
    assert (rollout["model"], rollout["seed"], rollout["prompt_tokens"]) == ("a", 3, 3)
    assert (state["loads"], state["unloads"], state["finished"], state["in_flight"]) == (1, {"a": 1}, 1, 0)
    assert state["calls"]["POST /v1/completions"] == 1
    assert state["authorization"]["POST /v1/completions"] is None


def test_it_shows_its_adapters(replica: SimulatedReplica, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", seed=1)
    replica.load("a", path)
    shown = replica.state()["adapters"]["a"]
    assert shown == {"path": str(path), "digest": adapter_weights(path), "in_memory": True}


def test_a_client_that_goes_away_is_noticed(replica: SimulatedReplica) -> None:
    aborted = replica.state()["aborted"]
    with replica.opened_stream(max_tokens=3000) as stream:
        next(stream.iter_lines())
    wait_until(lambda: replica.state()["aborted"] == aborted + 1, limit_s=2, what="aborted")
    assert replica.state()["in_flight"] == 0


def test_a_dead_engine_ends_the_process_with_1(own: SimulatedReplica) -> None:
    own.kill_engine()
    assert own.wait_exit(limit_s=5) == 1


def test_exit_cuts_connections_off(own: SimulatedReplica) -> None:
    with own.opened_stream(max_tokens=3000) as stream:
        lines = stream.iter_lines()
        next(lines)
        with pytest.raises(httpx2.TransportError):
            own.client.post("/sim/faults", json={"exit": True})
        with pytest.raises(httpx2.TransportError):
            list(lines)


def test_it_comes_back_empty_on_the_same_port(own: SimulatedReplica, tmp_path: Path) -> None:
    own.load("a", write_adapter(tmp_path / "a", seed=1))
    url, instance = own.url, own.state()["instance_id"]
    own.kill()
    own.restart()
    assert own.url == url
    assert own.state()["instance_id"] != instance
    assert list(own.models()) == ["sim"]


def test_sigterm_can_get_stuck(own: SimulatedReplica) -> None:
    own.set_faults(stuck_at_sigterm=True)
    with own.in_flight(n=1) as sent:
        own.terminate()
        wait_until(lambda: not own.accepts(), limit_s=5, what="the port is closed")
        assert not sent.done()
        assert own.is_running()


def test_several_start_with_one_call() -> None:
    with simulators(2, model="m") as replicas:
        assert [list(replica.models()) for replica in replicas] == [["m"], ["m"]]
        assert replicas[0].url != replicas[1].url


def test_many_short_rollouts_at_once(own: SimulatedReplica) -> None:
    def rollout(seed: int) -> bool:
        tokens = own.complete(prompt=[seed % 7 + 1] * 50, max_tokens=16, seed=seed)
        return tokens == expected_tokens(base_weights("sim"), [seed % 7 + 1] * 50, seed, 16)

    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(rollout, range(400)))
    assert own.state()["finished"] == 400


def test_in_async_code_it_starts_off_the_loop(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        async with SimulatedReplica() as replica:
            return list(await asyncio.to_thread(replica.models))

    assert asyncio.run(scenario()) == ["sim"]


def test_settings_that_do_not_exist_do_not_start() -> None:
    start: Callable[[], object] = SimulatedReplica(max_lora=3).__enter__
    with pytest.raises(AssertionError, match="did not start"):
        start()
