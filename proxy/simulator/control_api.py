"""The development endpoints that steer the engine: pause, resume, cache, aborts."""

from __future__ import annotations

import json
from typing import cast

from proxy.simulator.asgi import Answer, Refusal, Request, as_json
from proxy.simulator.engine import PauseMode
from proxy.simulator.replica import Replica

_MODES = ("abort", "wait", "keep")
_TRUE = ("1", "true", "yes", "on", "t", "y")
_FALSE = ("0", "false", "no", "off", "f", "n")


async def pause(replica: Replica, request: Request) -> Answer:
    """Pause the engine. Mode and clear_cache come from the query alone; a body is ignored."""
    mode = request.query.get("mode", "abort")
    if mode not in _MODES:
        expected = "'abort', 'wait' or 'keep'"
        found = {
            "type": "literal_error",
            "loc": "query.mode",
            "msg": f"Input should be {expected}",
            "input": mode,
            "ctx": {"expected": expected},
        }
        raise Refusal.invalid(str(found), param="query.mode")
    clear_cache = _flag(request, "clear_cache", default=True)
    await replica.engine.pause(cast(PauseMode, mode), clear_cache=clear_cache)
    return as_json({"status": "paused"})


async def resume(replica: Replica, request: Request) -> Answer:
    """Resume the engine, paused or not."""
    await replica.engine.resume()
    return as_json({"status": "resumed"})


async def is_paused(replica: Replica, request: Request) -> Answer:
    """Tell whether the engine is paused. This asks the engine, so it hangs when the engine does."""
    await replica.engine.responsive()
    return as_json({"is_paused": replica.engine.paused is not None})


async def reset_prefix_cache(replica: Replica, request: Request) -> Answer:
    """Empty the prefix cache; `success` is false when sequences run."""
    preempt = _flag(request, "reset_running_requests", default=False)
    return as_json({"success": await replica.engine.reset_prefix_cache(preempt_running=preempt)})


async def abort_requests(replica: Replica, request: Request) -> Answer:
    """Abort the requests with these ids, or everything in flight; unknown ids are counted all the same."""
    try:
        body = json.loads(request.body)
    except ValueError as error:
        raise Refusal(400, "Invalid JSON format", type="Bad Request") from error
    await replica.engine.responsive()
    ids = body.get("request_ids") if isinstance(body, dict) else None
    if not ids:
        return as_json({"status": "aborted", "aborted": replica.engine.abort_all()})
    replica.engine.abort(set(ids))
    return as_json({"status": "aborted", "aborted": len(ids)})


def _flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query.get(name)
    if value is None:
        return default
    if value.lower() not in _TRUE + _FALSE:
        message = "Input should be a valid boolean, unable to interpret input"
        raise Refusal.wrong(f"query.{name}", value, type="bool_parsing", message=message)
    return value.lower() in _TRUE
