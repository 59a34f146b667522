"""A proxy with PROXY_API_KEY: the browser asks for a password, and with it the page works as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import OpenPage, up_to_date
from tests.support.browser import Chromium
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators

KEY = "a-key-for-people"


@pytest.fixture
def proxy() -> Iterator[RunningProxy]:
    """A proxy in front of one simulator, which asks for a key."""
    with simulators(1) as (replica,), RunningProxy(replica.url, PROXY_API_KEY=f"another, {KEY}") as proxy:
        proxy.client.headers["Authorization"] = f"Bearer {KEY}"
        yield proxy


def test_with_the_password_the_page_is_live(
    proxy: RunningProxy, open_page: OpenPage, adapter: Callable[[int], Path]
) -> None:
    page = open_page(proxy, password=KEY)
    assert proxy.load("math-v1", adapter(1)).status_code == 200
    page.wait("document.body.innerText.includes('math-v1')")
    up_to_date(page)
    assert KEY not in page.text() and KEY not in page.evaluate("document.documentElement.outerHTML")


def test_the_stream_comes_back_by_itself_after_a_restart(proxy: RunningProxy, open_page: OpenPage) -> None:
    page = open_page(proxy, password=KEY)
    proxy.kill()
    page.wait("document.getElementById('connection').textContent === 'No connection'", limit_s=20)
    proxy.start(healthy=False)
    page.wait("document.getElementById('connection').textContent === 'Live'", limit_s=20)
    page.problems.clear()  # of the time without a proxy


@pytest.mark.parametrize("password", ["wrong", ""])
def test_without_it_nothing_is_shown_but_why(proxy: RunningProxy, chromium: Chromium, password: str) -> None:
    page = chromium.open(proxy.url + "/proxy/dashboard", password=password)
    assert "PROXY_API_KEY" in page.text() and "Replicas" not in page.text()
    page.close()
