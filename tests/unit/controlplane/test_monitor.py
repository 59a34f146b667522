"""What a probe concludes from the label of base weights, and from what a server that is not well says."""

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


class UnwellApi(LabelledApi):
    """A server that is not well, and says more with each probe."""

    async def call(
        self, method: str, target: str, *, body: bytes | None = None, timeout_s: float | None = None
    ) -> Answer:
        self._answers[target] += "it is down: " * 30
        if len(self._answers[target]) > 1000:
            self.asked.set()
        return Answer(503, self._answers[target])


def test_what_a_server_says_is_kept_short() -> None:
    """A proxy among its own replicas by another name repeats what it said before, and more."""

    async def scenario() -> None:
        fleet = Fleet(("http://replica",), clock=lambda: 0.0)
        [replica] = fleet.replicas
        api, settings = UnwellApi(""), ControlSettings(probe_s=0.01)
        monitor = Monitor(fleet, replica, api, Pausing(fleet, {0: api}, settings), settings)
        running = asyncio.get_running_loop().create_task(monitor.run())
        await api.asked.wait()
        await asyncio.sleep(0)
        running.cancel()
        assert replica.reason.startswith("/health: 503 it is down") and len(replica.reason) < 250
        events = [event.message for event in fleet.events.after(0)]
        assert events and all(said.startswith("still down (/health: 503 ") for said in events)

    asyncio.run(scenario())
