"""The spans of a rollout: `rollout`, and below it `choose`, `upstream` for each try on a replica, and `relay`.

`upstream` lasts from the request to the last byte of the replica's answer, `relay` from the first to the last byte that
the client is sent: of a stream they overlap. What is counted for Prometheus (outcome, staleness, tokens) the spans tell
as well, taken from the same calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from opentelemetry import context as active
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.contract import LOAD_PATH, version_of
from proxy.dataplane.app import GENERATION_PATHS
from proxy.dataplane.client_request import CLIENT
from proxy.dataplane.connection import Connection
from proxy.dataplane.exchange import Exchange
from proxy.dataplane.headers import Headers, request_id
from proxy.dataplane.upstream import Upstream
from proxy.fleet import names
from proxy.fleet.pool import Candidate
from proxy.metrics.rollouts import RolloutMetrics
from proxy.routing.choose import Choice
from proxy.routing.load import Usage
from proxy.routing.request_key import RequestKey
from proxy.routing.router import Router
from proxy.tracing.context import context_of, with_context


def traced_rollouts(tracer: Tracer) -> dict[str, Any]:
    """Return the parts (see `parts`) that write the spans of rollouts."""
    return {
        "router": partial(TracedRouter, tracer),
        "upstream": partial(TracedUpstream, tracer),
        "rollouts": TracedRolloutMetrics,
        "front": partial(TracedFront, tracer),
    }


class _Trace:
    """The open spans of one rollout."""

    def __init__(self, tracer: Tracer, root: Span) -> None:
        self.tracer = tracer
        self.root = root
        self.context = set_span_in_context(root)
        self._try: Span | None = None
        self._exchange: Exchange | None = None
        self._relay: Span | None = None

    def begin_try(self, url: str) -> Span:
        """Open the span of a try on a replica; the one before it has ended."""
        self.end_try()
        attributes = {"lora_sync.replica": url}
        self._try = self.tracer.start_span("upstream", self.context, SpanKind.CLIENT, attributes)
        return self._try

    def answered(self, exchange: Exchange) -> None:
        """Take in the answer of the try; its head is there."""
        self._exchange = exchange

    def tell_try(self, name: str, value: str | int) -> None:
        """Note something about the last try."""
        if self._try is not None:
            self._try.set_attribute(name, value)

    def end_try(self) -> None:
        """End the span of the last try when its answer ended."""
        span, exchange, self._try, self._exchange = self._try, self._exchange, None, None
        if span is None:
            return
        ended_at = None
        if exchange is not None:
            span.set_attribute("http.response.status_code", exchange.status)
            if exchange.answered_at is not None:
                span.add_event("first byte", timestamp=_since_1970_ns(exchange.answered_at))
            if not exchange.complete:
                span.set_status(Status(StatusCode.ERROR, "its answer was not read to the end"))
            ended_at = None if exchange.ended_at is None else _since_1970_ns(exchange.ended_at)
        span.end(ended_at)

    def begin_answer(self, status: int) -> None:
        """Take in that the client is about to be sent its answer."""
        self.root.set_attribute("http.response.status_code", status)
        if status >= 500:
            self.root.set_status(StatusCode.ERROR)
        self._relay = self.tracer.start_span("relay", self.context)

    def end(self) -> None:
        """End all that is still open."""
        self.end_try()
        if self._relay is not None:
            self._relay.end()
        self.root.end()


_current: ContextVar[_Trace | None] = ContextVar("lora_sync_rollout", default=None)
"""The rollout that this task serves."""


class TracedFront:
    """Plain ASGI around everything: opens the span of a rollout, and takes in the context that a sync came with."""

    def __init__(self, tracer: Tracer, app: ASGIApp) -> None:
        self._tracer = tracer
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if path in GENERATION_PATHS:
            await self._rollout(scope, receive, send)
        elif path == LOAD_PATH:
            token = active.attach(context_of(scope["headers"]))
            try:
                await self._app(scope, receive, send)
            finally:
                active.detach(token)
        else:
            await self._app(scope, receive, send)

    async def _rollout(self, scope: Scope, receive: Receive, send: Send) -> None:
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        root = self._tracer.start_span("rollout", context_of(scope["headers"]), SpanKind.SERVER, attributes)
        if not root.is_recording():
            await self._pass_on(root, scope, receive, send)
            return
        trace = _Trace(self._tracer, root)
        token = _current.set(trace)
        scope[CLIENT].on_answer = trace.begin_answer
        try:
            await self._app(scope, receive, send)
        finally:
            trace.end()
            _current.reset(token)

    async def _pass_on(self, root: Span, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a rollout that is not sampled: nothing but its replica's knowing that costs anything."""
        headers = with_context(scope["headers"], set_span_in_context(root))
        await self._app({**scope, "headers": headers}, receive, send)


