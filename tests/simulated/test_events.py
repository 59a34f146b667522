"""GET /proxy/events and /proxy/replicas: which weights each replica holds, since when, and why not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests.simulated.checks import held, upstream_of, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

Event = dict[str, Any]


@pytest.fixture
def replicas() -> Iterator[list[SimulatedReplica]]:
    with simulators(2) as replicas:
        yield replicas


@contextmanager
def events(proxy: RunningProxy, *, query: str = "", **headers: str) -> Iterator[Iterator[Event]]:
    """Read along, one event at a time."""
    with proxy.client.stream("GET", f"/proxy/events{query}", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        yield _parsed(answer)


def _parsed(answer: httpx2.Response) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields.get("data"):
            event: Event = json.loads(fields["data"])
            assert (fields["id"], fields["event"]) == (str(event["id"]), event["kind"])
            yield event
            fields = {}


def _until(stream: Iterator[Event], kind: str, policy: str | None = None) -> list[Event]:
    """Read up to and with the first event of a kind."""
    seen = []
    for event in stream:
        seen.append(event)
        if event["kind"] == kind and policy in (None, event["policy"]):
            return seen
    raise AssertionError(f"the stream ended before {kind}: {[event['kind'] for event in seen]}")


def test_they_come_in_order_and_go_on_where_a_reader_stopped(
    replicas: list[SimulatedReplica], adapter: Adapters
) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        with events(proxy) as stream:
            began = _until(stream, "replica.ready") + _until(stream, "replica.ready")
            assert {event["replica"] for event in began} == {replica.url for replica in replicas}
            replicas[1].set_faults(late={"attempts": 1})
            assert proxy.load("policy-v1", adapter(1)).status_code == 200
            loaded = _until(stream, "policy.live")
            assert [event["kind"] for event in loaded] == ["policy.announced", "load.late", "policy.live"]
            assert {event["policy"] for event in loaded} == {"policy-v1"}
            assert loaded[1]["replica"] == replicas[1].url and "No adapter found" in loaded[1]["message"]
        every = began + loaded
        assert [event["id"] for event in every] == list(range(1, len(every) + 1))
        assert all(time.time() - 60 < event["at"] <= time.time() + 1 for event in every)
        assert proxy.unload("policy-v1").status_code == 200
        # A browser that lost its connection says what it saw last; a script says it in the query.
        last = str(every[-1]["id"])
        for reader in (events(proxy, **{"Last-Event-ID": last}), events(proxy, query=f"?after={last}")):
            with reader as stream:
                missed = _until(stream, "policy.retired")
            assert missed[0]["id"] == every[-1]["id"] + 1
            assert [event["kind"] for event in missed] == ["policy.retiring", "policy.retired"]
        assert proxy.client.get("/proxy/events?after=x").status_code == 400
        wait_until(lambda: proxy.policy("policy-v1")["files_deletable"], what="it is unloaded")


def test_they_end_with_the_proxy_and_do_not_hold_up_its_end(replicas: list[SimulatedReplica]) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy, ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(proxy.client.get, f"/proxy/events?after={after}") for after in (0, 1_000_000)]
        with events(proxy) as stream:
            _until(stream, "replica.ready")
            began = time.monotonic()
            proxy.process.terminate()
            assert proxy.process.wait(10) == 0
            assert time.monotonic() - began < 5
            assert all(isinstance(event["id"], int) for event in stream), "the stream ends, and not in the middle"
        for reader in readers:
            assert reader.result().status_code == 200


def test_a_reader_that_leaves_is_forgotten(replicas: list[SimulatedReplica], adapter: Adapters) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy:
        for _ in range(20):
            with events(proxy) as stream:
                _until(stream, "replica.ready")
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        wait_quiet(proxy, *replicas)


def test_which_weights_each_replica_holds_since_when_and_why_not(
    replicas: list[SimulatedReplica], adapter: Adapters
) -> None:
    with RunningProxy(*(replica.url for replica in replicas)) as proxy, ThreadPoolExecutor(1) as pool:
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        first, second = proxy.replicas()
        for shown, replica in ((first, replicas[0]), (second, replicas[1])):
            (upstream, holding), *others = shown["policies"].items()
            assert (upstream, others) == (upstream_of(replica, "policy-v1"), [])
            assert holding["path"] == str(adapter(1))
            assert time.time() - 60 < holding["since"] <= time.time()
            assert (shown["state"], shown["missing"], shown["unsure"]) == ("ready", {}, [])
        since = {shown["url"]: shown["policies"][upstream]["since"] for shown in (first, second)}
        # Late on one: the page says how often it was asked, and what it said.
        replicas[1].set_faults(late={"seconds": 60})
        loading = pool.submit(proxy.load, "policy-v2", adapter(2))
        wait_until(lambda: "policy-v2" in held(replicas[0]), what="the other holds it")
        wait_until(
            lambda: any(missing["tries"] > 1 for missing in proxy.replicas()[1]["missing"].values()),
            what="it was asked again",
        )
        (missing,) = proxy.replicas()[1]["missing"].values()
        assert missing["outcome"] == "late" and "No adapter found" in missing["message"]
        assert proxy.policy("policy-v2")["held_by"] == [replicas[0].url]
        replicas[1].clear_faults()
        assert loading.result().status_code == 200
        # Gone: the page says since when, and why.
        replicas[0].kill()
        proxy.wait_states("down", "ready")
        down = proxy.replicas()[0]
        assert down["policies"] == {} and "/health: no answer" in down["reason"]
        assert len(down["missing"]) == 2
        assert down["since"] > since[replicas[0].url]
        assert proxy.replicas()[1]["policies"][upstream]["since"] == since[replicas[1].url], "nothing has changed there"
        replicas[0].restart()
        proxy.wait_states("ready", "ready")
        again = proxy.replicas()[0]
        assert again["missing"] == {} and again["policies"][upstream]["since"] > since[replicas[0].url]
