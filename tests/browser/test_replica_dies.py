"""The page follows a replica that dies and comes back, and a proxy that starts anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.browser.conftest import OpenPage, shoot, up_to_date
from tests.browser.rows import chips, figures, rows
from tests.support.browser import Chromium
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators

_WORDS = "[...document.querySelectorAll('#replicas [data-field=word]')].map((word) => word.textContent).join()"
_SAID = "document.getElementById('announcer').textContent"


def test_a_replica_dies_and_comes_back(open_page: OpenPage, adapter: Callable[[int], Path]) -> None:
    with simulators(2) as replicas, RunningProxy(*(replica.url for replica in replicas)) as proxy:
        assert proxy.load("math-v1", adapter(1)).status_code == 200
        page = open_page(proxy)
        page.wait(f"{_WORDS} === 'ready,ready'")
        replicas[1].kill()
        page.wait(f"{_WORDS} === 'ready,down'")
        up_to_date(page)
        (down,) = (row for row in rows(page, "replicas") if row["word"] == "down")
        state = proxy.replicas()[1]
        assert down["reason"] == state["reason"] != ""
        assert down["errors"] and state["reason"] in down["errors"]
        assert chips(page, replicas[1].url) == ["v1 not asked"]
        assert figures(page)["ready"] == "1 of 2"
        assert rows(page, "policies")[0]["held"] == f"1 of 2, not on {replicas[1].url.removeprefix('http://')}"
        assert "down" in page.evaluate(_SAID)
        shoot(page, "down")
        replicas[1].restart()
        page.wait(f"{_WORDS} === 'ready,ready'")
        page.wait(f"{_SAID}.includes('joining -> ready')")
        up_to_date(page)
        assert chips(page, replicas[1].url) == ["v1"]
        assert figures(page)["ready"] == "2 of 2"


def test_the_proxy_starts_anew(chromium: Chromium, adapter: Callable[[int], Path]) -> None:
    with simulators(1) as (replica,), RunningProxy(replica.url) as proxy:
        assert proxy.load("math-v1", adapter(1)).status_code == 200
        page = chromium.open(proxy.url + "/proxy/dashboard")
        page.wait("document.getElementById('connection').textContent === 'Live'")
        proxy.stop()
        page.wait("document.getElementById('connection').textContent === 'No connection'")
        proxy.start()
        page.wait("document.getElementById('connection').textContent === 'Live'")
        up_to_date(page)
        messages = [row["message"] for row in rows(page, "events")]
        assert sum("found on" in message for message in messages) == 1, messages
        assert not any("from " in message and "found on" not in message for message in messages), "of the one before"
        assert {problem.split(":")[0] for problem in page.problems} <= {"log"}, page.problems
        assert all("ERR_" in problem for problem in page.problems), "only that nobody was there"
        page.close()
