"""What clients of the control plane call: vLLM's own paths, so that TRL finds what it knows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ValidationError

from proxy.contract import LOAD_PATH, UNLOAD_PATH, LoadReport, LoadRequest, UnloadRequest
from proxy.controlplane.broadcast import agreed, broadcast
from proxy.controlplane.loading import Loading
from proxy.controlplane.replica_api import Answer, ReplicaApi
from proxy.controlplane.retiring import Retiring
from proxy.errors import ApiError
from proxy.fleet.policies import Policy
from proxy.fleet.pool import Fleet
from proxy.settings import ControlSettings

Body = TypeVar("Body", bound=BaseModel)


def control_routes(
    fleet: Fleet, apis: dict[int, ReplicaApi], loading: Loading, retiring: Retiring, settings: ControlSettings
) -> APIRouter:
    """Return the routes of the control plane."""
    routes = APIRouter()

    def up() -> list[ReplicaApi]:
        return [apis[replica.index] for replica in fleet.up]

    def note_empty_caches(answers: dict[str, Answer]) -> None:
        for replica in fleet.replicas:
            if (answer := answers.get(replica.url)) is not None and answer.ok:
                fleet.cache_was_reset(replica)

    @routes.post(LOAD_PATH)
    async def load(request: Request) -> Response:
        wanted = await _read(request, LoadRequest)
        report = await loading.load(wanted)
        if wanted.policy is not None:
            return JSONResponse(report.model_dump())
        return PlainTextResponse(_success(report))

    @routes.post(UNLOAD_PATH)
    async def unload(request: Request) -> Response:
        wanted = await _read(request, UnloadRequest)
        policy = fleet.served_policy(wanted.lora_name)
        if policy is None:
            raise ApiError(
                404,
                f"The lora adapter '{wanted.lora_name}' cannot be found.",
                reason="unknown_policy",
                type="NotFoundError",
                param="lora_name",
            )
        retiring.retire(policy, "unloaded by the client")
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")

    @routes.post("/abort_requests")
    async def abort_requests(request: Request) -> Response:
        with fleet.client_aborting():
            answers = await broadcast(up(), "POST", _target(request), body=await request.body() or b"{}")
        return _passed_on(agreed(answers, what="/abort_requests"))

    @routes.post("/pause")
    async def pause(request: Request) -> Response:
        aborting = request.query_params.get("mode", "abort") == "abort"
        with fleet.client_aborting() if aborting else nullcontext():
            answers = await broadcast(up(), "POST", _target(request))
        if request.query_params.get("clear_cache", "true").lower() not in ("false", "0"):
            note_empty_caches(answers)
        try:
            return _passed_on(agreed(answers, what="The pause"))
        except ApiError:
            # A fleet that is half paused answers some rollouts and holds others for ever: undo what was done.
            await broadcast([api for api in apis.values() if (a := answers.get(api.url)) and a.ok], "POST", "/resume")
            raise

    @routes.post("/resume")
    async def resume(request: Request) -> Response:
        answers = await broadcast(up(), "POST", _target(request))
        return _passed_on(agreed(answers, what="The resume"))

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        answers = await broadcast(up(), "POST", _target(request))
        note_empty_caches(answers)
        return _passed_on(agreed(answers, what="/reset_prefix_cache"))

    @routes.get("/get_world_size")
    async def world_size(request: Request) -> Response:
        answers = await broadcast(up(), "GET", _target(request))
        agreed(answers, what="/get_world_size")
        return JSONResponse({"world_size": sum(_world_size(url, answer) for url, answer in answers.items())})

    @routes.get("/server_info")
    async def server_info(request: Request) -> Response:
        ready = fleet.ready
        if not ready:
            raise _not_ready(fleet, settings)
        answer = await apis[ready[0].index].call("GET", _target(request))
        info = answer.json()
        if answer.status != 200 or not isinstance(info, dict) or not isinstance(info.get("vllm_config"), dict):
            return _passed_on(answer)
        return JSONResponse(fleet_info(info, fleet))

    @routes.get("/v1/models")
    async def models() -> Response:
        known = [replica.facts for replica in fleet.replicas if replica.facts]
        if not known:
            raise _not_ready(fleet, settings)
        smallest = min((facts.max_model_len for facts in known if facts.max_model_len), default=None)
        base = [{**entry, "max_model_len": smallest} for entry in known[0].models]
        return JSONResponse({"object": "list", "data": base + [_model_entry(p, base) for p in fleet.live()]})

    @routes.get("/health")
    @routes.get("/ping")
    @routes.post("/ping")
    @routes.get("/proxy/ready")
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


async def _read(request: Request, shape: type[Body]) -> Body:
    try:
        return shape.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"The request body is not valid: {where or 'body'}: {first['msg']}"
        raise ApiError(400, message, reason="bad_request", type="Bad Request", param=where or None) from None


def _target(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def _passed_on(answer: Answer) -> Response:
    if answer.status is None:
        raise ApiError(502, f"A replica did not answer: {answer.text}", reason="replica_failed")
    return Response(answer.text, status_code=answer.status, media_type=answer.content_type or None)


def _world_size(url: str, answer: Answer) -> int:
    body = answer.json()
    size = body.get("world_size") if isinstance(body, dict) else None
    if not isinstance(size, int):
        raise ApiError(502, f"{url} does not tell its world size: {answer.text[:200]}", reason="replica_failed")
    return size


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
