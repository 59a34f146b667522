"""What can go wrong: each kind strikes, lasts for a while, and ends."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.support.proxies import RunningProxy
from tests.support.replicas import Replica

STILL_S = 20.0
"""Longer than any fault lasts."""

TERM_LIMIT_S = 10.0
"""vLLM often does not end at SIGTERM; whoever runs it kills it after a while."""

Act = Callable[[Replica], None]


@dataclass(frozen=True)
class Kind:
    """One kind of fault. What strikes and ends blocks, and is called in a thread."""

    name: str
    strike: Act
    end: Act
    takes_out: bool = False
    """The replica cannot serve meanwhile."""
    lasts: bool = True
    """It goes on for a while, rather than ending by itself."""
    many: bool = False
    """It may strike several replicas at once."""
    share: int = 4
    """How often it comes, against the others. The two that end a run of TRL come rarely, so that some runs last."""


def _nothing(replica: Replica) -> None:
    pass


def _restart(replica: Replica) -> None:
    replica.terminate()
    with suppress(subprocess.TimeoutExpired):
        replica.wait_exit(limit_s=TERM_LIMIT_S)
    replica.stop()
    replica.start()


def _loads(name: str, field: str, make: Callable[[], Any], end: Any = None, *, many: bool, share: int = 4) -> Kind:
    """Return a fault that loads meet, on simulators."""

    def change(replica: Replica, value: Any) -> None:
        # Over a connection of its own, since another fault may be restarting the replica. One that is down starts again
        # without faults; one that stands still takes it once it goes on.
        with suppress(httpx2.TransportError):
            url = f"{replica.url}/sim/faults"
            httpx2.post(url, json={field: value}, timeout=STILL_S, trust_env=False).raise_for_status()

    def strike(replica: Replica) -> None:
        change(replica, make())

    return Kind(name, strike, lambda replica: change(replica, end), many=many, share=share)


def _torn() -> dict[str, Any]:
    kinds = ["no_weights", "truncated", "empty_weights", "bad_config", "empty_config"]
    return {"kind": random.choice(kinds), "seconds": random.uniform(0.2, 3)}


PROXY = "proxy kill -9"

PROCESS_KINDS = [
    Kind("kill -9", lambda replica: replica.kill(), lambda replica: replica.start(), takes_out=True),
    Kind("restart", _restart, _nothing, takes_out=True, lasts=False),
    Kind("engine hangs", lambda replica: replica.hang(), lambda replica: replica.unhang(), takes_out=True),
    Kind("SIGSTOP", lambda replica: replica.freeze(), lambda replica: replica.thaw(), takes_out=True),
]
"""On every sort of replica."""

STORAGE_KINDS = [
    _loads("late storage", "late", lambda: {"seconds": random.uniform(0.2, 3)}, many=True),
    _loads("torn storage", "torn", _torn, many=True),
    _loads("load refused", "load_error", lambda: {"status": 500}, many=False, share=1),
    _loads("slow load", "load_delay_s", lambda: random.uniform(0.5, 4), 0, many=False),
]
"""On simulators, which can be told so."""


def kill_proxy(proxy: RunningProxy) -> None:
    """Kill the proxy and start it again with the same command line."""
    proxy.kill()
    proxy.start(healthy=False)
