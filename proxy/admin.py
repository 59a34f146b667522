"""The proxy's own pages: what it is doing, for people, for `lora-sync` and for Prometheus."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.contract import POLICIES_PATH, REPLICAS_PATH, PolicyStatus
from proxy.errors import ApiError
from proxy.fleet.policies import OCCUPYING, Policy
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica
from proxy.metrics import Metrics
from proxy.routing.choose import Route
from proxy.routing.router import Router


def admin_routes(fleet: Fleet, router: Router, metrics: Metrics) -> APIRouter:
    """Return the routes below /proxy and /metrics."""
    routes = APIRouter()

    @routes.get("/proxy/live")
    async def live() -> Response:
        return Response(status_code=200)

    @routes.get("/proxy/stats")
    async def stats() -> Response:
        return JSONResponse(stats_of(fleet, router))

    @routes.get(REPLICAS_PATH)
    async def replicas() -> Response:
        return JSONResponse({"replicas": [_replica(replica) for replica in fleet.replicas]})

    @routes.get(POLICIES_PATH)
    async def policies() -> Response:
        known = [_status(policy, fleet).model_dump() for policy in fleet.policies.values()]
        return JSONResponse({"policies": known, "slots": fleet.slots()})

    @routes.get(POLICIES_PATH + "/{name:path}")
    async def policy(name: str) -> Response:
        known = fleet.policies.get(name)
        if known is None:
            raise ApiError(404, f"The proxy knows no policy '{name}'.", reason="unknown_policy", type="NotFoundError")
        return JSONResponse(_status(known, fleet).model_dump())

    @routes.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return routes


def stats_of(fleet: Fleet, router: Router) -> dict[str, Any]:
    """Return the counts of /proxy/stats: the keys of the published setup, and `retried` and `state` beside them."""
    counts = {route.value: router.counts[route] for route in Route}
    return {
        "upstreams": [
            {"url": r.url, "inflight": r.inflight, "routed": r.routed, "state": r.state} for r in fleet.replicas
        ],
        "router": {"routed": sum(counts.values()), **counts, "tracked_blocks": len(router.index)},
    }


def _replica(replica: Replica) -> dict[str, Any]:
    facts = replica.facts
    return {
        "index": replica.index,
        "url": replica.url,
        "state": replica.state,
        "reason": replica.reason,
        "lacks": [lack.message for lack in facts.lacks] if facts else [],
        "policies": replica.held,
        "inflight": replica.inflight,
        "routed": replica.routed,
        "joins": replica.incarnation,
        "models": list(facts.model_names) if facts else [],
        "max_model_len": facts.max_model_len if facts else None,
        "max_loras": facts.max_loras if facts else None,
        "max_lora_rank": facts.max_lora_rank if facts else None,
    }


def _status(policy: Policy, fleet: Fleet) -> PolicyStatus:
    holders = tuple(replica.url for replica in fleet.replicas if policy.name in replica.held)
    return PolicyStatus(
        name=policy.name,
        path=policy.path,
        state=policy.state,
        reason=policy.reason,
        version=policy.version,
        step=policy.step,
        leases=policy.leases,
        held_by=holders,
        files_deletable=policy.state not in OCCUPYING and policy.leases == 0 and not holders,
    )
