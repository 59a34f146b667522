"""The token reaches the replicas, on every call, and nobody else; what clients send stops at the proxy (P8)."""

from __future__ import annotations

import pytest

from proxy.auth import Credentials
from proxy.settings import UpstreamSettings
from proxy.simulator.replica import fingerprint
from tests.simulated.checks import held, right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.simulated.flaky import FlakyReplica
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until

TOKEN = "hf_not_a_real_token"
CLIENT = {"Authorization": "Bearer clients-own", "Cookie": "clients=own", "Proxy-Authorization": "Basic x"}


def test_every_call_carries_it_and_never_the_clients(adapter: Adapters) -> None:
    with (
        simulators(2, api_key=TOKEN) as replicas,
        RunningProxy(*(replica.url for replica in replicas), HF_TOKEN=f" {TOKEN}\n", PROXY_PAUSE="real") as proxy,
    ):
        proxy.client.headers.update(CLIENT)
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        for seed in range(8):
            assert proxy.complete("policy-v1", prompt=[seed] * 9) == right_tokens(adapter(1), prompt=[seed] * 9)
        for path in ("/pause?mode=keep", "/resume", "/reset_prefix_cache"):
            assert proxy.client.post(path).status_code == 200, path
        for path in ("/get_world_size", "/server_info", "/version", "/v1/models"):
            assert proxy.client.get(path).status_code == 200, path
        assert proxy.unload("policy-v1").status_code == 200
        wait_until(lambda: not any("policy-v1" in held(replica) for replica in replicas), what="it is unloaded")
        ours = fingerprint(f"Bearer {TOKEN}")
        for replica in replicas:
            # The test itself talks to /v1/models and /sim/state, with the same key.
            seen = replica.state()["authorization"]
            assert {
                "POST /v1/completions",
                "POST /v1/load_lora_adapter",
                "POST /pause",
                "GET /server_info",
            } <= seen.keys()
            assert {path: given for path, given in seen.items() if given != ours} == {}
        for page in ("/proxy/stats", "/proxy/replicas", "/proxy/policies", "/metrics"):
            assert TOKEN not in proxy.client.get(page).text
        assert TOKEN not in proxy.log()
        wait_quiet(proxy, *replicas)


def test_without_one_nothing_is_sent_and_the_clients_still_stops_here() -> None:
    with simulators(1) as (replica,), RunningProxy(replica.url, HF_TOKEN="") as proxy:
        proxy.client.headers.update(CLIENT)
        proxy.complete("sim")
        proxy.client.post("/pause?mode=wait")
        proxy.client.post("/resume")
        wait_until(lambda: "GET /v1/models" in replica.state()["calls"], what="it was probed")
        seen = replica.state()["authorization"]
        assert {seen[path] for path in ("POST /v1/completions", "POST /resume", "GET /v1/models")} == {None}
        assert "HF_TOKEN is not sent" not in proxy.log()


def test_a_redirect_is_not_followed(adapter: Adapters) -> None:
    with FlakyReplica() as replica, RunningProxy(replica.url, HF_TOKEN=TOKEN, PROXY_PROBE_S="0.05") as proxy:
        replica.spoil("POST /v1/completions", "moved")
        assert proxy.completion("sim").status_code == 307
        replica.spoil("POST /v1/load_lora_adapter", "moved")
        assert proxy.load("policy-v1", adapter(1)).status_code == 500
        replica.spoil("GET /v1/models", "moved")
        seen = len(replica.calls)
        wait_until(lambda: len(replica.calls) > seen + 3, what="it was probed again")
        assert "elsewhere" not in " ".join(replica.calls)


def test_over_plain_http_to_elsewhere_it_is_left_out_with_one_warning() -> None:
    elsewhere = "http://192.0.2.1:8000"  # TEST-NET-1: nobody is there
    with (
        simulators(1) as (replica,),
        RunningProxy(replica.url, elsewhere, HF_TOKEN=TOKEN, PROXY_START_WAIT_S="0") as proxy,
    ):
        proxy.complete("sim")
        warnings = [line for line in proxy.log().splitlines() if "HF_TOKEN is not sent" in line]
        assert len(warnings) == 1
        assert elsewhere in warnings[0] and replica.url not in warnings[0]
        assert TOKEN not in proxy.log()
        proxy.process.kill()  # a probe of that address is still waiting for a connection


@pytest.mark.parametrize(("allowed", "url"), [(True, "http://grp-1:8000"), (False, "http://other:8000")])
def test_the_network_group_gets_it(monkeypatch: pytest.MonkeyPatch, allowed: bool, url: str) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_NETWORK_GROUP_PREFIX", "grp-")
    monkeypatch.setenv("UPSTREAM_URLS", url)
    settings = UpstreamSettings()
    credentials = Credentials(settings.read_token, network_group_prefix=settings.network_group_prefix)
    assert credentials.bearer(url) == (TOKEN if allowed else None)
