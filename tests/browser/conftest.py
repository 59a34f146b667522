"""One Chromium for all tests of the status page, and pages that nobody may complain of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy.simulator.adapters import write_adapter
from tests.support.browser import PROGRAM, Chromium, Page
from tests.support.proxies import RunningProxy

SCREENSHOTS = Path(__file__).parents[2] / ".screenshots"
"""Kept after the tests, for people and for CI to look at; ignored by git."""

HERE = Path(__file__).parent

OpenPage = Callable[..., Page]
"""Takes the proxy, and `password` for one that asks for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this room, and skip it where there is no browser."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(90))
            if PROGRAM is None:
                item.add_marker(pytest.mark.skip(reason="no Chromium on this machine; scripts/browser-env installs it"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """One browser for the session."""
    with Chromium() as browser:
        yield browser


@pytest.fixture
def open_page(chromium: Chromium) -> Iterator[OpenPage]:
    """Open the status page of a proxy. At its end: no error, no violation of its policy, no request to another host."""
    opened: list[tuple[Page, str]] = []

    def opens(proxy: RunningProxy, *, password: str | None = None) -> Page:
        page = chromium.open(proxy.url + "/", password=password)
        opened.append((page, urlsplit(proxy.url).netloc))
        page.wait("document.getElementById('connection').textContent === 'Live'")
        return page

    yield opens
    for page, host in opened:
        page.evaluate("1")  # reads what the browser still has to tell
        assert page.problems == []
        assert page.hosts == {host}
        page.close()


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that makes the adapter of a seed."""
    return lambda seed: write_adapter(tmp_path / f"seed-{seed}", seed=seed)


def up_to_date(page: Page) -> None:
    """Wait until the page shows a moment that is not before this call."""
    page.wait(f"Number(document.documentElement.dataset.at) > {time.time()}")


def shoot(page: Page, name: str) -> None:
    """Save screenshots of the page in both themes, wide and narrow, where it must not scroll sideways."""
    for width in (1280, 400):
        for theme in ("light", "dark"):
            page.look(width=width, dark=theme == "dark")
            up_to_date(page)
            page.screenshot(SCREENSHOTS / f"{name}-{width}-{theme}.png")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.look(width=1280, dark=False)
