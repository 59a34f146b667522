"""The page as such: strict headers, usable by keyboard and screen reader, in both themes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy.dashboard.routes import STATIC
from tests.browser.conftest import OpenPage
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators


@pytest.fixture(scope="module")
def proxy() -> Iterator[RunningProxy]:
    """A proxy in front of one simulator."""
    with simulators(1) as (replica,), RunningProxy(replica.url) as proxy:
        yield proxy


def test_headers_allow_nothing_but_the_page_itself(proxy: RunningProxy) -> None:
    assert proxy.client.get("/").headers["location"] == "proxy/dashboard"
    files = ["", *(f"/{path.relative_to(STATIC)}" for path in STATIC.rglob("*.*") if path.suffix in (".js", ".css"))]
    for file in files:
        answer = proxy.client.get(f"/proxy/dashboard{file}")
        assert answer.status_code == 200
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_nothing_inline_and_nothing_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:", page)
    for own in [page, *(path.read_text() for path in STATIC.glob("*.*s"))]:
        assert not re.search(r"https?://(?!www\.w3\.org)[a-z]", own)
        assert "innerHTML" not in own and "insertAdjacentHTML" not in own


def test_the_browser_would_stop_what_the_policy_forbids(proxy: RunningProxy, open_page: OpenPage) -> None:
    page = open_page(proxy)
    assert page.evaluate(
        "(() => { try { document.body.innerHTML = '<b>x'; return '' } catch (e) { return e.name } })()"
    ) == ("TypeError")
    assert page.problems, "and says so"
    page.problems.clear()


def test_everything_has_a_name_for_screen_readers(proxy: RunningProxy, open_page: OpenPage) -> None:
    page = open_page(proxy)
    page.wait("document.querySelectorAll('#replicas tr').length === 1")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    by_role: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            by_role.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert by_role["table"] == ["Fleet", "Policies"]
    assert by_role["rowheader"] and "State" in by_role["columnheader"]
    assert len([name for name in by_role["image"] if name]) == 6, "each chart tells what it shows"
    assert all(by_role["image"])
    assert {"banner", "main", "status"} <= by_role.keys()
    titles = {"lora-sync-proxy", "Fleet", "Policies", "Syncs", "Events"}
    assert titles <= set(by_role["heading"])


@pytest.mark.parametrize("width", [1280, 400])
def test_tables_stay_tables_when_narrow(proxy: RunningProxy, open_page: OpenPage, width: int) -> None:
    page = open_page(proxy)
    page.look(width=width, dark=False)
    page.wait("document.querySelectorAll('#replicas tr').length === 1")
    roles = [n["role"]["value"] for n in page.call("Accessibility.getFullAXTree")["nodes"] if not n.get("ignored")]
    assert roles.count("table") == 2
    assert roles.count("cell") >= 7


def test_the_keyboard_reaches_what_can_be_used_and_shows_where_it_is(proxy: RunningProxy, open_page: OpenPage) -> None:
    page = open_page(proxy)
    page.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0, "it comes into sight"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "events", "the list that scrolls"


def test_a_pause_is_told_while_it_lasts(proxy: RunningProxy, open_page: OpenPage) -> None:
    page = open_page(proxy)
    note = "document.getElementById('pause')"
    assert page.evaluate(f"{note}.hidden")
    proxy.client.post("/pause?mode=keep").raise_for_status()
    page.wait(f"!{note}.hidden")
    assert "/pause?mode=keep: it is on record, and nothing stops" in page.evaluate(f"{note}.textContent")
    proxy.client.post("/resume").raise_for_status()
    page.wait(f"{note}.hidden")


_CONTRASTS = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const rgb = (layers) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => c.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const poor = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility()) continue;
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    const [a, b] = [light(rgb(layers)), light(rgb([...layers, getComputedStyle(node).color]))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) poor.push(`${node.textContent.trim().slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return poor;
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out(proxy: RunningProxy, open_page: OpenPage, adapter: Callable[[int], Path], dark: bool) -> None:
    """WCAG 2.2 asks for a contrast of 4.5 (1.4.3)."""
    page = open_page(proxy)
    proxy.load("math-v1", adapter(1)).raise_for_status()
    page.look(width=1280, dark=dark)
    page.wait("document.querySelectorAll('#policies tr').length === 1")
    assert page.evaluate(_CONTRASTS) == []
