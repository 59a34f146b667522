"""This project's proxy without what it counts of a rollout for Prometheus: the difference is what counting costs.

usage: python -m benchmarks.uncounted     (configured as lora-sync-proxy is)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

import proxy.app
from proxy.cli import main
from proxy.dataplane.relay import Relay
from proxy.fleet.pool import Fleet
from proxy.metrics.rollouts import RolloutMetrics
from proxy.tracing.parts import Parts


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Uncounted(RolloutMetrics):
    """Counts nothing."""

    tried = failed = ended = answered = stale = reported = _nothing


@asynccontextmanager
async def _parts(_: Any) -> AsyncIterator[Parts]:
    yield Parts(rollouts=Uncounted)


async def _no_lag(_: CollectorRegistry) -> None:
    await asyncio.Event().wait()


if __name__ == "__main__":
    setattr(proxy.app, "parts", _parts)  # noqa: B010  # from here on the module differs from what mypy knows
    setattr(proxy.app, "measure_lag", _no_lag)  # noqa: B010
    setattr(Relay, "_count_answer", _nothing)  # noqa: B010
    setattr(Fleet, "staleness", _nothing)  # noqa: B010
    main()
