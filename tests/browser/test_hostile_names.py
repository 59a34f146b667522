"""Whatever a policy is called, the page shows its name as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.browser.conftest import OpenPage, shoot, up_to_date
from tests.browser.rows import rows
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators

NAMES = [
    "<script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title = 'taken'\">",
    "\"' onmouseover='x' &amp; ${document.title} `",
    "long-" + "x" * 295,
    "\u202eright to left, 中文 and \N{PILE OF POO}",
]


def test_names_are_text(open_page: OpenPage, adapter: Callable[[int], Path]) -> None:
    with (
        simulators(2, max_loras=8) as replicas,
        RunningProxy(*(replica.url for replica in replicas), PROXY_LORA_LOAD_TIMEOUT_S="2") as proxy,
    ):
        page = open_page(proxy)
        for seed, name in enumerate(NAMES, start=1):
            assert proxy.load(name, adapter(seed)).status_code == 200
        assert proxy.load("refused", f"/nowhere/{NAMES[0]}").status_code >= 400
        up_to_date(page)
        assert [row["name"] for row in rows(page, "policies")] == NAMES[::-1]
        assert [row["name"] for row in rows(page, "syncs") if row["word"] == "served"] == NAMES[::-1]
        assert set(NAMES) <= {row["about"] for row in rows(page, "events")}
        assert page.evaluate("document.title") == "lora-sync-proxy"
        assert page.evaluate("document.querySelectorAll('body script, [onerror], [onmouseover]').length") == 0
        shoot(page, "hostile")
