"""Base weights that come from a trainer: init, start, update, finish, and the version that they are given.

No tensors travel here. What a replica serves after an update follows from the body of /update_weights, so whoever sent
it can compute the right answers (see `tokens`). As in vLLM, a generation between start and finish kills the engine.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from proxy.artifacts.checkpoint import INDEX
from proxy.errors import ArtifactError
from proxy.simulator.asgi import Answer, Refusal, Request, as_json
from proxy.simulator.replica import Replica
from proxy.simulator.tokens import checkpoint_weights, updated_base_weights

_NOT_CONFIGURED = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."


async def init(replica: Replica, request: Request) -> Answer:
    """Join the trainer's group."""
    info = _field(request, "init_info")
    await _in_worker(replica)
    replica.group = info
    return as_json({"message": "Weight transfer initialized"})


async def start(replica: Replica, request: Request) -> Answer:
    """Begin an update."""
    await _in_worker(replica)
    replica.engine.updating = True
    return as_json({"message": "Weight update started"})


async def update(replica: Replica, request: Request) -> Answer:
    """Receive weights."""
    info = _field(request, "update_info")
    await _in_worker(replica)
    replica.received = updated_base_weights(replica.settings.model, info)
    return as_json({"message": "Weights updated"})


async def finish(replica: Replica, request: Request) -> Answer:
    """End an update: from now on what was received is served. The prefix cache stays as it is."""
    body = request.json_object() if request.body else {}
    await _in_worker(replica)
    replica.engine.updating = False
    if replica.received is not None:
        replica.engine.batch.change_base(replica.received)
        replica.received = None
    if (version := body.get("weight_version")) is not None:
        replica.weight_version = str(version)
    return as_json({"message": "Weight update finished"})


async def collective_rpc(replica: Replica, request: Request) -> Answer:
    """Call a method of the worker: `reload_weights` with a path, which reads a checkpoint. Others are not there."""
    body = request.json_object()
    if "method" not in body:
        raise Refusal(400, "Missing 'method' in request body", type="Bad Request")
    await replica.engine.responsive()
    async with replica.engine.occupied():
        await replica.faults.weights_may_go_on()
        if body["method"] != "reload_weights":
            raise _worker_error(f"'CPUWorker' object has no attribute '{body['method']}'")
        await _reload(replica, Path(str(body.get("kwargs", {}).get("weights_path"))))
    return as_json({"results": [None]})


async def _reload(replica: Replica, path: Path) -> None:
    """Read a checkpoint. Until one has been read whole the next generation kills the engine, as vLLM's.

    One that breaks off tears the model for good.
    """
    replica.engine.updating = True
    if (missing := await asyncio.to_thread(_missing, path)) is not None:
        raise _worker_error(missing)
    if replica.torn:
        raise _worker_error("'Parameter' object has no attribute 'weight_loader'")
    try:
        if replica.faults.now.weights_error:
            raise ArtifactError("the checkpoint was not read, on purpose")
        weights = await asyncio.to_thread(checkpoint_weights, path)
    except ArtifactError as error:
        replica.torn = True
        raise _worker_error(f"Error while deserializing header: {error}") from error
    replica.engine.updating = False
    replica.engine.batch.change_base(weights)


def _missing(path: Path) -> str | None:
    """Return what vLLM says of a directory that it cannot begin to read."""
    if not path.is_dir():
        form = "Repo id must be in the form 'repo_name' or 'namespace/repo_name'"
        return f"{form}: '{path}'. Use `repo_type` argument if needed."
    if not any(path.glob("*.safetensors")):
        return f"Cannot find any model weights with `{path}`"
    index = path / INDEX
    promised = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else set()
    lost = {str(path / name) for name in promised if not (path / name).exists()}
    return f"Weight files referenced in index but missing: {lost}" if lost else None


async def info(replica: Replica, request: Request) -> Answer:
    """Tell the version that was last set. The engine keeps it."""
    await replica.engine.responsive()
    return as_json({"weight_version": replica.weight_version})


async def set_version(replica: Replica, request: Request) -> Answer:
    """Set the version that /weight_info tells."""
    body = request.json_object()
    if "new_version" not in body:
        raise Refusal.missing("new_version", body=None)
    await replica.engine.responsive()
    replica.weight_version = str(body["new_version"])
    return as_json({"success": True, "new_version": replica.weight_version})


async def world_size(replica: Replica, request: Request) -> Answer:
    """Tell how many workers there are."""
    return as_json({"world_size": replica.settings.data_parallel_size * replica.settings.tensor_parallel_size})


def _field(request: Request, name: str) -> Any:
    body = request.json_object()
    if name not in body:
        raise Refusal.missing(name, body=None)
    return body[name]


async def _in_worker(replica: Replica) -> None:
    """Wait as a collective does, and fail as vLLM's worker does."""
    await replica.engine.responsive()
    if not replica.settings.weight_transfer:
        raise _worker_error(_NOT_CONFIGURED)
    await replica.faults.weights_may_go_on()
    if replica.faults.now.weights_error:
        raise _worker_error("the weights did not arrive, on purpose")


def _worker_error(said: str) -> Refusal:
    text = (
        f"Call to collective_rpc method failed: Worker failed with error '{said}', "
        "please check the stack trace above for the root cause"
    )
    return Refusal(500, text, type="InternalServerError")
