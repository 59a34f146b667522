"""The OpenTelemetry SDK as the standard OTEL_ variables configure it: exporter, endpoint, sampler, resource."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points, version

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer

from proxy.errors import SettingsError

DISTRIBUTION = "lora-sync-proxy"

LAST_SPANS_S = 5.0
"""Seconds that the last spans get to reach the collector when the proxy stops: one that is away delays nobody."""

_EXPORTERS = "opentelemetry_traces_exporter"
"""The group of entry points in which packages offer what OTEL_TRACES_EXPORTER names."""


@asynccontextmanager
async def started() -> AsyncIterator[Tracer]:
    """Yield the tracer of a new provider. Raises SettingsError if the environment asks for what is not there."""
    logging.getLogger("opentelemetry").setLevel(logging.WARNING)
    service = Resource({"service.name": DISTRIBUTION, "service.version": version(DISTRIBUTION)})
    resource = Resource.create().merge(service).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if (exporter := _exporter()) is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer(DISTRIBUTION, version(DISTRIBUTION))
    finally:
        # A thread that ends with the process: the SDK itself would wait for a collector for half a minute and longer.
        sending = threading.Thread(target=provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, LAST_SPANS_S)


def _exporter() -> SpanExporter | None:
    """Return what OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_PROTOCOL name; None for `none`."""
    wanted = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if wanted == "none":
        return None
    if wanted == "otlp":
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        wanted = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    found = entry_points(group=_EXPORTERS, name=wanted)
    if not found:
        raise SettingsError(
            f"No exporter '{wanted}' is installed for traces: install its package "
            f"(pip install opentelemetry-exporter-{wanted.replace('_', '-')}), or set OTEL_TRACES_EXPORTER and "
            "OTEL_EXPORTER_OTLP_PROTOCOL to what is there: otlp over http/protobuf, or console."
        )
    exporter: SpanExporter = next(iter(found)).load()()
    return exporter
