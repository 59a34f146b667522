"""What one policy waits for holds up no other one."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest

from proxy.controlplane.changes import Changes
from proxy.controlplane.reconciler import Reconciler
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Fleet
from proxy.settings import ControlSettings
from tests.support.hanging_mount import WITHOUT_MOUNTS, hanging_mount


def live(fleet: Fleet, name: str, path: Path) -> Policy:
    policy = Policy(name, name, str(path), 1, None, None, announced_at=time.monotonic())
    fleet.add_policy(policy)
    fleet.set_policy_state(policy, PolicyState.LIVE)
    return policy


@pytest.mark.skipif(WITHOUT_MOUNTS is not None, reason=WITHOUT_MOUNTS or "")
def test_a_mount_that_hangs_under_a_blocked_policy_holds_up_no_other_one(tmp_path: Path) -> None:
    async def scenario(lora: Path) -> None:
        fleet = Fleet((), clock=time.monotonic)
        blocked = live(fleet, "blocked-v1", lora / "policy")
        blocked.blocked = "it has killed two engines"
        reconciling = asyncio.get_running_loop().create_task(Reconciler(fleet, ControlSettings()).run())
        for _ in range(5):
            await asyncio.sleep(0)  # its first turns: it looks for the files
        other = live(fleet, "other-v2", tmp_path)
        fleet.retire(other, "unloaded", deadline=fleet.clock())
        changes = Changes(fleet)
        assert await changes.wait_until(lambda: other.state is PolicyState.RETIRED, deadline=fleet.clock() + 5)
        assert blocked.blocked
        reconciling.cancel()
        with suppress(asyncio.CancelledError):
            await reconciling

    with hanging_mount(tmp_path / "lora") as lora:
        asyncio.run(scenario(lora))
