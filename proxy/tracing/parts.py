"""The classes that `app` builds the proxy from: the plain ones, or those that write spans. Imports no OpenTelemetry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from proxy.controlplane.loading import Loading
from proxy.controlplane.replica_api import ReplicaApi
from proxy.dataplane.upstream import Upstream
from proxy.errors import SettingsError
from proxy.metrics.rollouts import RolloutMetrics
from proxy.routing.router import Router
from proxy.settings import TracingSettings


@dataclass(frozen=True)
class Parts:
    """How to make each part whose work a span can show. The arguments are those of the plain classes."""

    router: Callable[..., Router] = Router
    upstream: Callable[..., Upstream] = Upstream
    rollouts: Callable[..., RolloutMetrics] = RolloutMetrics
    loading: Callable[..., Loading] = Loading
    replica_api: Callable[..., ReplicaApi] = ReplicaApi
    front: Callable[[ASGIApp], ASGIApp] = lambda app: app
    """Put around the whole application."""
    request_hooks: Sequence[Callable[[Any], Any]] = ()
    """Called with every request of the control plane before it is sent."""


@asynccontextmanager
async def parts(settings: TracingSettings) -> AsyncIterator[Parts]:
    """Yield the plain parts, or traced ones, whose last spans are sent at the end.

    Raises SettingsError if traces are wanted and cannot be written.
    """
    if not settings.wanted:
        yield Parts()
        return
    try:
        from proxy.tracing.provider import started
        from proxy.tracing.rollouts import traced_rollouts
        from proxy.tracing.syncs import traced_syncs
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise SettingsError(
            "Traces are asked for (PROXY_OTEL or OTEL_EXPORTER_OTLP_ENDPOINT is set), but OpenTelemetry is not "
            "installed: run `pip install 'lora-sync-proxy[otel]'`, or set PROXY_OTEL=0."
        ) from None
    async with started() as tracer:
        yield Parts(**traced_rollouts(tracer), **traced_syncs(tracer))
