"""A rollout has limits: so many at once (PROXY_MAX_INFLIGHT), and so long each (PROXY_ROLLOUT_TIMEOUT_S)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest

from benchmarks import rivals
from tests.simulated.checks import right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.simulated.test_limits import begun, fill
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until

LIMIT = 4

REFUSED, BODY_BYTES = 400, 60_000
"""As much of a body as the server takes in before it asks whether somebody wants it."""


def test_one_too_many_is_told_to_come_again(pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(pair[0].url, PROXY_MAX_INFLIGHT=str(LIMIT)) as proxy, ExitStack() as held:
        assert proxy.load("many-v1", adapter(1)).status_code == 200
        body = json.dumps({"model": "many-v1", "prompt": [1], "max_tokens": 1}).encode()
        fill(proxy, body, held, lambda: proxy.completion("many-v1").status_code == 503)
        refused = proxy.completion("many-v1")
        assert (refused.headers["Retry-After"], refused.headers["X-Proxy-Error"]) == ("1", "overloaded")
        assert "PROXY_MAX_INFLIGHT" in refused.json()["error"]["message"]
        assert proxy.load("many-v2", adapter(2)).status_code == 200, "control calls are no rollouts"
        held.close()
        wait_until(lambda: proxy.completion("many-v1").status_code == 200, what="there is room again")
        assert proxy.complete("many-v2") == right_tokens(adapter(2))
        wait_quiet(proxy, pair[0])


def test_a_refused_one_leaves_its_connection_whole(pair: list[SimulatedReplica]) -> None:
    with RunningProxy(pair[0].url, PROXY_MAX_INFLIGHT="1") as proxy, ExitStack() as held:
        body = json.dumps({"model": "sim", "prompt": [1], "max_tokens": 1, "user": "x" * 300_000}).encode()
        fill(proxy, body, held, lambda: proxy.completion("sim").status_code == 503)
        statuses = [proxy.client.post("/v1/completions", content=body).status_code for _ in range(3)]
        assert statuses == [503] * 3
        held.close()
        wait_until(lambda: proxy.completion("sim").status_code == 200, what="there is room again")
        wait_quiet(proxy, pair[0])


def test_what_is_refused_takes_no_memory(pair: list[SimulatedReplica]) -> None:
    with RunningProxy(pair[0].url, PROXY_MAX_INFLIGHT="1") as proxy, ExitStack() as held:
        body = json.dumps({"model": "sim", "prompt": [1], "max_tokens": 1, "user": "x" * BODY_BYTES}).encode()
        fill(proxy, body, held, lambda: proxy.completion("sim").status_code == 503)
        process = rivals.Process("proxy", proxy.port, proxy.process.pid)
        before_mb = process.rss_mb()
        for _ in range(REFUSED):
            client = held.enter_context(begun(proxy, body))
            client.sendall(body[-1:])
            assert client.recv(1024).startswith(b"HTTP/1.1 503 ")
        assert process.rss_mb() - before_mb < 0.5 * REFUSED * BODY_BYTES / 2**20
        held.close()
        wait_quiet(proxy, pair[0])


def test_a_rollout_that_takes_too_long_ends(pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(*(r.url for r in pair), PROXY_ROLLOUT_TIMEOUT_S="0.5") as proxy:
        assert proxy.load("long-v1", adapter(1)).status_code == 200
        assert proxy.complete("long-v1") == right_tokens(adapter(1))
        late = proxy.completion("long-v1", max_tokens=2000)
        assert (late.status_code, late.headers["X-Proxy-Error"]) == (504, "too_long")
        assert "PROXY_ROLLOUT_TIMEOUT_S" in late.json()["error"]["message"]
        wait_quiet(proxy, *pair)  # and its replica was told


def test_so_does_a_stream_and_it_does_not_look_whole(pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(*(r.url for r in pair), PROXY_ROLLOUT_TIMEOUT_S="0.5") as proxy:
        assert proxy.load("long-v1", adapter(1)).status_code == 200
        asked = {"model": "long-v1", "prompt": [1, 2], "max_tokens": 2000, "stream": True}
        with (
            proxy.client.stream("POST", "/v1/completions", json=asked) as stream,
            pytest.raises(httpx2.RemoteProtocolError),
        ):
            list(stream.iter_lines())
        wait_quiet(proxy, *pair)


def test_the_limit_of_open_files_is_raised_or_told(pair: list[SimulatedReplica]) -> None:
    with _Narrow(pair[0].url) as proxy:
        assert "may open 300 files" in proxy.log() and "PROXY_MAX_INFLIGHT" in proxy.log()
        with ThreadPoolExecutor(8) as pool:  # more than the soft limit leaves
            held = [pool.submit(proxy.completion, "sim", max_tokens=300) for _ in range(8)]
            wait_until(lambda: proxy.inflight() == 8, what="all are in flight")
            assert all(one.result().status_code == 200 for one in held)


class _Narrow(RunningProxy):
    within = ("bash", "-c", 'ulimit -Sn 24; ulimit -Hn 300; exec "$@"', "-")
