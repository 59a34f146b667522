"""Trace context in headers: by default W3C's `traceparent` and `tracestate`; OTEL_PROPAGATORS may name others."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from opentelemetry import propagate
from opentelemetry.context import Context

Headers = list[tuple[bytes, bytes]]


def context_of(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """Return the context that a client has sent. One that cannot be read counts as none."""
    fields = _fields()
    return propagate.extract({name.decode(): value.decode("latin-1") for name, value in headers if name in fields})


def with_context(headers: Iterable[tuple[bytes, bytes]], context: Context) -> Headers:
    """Return `headers` with `context` in place of what the client had sent."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    fields = _fields()
    kept = [header for header in headers if header[0] not in fields]
    return kept + [(name.lower().encode(), value.encode("latin-1")) for name, value in carrier.items()]


@cache
def _fields() -> frozenset[bytes]:
    return frozenset(name.lower().encode() for name in propagate.get_global_textmap().fields)
