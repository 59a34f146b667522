"""Open further paths of vLLM by name (PROXY_FORWARD_PATHS). vLLM guards none of them, so each is a decision."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from proxy.access import Keys
from proxy.controlplane.broadcast import agreed, broadcast
from proxy.controlplane.guard import require_admin
from proxy.controlplane.passing_on import passed_on, target_of
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.replica_api import ReplicaApi
from proxy.errors import ApiError
from proxy.fleet.pool import Fleet
from proxy.settings import ControlSettings

_METHODS = ["GET", "POST", "PUT", "DELETE"]


def forwarded_routes(
    fleet: Fleet, apis: Mapping[int, ReplicaApi], pausing: Pausing, settings: ControlSettings, keys: Keys
) -> APIRouter:
    """Return a route for each path of the setting. They are for who may change the fleet."""
    routes = APIRouter()

    async def to_one(request: Request) -> Response:
        require_admin(request, keys)
        if not fleet.ready:
            raise ApiError(503, f"No replica is ready: {fleet.not_ready()}.", reason="not_ready", retry_after_s=1)
        api = apis[fleet.ready[0].index]
        return passed_on(await api.call(request.method, target_of(request), body=await request.body() or None))

    async def to_all(request: Request) -> Response:
        require_admin(request, keys)
        if request.method != "GET":
            await pausing.make_real()  # it may change base weights, which no rollout may run through
        body = await request.body() or None
        answers = await broadcast([apis[r.index] for r in fleet.up], request.method, target_of(request), body=body)
        return passed_on(agreed(answers, what=request.url.path))

    for path, reach in settings.forward_paths:
        routes.add_api_route(path, to_all if reach == "all" else to_one, methods=_METHODS)
    return routes
