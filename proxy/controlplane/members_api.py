"""Add replicas to a running fleet, and remove them: POST and DELETE /proxy/replicas."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from proxy.access import Keys
from proxy.contract import REPLICAS_PATH
from proxy.controlplane.guard import require_admin
from proxy.controlplane.members import Members
from proxy.errors import ApiError
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica
from proxy.settings import base_url, is_address_of


def members_routes(fleet: Fleet, members: Members, keys: Keys) -> APIRouter:
    """Return the routes. What they change lasts until the proxy restarts; PROXY_DISCOVER is for lasting changes."""
    routes = APIRouter()

    @routes.post(REPLICAS_PATH)
    async def add(request: Request, wait: bool = True) -> Response:
        require_admin(request, keys)
        url = _url_in(await request.body())
        host, port = request.scope["server"]
        if is_address_of(host, port, url):
            message = f"{url} is the proxy's own address; name a replica's."
            raise ApiError(400, message, reason="bad_request", type="BadRequestError", param="url")
        replica = members.add(url)
        if wait and not await members.is_ready(replica):
            message = f"{replica.url} is in the fleet, but not ready yet: it is {replica.state} ({replica.reason})."
            raise ApiError(504, message, reason="not_ready")
        return JSONResponse(_shown(replica), status_code=200 if replica.is_ready else 202)

    @routes.delete(REPLICAS_PATH)
    async def remove(request: Request, wait: bool = True, force: bool = False) -> Response:
        require_admin(request, keys)
        url = _url_in(await request.body())
        replica = next((known for known in fleet.replicas if known.url == url), None)
        if replica is None:
            raise ApiError(404, f"{url} is not in the fleet.", reason="unknown_replica", type="NotFoundError")
        if fleet.weights.update is not None and not force:
            message = "Base weights are being updated, and without one of its members an update fails: finish it first"
            raise ApiError(409, f"{message}, or send ?force=true if nobody will.", reason="updating")
        removal = members.remove(replica)
        if wait:
            await asyncio.shield(removal)
        return JSONResponse(_shown(replica), status_code=200 if wait else 202)

    return routes


def _shown(replica: Replica) -> dict[str, str]:
    return {"url": replica.url, "state": replica.state, "reason": replica.reason}


class _Url(msgspec.Struct):
    url: str


def _url_in(body: bytes) -> str:
    try:
        return base_url(msgspec.json.decode(body, type=_Url).url)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        message = f'The body must be {{"url": "http://HOST:PORT"}}: {error}'
        raise ApiError(400, message, reason="bad_request", type="BadRequestError", param="url") from None
