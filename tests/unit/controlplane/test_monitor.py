"""What a probe concludes from the label of base weights."""

from __future__ import annotations

import asyncio

import pytest

from proxy.controlplane.answer import Answer
from proxy.controlplane.monitor import Monitor
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.replica_api import ReplicaApi
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import ReplicaState
from proxy.settings import ControlSettings


class LabelledApi(ReplicaApi):
    """A replica that is well, runs, and has these base weights."""

    def __init__(self, label: str) -> None:
        self.url = "http://replica"
        self._answers = {
            "/health": "",
            "/is_paused": '{"is_paused": false}',
            "/weight_info": f'{{"weight_version": "{label}"}}',
        }
        self._stall_s = 1.0
        self._in_engine = {}
        self.asked = asyncio.Event()

    async def call(
        self, method: str, target: str, *, body: bytes | None = None, timeout_s: float | None = None
    ) -> Answer:
        if target == "/weight_info":
            self.asked.set()
        return Answer(200, self._answers[target])


@pytest.mark.parametrize(
    ("known", "label", "lives", "state"),
    [
        (None, "default", 0, ReplicaState.QUARANTINED),  # put out before it had been read: this is no restart
        ("default", "default", 0, ReplicaState.QUARANTINED),
        ("updating", "default", 1, ReplicaState.DOWN),
        ("updating", "3", 0, ReplicaState.JOINING),
    ],
)
def test_a_restart_is_a_label_that_has_changed(known: str | None, label: str, lives: int, state: ReplicaState) -> None:
    async def scenario() -> None:
        fleet = Fleet(("http://replica",), clock=lambda: 0.0)
        [replica] = fleet.replicas
        fleet.want_weights("3")
        fleet.set_state(replica, ReplicaState.QUARANTINED, "its base weights are not the fleet's")
        replica.weights = known
        api, settings = LabelledApi(label), ControlSettings(probe_s=60)
        monitor = Monitor(fleet, replica, api, Pausing(fleet, {0: api}, settings), settings)
        states: list[ReplicaState] = []
        fleet.on_change(lambda: states.append(replica.state))
        running = asyncio.get_running_loop().create_task(monitor.run())
        await api.asked.wait()
        running.cancel()
        assert replica.life == lives
        assert state in [*states, replica.state]

    asyncio.run(scenario())
