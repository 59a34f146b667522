"""The stream of the status page: history, events and snapshots, resumed after the last event, ended by the proxy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators

Message = tuple[str, str, Any]
"""Kind, id and data of a server-sent event."""


def messages(proxy: RunningProxy, last_id: str = "") -> Iterator[Message]:
    """Read the stream."""
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with proxy.client.stream("GET", "/proxy/dashboard/stream", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            else:
                yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
                fields = {}


def until_snapshot(stream: Iterator[Message]) -> tuple[list[Message], Any]:
    """Return the messages before the next snapshot, and the snapshot."""
    before: list[Message] = []
    for message in stream:
        if message[0] == "snapshot":
            return before, message[2]
        before.append(message)
    raise AssertionError("the stream has ended")


def test_the_stream_tells_everything_and_goes_on_where_it_stopped(adapter: Adapters) -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("math-v1", adapter(1)).status_code == 200
        proxy.complete("math-v1", prompt=[1] * 200)
        stream = messages(proxy)
        (history, *happened), shown = until_snapshot(stream)
        assert history[0] == "history"
        assert len({len(column) for column in history[2]["columns"].values()}) == 1
        assert {kind for kind, _, _ in happened} == {"happened"}
        assert [data["message"] for _, _, data in happened][-1] == "loading -> live"
        assert shown["policies"][0]["name"] == "math-v1"
        assert shown["policies"][0]["slowest"]["tries"] == 1
        assert shown["router"] == proxy.stats()["router"]
        for replica, told in zip(shown["replicas"], proxy.replicas(), strict=True):
            assert {key: replica[key] for key in told} == told
        assert sum(replica["prefix_cache"]["reported"]["prompt_tokens"] for replica in shown["replicas"]) > 100

        last_id = happened[-1][1]
        (_, *again), _ = until_snapshot(messages(proxy, last_id))
        assert again == [], "nothing has happened since"
        process, _, number = last_id.partition("-")
        (_, *resumed), _ = until_snapshot(messages(proxy, f"{process}-{int(number) - 2}"))
        assert resumed == happened[-2:]
        for foreign in (f"1{process}-{number}", "nonsense", f"{process}-x"):
            (_, *all_of_them), _ = until_snapshot(messages(proxy, foreign))
            assert all_of_them == happened

        later = [until_snapshot(stream)[1]["at"] for _ in range(2)]
        assert 0.5 < later[1] - later[0] < 5


def test_an_open_page_does_not_keep_the_proxy_from_stopping() -> None:
    with simulators(1) as (replica,), RunningProxy(replica.url) as proxy:
        stream = messages(proxy)
        until_snapshot(stream)
        began = time.monotonic()
        proxy.process.terminate()
        for _ in stream:
            pass  # it ends, and does not break off
        assert proxy.process.wait(10) == 0
        assert time.monotonic() - began < 8
