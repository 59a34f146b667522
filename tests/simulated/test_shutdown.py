"""SIGTERM: no new rollouts, those in flight finish, exit status 0; whoever cannot wait asks for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.demo.processes import free_port
from tests.simulated.checks import held, right_tokens
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until


@pytest.fixture(scope="module")
def replica() -> Iterator[SimulatedReplica]:
    with SimulatedReplica(max_loras=32, max_cpu_loras=64) as replica:
        yield replica


def _refuses(proxy: RunningProxy) -> bool:
    try:
        socket.create_connection(("127.0.0.1", proxy.port), timeout=1).close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_with_nothing_in_flight(replica: SimulatedReplica, number: signal.Signals) -> None:
    with RunningProxy(replica.url) as proxy:
        began = time.monotonic()
        assert proxy.stop(number) == 0
        assert time.monotonic() - began < 5


def test_before_any_replica_answers() -> None:
    proxy = RunningProxy(f"http://127.0.0.1:{free_port()}")
    proxy.start(healthy=False)
    assert proxy.stop() == 0
    assert "Traceback" not in proxy.log()


@pytest.mark.parametrize("stream", [False, True])
def test_rollouts_in_flight_finish(replica: SimulatedReplica, adapter: Adapters, stream: bool) -> None:
    with RunningProxy(replica.url) as proxy:
        assert proxy.load(f"drain-{stream}", adapter(1)).status_code == 200
        with ThreadPoolExecutor(5) as pool:
            pending = [
                pool.submit(proxy.completion, f"drain-{stream}", max_tokens=60, seed=seed, stream=stream)
                for seed in range(4)
            ]
            wait_until(lambda: proxy.inflight() == 4, what="they are in flight")
            proxy.process.send_signal(signal.SIGTERM)
            wait_until(lambda: _refuses(proxy), what="it listens no more")
            assert proxy.process.poll() is None
            for seed, one in enumerate(pending):
                answer = one.result()
                assert answer.status_code == 200
                if stream:
                    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
                    assert events.pop() == "[DONE]"
                    tokens = [t for event in events for t in json.loads(event)["choices"][0]["token_ids"]]
                else:
                    tokens = answer.json()["choices"][0]["token_ids"]
                assert tokens == right_tokens(adapter(1), seed=seed, count=60)
        assert proxy.process.wait(5) == 0
        assert replica.state()["in_flight"] == 0


def test_the_drain_has_a_limit(replica: SimulatedReplica) -> None:
    proxy = RunningProxy(replica.url, PROXY_SHUTDOWN_S="0").start()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(proxy.completion, "sim", max_tokens=3000)
        wait_until(lambda: proxy.inflight() == 1, what="it is in flight")
        began = time.monotonic()
        assert proxy.stop() == 0
        assert time.monotonic() - began < 5
        answer = pending.result()
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (503, "stopping")
        assert "Traceback" not in proxy.log()
    wait_until(lambda: replica.state()["in_flight"] == 0, what="the replica stops generating")


@pytest.mark.parametrize("call", ["load", "pause"])
def test_control_calls_under_way_are_told(adapter: Adapters, call: str) -> None:
    with SimulatedReplica() as replica:
        proxy = RunningProxy(replica.url, PROXY_SHUTDOWN_S="0").start()
        with ThreadPoolExecutor(2) as pool:
            if call == "load":
                replica.set_faults(load_delay_s=30)
                pending = pool.submit(proxy.load, "stops-v1", adapter(1))
                wait_until(lambda: proxy.policy("stops-v1").get("state") == "loading", what="it is loading")
            else:
                pool.submit(proxy.completion, "sim", max_tokens=3000)
                wait_until(lambda: proxy.inflight() == 1, what="a rollout is in flight")
                pending = pool.submit(proxy.client.post, "/pause?mode=wait")
                wait_until(lambda: "POST /pause" in replica.state()["calls"], what="the replica waits for the rollout")
            assert proxy.stop() == 0
            answer = pending.result()
            assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (503, "stopping"), answer.text
        assert "Traceback" not in proxy.log(), proxy.log()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(
    replica: SimulatedReplica, first: signal.Signals, second: signal.Signals
) -> None:
    proxy = RunningProxy(replica.url).start()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(proxy.completion, "sim", max_tokens=3000)
        wait_until(lambda: proxy.inflight() == 1, what="it is in flight")
        proxy.process.send_signal(first)
        wait_until(lambda: _refuses(proxy), what="it listens no more")
        began = time.monotonic()
        assert proxy.stop(second) == 128 + second
        assert time.monotonic() - began < 5
        assert pending.exception() is not None or pending.result().status_code >= 500
    wait_until(lambda: replica.state()["in_flight"] == 0, what="the replica stops generating")


def test_as_systemd_stops_it(replica: SimulatedReplica) -> None:
    with RunningProxy(replica.url) as proxy, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(proxy.complete, "sim", max_tokens=70)
        wait_until(lambda: proxy.inflight() == 1, what="it is in flight")
        proxy.process.send_signal(signal.SIGTERM)
        proxy.process.send_signal(signal.SIGCONT)
        assert pending.result() == right_tokens("base:sim", count=70)
        assert proxy.process.wait(5) == 0


def _namespaces() -> bool:
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode == 0


def test_as_docker_stops_it(replica: SimulatedReplica) -> None:
    """As the first process of a container, to which a signal without a handler does nothing."""
    if not _namespaces():
        pytest.skip("no PID namespaces here")
    proxy = RunningProxy(replica.url)
    proxy.within = ("unshare", "--pid", "--fork", "--kill-child")
    with proxy, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(proxy.complete, "sim", max_tokens=70)
        wait_until(lambda: proxy.inflight() == 1, what="it is in flight")
        children = Path(f"/proc/{proxy.process.pid}/task/{proxy.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert pending.result() == right_tokens("base:sim", count=70)
        assert proxy.process.wait(5) == 0


def test_a_signal_while_it_starts_is_not_lost() -> None:
    moments: dict[str, Callable[[RunningProxy], bool]] = {
        "it imports what it needs": _handles_sigterm,
        "it has the port, and begins to build its rooms": lambda proxy: not _refuses(proxy),
    }
    for moment, has_come in moments.items():
        proxy = RunningProxy(f"http://127.0.0.1:{free_port()}")
        proxy.spawn()
        wait_until(lambda p=proxy, h=has_come: h(p), what=moment)  # type: ignore[misc]
        assert "listening" not in proxy.log()
        assert proxy.stop() == 0, moment
        assert "Traceback" not in proxy.log()


def _handles_sigterm(proxy: RunningProxy) -> bool:
    status = Path(f"/proc/{proxy.process.pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught & 1 << (signal.SIGTERM - 1))


def test_while_an_unload_waits_for_its_rollouts(replica: SimulatedReplica, adapter: Adapters) -> None:
    with RunningProxy(replica.url) as proxy, ThreadPoolExecutor(1) as pool:
        assert proxy.load("going", adapter(1)).status_code == 200
        pending = pool.submit(proxy.complete, "going", max_tokens=60)
        wait_until(lambda: proxy.inflight() == 1, what="it is in flight")
        assert proxy.unload("going").status_code == 200
        proxy.process.send_signal(signal.SIGTERM)
        assert pending.result() == right_tokens(adapter(1), count=60)
        assert proxy.process.wait(5) == 0
        assert "going" not in held(replica)


def test_while_a_load_waits_for_late_files(replica: SimulatedReplica, adapter: Adapters) -> None:
    replica.set_faults(late={"seconds": 1})
    try:
        with RunningProxy(replica.url) as proxy, ThreadPoolExecutor(1) as pool:
            loading = pool.submit(proxy.load, "coming", adapter(1))
            wait_until(lambda: proxy.policy("coming").get("state") == "loading", what="it is loading")
            proxy.process.send_signal(signal.SIGTERM)
            assert loading.result().status_code == 200
            assert proxy.process.wait(5) == 0
    finally:
        replica.clear_faults()
