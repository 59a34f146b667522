"""The log: one line an event, with what it is about, as text and as JSON; never a prompt, never a token."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.simulated.checks import wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until

TOKEN = "hf_not_a_real_token"
PROMPT = "an utterly private prompt"

_TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) (.*)")


def run_of(adapter: Adapters, style: str) -> list[str]:
    """Let a good deal go right and wrong, and return the lines that were logged."""
    with (
        simulators(2, api_key=TOKEN) as pair,
        RunningProxy(
            *(replica.url for replica in pair),
            HF_TOKEN=TOKEN,
            PROXY_LOG=style,
            PROXY_STATS_EVERY_S="0.2",
            PROXY_WAIT_READY_S="0.5",
        ) as proxy,
    ):
        assert proxy.load("run-v1", adapter(1)).status_code == 200
        pair[0].set_faults(load_error={"status": 400})
        assert proxy.load("run-v2", adapter(2)).status_code == 500
        pair[0].set_faults(load_error=None, abort_answers=True)
        pair[1].set_faults(abort_answers=True)
        body = {"model": "run-v1", "prompt": PROMPT, "max_tokens": 4}
        headers = {"X-Request-Id": "request-of-the-client", "Authorization": "Bearer clients-own"}
        lost = proxy.client.post("/v1/completions", json=body, headers=headers)
        assert (lost.status_code, lost.headers["X-Request-Id"]) == (503, "request-of-the-client")
        for replica in pair:
            replica.clear_faults()
        proxy.wait_states("ready", "ready")
        assert proxy.client.post("/v1/completions", json={**body, "max_tokens": -1}).status_code == 400
        unknown = proxy.client.post("/v1/completions", json={**body, "model": "no\nbody"})
        assert unknown.status_code == 404 and unknown.headers["X-Request-Id"], "made, and told"
        summaries = proxy.log().count("summary")
        assert proxy.client.post("/v1/completions", json=body).status_code == 200
        wait_until(lambda: proxy.log().count("summary") > summaries, what="it has summed up")
        wait_quiet(proxy, *pair)
        log = proxy.log()
    for secret in (TOKEN, PROMPT, "private", "clients-own"):
        assert secret not in log
    return log.splitlines()


def test_as_json_every_line_says_what_it_is_about(adapter: Adapters) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in run_of(adapter, "json")]
    assert all({"at", "level", "message"} <= line.keys() for line in lines)

    def of(event: str) -> list[dict[str, Any]]:
        return [line for line in lines if line.get("event") == event]

    (live,) = of("policy.live")
    assert (live["policy"], live["version"], live["level"]) == ("run-v1", 1, "info")
    assert 0 < live["seconds"] < 15
    (failed,) = of("policy.failed")
    assert (failed["policy"], failed["version"], failed["level"]) == ("run-v2", 2, "warning")
    assert all(line["replica"].startswith("http://127.0.0.1:") and line["seconds"] >= 0 for line in of("replica.ready"))
    tries = of("rollout")
    assert {line["request"] for line in tries} == {"request-of-the-client"}
    assert {(line["policy"], line["version"]) for line in tries} == {("run-v1", 1)}
    assert len({line["replica"] for line in tries if "replica" in line}) == 2
    assert "answered 503 aborted" in tries[-1]["message"] and tries[-1]["seconds"] > 0
    summary = of("summary")[-1]
    assert summary["routed"] == sum(summary[route] for route in ("affinity", "spilled", "unmatched", "retried")) > 0
    assert (summary["ready"], summary["newest"]) == (2, {"": "run-v1"})


def test_as_text_every_event_is_one_line(adapter: Adapters) -> None:
    lines = run_of(adapter, "text")
    told = [matched[2] for line in lines if (matched := _TEXT_LINE.fullmatch(line))]
    assert len(told) == len(lines)
    (live,) = [line for line in told if line.startswith("policy.live: ")]
    assert re.fullmatch(r"policy\.live: loading -> live policy=run-v1 version=1 seconds=\d+\.\d+", live)
    tries = [line for line in told if line.startswith("rollout: a try failed: it aborted the rollout policy=run-v1 ")]
    assert tries and all(" replica=http://" in line and " request=request-of-the-client " in line for line in tries)
    (*_, summary) = [line for line in told if line.startswith("summary: routed ")]
    assert re.search(r"affinity \d+ \(\d+\.\d%\) .* in flight \d+ \(\d+:\d+\); ready 2 of 2; newest run-v1", summary)


@pytest.mark.parametrize("every_s", ["0", "30"])
def test_nothing_is_summed_up_before_its_time(every_s: str) -> None:
    with simulators(1) as (replica,), RunningProxy(replica.url, PROXY_STATS_EVERY_S=every_s) as proxy:
        for seed in range(4):
            proxy.complete("sim", prompt=[seed] * 8)
        assert "summary" not in proxy.log()
        assert "completions" not in proxy.log()  # no access log
