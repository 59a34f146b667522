"""What trainers call to update base weights: vLLM's own paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from proxy.access import Keys
from proxy.contract import RELOAD_PATH, ReloadReport, ReloadRequest
from proxy.controlplane.answer import Answer
from proxy.controlplane.connected import while_connected
from proxy.controlplane.guard import require_admin
from proxy.controlplane.passing_on import passed_on
from proxy.controlplane.reading import JsonObject, read, takes
from proxy.controlplane.reloading import Reloading
from proxy.controlplane.weights import FINISH_PATH, INIT_PATH, LABEL_PATH, START_PATH, UPDATE_PATH, Weights


def weights_routes(weights: Weights, reloading: Reloading, keys: Keys) -> APIRouter:
    """Return the routes. A client that goes away in the middle has failed the call, as if a replica had."""
    routes = APIRouter()

    @routes.get("/get_world_size")
    async def world_size() -> Response:
        return JSONResponse({"world_size": await weights.world_size()})

    @routes.post(INIT_PATH)
    async def init(request: Request) -> Response:
        body = (await read(request, JsonObject)).root
        return passed_on(await while_connected(request, weights.init(body)))

    def step(carry_out: Callable[[bytes], Coroutine[Any, Any, Answer]]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            body = await request.body()
            return passed_on(await while_connected(request, carry_out(body)))

        return route

    for path, carry_out in ((START_PATH, weights.start), (UPDATE_PATH, weights.update), (FINISH_PATH, weights.finish)):
        routes.add_api_route(path, step(carry_out), methods=["POST"])

    @routes.post(LABEL_PATH)
    async def label(request: Request) -> Response:
        return passed_on(await weights.set_version((await read(request, JsonObject)).root))

    @routes.post(RELOAD_PATH, openapi_extra=takes(ReloadRequest), responses={200: {"model": ReloadReport}})
    async def reload(request: Request) -> Response:
        require_admin(request, keys)
        wanted = await read(request, ReloadRequest)
        return JSONResponse((await while_connected(request, reloading.reload(wanted))).model_dump())

    return routes
