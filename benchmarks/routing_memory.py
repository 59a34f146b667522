"""What the router keeps in memory: the process's size before, at most and after 200,000 prompts under 300 policies.

usage: python -m benchmarks.routing_memory      (a process of its own, started by benchmarks.routing)
"""

from __future__ import annotations

import gc
import json
from pathlib import Path

from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Facts, ReplicaState
from proxy.routing.request_key import read_request
from proxy.routing.router import Router

PROMPTS = 200_000
POLICIES = 300
LIVE = 4
"""Policies that serve at once."""


def main() -> None:
    """Replay, and print the sizes in MB as JSON."""
    fleet = Fleet(("http://0", "http://1"), clock=lambda: 0.0)
    router = Router(max_tracked_blocks=500_000)
    fleet.on_change(lambda: router.follow(fleet))
    for replica in fleet.replicas:
        fleet.set_state(replica, ReplicaState.JOINING)
        fleet.admit(replica, Facts(models=({"id": "base"},)))
    tail = ",".join(str(100_000 + number) for number in range(1023))
    start = _memory_mb("VmRSS")
    tracked = 0
    for number in range(PROMPTS):
        if number % (PROMPTS // POLICIES) == 0:
            _next_policy(fleet, number // (PROMPTS // POLICIES))
        name = f"p-v{number // (PROMPTS // POLICIES)}"
        key = read_request(f'{{"model":"{name}","prompt":[{100_000 + number},{tail}],"max_tokens":512}}'.encode())
        choice = router.choose(key, fleet.candidates(None))
        fleet.release(fleet.lease(choice.replica, fleet.policies.get(name), load=choice.load))
        router.finished(key, b'{"usage":{"completion_tokens":300}}')
        tracked = max(tracked, len(router.index))
    for policy in list(fleet.policies.values()):
        fleet.set_policy_state(policy, PolicyState.RETIRED)
    gc.collect()
    most, end = _memory_mb("VmHWM"), _memory_mb("VmRSS")
    print(json.dumps({"start": start, "most": most, "end": end, "most_tracked": tracked}))


def _next_policy(fleet: Fleet, number: int) -> None:
    for policy in fleet.occupying()[: -LIVE + 1]:
        fleet.set_policy_state(policy, PolicyState.RETIRED)
    name = f"p-v{number}"
    policy = Policy(name, name, "/p", number, None, None, announced_at=0.0, state=PolicyState.LIVE)
    fleet.add_policy(policy)


def _memory_mb(name: str) -> float:
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(sizes[name].split()[0]) / 1024


if __name__ == "__main__":
    main()
