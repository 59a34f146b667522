"""Send one call to several replicas that answer it together or not at all.

In a collective every member waits for all others. When one fails, or dies before its turn, the others would wait for
ever: then this hangs up on them and says who it was.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from proxy.controlplane.answer import Answer
from proxy.controlplane.changes import Changes
from proxy.controlplane.replica_api import ReplicaApi
from proxy.fleet.weights import Member

LAST_WORDS_S = 0.5
"""What the others get to answer once one has failed: most fail for the same reason, and then all are named."""


async def together(
    calls: Sequence[tuple[Member, bytes]],
    target: str,
    *,
    apis: Mapping[int, ReplicaApi],
    changes: Changes,
    timeout_s: float | None = math.inf,
) -> dict[Member, Answer]:
    """Send each member its own body, all at once, and return every answer; a missing one says why it is missing.

    Returns early when a member fails or leaves; nothing is sent if one has left before. `timeout_s`: as in
    `ReplicaApi.call`; by default the caller has one.
    """
    if not all(member.is_there for member, _ in calls):  # its index may be another replica's by now
        return {member: _unheard(member) for member, _ in calls}
    async with asyncio.TaskGroup() as group:
        tasks = {
            member: group.create_task(
                apis[member.replica.index].call("POST", target, body=body or None, timeout_s=timeout_s)
            )
            for member, body in calls
        }
        leaving = group.create_task(
            changes.wait_until(lambda: not all(member.is_there for member in tasks), deadline=math.inf)
        )
        pending = set(tasks.values())
        while pending:
            done, _ = await asyncio.wait({*pending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            if leaving in done or any(task in done and not task.result().ok for task in tasks.values()):
                break
        if pending:
            await asyncio.wait(pending, timeout=LAST_WORDS_S)
        answers = {member: task.result() if task.done() else _unheard(member) for member, task in tasks.items()}
        for task in (*pending, leaving):
            task.cancel()
    return answers


def _unheard(member: Member) -> Answer:
    if not member.is_there:
        return Answer(None, f"it has left the group: {member.replica.reason}")
    return Answer(None, "given up, since another one had failed or left")
