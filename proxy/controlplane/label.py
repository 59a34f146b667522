"""Read the label of a replica's base weights, at a moment when what it says can be held against what is known."""

from __future__ import annotations

from proxy.controlplane.replica_api import ReplicaApi
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica


async def label_told(fleet: Fleet, replica: Replica, api: ReplicaApi) -> str | None:
    """Return the label; None where it may just have changed, where the replica went down meanwhile or tells none."""
    before = (replica.weights, replica.life)
    label = await api.weight_version() if fleet.weights.settled else None
    return label if fleet.weights.settled and (replica.weights, replica.life) == before else None
