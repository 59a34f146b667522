"""Bring together what is read for Prometheus and is not counted where it happens."""

from __future__ import annotations

import importlib.metadata
import platform

from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics

from proxy.fleet.pool import Fleet
from proxy.routing.router import Router
from proxy.telemetry.event_counts import EventCounts
from proxy.telemetry.fleet_state import FleetState

DISTRIBUTION = "lora-sync-proxy"


def observe(fleet: Fleet, router: Router, registry: CollectorRegistry) -> None:
    """Let `registry` tell of the fleet, its events, this build and this process from now on."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each counter; nobody reads it
    FleetState(fleet, router, registry)
    EventCounts(fleet, registry)
    ProcessCollector(namespace="lora_sync", registry=registry)
    build = Info("lora_sync_build", "Version of this proxy, and of Python", registry=registry)
    build.info({"version": importlib.metadata.version(DISTRIBUTION), "python": platform.python_version()})
