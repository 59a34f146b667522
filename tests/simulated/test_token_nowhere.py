"""Whatever replicas, gates and clients do, the token and the keys are where they belong and nowhere else (P8)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulated.conftest import Adapters
from tests.simulated.flaky import FlakyReplica
from tests.simulated.lying import SESSION, Lie, LyingReplica
from tests.support.addresses import own_address
from tests.support.proxies import RunningProxy
from tests.support.replicas import descendants, wait_until

TOKEN, KEY, ADMIN = "hf_this_is_not_a_real_token", "the-key-of-the-callers", "the-key-of-the-operator"
SECRETS = (TOKEN, KEY, ADMIN, SESSION)
PAGES = ("/proxy/stats", "/proxy/replicas", "/proxy/policies", "/metrics", "/v1/models", "/server_info", "/health")


class LoudProxy(RunningProxy):
    """A proxy with two keys, which logs all that its libraries have to say."""

    within = (sys.executable, "-m", "tests.support.debug_log")


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[FlakyReplica]:
    """Nobody has configured it. It notes who comes."""
    with FlakyReplica() as elsewhere:
        yield elsewhere


@pytest.fixture(scope="module")
def liar() -> Iterator[LyingReplica]:
    with LyingReplica() as liar:
        yield liar


@pytest.fixture(scope="module")
def loud(liar: LyingReplica) -> Iterator[RunningProxy]:
    """A proxy before the liar."""
    environment = {"HF_TOKEN": TOKEN, "PROXY_API_KEY": KEY, "PROXY_ADMIN_KEY": ADMIN, "PROXY_PROBE_S": "0.1"}
    environment |= {"PROXY_WAIT_READY_S": "0.3", "PROXY_LORA_LOAD_TIMEOUT_S": "0.5", "PROXY_FORWARD_PATHS": "/echo=one"}
    with LoudProxy(liar.url, **environment) as proxy:
        proxy.client.headers["Authorization"] = f"Bearer {KEY}"
        yield proxy


def _completion(proxy: RunningProxy, path: Path) -> httpx2.Response:
    return proxy.completion("sim")


def _load(proxy: RunningProxy, path: Path) -> httpx2.Response:
    return proxy.load("policy-v1", path)


def _post(target: str) -> Callable[[RunningProxy, Path], httpx2.Response]:
    return lambda proxy, path: proxy.client.post(target, content=b"{}")


def _as_admin(proxy: RunningProxy, path: Path) -> httpx2.Response:
    return proxy.client.get("/echo", headers={"Authorization": f"Bearer {ADMIN}"})


CALLS: dict[str, Callable[[RunningProxy, Path], httpx2.Response]] = {
    "POST /v1/completions": _completion,
    "POST /v1/load_lora_adapter": _load,
    "POST /pause": _post("/pause?mode=wait"),
    "POST /reset_prefix_cache": _post("/reset_prefix_cache"),
    "POST /init_weight_transfer_engine": _post("/init_weight_transfer_engine"),
    "POST /tokenize": _post("/tokenize"),
    "GET /server_info": lambda proxy, path: proxy.client.get("/server_info"),
    "GET /metrics": lambda proxy, path: proxy.client.get("/proxy/replicas/metrics"),
    "GET /echo": _as_admin,
}

places = st.sampled_from(["http://{0}/x", "//{0}/x", "http://user@{0}/x", "http://127.0.0.1@{0}/", "/\\{0}"])


@pytest.mark.timeout(120)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    call=st.sampled_from(sorted(CALLS)),
    status=st.sampled_from([200, 300, 301, 302, 303, 307, 308, 400, 401, 403, 404, 418, 500, 502, 503]),
    place=st.none() | places,
    host=st.sampled_from([None, "evil.example", "127.0.0.1@evil.example", "[::1]evil.example", "a b", "x" * 300, ""]),
)
def test_a_replica_that_lies_gets_it_and_tells_nobody(
    loud: RunningProxy,
    liar: LyingReplica,
    elsewhere: FlakyReplica,
    adapter: Adapters,
    call: str,
    status: int,
    place: str | None,
    host: str | None,
) -> None:
    address = elsewhere.url.removeprefix("http://")
    wait_until(lambda: loud.states() == ["ready"], limit_s=20, what="it is trusted again")
    told = liar.told
    liar.lies[call] = Lie(status, place.format(address) if place else None, repeats=status != 200)
    if host is not None:
        loud.client.headers["Host"] = host
    try:
        answer = CALLS[call](loud, adapter(1))
    finally:
        loud.client.headers.pop("Host", None)
        liar.lies.clear()
    _says_nothing(answer)
    if call != "GET /metrics":  # a page of those that are up
        assert liar.told > told or answer.headers.get("X-Proxy-Error"), "the lie has been heard, or nobody was asked"
    for page in PAGES:
        _says_nothing(loud.client.get(page))
    assert elsewhere.calls == []
    assert liar.authorizations == {f"Bearer {TOKEN}"}
    assert liar.hosts == {liar.url.removeprefix("http://")}


def _says_nothing(answer: httpx2.Response) -> None:
    said = answer.text + "".join(f"{name}: {value}\n" for name, value in answer.headers.items())
    assert not any(secret in said for secret in SECRETS), said


def test_the_whole_log_of_every_library_holds_none(loud: RunningProxy, liar: LyingReplica) -> None:
    probes = ("GET /v1/models", "GET /health")
    for status in (301, 401, 500):
        liar.lies |= {call: Lie(status, "http://127.0.0.1:9/", repeats=True) for call in probes}
        told = liar.told
        while liar.told < told + 3:
            _says_nothing(loud.client.get("/proxy/replicas"))
        liar.lies.clear()
    log = loud.log()
    assert "DEBUG:httpcore2" in log, "it is as loud as it can be"
    # httpcore2 tells the headers of answers, and what a gate writes there is its own.
    assert [line for line in log.splitlines() if any(secret in line for secret in (TOKEN, KEY, ADMIN))] == []


def test_no_command_line_holds_one(loud: RunningProxy) -> None:
    for pid in (loud.process.pid, *(pid for pid, _ in descendants(loud.process.pid))):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert line and not any(secret.encode() in line for secret in SECRETS)


def test_events_and_the_page_hold_none(loud: RunningProxy) -> None:
    for path in ("/proxy/events", "/proxy/dashboard/stream"):
        with loud.client.stream("GET", path) as answer:
            said = ""
            for piece in answer.iter_text():
                said += piece
                if said.count("\n\n") > 1:
                    break
        assert said and not any(secret in said for secret in SECRETS)


@pytest.mark.parametrize(("allowed", "arrives"), [("0", None), ("1", f"Bearer {TOKEN}")])
def test_over_plain_http_to_another_machine_it_does_not_leave(allowed: str, arrives: str | None) -> None:
    if (address := own_address()) is None:
        pytest.skip("this machine has no address but loopback")
    environment = {"HF_TOKEN": TOKEN, "PROXY_TOKEN_OVER_HTTP": allowed}
    with LyingReplica(address) as replica, RunningProxy(replica.url, **environment) as proxy:
        assert proxy.completion("sim").status_code == 200
        assert proxy.client.get("/server_info").status_code == 200
        assert replica.authorizations == {arrives}
        assert proxy.log().count("HF_TOKEN is not sent to") == (arrives is None)
