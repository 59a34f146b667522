"""What the proxy holds is bounded: long answers are passed on, a full proxy says so, gone clients leave nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx2

from benchmarks import rivals
from tests.simulated.checks import right_tokens, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

BODIES, BODY_BYTES = 24, 2 * 1024 * 1024


def test_an_answer_beyond_the_hold_limit_arrives_whole(pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(pair[0].url, PROXY_HOLD_LIMIT="1000") as proxy:
        assert proxy.load("limits-v1", adapter(1)).status_code == 200
        answer = proxy.completion("limits-v1", max_tokens=300)
        assert answer.status_code == 200 and "X-Proxy-Upstream" in answer.headers
        assert answer.json()["choices"][0]["token_ids"] == right_tokens(adapter(1), count=300)
        wait_quiet(proxy, pair[0])


def test_a_proxy_that_is_full_answers_503_and_recovers(pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(pair[0].url, PROXY_MAX_BUFFER=str(1 << 20)) as proxy, ExitStack() as held:
        assert proxy.load("limits-v2", adapter(2)).status_code == 200
        prompt = [100_000] * 40_000  # 280 KB of text; the simulator refuses it as too long, which costs it little
        body = json.dumps({"model": "limits-v2", "prompt": prompt, "max_tokens": 1}).encode()
        headers = {"content-type": "application/json"}
        fill(proxy, body, held, lambda: _refused(proxy, body, headers))
        held.close()
        wait_until(lambda: not _refused(proxy, body, headers), what="there is room again")
        assert proxy.complete("limits-v2") == right_tokens(adapter(2))
        wait_quiet(proxy, pair[0])


def test_an_answer_that_its_client_does_not_read_takes_room_as_well(pair: list[SimulatedReplica]) -> None:
    asked = {"model": "sim", "prompt": [1], "max_tokens": 1, "user": "x" * (12 << 20)}
    with RunningProxy(pair[0].url, PROXY_MAX_BUFFER=str(16 << 20)) as proxy:

        def is_full() -> bool:
            return proxy.client.post("/v1/completions", json=asked).status_code == 503

        assert not is_full()
        text = json.dumps({"model": "sim", "prompt": "x" * 3_000_000}).encode()
        with begun(proxy, text, path="/tokenize") as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            client.sendall(text[-1:])
            assert client.recv(12) == b"HTTP/1.1 200", "and no more of the 12 MB, of which the network takes a third"
            assert is_full()
        wait_until(lambda: not is_full(), what="there is room again")


def test_a_body_is_held_once(adapter: Adapters) -> None:
    """Though replicas know its policy by another name: PROXY_MAX_BUFFER bounds memory, not half of it."""
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "limits-v4", "messages": messages, "max_tokens": 8, "user": "x" * BODY_BYTES}
    with simulators(1) as (replica,), RunningProxy(replica.url, PROXY_STALL_S="120") as proxy:
        assert proxy.load("limits-v4", adapter(4)).status_code == 200
        process = rivals.Process("proxy", proxy.port, proxy.process.pid)
        with ThreadPoolExecutor(BODIES) as pool:
            assert proxy.client.post("/v1/chat/completions", json=body).status_code == 200
            replica.hang()
            before_mb = process.rss_mb()
            sent: list[Future[httpx2.Response]] = []
            while len(sent) < BODIES:
                sent.append(pool.submit(proxy.client.post, "/v1/chat/completions", json=body))
                wait_until(lambda: proxy.inflight() == len(sent), what="it is on its way")
            grown_mb = process.rss_mb() - before_mb
            replica.unhang()
            assert [one.result().status_code for one in sent] == [200] * BODIES
        assert grown_mb < 1.5 * BODIES * BODY_BYTES / 2**20
        wait_quiet(proxy, replica)


def begun(proxy: RunningProxy, body: bytes, path: str = "/v1/completions") -> socket.socket:
    """Send a request all but its last byte, so that it is held."""
    url = urlsplit(proxy.url)
    connection = socket.create_connection((url.hostname, url.port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[:-1])
    return connection


def fill(proxy: RunningProxy, body: bytes, held: ExitStack, is_full: Callable[[], bool]) -> None:
    """Begin requests until `is_full`, which tries one itself: what begins meanwhile may find no room because of it."""

    def one_more() -> bool:
        if is_full():
            return True
        held.enter_context(begun(proxy, body))
        return False

    wait_until(one_more, what="the proxy is full")


def _refused(proxy: RunningProxy, body: bytes, headers: dict[str, str]) -> bool:
    answer = proxy.client.post("/v1/completions", content=body, headers=headers)
    if answer.status_code != 503:
        return False
    assert answer.headers["Retry-After"] == "1" and "PROXY_MAX_BUFFER" in answer.json()["error"]["message"]
    return True


def test_a_storm_of_clients_that_leave_leaves_nothing_behind(pair: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(*(replica.url for replica in pair)) as proxy:
        assert proxy.load("limits-v3", adapter(3)).status_code == 200
        body = json.dumps({"model": "limits-v3", "prompt": [1, 2, 3], "max_tokens": 1000}).encode()

        def come_and_go(_: int) -> None:
            with begun(proxy, body) as connection:
                connection.sendall(body[-1:])

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(come_and_go, range(2000)))
        wait_until(lambda: proxy.inflight() == 0, limit_s=15, what="no lease is held")
        wait_quiet(proxy, *pair)
        assert proxy.complete("limits-v3") == right_tokens(adapter(3))
