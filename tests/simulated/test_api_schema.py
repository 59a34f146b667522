"""Whatever is sent to the proxy's own paths, the answer is one that /proxy/openapi.json declares. By schemathesis.

`HYPOTHESIS_PROFILE=deep` tries fifty times as much.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from tests.simulated.checks import right_tokens
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators

EXAMPLES = 500 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 10
LIMIT_S = 10
"""For an answer. Longer is a hang."""

ENDLESS = {"/proxy/events"}
"""Streams have no end of their own; simulated/test_events.py reads them."""

OF_REPLICAS = {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
"""A replica's own refusal is passed on as it is, and vLLM's status for a weight call is 500."""

KNOWN = {"not_ready", "load_failed", "no_replica", "unfinished", "reload_failed", "replica_failed", "disagree"}
"""Errors of the server's kind that a healthy proxy may answer (docs/operating.md)."""


@pytest.fixture(scope="module")
def proxy() -> Iterator[RunningProxy]:
    with simulators(2) as replicas:
        urls = (replica.url for replica in replicas)
        with RunningProxy(*urls, PROXY_LORA_LOAD_TIMEOUT_S="0.5", PROXY_CALL_TIMEOUT_S="3") as proxy:
            yield proxy


DECLARED = [status_code_conformance, content_type_conformance, response_schema_conformance]


def operations(proxy: RunningProxy) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{proxy.url}/proxy/openapi.json")
    described: list[Any] = list(schema.get_all_operations())
    return [found.ok() for found in described if found.ok().path not in ENDLESS]


def test_the_page_describes_the_proxys_own_paths(proxy: RunningProxy) -> None:
    described = {(operation.method.upper(), operation.path) for operation in operations(proxy)}
    assert {
        ("POST", "/v1/load_lora_adapter"),
        ("GET", "/proxy/policies/{name}"),
        ("DELETE", "/proxy/replicas"),
        ("POST", "/update_weights"),
        ("GET", "/health"),
    } <= described
    assert len(described) > 25


def test_any_call_is_answered_as_declared(proxy: RunningProxy) -> None:
    for number, operation in enumerate(operations(proxy)):

        @seed(number)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def any_call(case: Any) -> None:
            answer = case.call(timeout=LIMIT_S, allow_redirects=False)
            case.validate_response(answer, checks=DECLARED)
            if answer.status_code >= 500 and case.operation.path not in OF_REPLICAS:
                assert answer.headers["X-Proxy-Error"][0] in KNOWN, answer.text

        any_call()
    proxy.client.post("/resume").raise_for_status()
    assert proxy.complete("sim") == right_tokens("base:sim")
    assert proxy.states() == ["ready", "ready"]
