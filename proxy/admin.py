"""The proxy's own pages: what it is doing, for people, for `lora-sync` and for Prometheus."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from proxy.contract import (
    EVENTS_PATH,
    POLICIES_PATH,
    REPLICAS_PATH,
    STATS_PATH,
    PolicyList,
    PolicyStatus,
    ReplicaList,
    Stats,
)
from proxy.errors import ApiError
from proxy.fleet.events import EventLog
from proxy.fleet.policies import OCCUPYING, Policy, PolicyState
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, Trial
from proxy.metrics.rollouts import RolloutMetrics
from proxy.routing.choose import Route
from proxy.routing.router import Router

PING_S = 15.0
"""An event stream without events says so often that it is alive; proxies on the way cut silent ones after a minute."""


def admin_routes(fleet: Fleet, router: Router, rollouts: RolloutMetrics, registry: CollectorRegistry) -> APIRouter:
    """Return the routes below /proxy and /metrics."""
    routes = APIRouter()

    @routes.get("/proxy/live", response_class=Response)
    async def live() -> Response:
        return Response(status_code=200)

    @routes.get(STATS_PATH, responses={200: {"model": Stats}})
    async def stats() -> Response:
        return JSONResponse(stats_of(fleet, router))

    @routes.get(REPLICAS_PATH, responses={200: {"model": ReplicaList}})
    async def replicas() -> Response:
        told = [replica_status(replica, fleet, router, rollouts) for replica in fleet.replicas]
        return JSONResponse({"replicas": told, "checkpoints": fleet.checkpoints()})

    @routes.get(POLICIES_PATH, responses={200: {"model": PolicyList}})
    async def policies() -> Response:
        known = [policy_status(policy, fleet).model_dump() for policy in fleet.policies.values()]
        return JSONResponse({"policies": known, "slots": fleet.slots()})

    @routes.get(POLICIES_PATH + "/{name:path}", responses={200: {"model": PolicyStatus}})
    async def policy(name: str) -> Response:
        known = fleet.named.get(name) or fleet.policies.get(name)
        if known is None:
            raise ApiError(404, f"The proxy knows no policy '{name}'.", reason="unknown_policy", type="NotFoundError")
        return JSONResponse(policy_status(known, fleet).model_dump())

    @routes.get(EVENTS_PATH, response_class=StreamingResponse)
    async def events(request: Request) -> Response:
        return StreamingResponse(
            event_stream(fleet.events, after=_last_id(request)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes


def stats_of(fleet: Fleet, router: Router) -> dict[str, Any]:
    """Return the counts of /proxy/stats: those of the published setup, and `retried`, `state` and tokens."""
    counts = {route.value: router.counts[route] for route in Route}
    return {
        "upstreams": [
            {"url": r.url, "inflight": r.inflight, "routed": r.routed, "state": r.state} for r in fleet.replicas
        ],
        "router": {"routed": sum(counts.values()), **counts, "tracked_blocks": len(router.index)},
        "generated_tokens": router.generated_tokens,
    }


async def event_stream(log: EventLog, *, after: int) -> AsyncIterator[bytes]:
    """Yield the events above id `after`, and then every new one, as server-sent events, until the proxy stops."""
    woken = asyncio.Event()
    forget = log.on_event(woken.set)
    try:
        while not log.closed:
            woken.clear()
            for event in log.after(after):
                after = event.id
                yield b"id: %d\nevent: %b\ndata: %b\n\n" % (after, event.kind.encode(), msgspec.json.encode(event))
            try:
                async with asyncio.timeout(PING_S):
                    await woken.wait()
            except TimeoutError:
                yield b": still here\n\n"
    finally:
        forget()


def _last_id(request: Request) -> int:
    """Return where the client stopped reading, as browsers say it, or as `?after=`. A first visit gets all."""
    given = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
    if not given.isdecimal() or len(given) > 18:  # Python refuses to read a number of 4,300 digits
        raise ApiError(400, f"`after` must be an event's id, not {given!r:.50}.", reason="bad_request", param="after")
    return int(given)


def replica_status(replica: Replica, fleet: Fleet, router: Router, rollouts: RolloutMetrics) -> dict[str, Any]:
    """Return one entry of /proxy/replicas."""
    facts = replica.facts
    return {
        "index": replica.index,
        "url": replica.url,
        "state": replica.state,
        "reason": replica.reason,
        "since": replica.since,
        "about": replica.about,
        "paused": replica.paused,
        "weights": replica.weights,
        "lacks": [lack.message for lack in facts.lacks] if facts else [],
        "policies": {
            name: {"path": path, "since": replica.held_since.get(name)} for name, path in replica.held.items()
        },
        "missing": {
            policy.upstream: _trial(replica, policy) for policy in fleet.required() if not replica.has_proven(policy)
        },
        "unsure": sorted(replica.unsure),
        "inflight": replica.inflight,
        "load": replica.load,
        "routed": replica.routed,
        "joins": replica.joins,
        "prefix_cache": {
            "predicted": _hits(replica, router.prompt_tokens, router.cached_tokens),
            "reported": _hits(replica, rollouts.prompt_tokens, rollouts.cached_tokens),
        },
        "models": list(facts.model_names) if facts else [],
        "dtype": facts.dtype if facts else None,
        "model": facts.model if facts else None,
        "max_model_len": facts.max_model_len if facts else None,
        "max_loras": facts.max_loras if facts else None,
        "max_lora_rank": facts.max_lora_rank if facts else None,
        "kv_cache_tokens": facts.kv_cache_tokens if facts else None,
    }


def _hits(replica: Replica, prompt_tokens: Counter[int], cached_tokens: Counter[int]) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens[replica.index], "cached_tokens": cached_tokens[replica.index]}


def _trial(replica: Replica, policy: Policy) -> dict[str, Any]:
    trial = replica.trials.get(policy.upstream, Trial(0.0))
    return {"outcome": trial.outcome or "not asked", "tries": trial.tries, "message": trial.message}


def _waits_for(policy: Policy, fleet: Fleet) -> str:
    """Return what replicas that do not have a loading policy yet have said."""
    if policy.state is not PolicyState.LOADING:
        return ""
    trials = [(replica.url, replica.trials.get(policy.upstream)) for replica in fleet.ready]
    return "; ".join(f"{url} after {t.tries} tries: {t.message}" for url, t in trials if t and t.message)


def policy_status(policy: Policy, fleet: Fleet) -> PolicyStatus:
    """Return one entry of /proxy/policies."""
    holders = tuple(replica.url for replica in fleet.up if replica.may_hold(policy.upstream))
    return PolicyStatus(
        name=policy.name,
        upstream=policy.upstream,
        path=policy.path,
        state=policy.state,
        reason=policy.reason or _waits_for(policy, fleet),
        since=policy.since,
        run=policy.run,
        alias=policy.alias,
        digest=policy.digest,
        adopted=policy.adopted,
        blocked=policy.blocked,
        version=policy.version,
        step=policy.step,
        leases=policy.leases,
        in_flight=dict(Counter(lease.replica.url for lease in policy.leased)),
        held_by=holders,
        phases=policy.phases,
        files_deletable=policy.state not in OCCUPYING and policy.leases == 0 and not holders,
    )
