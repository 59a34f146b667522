"""What clients of the control plane call: vLLM's own paths, so that TRL finds what it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from proxy.contract import LOAD_PATH, UNLOAD_PATH, LoadReport, LoadRequest, UnloadRequest
from proxy.controlplane.broadcast import agreed, broadcast, number_told
from proxy.controlplane.changes import Changes
from proxy.controlplane.connected import while_connected
from proxy.controlplane.loading import Loading
from proxy.controlplane.passing_on import passed_on, target_of
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.reading import read, takes
from proxy.controlplane.replica_api import ReplicaApi
from proxy.errors import ApiError
from proxy.fleet.policies import OCCUPYING, Policy
from proxy.fleet.pool import Fleet
from proxy.settings import ControlSettings

_OR_A_SENTENCE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
"""What vLLM answers to a load or unload; a load that carried `policy` is answered with its report."""


def control_routes(
    fleet: Fleet,
    apis: Mapping[int, ReplicaApi],
    loading: Loading,
    pausing: Pausing,
    changes: Changes,
    settings: ControlSettings,
) -> APIRouter:
    """Return the routes of the control plane."""
    routes = APIRouter()

    async def begun(enough: Callable[[], bool] = lambda: bool(fleet.usable)) -> None:
        """Wait, after a start, until `enough` is known or every replica has been looked at.

        TRL repeats no control call: without this a proxy that is restarted between two syncs would end its run (P10).
        """
        deadline = fleet.clock() + settings.call_timeout_s
        await changes.wait_until(lambda: not fleet.is_looking or enough(), deadline=deadline)

    def up() -> list[ReplicaApi]:
        return [apis[replica.index] for replica in fleet.up]

    @routes.post(LOAD_PATH, openapi_extra=takes(LoadRequest), responses=_OR_A_SENTENCE)
    async def load(request: Request) -> Response:
        wanted = await read(request, LoadRequest)
        await begun()
        report = await while_connected(request, loading.load(wanted))
        if wanted.policy is not None:
            return JSONResponse(report.model_dump())
        return PlainTextResponse(_success(report))

    @routes.post(UNLOAD_PATH, openapi_extra=takes(UnloadRequest), responses=_OR_A_SENTENCE)
    async def unload(request: Request) -> Response:
        name = (await read(request, UnloadRequest)).lora_name
        await begun(lambda: name in fleet.named)
        policy = fleet.named.get(name)
        if policy is None or policy.state not in OCCUPYING:
            raise ApiError(
                404,
                f"The lora adapter '{name}' cannot be found.",
                reason="unknown_policy",
                type="NotFoundError",
                param="lora_name",
            )
        if name != policy.name:
            del fleet.named[name]  # the name alone is given up; the policy has an owner who unloads it
        else:
            fleet.retire(policy, "unloaded by the client", deadline=fleet.clock() + settings.unload_wait_s)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    @routes.post("/abort_requests")
    async def abort_requests(request: Request) -> Response:
        with fleet.client_aborting():
            answers = await broadcast(up(), "POST", target_of(request), body=await request.body() or b"{}")
        return passed_on(agreed(answers, what="/abort_requests"))

    @routes.post("/pause")
    async def pause(request: Request) -> Response:
        await begun()
        return passed_on(await pausing.pause(target_of(request)))

    @routes.post("/resume")
    async def resume(request: Request) -> Response:
        await begun()
        return passed_on(await pausing.resume(target_of(request)))

    @routes.get("/is_paused")
    async def is_paused() -> Response:
        return JSONResponse({"is_paused": pausing.intended})

    @routes.get("/load")
    async def server_load(request: Request) -> Response:
        answers = await broadcast(up(), "GET", target_of(request))
        agreed(answers, what="/load")
        return JSONResponse({"server_load": sum(number_told(url, a, "server_load") for url, a in answers.items())})

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        answers = await broadcast(up(), "POST", target_of(request))
        for replica in fleet.replicas:
            if (answer := answers.get(replica.url)) is not None and answer.ok:
                fleet.cache_was_reset(replica)
        return passed_on(agreed(answers, what="/reset_prefix_cache"))

    @routes.get("/server_info")
    async def server_info(request: Request) -> Response:
        usable = fleet.usable
        if not usable:
            raise _not_ready(fleet, settings)
        answer = await apis[usable[0].index].call("GET", target_of(request))
        info = answer.json()
        if answer.status != 200 or not isinstance(info, dict) or not isinstance(info.get("vllm_config"), dict):
            return passed_on(answer)
        return JSONResponse(fleet_info(info, fleet))

    @routes.get("/v1/models")
    async def models() -> Response:
        known = [replica.facts for replica in fleet.replicas if replica.facts]
        if not known:
            raise _not_ready(fleet, settings)
        smallest = min((facts.max_model_len for facts in known if facts.max_model_len), default=None)
        base = [{**entry, "max_model_len": smallest} for entry in known[0].models]
        return JSONResponse({"object": "list", "data": base + [_model_entry(p, base) for p in fleet.live()]})

    @routes.get("/health", response_class=Response)
    @routes.get("/ping", response_class=Response)
    @routes.post("/ping", response_class=Response)
    @routes.get("/proxy/ready", response_class=Response)
    async def health() -> Response:
        healthy, _ = fleet.health(min_ready=settings.min_ready, start_wait_s=settings.start_wait_s)
        if not healthy:
            raise _not_ready(fleet, settings)
        return Response(status_code=200)

    return routes


def fleet_info(info: dict[str, Any], fleet: Fleet) -> dict[str, Any]:
    """Return one replica's /server_info with what holds for the whole fleet in the fields that TRL reads.

    The smallest max_loras and max_lora_rank, since a policy must fit everywhere; the largest data_parallel_size, since
    TRL refuses adapters above 1 and one such replica is enough to lose them.
    """
    facts = [replica.facts for replica in fleet.replicas if replica.facts]
    config = dict(info["vllm_config"])
    if isinstance(lora := config.get("lora_config"), dict):
        smallest = {
            name: min(values)
            for name in ("max_loras", "max_lora_rank")
            if (values := [value for f in facts if (value := getattr(f, name)) is not None])
        }
        config["lora_config"] = {**lora, **smallest}
    if isinstance(parallel := config.get("parallel_config"), dict):
        sizes = [f.data_parallel_size for f in facts if f.data_parallel_size is not None]
        config["parallel_config"] = {**parallel, **({"data_parallel_size": max(sizes)} if sizes else {})}
    return {**info, "vllm_config": config}


def _success(report: LoadReport) -> str:
    warnings = "".join(f"\nWarning: {warning}" for warning in report.warnings)
    return f"Success: LoRA adapter '{report.policy}' added successfully.{warnings}"


def _model_entry(policy: Policy, base: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **base[0],
        "id": policy.name,
        "root": policy.path,
        "parent": base[0]["id"],
        "max_model_len": None,
    }


def _not_ready(fleet: Fleet, settings: ControlSettings) -> ApiError:
    _, behind = fleet.health(min_ready=settings.min_ready, start_wait_s=settings.start_wait_s)
    return ApiError(503, f"Not ready: {behind}.", reason="not_ready", retry_after_s=1)
