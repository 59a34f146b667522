"""Traces: the spans that a real collector gets of rollouts and syncs, what replicas get, and what is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated.conftest import Adapters
from tests.support.collector import Collector, Span
from tests.support.proxies import RunningProxy, proxy_command
from tests.support.replicas import SimulatedReplica, simulators, wait_until
from trainer_client import TrainerClient

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
"""As a client sends it; the example of the W3C's recommendation."""

SLACK_NS = 5_000_000
"""Two clocks are compared where a span ends with its answer's last byte."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def proxy(pair: list[SimulatedReplica], collector: Collector) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in pair), **collector.environment) as proxy:
        yield proxy
        for replica in pair:
            replica.clear_faults()


def seen_by(pair: list[SimulatedReplica], request_id: str) -> list[dict[str, str]]:
    """Return the headers with which the replicas got this rollout, one for each try."""
    rollouts = [rollout for replica in pair for rollout in replica.state()["rollouts"]]
    return [r["headers"] for r in rollouts if r["headers"].get("x-request-id") == request_id]


def assert_within(inner: Span, outer: Span) -> None:
    assert outer.began <= inner.began <= inner.ended <= outer.ended + SLACK_NS, (inner, outer)


def test_a_rollout_is_a_span_with_its_parts(
    proxy: RunningProxy, pair: list[SimulatedReplica], collector: Collector, adapter: Adapters
) -> None:
    assert proxy.load("traced-v7", adapter(1)).status_code == 200
    answer = proxy.client.post(
        "/v1/completions",
        json={"model": "traced-v7", "prompt": [5] * 64, "max_tokens": 3},
        headers={"X-Request-Id": "traced-1", "traceparent": TRACEPARENT, "tracestate": "vendor=1"},
    )
    (rollout,) = collector.wait("rollout", request_id="traced-1")
    assert (rollout.kind, rollout.trace_id, rollout.parent_id) == ("server", TRACE, CALLER)
    told = rollout.attributes
    assert (told["lora_sync.policy"], told["lora_sync.version"]) == ("traced-v7", 7)
    assert (told["lora_sync.outcome"], told["http.response.status_code"]) == ("answered", 200)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (64, 3)
    assert [child.name for child in rollout.children] == ["choose", "upstream", "relay"]
    choose, upstream, relay = rollout.children
    for child in rollout.children:
        assert_within(child, rollout)
    assert choose.ended <= upstream.began < upstream.ended <= relay.began + SLACK_NS
    assert choose.attributes["lora_sync.route"] == answer.headers["X-Proxy-Route"]
    assert choose.attributes["lora_sync.candidates"] == 2
    assert upstream.kind == "client" and upstream.events == ["first byte"] and not upstream.failed
    assert upstream.attributes["lora_sync.replica"] == pair[int(answer.headers["X-Proxy-Upstream"])].url
    assert (upstream.attributes["lora_sync.outcome"], upstream.attributes["lora_sync.staleness"]) == ("answered", 0)
    (headers,) = seen_by(pair, "traced-1")
    assert upstream.sent_as(headers["traceparent"]), "vLLM's own spans hang below the try"
    assert headers["tracestate"] == "vendor=1"


def test_each_try_is_a_span_and_the_replica_that_failed_is_told(
    proxy: RunningProxy, pair: list[SimulatedReplica], collector: Collector, adapter: Adapters
) -> None:
    assert proxy.load("traced-v8", adapter(2)).status_code == 200
    pair[0].set_faults(abort_answers=True)
    for seed in range(4):  # one of them meets the replica that aborts
        request_id = f"retried-{seed}"
        body = {"model": "traced-v8", "prompt": [seed] * 64, "max_tokens": 3}
        answer = proxy.client.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})
        if answer.headers["X-Proxy-Route"] == "retried":
            break
    (rollout,) = collector.wait("rollout", request_id=request_id)
    first, second = rollout.below("upstream")
    assert first.attributes["lora_sync.replica"] == pair[0].url
    assert (first.attributes["lora_sync.outcome"], first.attributes["lora_sync.cause"]) == ("failed", "aborted")
    assert second.attributes["lora_sync.outcome"] == "answered"
    assert first.ended <= second.began + SLACK_NS
    sent = [headers["traceparent"] for headers in seen_by(pair, request_id)]
    assert len(sent) == 2 and all(any(span.sent_as(one) for one in sent) for span in (first, second))


def test_of_a_stream_the_relay_lasts_to_its_end(proxy: RunningProxy, collector: Collector) -> None:
    body = {"model": "sim", "prompt": [1, 2], "max_tokens": 200, "stream": True}
    with proxy.client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "streamed"}) as answer:
        for _ in answer.iter_lines():
            pass
    (rollout,) = collector.wait("rollout", request_id="streamed")
    _, upstream, relay = rollout.children
    assert upstream.began < relay.began < upstream.ended, "it is passed on while it comes"
    assert abs(relay.ended - rollout.ended) < 100 * SLACK_NS


def test_a_client_that_leaves_ends_its_spans(proxy: RunningProxy, collector: Collector) -> None:
    body = {"model": "sim", "prompt": [1, 2], "max_tokens": 2000, "stream": True}
    with proxy.client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "left"}):
        pass
    (rollout,) = collector.wait("rollout", request_id="left")
    assert rollout.attributes["lora_sync.outcome"] == "client_gone"
    (upstream,) = rollout.below("upstream")
    assert upstream.failed and upstream.attributes["lora_sync.outcome"] == "cancelled"


def test_an_error_of_the_proxy_is_a_span_too(proxy: RunningProxy, collector: Collector) -> None:
    assert proxy.client.post("/v1/completions", content=b"{").status_code == 400
    assert proxy.completion("nobody-v1").status_code == 404
    outcomes = {r.attributes["lora_sync.outcome"]: r for r in collector.wait("rollout", count=2)}
    assert outcomes.keys() == {"bad_request", "unknown_policy"}
    assert outcomes["unknown_policy"].attributes["http.response.status_code"] == 404
    assert outcomes["unknown_policy"].below("upstream") == []


def test_a_sync_is_a_span_with_its_phases_and_every_call_to_a_replica(
    pair: list[SimulatedReplica], proxy: RunningProxy, collector: Collector, adapter: Adapters, tmp_path: Path
) -> None:
    pair[1].set_faults(late={"attempts": 2})
    with TrainerClient(proxy.url, store=tmp_path, run="traced", max_staleness=2) as client:
        policy = client.publish(adapter(3), step=12)
    (sync,) = collector.wait("sync", policy=policy.name)
    told = sync.attributes
    assert (told["lora_sync.run"], told["lora_sync.version"], told["lora_sync.step"]) == ("traced", policy.version, 12)
    assert told["lora_sync.outcome"] == "live" and not sync.failed
    phases = [child for child in sync.children if child.name not in ("load", "verify")]
    in_order = [phase.name for phase in sorted(phases, key=lambda phase: phase.began)]
    assert in_order == ["check", "name", "gate", "slot", "commit"]
    prompt, late = ([s for s in sync.below("load") if s.attributes["lora_sync.replica"] == r.url] for r in pair)
    assert [load.attributes["lora_sync.outcome"] for load in prompt] == ["loaded"]
    assert [load.attributes["lora_sync.outcome"] for load in late] == ["late", "late", "loaded"]
    assert [load.failed for load in late] == [True, True, False]
    assert "No adapter found" in late[0].message
    assert {s.attributes["lora_sync.replica"] for s in sync.below("verify")} == {replica.url for replica in pair}
    commit = next(phase for phase in phases if phase.name == "commit")
    assert all(call.ended <= commit.began + 100 * SLACK_NS for call in sync.below("verify"))
    for child in sync.children:
        assert child.began >= sync.began - 100 * SLACK_NS and child.ended <= sync.ended + SLACK_NS


def test_a_sync_that_fails_says_why_and_carries_on_the_trace_of_its_trainer(
    pair: list[SimulatedReplica], proxy: RunningProxy, collector: Collector, adapter: Adapters
) -> None:
    pair[0].set_faults(load_error={"status": 400, "body": {"error": {"message": "out of shape"}}})
    body = {"lora_name": "traced-v9", "lora_path": str(adapter(4))}
    headers = {"traceparent": TRACEPARENT}
    assert proxy.client.post("/v1/load_lora_adapter", json=body, headers=headers).status_code == 500
    (sync,) = collector.wait("sync", policy="traced-v9")
    assert (sync.trace_id, sync.parent_id) == (TRACE, CALLER)
    assert sync.failed and "out of shape" in sync.message
    assert sync.attributes["lora_sync.outcome"] == "load_failed"
    assert sync.below("rollback") and not sync.below("commit")
    calls = [call for replica in pair for call in replica.state()["control"] if "traced-v9" in call["body"]]
    sent = [call["headers"]["traceparent"] for call in calls if call["path"] == "/v1/load_lora_adapter"]
    assert sync.below("load") and all(any(load.sent_as(one) for one in sent) for load in sync.below("load"))


def test_a_replica_that_joins_is_a_trace_of_its_own(collector: Collector, adapter: Adapters) -> None:
    with simulators(2) as (staying, leaving), RunningProxy(staying.url, leaving.url, **collector.environment) as proxy:
        assert proxy.load("traced-v1", adapter(1)).status_code == 200
        (sync,) = collector.wait("sync")
        leaving.kill()
        proxy.wait_states("ready", "down")
        leaving.restart()
        proxy.wait_states("ready", "ready")
        again = [span for span in collector.wait("load", 3, policy="traced-v1") if span.trace_id != sync.trace_id]
        assert [span.attributes["lora_sync.replica"] for span in again] == [leaving.url]
        assert again[0].parent_id == ""


def test_nothing_private_is_in_a_span(collector: Collector, adapter: Adapters) -> None:
    with (
        simulators(1, api_key="hf_secret") as (replica,),
        RunningProxy(replica.url, HF_TOKEN="hf_secret", **collector.environment) as proxy,
    ):
        assert proxy.load("traced-v1", adapter(1)).status_code == 200
        headers = {"Authorization": "Bearer clients-own", "X-Request-Id": "private-1"}
        body = {"model": "traced-v1", "prompt": "an utterly private prompt", "max_tokens": 4}
        answer = proxy.client.post("/v1/completions", json=body, headers=headers)
        bad = {**body, "max_tokens": "an utterly private prompt"}
        assert proxy.client.post("/v1/completions", json=bad, headers=headers).status_code == 400
        assert proxy.client.post("/v1/completions", content=b'{"prompt": "an utterly').status_code == 400
        collector.wait("rollout", count=3)
    text = answer.json()["choices"][0]["text"].encode()
    assert text and not any(secret in collector.raw for secret in (b"utterly", b"hf_secret", b"clients-own", text))


def test_the_standard_variables_are_obeyed(pair: list[SimulatedReplica], collector: Collector) -> None:
    environment = {
        **collector.environment,
        "OTEL_SERVICE_NAME": "rollouts-of-mine",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=night",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-team=math",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }
    with RunningProxy(pair[0].url, **environment) as proxy:
        body = {"model": "sim", "prompt": [1], "max_tokens": 1}
        headers = {"X-Request-Id": "unsampled"}
        assert proxy.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        headers = {"traceparent": TRACEPARENT, "X-Request-Id": "sampled"}
        assert proxy.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        collector.wait("rollout", request_id="sampled")
    assert {span.trace_id for span in collector.spans()} == {TRACE}, "the others are not sampled"
    (unsampled,) = (headers["traceparent"] for headers in seen_by(pair, "unsampled"))
    assert not int(unsampled.rpartition("-")[2], 16) & 1, "vLLM is told so"
    assert collector.resources[0]["service.name"] == "rollouts-of-mine"
    assert collector.resources[0]["deployment.environment"] == "night"
    assert collector.headers[0]["x-team"] == "math"


def test_the_last_spans_are_sent_when_the_proxy_stops(pair: list[SimulatedReplica], collector: Collector) -> None:
    environment = {**collector.environment, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
    with RunningProxy(pair[0].url, **environment) as proxy:
        proxy.complete("sim")
        assert proxy.stop() == 0
    assert [span.name for span in collector.spans() if not span.parent_id] == ["rollout"]
    assert collector.resources[0]["service.name"] == "lora-sync-proxy"


def test_a_collector_that_is_away_disturbs_nobody(pair: list[SimulatedReplica]) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with RunningProxy(pair[0].url, **environment) as proxy:
        proxy.complete("sim")
        wait_until(lambda: "opentelemetry" in proxy.log().lower() or "span" in proxy.log(), what="the log tells")
        proxy.complete("sim")
        assert proxy.stop() == 0


def test_without_it_a_rollout_is_as_it_was(pair: list[SimulatedReplica], collector: Collector) -> None:
    with RunningProxy(pair[0].url, **collector.environment, PROXY_OTEL="0") as proxy:
        body = {"model": "sim", "prompt": [1], "max_tokens": 1}
        headers = {"traceparent": TRACEPARENT, "X-Request-Id": "untraced"}
        assert proxy.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert collector.spans() == []
    (seen,) = seen_by(pair, "untraced")
    assert seen["traceparent"] == TRACEPARENT, "the client's own reaches vLLM"


def test_what_is_off_is_not_even_imported() -> None:
    code = (
        "import sys, proxy.app, proxy.cli; ours = ('opentelemetry.sdk', 'opentelemetry.exporter', 'proxy.tracing.'); "
        "loaded = {m for m in sys.modules if m.startswith(ours)} - {'proxy.tracing.parts'}; assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wanted", [{"PROXY_OTEL": "1"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}])
def test_without_the_extra_the_proxy_says_what_to_install(wanted: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "for name in ('opentelemetry.sdk', 'opentelemetry.exporter'):\n"
        "    sys.modules[name] = None  # an import then fails as if it were not installed\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = proxy_command({"UPSTREAM_URLS": "http://127.0.0.1:9", "PROXY_PORT": "0", "PYTHONPATH": path, **wanted})
    assert done.returncode == 64
    assert done.stderr.count("\n") == 1
    assert "pip install 'lora-sync-proxy[otel]'" in done.stderr and "PROXY_OTEL=0" in done.stderr


def test_an_exporter_that_is_not_there_is_named() -> None:
    environment = {"PROXY_OTEL": "1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "PROXY_PORT": "0"}
    done = proxy_command({"UPSTREAM_URLS": "http://127.0.0.1:9", **environment})
    assert done.returncode == 64
    assert "pip install opentelemetry-exporter-otlp-proto-grpc" in done.stderr
