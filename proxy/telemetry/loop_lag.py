"""Measure how late the event loop is: everything that a rollout waits for inside the proxy waits for the loop."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Histogram

EVERY_S = 0.1
"""Ten times a second: a loop that stands still is seen within that, and an idle one is woken rarely."""

LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
"""The loop's own clock counts milliseconds."""


async def measure_lag(registry: CollectorRegistry) -> None:
    """Note for ever how much later than asked for a sleep ends. Cancel it to stop."""
    lag = Histogram(
        "lora_sync_loop_lag_seconds",
        "Seconds by which the event loop came too late to what was due",
        buckets=LAG_S,
        registry=registry,
    )
    while True:
        due_at = time.monotonic() + EVERY_S
        await asyncio.sleep(EVERY_S)
        lag.observe(max(time.monotonic() - due_at, 0.0))
