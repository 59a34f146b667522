"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's answers for everything that can be wrong."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.simulator.asgi import Answer, Refusal, Request, as_json
from proxy.simulator.faults import LoadVerdict
from proxy.simulator.lora_directory import AdapterNotFoundError, AdapterRefusedError
from proxy.simulator.replica import Replica


async def load(replica: Replica, request: Request) -> Answer:
    """Load an adapter under a name."""
    body = request.json_object()
    if missing := [field for field in ("lora_name", "lora_path") if field not in body]:
        raise Refusal.missing(*missing, body=body)
    name, path = _text(body, "lora_name"), _text(body, "lora_path")
    inplace = bool(body.get("load_inplace"))
    async with replica.load_locks[name]:
        _check_load(replica, name, path, inplace=inplace)
        if verdict := replica.faults.judge_load(name, path):
            await replica.engine.responsive()
            return _answer_of(verdict)
        lora = replica.registry.request(name=name, path=path, inplace=inplace)
        try:
            await replica.engine.load(lora)
        except AdapterNotFoundError:
            return _not_found(f"Loading lora {name} failed: No adapter found for {path}").answer()
        except AdapterRefusedError as error:
            return _worker_failed(str(error)).answer()
        replica.registry.register(lora)
        return _success(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(replica: Replica, request: Request) -> Answer:
    """Forget a name. The engine is not asked: memory and running sequences keep the weights."""
    body = request.json_object()
    if "lora_name" not in body:
        raise Refusal.missing("lora_name", body=body)
    name = _text(body, "lora_name")
    async with replica.load_locks[name]:
        await asyncio.sleep(replica.faults.now.unload_delay_s)
        if status := replica.faults.now.unload_status:
            raise Refusal(status, "the unload failed on purpose", type="InternalServerError")
        if not name:
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in replica.registry:
            raise _not_found(f"The lora adapter '{name}' cannot be found.")
        replica.registry.forget(name)
        replica.unloads[name] += 1
        return _success(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_load(replica: Replica, name: str, path: str, *, inplace: bool) -> None:
    if not name or not path:
        raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
    if name == replica.settings.model:
        raise _invalid(f"The lora adapter '{name}' conflicts with a served base model.")
    if name in replica.registry and not inplace:
        raise _invalid(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            "set 'load_inplace' to True."
        )


def _text(body: dict[str, Any], field: str) -> str:
    value = body[field]
    if not isinstance(value, str):
        raise Refusal.wrong(f"body.{field}", value, type="string_type", message="Input should be a valid string")
    return value


def _answer_of(verdict: LoadVerdict) -> Answer:
    if isinstance(verdict.body, str):
        return Answer(verdict.status, verdict.body.encode(), "text/plain; charset=utf-8")
    if verdict.body is not None:
        return as_json(verdict.body, status=verdict.status)
    if verdict.status == 404:
        return _not_found(verdict.message).answer()
    refusal = _worker_failed(verdict.message)
    refusal.status = verdict.status
    return refusal.answer()


def _success(text: str) -> Answer:
    return Answer(200, text.encode(), content_type=None)  # vLLM sends this one without a content type


def _invalid(message: str) -> Refusal:
    return Refusal(400, message, type="InvalidUserInput")


def _not_found(message: str) -> Refusal:
    return Refusal(404, message, type="NotFoundError")


def _worker_failed(reason: str) -> Refusal:
    text = (
        f"Call to add_lora method failed: Worker failed with error '{reason}', "
        "please check the stack trace above for the root cause"
    )
    return Refusal(500, text, type="InternalServerError")
