"""Replicas are added to a running fleet and removed from it (/proxy/replicas) without losing a rollout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from proxy.demo.processes import free_port
from tests.simulated.checks import (
    BASE,
    Traffic,
    assert_served_by_all,
    held,
    models_of,
    right_tokens,
    wait_quiet,
)
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

KEY = "only-the-operator-knows"


def add(proxy: RunningProxy, url: str, *, query: str = "", **headers: str) -> httpx2.Response:
    return proxy.client.post(f"/proxy/replicas{query}", json={"url": url}, headers=headers)


def remove(proxy: RunningProxy, url: str, *, query: str = "", **headers: str) -> httpx2.Response:
    return proxy.client.request("DELETE", f"/proxy/replicas{query}", json={"url": url}, headers=headers)


def _urls(proxy: RunningProxy) -> list[str]:
    return [replica["url"] for replica in proxy.replicas()]


def test_one_is_added_in_the_middle_of_a_run(adapter: Adapters) -> None:
    with simulators(3) as replicas, RunningProxy(replicas[0].url, replicas[1].url) as proxy:
        policies = {f"policy-v{seed}": adapter(seed) for seed in (1, 2)}
        for name, directory in policies.items():
            assert proxy.load(name, directory).status_code == 200
        with Traffic(proxy, policies, threads=6) as traffic:
            traffic.wait_more(10)
            answer = add(proxy, replicas[2].url + "/")
            assert (answer.status_code, answer.json()["state"]) == (200, "ready")
            assert_served_by_all(replicas, "policy-v2", adapter(2))
            wait_until(lambda: "2" in traffic.by_replica, what="it is used")
            assert proxy.load("policy-v3", adapter(3)).status_code == 200
            traffic.serve("policy-v3", adapter(3))
            traffic.wait_more(20)
        assert add(proxy, replicas[2].url).status_code == 200, "once more changes nothing"
        assert _urls(proxy) == [replica.url for replica in replicas]
        for name, directory in {**policies, "policy-v3": adapter(3)}.items():
            assert_served_by_all(replicas, name, directory)
        wait_quiet(proxy, *replicas)


def test_one_joins_while_a_policy_loads(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(replicas[0].url) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        replicas[0].set_faults(late={"seconds": 60})
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic, ThreadPoolExecutor(1) as pool:
            loading = pool.submit(proxy.load, "policy-v2", adapter(2))
            wait_until(lambda: proxy.policy("policy-v2").get("state") == "loading", what="it is loading")
            # It is not kept out by a policy that the others do not hold yet, but it loads that one before it is ready.
            assert add(proxy, replicas[1].url).status_code == 200
            assert held(replicas[1]).keys() == {"sim", "policy-v1", "policy-v2"}
            assert proxy.policy("policy-v2")["state"] == "loading"
            traffic.wait_more(10)
            replicas[0].clear_faults()
            assert loading.result().status_code == 200
            traffic.serve("policy-v2", adapter(2))
            traffic.wait_more(20)
        assert set(traffic.by_replica) == {"0", "1"}
        assert_served_by_all(replicas, "policy-v2", adapter(2))
        wait_quiet(proxy, *replicas)


def test_a_join_that_takes_long_holds_up_nobody(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(replicas[0].url) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        replicas[1].set_faults(late={"seconds": 60, "name": "policy-v1"})
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            answer = add(proxy, replicas[1].url, query="?wait=false")
            assert answer.status_code == 202
            wait_until(lambda: "cannot load policy-v1" in proxy.replicas()[1]["reason"], what="it says why not")
            for seed in (2, 3):
                assert proxy.load(f"policy-v{seed}", adapter(seed)).status_code == 200
            traffic.wait_more(10)
            assert proxy.states() == ["ready", "joining"]
            replicas[1].clear_faults()
            proxy.wait_states("ready", "ready")
            wait_until(lambda: "1" in traffic.by_replica, what="it is used")
        assert_served_by_all(replicas, "policy-v3", adapter(3))
        wait_quiet(proxy, *replicas)


def test_one_is_removed_and_its_rollouts_finish_there(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(9) as pool:
            pending = [pool.submit(proxy.completion, "policy-v1", max_tokens=150, prompt=[seed]) for seed in range(8)]
            wait_until(lambda: all(replica.state()["in_flight"] > 1 for replica in replicas), what="both have some")
            leaving = pool.submit(remove, proxy, replicas[1].url)
            proxy.wait_states("ready", "draining")
            for seed in range(20, 26):
                answer = proxy.completion("policy-v1", seed=seed)
                assert (answer.status_code, answer.headers["X-Proxy-Upstream"]) == (200, "0")
            assert not leaving.done()
            answers = [one.result() for one in pending]
            assert leaving.result().status_code == 200
        for seed, answer in enumerate(answers):
            assert answer.json()["choices"][0]["token_ids"] == right_tokens(adapter(1), prompt=[seed], count=150)
        assert {answer.headers["X-Proxy-Upstream"] for answer in answers} == {"0", "1"}
        assert proxy.stats()["router"]["retried"] == 0
        assert _urls(proxy) == [replicas[0].url]
        # From now on it is nobody's: no load reaches it, and its state is no concern of /health.
        assert proxy.load("policy-v2", adapter(2)).status_code == 200
        assert "policy-v2" not in held(replicas[1])
        replicas[1].kill()
        assert proxy.client.get("/health").status_code == 200
        wait_quiet(proxy, replicas[0])


def test_the_drain_has_a_limit_and_what_is_left_goes_elsewhere(adapter: Adapters) -> None:
    with (
        simulators(2) as replicas,
        RunningProxy(*(replica.url for replica in replicas), PROXY_DRAIN_TIMEOUT_S="0.3") as proxy,
    ):
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(8) as pool:
            pending = [pool.submit(proxy.completion, "policy-v1", max_tokens=200, prompt=[seed]) for seed in range(8)]
            wait_until(lambda: all(replica.state()["in_flight"] > 1 for replica in replicas), what="both have some")
            assert remove(proxy, replicas[1].url).status_code == 200
            assert "removed with" in proxy.log()
            for seed, one in enumerate(pending):
                assert one.result().status_code == 200, one.result().text
                assert one.result().headers["X-Proxy-Upstream"] == "0"
                tokens = one.result().json()["choices"][0]["token_ids"]
                assert tokens == right_tokens(adapter(1), prompt=[seed], count=200)
        wait_quiet(proxy, *replicas)


def test_the_last_one_is_removed_and_another_takes_its_place(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(replicas[0].url) as proxy, ThreadPoolExecutor(4) as pool:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        assert remove(proxy, replicas[0].url, query="?wait=false").status_code == 202
        wait_until(lambda: not proxy.replicas(), what="the fleet is empty")
        assert proxy.client.get("/health").status_code == 503
        held_back = [pool.submit(proxy.complete, "policy-v1", seed=seed) for seed in range(4)]
        assert add(proxy, replicas[1].url).status_code == 200
        for seed, one in enumerate(held_back):
            assert one.result() == right_tokens(adapter(1), seed=seed)
        assert proxy.client.get("/health").status_code == 200
        wait_quiet(proxy, *replicas)


def test_a_removed_one_may_come_back_even_in_the_middle_of_its_removal(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        with ThreadPoolExecutor(8) as pool:
            pending = [pool.submit(proxy.complete, "policy-v1", max_tokens=100, prompt=[seed]) for seed in range(8)]
            wait_until(lambda: all(replica.state()["in_flight"] > 1 for replica in replicas), what="both have some")
            assert remove(proxy, replicas[1].url, query="?wait=false").status_code == 202
            assert add(proxy, replicas[1].url).status_code == 200
            for seed, one in enumerate(pending):
                assert one.result() == right_tokens(adapter(1), prompt=[seed], count=100)
        wait_until(lambda: _urls(proxy) == [replica.url for replica in replicas], what="it is there once")
        with Traffic(proxy, {"policy-v1": adapter(1)}) as traffic:
            wait_until(lambda: len(traffic.by_replica) == 2, what="both are used")
        wait_quiet(proxy, *replicas)


def test_one_that_never_answers_can_be_added_and_removed() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with SimulatedReplica() as replica, RunningProxy(replica.url, PROXY_LORA_LOAD_TIMEOUT_S="0.5") as proxy:
        answer = add(proxy, dead)
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (504, "not_ready")
        assert "down" in answer.json()["error"]["message"]
        assert proxy.states() == ["ready", "down"]
        assert proxy.complete("sim") == right_tokens(BASE)
        assert remove(proxy, dead).status_code == 200
        assert proxy.states() == ["ready"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"url": 3}', b'{"url": "ftp://x"}', b'{"url": "http://u:p@h"}'])
def test_what_is_no_url_is_refused(body: bytes, proxy: RunningProxy) -> None:
    for method in ("POST", "DELETE"):
        answer = proxy.client.request(method, "/proxy/replicas", content=body)
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (400, "bad_request")
    assert proxy.states() == ["ready", "ready"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_proxy_is_no_replica_of_its_own(proxy: RunningProxy, host: str) -> None:
    before = _urls(proxy)
    answer = add(proxy, f"http://{host}:{proxy.port}", query="?wait=false")
    assert (answer.status_code, _urls(proxy)) == (400, before)
    assert "is the proxy's own address" in answer.json()["error"]["message"]


def test_what_is_not_in_the_fleet_cannot_be_removed(proxy: RunningProxy) -> None:
    answer = remove(proxy, "http://127.0.0.1:9")
    assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (404, "unknown_replica")


def _refused(answer: httpx2.Response) -> bool:
    return (answer.status_code, answer.headers.get("X-Proxy-Error")) == (403, "forbidden")


def test_with_a_key_only_its_bearer_may_change_the_fleet() -> None:
    with simulators(2) as replicas, RunningProxy(replicas[0].url, PROXY_ADMIN_KEY=KEY) as proxy:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": "Bearer"}):
            assert _refused(add(proxy, replicas[1].url, **headers))
            assert _refused(remove(proxy, replicas[0].url, **headers))
        assert _urls(proxy) == [replicas[0].url]
        assert replicas[1].state()["calls"].keys() <= {"GET /health"}, "nobody has looked at it"
        rightful: dict[str, Any] = {"authorization": f"Bearer {KEY}"}
        assert add(proxy, replicas[1].url, **rightful).status_code == 200
        assert remove(proxy, replicas[0].url, **rightful).status_code == 200
        assert _urls(proxy) == [replicas[1].url]
        assert models_of(proxy) == ["sim"]
        assert KEY not in proxy.log()
