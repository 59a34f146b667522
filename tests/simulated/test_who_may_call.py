"""PROXY_API_KEY and PROXY_ADMIN_KEY on a running proxy: who gets in, who does not, and what the start says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from proxy.contract import RELOAD_PATH, REPLICAS_PATH
from tests.simulated.checks import BASE, WaitingProxy, right_tokens
from tests.simulated.conftest import Adapters
from tests.support.addresses import own_address
from tests.support.proxies import RunningProxy, proxy_command
from tests.support.replicas import SimulatedReplica, simulators
from trainer_client import AnnounceError, TrainerClient

FIRST, SECOND, ADMIN = "first-of-the-keys", "second-of-the-keys", "only-the-operator-knows"

OPEN = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/proxy/live"), ("GET", "/proxy/ready")]
CLOSED = [
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate")),
    *(("POST", path) for path in ("/tokenize", "/detokenize", "/v1/completions/render")),
    *(("POST", path) for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/resume")),
    *(("POST", path) for path in ("/abort_requests", "/reset_prefix_cache", "/init_weight_transfer_engine")),
    *(("POST", path) for path in ("/update_weights", REPLICAS_PATH, RELOAD_PATH, "/is_sleeping")),
    *(("GET", path) for path in ("/", "/v1/models", "/version", "/server_info", "/load", "/is_paused", "/metrics")),
    *(("GET", path) for path in ("/proxy/stats", REPLICAS_PATH, "/proxy/policies", "/proxy/replicas/metrics")),
    *(("GET", path) for path in ("/proxy/events", "/proxy/dashboard", "/proxy/dashboard/stream", "/is_sleeping")),
    *(("GET", path) for path in ("/health/", "//health", "/proxy/live/../stats", "/%68ealth/x", "/no/such/path")),
    ("DELETE", REPLICAS_PATH),
    ("OPTIONS", "/v1/completions"),
    ("HEAD", "/proxy/stats"),
]


def refusal(answer: httpx2.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.headers.get("X-Proxy-Error")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked(pair: list[SimulatedReplica]) -> Iterator[RunningProxy]:
    """A proxy with two keys and one for its administrator, which has opened a path of vLLM."""
    keys = {"PROXY_API_KEY": f"{FIRST}, {SECOND}", "PROXY_ADMIN_KEY": ADMIN, "PROXY_FORWARD_PATHS": "/is_sleeping=one"}
    with RunningProxy(*(replica.url for replica in pair), **keys) as proxy:
        yield proxy
        assert not any(key in proxy.log() for key in (FIRST, SECOND, ADMIN))


def test_whether_it_is_up_is_told_to_everybody(locked: RunningProxy) -> None:
    for method, path in OPEN:
        assert locked.client.request(method, path).status_code == 200, path


def test_for_everything_else_a_key_is_asked(locked: RunningProxy) -> None:
    for method, path in CLOSED:
        for headers in ({}, bearer("wrong")):
            answer = locked.client.request(method, path, headers=headers)
            assert refusal(answer) == (401, "unauthorized"), (method, path)
            assert answer.headers["WWW-Authenticate"].startswith("Basic realm="), "browsers ask for a password then"
            if method != "HEAD":
                assert "PROXY_API_KEY" in answer.json()["error"]["message"]


def test_a_body_that_is_refused_costs_nothing_and_the_connection_lives(locked: RunningProxy) -> None:
    large = b"x" * 8_000_000
    assert refusal(locked.client.post("/v1/completions", content=large)) == (401, "unauthorized")
    assert locked.client.post("/ping", content=large).status_code == 200
    assert locked.client.get("/proxy/stats", headers=bearer(FIRST)).status_code == 200


@pytest.mark.parametrize("key", [FIRST, SECOND, ADMIN])
def test_each_key_is_enough_and_goes_no_further(
    locked: RunningProxy, pair: list[SimulatedReplica], adapter: Adapters, key: str
) -> None:
    with httpx2.Client(base_url=locked.url, trust_env=False, auth=("anybody", key)) as client:
        for headers in (bearer(key), {}):  # what is given by hand counts; else Basic
            body = {"lora_name": "policy-v1", "lora_path": str(adapter(1))}
            assert client.post("/v1/load_lora_adapter", json=body, headers=headers).status_code == 200
            asked: dict[str, Any] = {"model": "policy-v1", "prompt": [1, 2], "max_tokens": 4, "temperature": 0}
            asked["return_token_ids"] = True
            answer = client.post("/v1/completions", json=asked, headers={**headers, "X-Api-Key": key})
            assert answer.json()["choices"][0]["token_ids"] == right_tokens(adapter(1), prompt=[1, 2], count=4)
            for path in ("/proxy/stats", "/metrics", "/proxy/dashboard", "/v1/models", "/version", "/server_info"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 200 and key not in answer.text, path
            unloaded = client.post("/v1/unload_lora_adapter", json={"lora_name": "policy-v1"}, headers=headers)
            assert unloaded.status_code == 200
    for replica in pair:
        assert set(replica.state()["authorization"].values()) == {None}


def test_the_fleet_is_for_the_admin_key_alone(locked: RunningProxy, pair: list[SimulatedReplica]) -> None:
    calls = (("POST", REPLICAS_PATH), ("DELETE", REPLICAS_PATH), ("POST", RELOAD_PATH), ("GET", "/is_sleeping"))
    for method, path in calls:
        answer = locked.client.request(method, path, json={"url": pair[0].url}, headers=bearer(FIRST))
        assert refusal(answer) == (403, "forbidden"), path
        assert "send PROXY_ADMIN_KEY as a bearer token" in answer.json()["error"]["message"]
    answer = locked.client.post(REPLICAS_PATH, json={"url": pair[0].url}, headers=bearer(ADMIN))
    assert answer.status_code == 200
    assert refusal(locked.client.post(RELOAD_PATH, json={}, headers=bearer(ADMIN))) == (400, "bad_request")
    assert locked.client.get("/is_sleeping", headers=bearer(ADMIN)).headers.get("X-Proxy-Error") is None
    with httpx2.Client(base_url=locked.url, trust_env=False, auth=("admin", ADMIN)) as browser:
        answer = browser.post(REPLICAS_PATH, json={"url": pair[0].url})
        assert refusal(answer) == (403, "forbidden"), "a browser sends its password for any page that asks"


def test_pages_of_other_sites_can_do_nothing(locked: RunningProxy, proxy: RunningProxy) -> None:
    elsewhere = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    for target, key in ((locked, bearer(FIRST)), (proxy, {})):
        for path in ("/pause?mode=abort", "/v1/load_lora_adapter", "/v1/completions", REPLICAS_PATH):
            answer = target.client.post(path, content=b"{}", headers={**elsewhere, **key})
            assert refusal(answer) == (403, "cross_site"), path
            assert "http://evil.example" in answer.json()["error"]["message"]
    assert proxy.client.get("/is_paused").json() == {"is_paused": False}


def test_a_name_that_leads_here_by_a_trick_of_dns_cannot_change_the_fleet(
    proxy: RunningProxy, pair: list[SimulatedReplica]
) -> None:
    rebound = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
    answer = proxy.client.post(REPLICAS_PATH, json={"url": "https://evil.example"}, headers=rebound)
    assert refusal(answer) == (403, "forbidden") and "web page" in answer.text
    assert [replica["url"] for replica in proxy.replicas()] == [replica.url for replica in pair]


def test_keys_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{FIRST}\n{SECOND}\n")
    with simulators(1) as (replica,), RunningProxy(replica.url, PROXY_API_KEY_FILE=str(file)) as proxy:
        assert refusal(proxy.completion("sim")) == (401, "unauthorized")
        for key in (FIRST, SECOND):
            proxy.client.headers.update(bearer(key))
            assert proxy.complete("sim") == right_tokens(BASE)


def test_the_trainer_and_the_command_line_send_their_key(
    locked: RunningProxy, adapter: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"store": tmp_path, "run": "keys", "max_staleness": 1}
    with (
        TrainerClient(locked.url, **options) as keyless,
        pytest.raises(AnnounceError, match=r"HTTP 401.*PROXY_API_KEY"),
    ):
        keyless.publish(adapter(1), step=1)
    with TrainerClient(locked.url, api_key=SECOND, **options) as client:
        policy = client.publish(adapter(1), step=1)
        assert [known.name for known in client.policies() if known.state == "live"] == [policy.name]
    assert _lora_sync("status", "--proxy", locked.url, "--json").returncode == 1
    monkeypatch.setenv("PROXY_API_KEY", f"{FIRST},{SECOND}")
    assert json.loads(_lora_sync("status", "--proxy", locked.url, "--json").stdout)["current"] == policy.name
    assert policy.name in _lora_sync("policies", "--proxy", locked.url, "--retire", "keys").stdout


def _lora_sync(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from trainer_client.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=40)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PROXY_REQUIRE_KEY": "1"}, "PROXY_REQUIRE_KEY is set, but there is no key"),
        ({"PROXY_REQUIRE_KEY": "1", "PROXY_API_KEY": "", "PROXY_ADMIN_KEY": ADMIN}, "but there is no key"),
        ({"PROXY_API_KEY": " , "}, "PROXY_API_KEY holds no key"),
        ({"PROXY_API_KEY": f"{FIRST},schl\u00fcssel"}, "PROXY_API_KEY holds characters"),
        ({"PROXY_ADMIN_KEY": f"{ADMIN},{FIRST}"}, "PROXY_ADMIN_KEY holds several keys"),
        ({"PROXY_API_KEY_FILE": "/no/such/file"}, "PROXY_API_KEY_FILE names /no/such/file, which cannot be read"),
        ({"PROXY_API_KEY_FILE": "/dev/null"}, "PROXY_API_KEY_FILE holds no key"),
    ],
)
def test_keys_that_protect_nothing_do_not_start(environment: dict[str, str], said: str) -> None:
    ended = proxy_command({"UPSTREAM_URLS": "http://127.0.0.1:9", **environment})
    assert ended.returncode == 64 and said in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not any(key in ended.stderr for key in (FIRST, ADMIN, "schl"))


def _outside(proxy: RunningProxy) -> httpx2.Client:
    if (address := own_address()) is None:
        pytest.skip("this machine has no address but loopback")
    return httpx2.Client(base_url=f"http://{address}:{proxy.port}", trust_env=False)


def test_an_open_port_without_a_key_is_told_at_the_start_and_shuts_out_administrators() -> None:
    with SimulatedReplica() as replica, WaitingProxy(replica.url, PROXY_HOST="0.0.0.0") as proxy:
        proxy.wait_states("ready")
        assert proxy.log().count("PROXY_API_KEY is not set, and the proxy listens on 0.0.0.0") == 1
        with _outside(proxy) as outside:
            assert outside.get(REPLICAS_PATH).status_code == 200
            for method in ("POST", "DELETE"):
                answer = outside.request(method, REPLICAS_PATH, json={"url": replica.url})
                assert refusal(answer) == (403, "forbidden")
                message = answer.json()["error"]["message"]
                assert outside.base_url.host in message and "set PROXY_ADMIN_KEY" in message
        assert proxy.client.post(REPLICAS_PATH, json={"url": replica.url}).status_code == 200


def test_a_key_alone_makes_nobody_elsewhere_an_administrator() -> None:
    environment = {"PROXY_HOST": "0.0.0.0", "PROXY_API_KEY": FIRST, "PROXY_REQUIRE_KEY": "1"}
    with SimulatedReplica() as replica, RunningProxy(replica.url, **environment) as proxy:
        proxy.client.headers.update(bearer(FIRST))
        assert "PROXY_API_KEY is not set" not in proxy.log()
        with _outside(proxy) as outside:
            answer = outside.post(REPLICAS_PATH, json={"url": replica.url}, headers=bearer(FIRST))
            assert refusal(answer) == (403, "forbidden")
        assert proxy.client.post(REPLICAS_PATH, json={"url": replica.url}).status_code == 200
