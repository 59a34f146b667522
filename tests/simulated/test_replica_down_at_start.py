"""Some or all replicas are not there when the proxy starts: those that are serve, the others join when they come."""

from __future__ import annotations

from proxy.demo.processes import free_port
from tests.simulated.checks import WaitingProxy, assert_served_by_all, models_of, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until


def test_one_of_two_is_down(adapter: Adapters) -> None:
    port = free_port()
    late_url = f"http://127.0.0.1:{port}"
    with SimulatedReplica() as replica, WaitingProxy(late_url, replica.url) as proxy:
        proxy.wait_states("down", "ready")
        health = proxy.client.get("/health")
        assert (health.status_code, health.headers["Retry-After"]) == (503, "1")
        assert late_url in health.json()["error"]["message"]
        # /health waits for everybody, but nobody who asks is kept waiting.
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        assert proxy.complete("policy-v1") == right_tokens(adapter(1))
        with SimulatedReplica(port=port) as late:
            proxy.wait_states("ready", "ready")
            assert proxy.client.get("/health").status_code == 200
            assert_served_by_all([replica, late], "policy-v1", adapter(1))
            wait_quiet(proxy, replica, late)


def test_health_stops_waiting_after_a_while() -> None:
    with (
        SimulatedReplica() as replica,
        RunningProxy(f"http://127.0.0.1:{free_port()}", replica.url, PROXY_START_WAIT_S="1") as proxy,
    ):
        assert proxy.states() == ["down", "ready"]


def test_min_ready_is_asked_for_even_then() -> None:
    with (
        SimulatedReplica() as replica,
        WaitingProxy(
            f"http://127.0.0.1:{free_port()}", replica.url, PROXY_START_WAIT_S="0", PROXY_MIN_READY="2"
        ) as proxy,
    ):
        proxy.wait_states("down", "ready")
        assert proxy.client.get("/health").status_code == 503


def test_all_are_down(adapter: Adapters) -> None:
    port = free_port()
    with WaitingProxy(f"http://127.0.0.1:{port}", PROXY_WAIT_READY_S="0.3") as proxy:
        for path in ("/health", "/v1/models", "/server_info", "/get_world_size"):
            assert proxy.client.get(path).status_code == 503, path
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            assert proxy.client.post(path).status_code == 503, path
        assert proxy.load("policy-v1", adapter(1)).status_code == 503
        assert proxy.completion("policy-v1").status_code == 503
        assert proxy.unload("policy-v1").status_code == 404
        assert proxy.client.get("/proxy/policies").json()["policies"] == []
        with SimulatedReplica(port=port) as replica:
            wait_until(lambda: proxy.client.get("/health").status_code == 200, what="healthy")
            assert models_of(proxy) == ["sim"]
            wait_quiet(proxy, replica)
