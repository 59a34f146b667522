"""What the status page shows of one moment: what the JSON of `admin` says, and the little that only the page needs."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from proxy.admin import policy_status, replica_status, stats_of
from proxy.dashboard.history import sample
from proxy.fleet.policies import OCCUPYING, Policy
from proxy.fleet.pool import Fleet
from proxy.metrics.rollouts import RolloutMetrics
from proxy.routing.router import Router

SHOWN_ENDED = 12
"""Ended policies in a snapshot, the last ones: those that the timeline of syncs has room for."""


REUSED_S = 0.5
"""However many pages are open, a snapshot is made no more often: one of 64 replicas takes about 5 ms."""


class Snapshots:
    """The latest snapshot, as JSON."""

    def __init__(self, fleet: Fleet, router: Router, rollouts: RolloutMetrics) -> None:
        self._fleet = fleet
        self._router = router
        self._rollouts = rollouts
        self._made_at = -math.inf
        self._json = b""

    def latest(self) -> bytes:
        """Return one that is at most REUSED_S old."""
        now = self._fleet.clock()
        if now - self._made_at >= REUSED_S:
            self._made_at, self._json = now, msgspec.json.encode(snapshot(self._fleet, self._router, self._rollouts))
        return self._json


def snapshot(fleet: Fleet, router: Router, rollouts: RolloutMetrics) -> dict[str, Any]:
    """Return the state of everything, ready for JSON; `at` is in seconds since 1970."""
    return {
        "at": fleet.wall_clock(),
        "models": fleet.base_models,
        "pause": {"target": fleet.pause.target, "real": fleet.pause.real} if fleet.pause else None,
        "slots": fleet.slots(),
        "router": stats_of(fleet, router)["router"],
        "sample": msgspec.to_builtins(sample(fleet, router, rollouts)),
        "replicas": [replica_status(replica, fleet, router, rollouts) for replica in fleet.replicas],
        "policies": [_policy(policy, fleet) for policy in _shown(fleet)],
    }


def _shown(fleet: Fleet) -> list[Policy]:
    """Return the policies that take a slot and the last of those that have ended, in the order in which they came."""
    ended = [policy for policy in fleet.policies.values() if policy.state not in OCCUPYING]
    shown = fleet.occupying() + fleet.leaving() + ended[-SHOWN_ENDED:]
    return sorted(dict.fromkeys(shown), key=lambda policy: policy.age_key)


def _policy(policy: Policy, fleet: Fleet) -> dict[str, Any]:
    return {
        **policy_status(policy, fleet).model_dump(exclude={"digest", "files_deletable"}),
        "announced": fleet.wall_clock() - (fleet.clock() - policy.announced_at),
        "slowest": _slowest(policy, fleet),
    }


def _slowest(policy: Policy, fleet: Fleet) -> dict[str, Any] | None:
    """Return the replica that its load took longest on, with the tries and seconds of it, or None if none was asked."""
    trials = [(r.url, trial) for r in fleet.replicas if (trial := r.trials.get(policy.upstream)) is not None]
    if not trials:
        return None
    url, trial = max(trials, key=lambda one: one[1].load_s + one[1].verify_s)
    return {"replica": url, "tries": trial.tries, "load_s": trial.load_s, "verify_s": trial.verify_s}
