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
from benchmarks.chaos.views import View
from benchmarks.chaos.wire import Trouble, Wire
from tests.support.proxies import RunningProxy
from tests.support.replicas import Replica

STILL_S = 20.0
"""Longer than any fault lasts."""

TERM_LIMIT_S = 10.0
"""vLLM often does not end at SIGTERM; whoever runs it kills it after a while."""


@dataclass(frozen=True, eq=False)
class Site:
    """One replica with what is around it."""

    replica: Replica
    wire: Wire
    """Through which the proxy reaches it."""
    view: View
    """Of the publisher's files."""

    def __repr__(self) -> str:
        return repr(self.replica)


Act = Callable[[Site], None]


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
    restarts: bool = False
    """The replica starts again, which takes real vLLM a minute or two."""
    has_met: Callable[[Site], bool] = lambda site: True
    """Whether it has met what it is there for; it goes on until then, but not for ever."""


def _nothing(site: Site) -> None:
    pass


def _restart(site: Site) -> None:
    site.replica.terminate()
    _start_again(site)


def _restart_otherwise(site: Site) -> None:
    site.replica.reconfigure(max_loras=MAX_LORAS + 1 + site.replica.max_loras % 2)  # never as before
    _restart(site)


def _start_again(site: Site) -> None:
    """Start a server that is about to end, by itself or since it was told to."""
    with suppress(subprocess.TimeoutExpired):
        site.replica.wait_exit(limit_s=TERM_LIMIT_S)
    site.replica.kill()
    site.replica.stop()
    site.replica.start()


def _network(trouble: Trouble, *, takes_out: bool) -> Kind:
    def strike(site: Site) -> None:
        site.wire.trouble = trouble

    def end(site: Site) -> None:
        site.wire.trouble = Trouble.NONE

    return Kind(trouble.value, strike, end, takes_out=takes_out)


def _storage(name: str, change: Callable[[View], None]) -> Kind:
    return Kind(
        name,
        lambda site: change(site.view),
        lambda site: site.view.renew(),
        many=True,
        has_met=lambda site: site.view.has_withheld,
    )


def _loads(name: str, field: str, make: Callable[[], Any], end: Any = None, *, ends_runs: bool = False) -> Kind:
    """Return a fault that loads meet, on simulators."""

    def change(site: Site, value: Any) -> None:
        # Over a connection of its own, since another fault may be restarting the replica. One that is down starts again
        # without faults; one that stands still takes it once it goes on.
        with suppress(httpx2.TransportError):
            url = f"{site.replica.url}/sim/faults"
            httpx2.post(url, json={field: value}, timeout=STILL_S, trust_env=False).raise_for_status()

    return Kind(name, lambda site: change(site, make()), lambda site: change(site, end), ends_runs=ends_runs)


PROCESS_KINDS = [
    Kind("kill -9", lambda site: site.replica.kill(), lambda site: site.replica.start(), takes_out=True, restarts=True),
    Kind("restarts empty (SIGTERM)", _restart, _nothing, takes_out=True, lasts=False, restarts=True),
    Kind("restarts with other settings", _restart_otherwise, _nothing, takes_out=True, lasts=False, restarts=True),
    Kind("server SIGSTOP", lambda site: site.replica.freeze(), lambda site: site.replica.thaw(), takes_out=True),
    Kind("engine SIGSTOP", lambda site: site.replica.hang(), lambda site: site.replica.unhang(), takes_out=True),
    Kind("engine kill -9", lambda site: site.replica.kill_engine(), _start_again, takes_out=True, restarts=True),
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
    _storage("late storage", View.grow_old),
    _storage("torn storage", View.tear),
]
"""Between the publisher and replicas."""

SIMULATED_KINDS = [
    _loads("load refused", "load_error", lambda: {"status": 500}, ends_runs=True),
    _loads("slow load", "load_delay_s", lambda: random.uniform(0.5, 4), 0),
]
"""On simulators, which can be told so."""


def of_proxy(proxy: RunningProxy) -> list[Kind]:
    """Return what can happen to the proxy: another one takes its place, on the same command line."""

    def kill(site: Site) -> None:
        proxy.kill()
        proxy.start(healthy=False)

    def stop(site: Site) -> None:
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
        Kind("disk full", lambda site: disk.fill(), lambda site: disk.free(), everyone=True, ends_runs=True),
    ]
