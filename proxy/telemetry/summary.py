"""The line that tells every minute, to those who read logs, how the run goes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from proxy.fleet.pool import Fleet
from proxy.routing.choose import Route
from proxy.routing.router import Router

logger = logging.getLogger(__name__)


async def tell(fleet: Fleet, router: Router, *, every_s: float) -> None:
    """Log the line every `every_s` seconds in which a rollout was routed; 0 logs none. Cancel it to stop."""
    before = 0
    while every_s:
        await asyncio.sleep(every_s)
        if (routed := router.counts.total()) != before:
            before = routed
            line, about = summary(fleet, router)
            logger.info(line, extra={"about": about})


def summary(fleet: Fleet, router: Router) -> tuple[str, dict[str, Any]]:
    """Return the counts of the published setup since the start, with the fleet's state, as a line and as data. Pure."""
    routed = router.counts.total()
    shares = {route.value: router.counts[route] for route in Route}
    told = " ".join(f"{name} {count} ({count / max(routed, 1):.1%})" for name, count in shares.items())
    by_replica = {str(replica.index): replica.inflight for replica in fleet.replicas}
    newest = {run or "": policy.name for run, policy in fleet.newest.items()}
    about = {
        "event": "summary",
        "routed": routed,
        **shares,
        "tracked_blocks": len(router.index),
        "in_flight": by_replica,
        "routed_to": {str(replica.index): replica.routed for replica in fleet.replicas},
        "ready": len(fleet.ready),
        "live": len(fleet.live()),
        "newest": newest,
    }
    line = (
        f"routed {routed}: {told}; in flight {fleet.inflight} ({':'.join(map(str, by_replica.values()))}); "
        f"ready {len(fleet.ready)} of {len(fleet.replicas)}; newest {', '.join(newest.values()) or 'none'}"
    )
    return line, about
