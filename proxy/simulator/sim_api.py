"""The simulator's own pages, which no vLLM has: /sim/faults and /sim/state."""

from __future__ import annotations

import os
from typing import Any

from pydantic import ValidationError

from proxy.simulator.asgi import Answer, Request, as_json, detail
from proxy.simulator.replica import Replica


async def show_faults(replica: Replica, request: Request) -> Answer:
    """Show the faults in force."""
    return as_json(replica.faults.now.model_dump())


async def set_faults(replica: Replica, request: Request) -> Answer:
    """Change the faults that the body names; `{"die": true}` kills the engine, `{"exit": true}` the whole process."""
    changes = request.json_object()
    if changes.pop("exit", False):
        os._exit(1)
    dies = changes.pop("die", False)
    try:
        faults = replica.faults.set(changes)
    except ValidationError as error:
        return detail(422, str(error))
    replica.engine.faults_changed()
    if dies:
        replica.engine.die()
    return as_json(faults.model_dump())


async def clear_faults(replica: Replica, request: Request) -> Answer:
    """End every fault."""
    replica.faults.clear()
    replica.engine.faults_changed()
    return as_json(replica.faults.now.model_dump())


async def state(replica: Replica, request: Request) -> Answer:
    """Show what the replica has done and was asked."""
    engine, calls = replica.engine, replica.calls
    counters, scheduler = engine.batch.counters, engine.batch.scheduler
    running, waiting = scheduler.running_count, scheduler.waiting.total
    return as_json(
        {
            "pid": os.getpid(),
            "instance_id": replica.instance_id,
            "paused": engine.paused,
            "dead": engine.dead,
            "running": running,
            "waiting": waiting,
            "in_flight": running + waiting,
            "finished": counters.finished,
            "aborted": counters.aborted,
            "preemptions": counters.preemptions,
            "generation_tokens": counters.generation_tokens,
            "loads": counters.loads,
            "unloads": dict(replica.unloads),
            "adapters": _adapters(replica),
            "weight_version": replica.weight_version,
            "group": replica.group,
            "calls": dict(calls.counts),
            "authorization": calls.authorization,
            "control": list(calls.control),
            "rollouts": list(calls.rollouts),
        }
    )


def _adapters(replica: Replica) -> dict[str, dict[str, Any]]:
    shown = {}
    for lora in replica.registry.all():
        files = replica.engine.batch.memory.get(lora)
        digest = files.digest if files else None
        shown[lora.name] = {"path": lora.path, "digest": digest, "in_memory": files is not None}
    return shown
