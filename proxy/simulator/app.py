"""Which handler answers which path, who may ask, and the engine's loop around it all. Bare ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from proxy.simulator import control_api, info_api, lora_api, openai_api, sim_api, weights_api
from proxy.simulator.asgi import Answer, Refusal, Request, as_json, detail, read_request
from proxy.simulator.engine import EngineDeadError
from proxy.simulator.replica import Replica
from proxy.simulator.settings import SimulatorSettings

Handler = Callable[[Replica, Request], Awaitable[Answer | None]]
Routes = dict[str, dict[str, Handler]]

_ALWAYS: Routes = {
    "/v1/completions": {"POST": openai_api.completions},
    "/v1/chat/completions": {"POST": openai_api.chat},
    "/v1/models": {"GET": openai_api.models},
    "/tokenize": {"POST": openai_api.tokenize_text},
    "/detokenize": {"POST": openai_api.detokenize_tokens},
    "/health": {"GET": info_api.health},
    "/ping": {"GET": info_api.health, "POST": info_api.health},
    "/version": {"GET": info_api.version},
    "/load": {"GET": info_api.load},
    "/metrics": {"GET": info_api.metrics},
    "/sim/faults": {
        "GET": sim_api.show_faults,
        "POST": sim_api.set_faults,
        "DELETE": sim_api.clear_faults,
    },
    "/sim/state": {"GET": sim_api.state},
}

_RUNTIME_LORA: Routes = {
    "/v1/load_lora_adapter": {"POST": lora_api.load},
    "/v1/unload_lora_adapter": {"POST": lora_api.unload},
}

_DEV_MODE: Routes = {
    "/server_info": {"GET": info_api.server_info},
    "/get_world_size": {"GET": weights_api.world_size},
    "/is_paused": {"GET": control_api.is_paused},
    "/pause": {"POST": control_api.pause},
    "/resume": {"POST": control_api.resume},
    "/reset_prefix_cache": {"POST": control_api.reset_prefix_cache},
    "/abort_requests": {"POST": control_api.abort_requests},
    "/weight_info": {"GET": weights_api.info},
    "/update_weight_version": {"POST": weights_api.set_version},
    "/collective_rpc": {"POST": weights_api.collective_rpc},
    "/init_weight_transfer_engine": {"POST": weights_api.init},
    "/start_weight_update": {"POST": weights_api.start},
    "/update_weights": {"POST": weights_api.update},
    "/finish_weight_update": {"POST": weights_api.finish},
}

_GUARDED = ("/v1/", "/v2/", "/inference/")
"""The paths that vLLM's --api-key protects. All others stay open."""

_NOT_CONTROL = frozenset({"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})


class App:
    """The ASGI application of one replica."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self.replica = Replica(settings)
        self._routes = {
            **_ALWAYS,
            **(_RUNTIME_LORA if settings.runtime_lora_updating else {}),
            **(_DEV_MODE if settings.dev_mode else {}),
        }

    def __repr__(self) -> str:
        return f"App({self.replica})"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the engine for as long as the server lives."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            request = await read_request(scope, receive, send)
            answer = await self._answer(request)
            if answer is not None:
                await answer.send(send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(self.replica.engine.run())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            loop.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, request: Request) -> Answer | None:
        own = request.path.startswith("/sim/")
        if not own:
            self.replica.calls.note(request)
        if not self._may_enter(request):
            return as_json({"error": "Unauthorized"}, status=401)
        methods = self._routes.get(request.path)
        if methods is None:
            return detail(404, "Not Found")
        handler = methods.get(request.method)
        if handler is None:
            return detail(405, "Method Not Allowed")
        if request.method != "GET" and not own and request.path not in _NOT_CONTROL:
            self.replica.calls.note_control(request)
        try:
            return await handler(self.replica, request)
        except Refusal as refusal:
            return refusal.answer()
        except EngineDeadError:
            return Refusal.engine_dead().answer()

    def _may_enter(self, request: Request) -> bool:
        key = self.replica.settings.api_key
        if key is None or not request.path.startswith(_GUARDED):
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and given == key