class TracedRouter(Router):
    """Tells how long the choice took, and what it was."""

    def __init__(self, tracer: Tracer, **options: Any) -> None:
        super().__init__(**options)
        self._tracer = tracer

    def choose(self, key: RequestKey, candidates: Sequence[Candidate], *, retried: bool = False) -> Choice:
        trace = _current.get()
        if trace is None:
            return super().choose(key, candidates, retried=retried)
        span = self._tracer.start_span("choose", trace.context, attributes={"lora_sync.candidates": len(candidates)})
        choice = super().choose(key, candidates, retried=retried)
        span.set_attribute("lora_sync.route", choice.route.value)
        span.end()
        name, _ = names.decode(key.model)
        trace.root.set_attribute("lora_sync.policy", name)
        if (version := version_of(name)) is not None:
            trace.root.set_attribute("lora_sync.version", version)
        return choice

    def finished(self, key: RequestKey, answer: bytes) -> Usage:
        usage = super().finished(key, answer)
        if (trace := _current.get()) is not None:
            for name, tokens in (
                ("gen_ai.usage.input_tokens", usage.prompt_tokens),
                ("gen_ai.usage.output_tokens", usage.completion_tokens),
                ("lora_sync.cached_tokens", usage.cached_tokens),
            ):
                if tokens is not None:
                    trace.root.set_attribute(name, tokens)
        return usage


class TracedUpstream(Upstream):
    """Opens the span of a try, and sends its context to the replica: vLLM's own spans then hang below it."""

    def __init__(self, tracer: Tracer, *rooms: Any) -> None:
        super().__init__(*rooms)
        self._tracer = tracer

    async def start(
        self, url: str, method: str, target: str, headers: Headers, body: bytes, **options: Any
    ) -> tuple[Connection, Exchange]:
        trace = _current.get()
        if trace is None:
            return await super().start(url, method, target, headers, body, **options)
        span = trace.begin_try(url)
        trace.root.set_attribute("lora_sync.request_id", request_id(headers))
        headers = with_context(headers, set_span_in_context(span, trace.context))
        try:
            connection, answer = await super().start(url, method, target, headers, body, **options)
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        trace.answered(answer)
        return connection, answer


class TracedRolloutMetrics(RolloutMetrics):
    """Tells the spans what is counted."""

    def tried(self, replica: int, route: str, outcome: str, *, staleness: int | None) -> None:
        super().tried(replica, route, outcome, staleness=staleness)
        if (trace := _current.get()) is not None:
            trace.tell_try("lora_sync.route", str(route))
            trace.tell_try("lora_sync.outcome", outcome)
            if staleness is not None:
                trace.tell_try("lora_sync.staleness", staleness)

    def failed(self, replica: int, cause: str) -> None:
        super().failed(replica, cause)
        if (trace := _current.get()) is not None:
            trace.tell_try("lora_sync.cause", cause)

    def ended(self, outcome: str) -> None:
        super().ended(outcome)
        if (trace := _current.get()) is not None:
            trace.root.set_attribute("lora_sync.outcome", outcome)


def _since_1970_ns(monotonic_s: float) -> int:
    """Return a time on `time.monotonic` as spans have it."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
