"""What can go wrong: each kind strikes, lasts for a while, and ends."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from benchmarks.chaos.disk import Disk
from benchmarks.chaos.scale import MAX_LORAS
from benchmarks.chaos.wire import Trouble, Wire
from tests.support.proxies import RunningProxy
from tests.support.replicas import Replica

STILL_S = 20.0
"""Longer than any fault lasts."""

TERM_LIMIT_S = 10.0
"""vLLM often does not end at SIGTERM; whoever runs it kills it after a while."""

Act = Callable[[Replica, Wire], None]


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
    everyone: bool = False
    """It strikes what all depend on: once, whichever replica it is given, and no other of these meanwhile."""
    ends_runs: bool = False
    """It ends a run of TRL whenever it meets a sync."""


def _nothing(replica: Replica, wire: Wire) -> None:
    pass


def _restart(replica: Replica, wire: Wire) -> None:
    replica.terminate()
    with suppress(subprocess.TimeoutExpired):
        replica.wait_exit(limit_s=TERM_LIMIT_S)
    replica.stop()
    replica.start()


def _restart_otherwise(replica: Replica, wire: Wire) -> None:
    replica.reconfigure(max_loras=MAX_LORAS + 1 + replica.max_loras % 2)  # never as before
    _restart(replica, wire)


def _start_again(replica: Replica, wire: Wire) -> None:
    """Start a server whose engine has died: it ends by itself, at the latest when it is told to."""
    with suppress(subprocess.TimeoutExpired):
        replica.wait_exit(limit_s=TERM_LIMIT_S)
    replica.stop()
    replica.start()


def _network(trouble: Trouble, *, takes_out: bool) -> Kind:
    def strike(replica: Replica, wire: Wire) -> None:
        wire.trouble = trouble

    def end(replica: Replica, wire: Wire) -> None:
        wire.trouble = Trouble.NONE

    return Kind(trouble.value, strike, end, takes_out=takes_out)


def _loads(
    name: str, field: str, make: Callable[[], Any], end: Any = None, *, many: bool, ends_runs: bool = False
) -> Kind:
    """Return a fault that loads meet, on simulators."""

    def change(replica: Replica, value: Any) -> None:
        # Over a connection of its own, since another fault may be restarting the replica. One that is down starts again
        # without faults; one that stands still takes it once it goes on.
        with suppress(httpx2.TransportError):
            url = f"{replica.url}/sim/faults"
            httpx2.post(url, json={field: value}, timeout=STILL_S, trust_env=False).raise_for_status()

    def strike(replica: Replica, wire: Wire) -> None:
        change(replica, make())

    return Kind(name, strike, lambda replica, wire: change(replica, end), many=many, ends_runs=ends_runs)


def _torn() -> dict[str, Any]:
    kinds = ["no_weights", "truncated", "empty_weights", "bad_config", "empty_config"]
    return {"kind": random.choice(kinds), "seconds": random.uniform(0.2, 3)}


PROCESS_KINDS = [
    Kind("kill -9", lambda replica, _: replica.kill(), lambda replica, _: replica.start(), takes_out=True),
    Kind("SIGTERM, restarts empty", _restart, _nothing, takes_out=True, lasts=False),
    Kind("restarts with other settings", _restart_otherwise, _nothing, takes_out=True, lasts=False),
    Kind("server SIGSTOP", lambda replica, _: replica.freeze(), lambda replica, _: replica.thaw(), takes_out=True),
    Kind("engine SIGSTOP", lambda replica, _: replica.hang(), lambda replica, _: replica.unhang(), takes_out=True),
    Kind("engine kill -9", lambda replica, _: replica.kill_engine(), _start_again, takes_out=True),
]
"""On every sort of replica. A simulator's engine is part of its server; it stands still, or dies, as it is told to."""

NETWORK_KINDS = [
    _network(Trouble.CUT, takes_out=True),
    _network(Trouble.HALF_OPEN, takes_out=True),
    _network(Trouble.RESET_HEAD, takes_out=True),
    _network(Trouble.RESET_BODY, takes_out=True),
    _network(Trouble.SLOW, takes_out=False),
    _network(Trouble.PIECES, takes_out=False),
]
"""Between the proxy and a replica."""

STORAGE_KINDS = [
    _loads("late storage", "late", lambda: {"seconds": random.uniform(0.2, 3)}, many=True),
    _loads("torn storage", "torn", _torn, many=True),
    _loads("load refused", "load_error", lambda: {"status": 500}, many=False, ends_runs=True),
    _loads("slow load", "load_delay_s", lambda: random.uniform(0.5, 4), 0, many=False),
]
"""On simulators, which can be told so."""


def of_proxy(proxy: RunningProxy) -> list[Kind]:
    """Return what can happen to the proxy: another one takes its place, on the same command line."""

    def kill(replica: Replica, wire: Wire) -> None:
        proxy.kill()
        proxy.start(healthy=False)

    def stop(replica: Replica, wire: Wire) -> None:
        proxy.stop()
        proxy.start(healthy=False)

    return [
        Kind("proxy kill -9", kill, _nothing, lasts=False, everyone=True, ends_runs=True),
        Kind("proxy SIGTERM", stop, _nothing, lasts=False, everyone=True, ends_runs=True),
    ]


def of_disk(disk: Disk | None) -> list[Kind]:
    """Return what can happen to the disk that the trainer publishes on; nothing without one of its own."""
    if disk is None:
        return []
    return [
        Kind("disk full", lambda *_: disk.fill(), lambda *_: disk.free(), everyone=True, ends_runs=True),
    ]
