"""A replica answers what no vLLM would: it stays out, the others go on, and the proxy lives."""

from __future__ import annotations

from tests.simulated.checks import BASE, Traffic, assert_served_by_all, held, wait_quiet
from tests.simulated.conftest import Adapters
from tests.simulated.flaky import GARBAGE, FlakyReplica
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until


def test_garbage_of_every_kind_in_its_probes(pair: list[SimulatedReplica]) -> None:
    kinds = [*GARBAGE, "cuts"]
    spoiled = [("GET /v1/models", how) for how in kinds] + [("GET /server_info", how) for how in kinds[1::2]]
    with (
        FlakyReplica() as flaky,
        RunningProxy(pair[0].url, flaky.url, PROXY_PROBE_S="0.05", PROXY_START_WAIT_S="0") as proxy,
    ):
        proxy.wait_states("ready", "ready")
        # Its rollouts are refused throughout, so that every answer can be checked.
        flaky.spoil("POST /v1/completions", "refuses")
        with Traffic(proxy, {"sim": BASE}, threads=1) as traffic:
            for call, how in spoiled:
                flaky.spoil("GET /health", "refuses")
                proxy.wait_states("ready", "down")
                flaky.spoil(call, how)
                del flaky.spoiled["GET /health"]
                seen = flaky.calls.count(call)
                wait_until(lambda c=call, s=seen: flaky.calls.count(c) > s, what=f"{call} answers {how}")  # type: ignore[misc]
                for page in ("/v1/models", "/server_info", "/proxy/replicas"):
                    assert proxy.client.get(page).status_code == 200
                assert proxy.states()[1] == "joining" or call != "GET /v1/models", how
                del flaky.spoiled[call]
            proxy.wait_states("ready", "ready")
            traffic.wait_more(5)
        wait_quiet(proxy, pair[0])


def test_control_calls_that_one_replica_answers_with_garbage(pair: list[SimulatedReplica]) -> None:
    with FlakyReplica() as flaky, RunningProxy(pair[0].url, flaky.url) as proxy:
        for how in ("html", "empty", "null", "list", "object", "binary"):
            flaky.spoil("GET /get_world_size", how)
            answer = proxy.client.get("/get_world_size")
            assert answer.status_code == 502, how
            assert flaky.url in answer.json()["error"]["message"]
        flaky.heal()
        assert proxy.client.get("/get_world_size").json() == {"world_size": 2}


def test_loads_that_one_replica_answers_with_garbage(pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with (
        FlakyReplica() as flaky,
        RunningProxy(pair[0].url, flaky.url, PROXY_CALL_TIMEOUT_S="0.3", PROXY_LORA_LOAD_TIMEOUT_S="0.8") as proxy,
    ):
        for how in ("html", "moved", "refuses", "cuts", "hangs"):
            flaky.spoil("POST /v1/load_lora_adapter", how)
            answer = proxy.load(f"policy-{how}", adapter(1))
            flaky.heal()
            assert answer.status_code == 500, (how, answer.text)
            assert flaky.url in answer.json()["error"]["message"]
            assert f"policy-{how}" not in held(pair[0])
            proxy.wait_states("ready", "ready")
            assert proxy.load(f"policy-{how}", adapter(1)).status_code == 200
            assert_served_by_all(pair[:1], f"policy-{how}", adapter(1))
            assert proxy.unload(f"policy-{how}").status_code == 200
            wait_until(lambda h=how: f"policy-{h}" not in held(pair[0]), what="it is unloaded")  # type: ignore[misc]


def test_rollouts_that_one_replica_answers_with_garbage(pair: list[SimulatedReplica]) -> None:
    with FlakyReplica() as flaky, RunningProxy(pair[0].url, flaky.url) as proxy:
        for number, how in enumerate(("moved", "cuts", "refuses")):
            flaky.spoil("POST /v1/completions", how)
            before = flaky.calls.count("POST /v1/completions")
            statuses = {proxy.completion("sim", prompt=[number, prompt]).status_code for prompt in range(6)}
            # New prompts each time: known ones would stay where they were answered. A redirect is the replica's
            # answer and is not followed: the token must not go where it points.
            assert statuses == ({200, 307} if how == "moved" else {200})
            assert flaky.calls.count("POST /v1/completions") > before
            flaky.heal()
            proxy.wait_states("ready", "ready")
        wait_quiet(proxy, pair[0])
