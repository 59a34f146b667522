"""Tells what an announcement waits for, which otherwise says nothing before its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from proxy.contract import PolicyStatus
from trainer_client.errors import ProxyError
from trainer_client.progress import Progress, Tell, tell_nobody
from trainer_client.proxy_api import ProxyApi

FIRST_S = 3.0
"""Files are on their replicas within about 2 s; what takes longer may be a wrong path."""

EVERY_S = 30.0


@contextmanager
def telling_waits(tell: Tell, proxy: ProxyApi, name: str, path: str) -> Iterator[None]:
    """Tell what the load of policy `name` waits for as long as the `with` block lasts: after 3 s, then every 30 s.

    `path`: where replicas look for its files.
    """
    if tell is tell_nobody:
        yield
        return
    ended = Event()
    Thread(target=_watch, args=(ended, tell, proxy, name, path), name="lora-sync-waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()  # not waited for: it may be asking


def waits_for(status: PolicyStatus | None, *, name: str, path: str, seconds: float) -> str:
    """Say what a load that has taken so long waits for. `status`: what the proxy knows of the policy. Pure."""
    begun = f"{name} is not served after {seconds:.0f} s: "
    if status is None:
        return f"{begun}no replica has been asked for it; the proxy waits until it sees the files whole, or for a slot"
    if not status.reason:
        return f"{begun}it is {status.state}"
    return f"{begun}{status.reason}. Replicas look in {path}: is that where they see the store (--mount)?"


def _watch(ended: Event, tell: Tell, proxy: ProxyApi, name: str, path: str) -> None:
    began, wait_s = time.monotonic(), FIRST_S
    while not ended.wait(wait_s):
        wait_s = EVERY_S
        try:
            said = waits_for(proxy.status(name), name=name, path=path, seconds=time.monotonic() - began)
        except ProxyError:  # the announcement itself tells of a proxy that does not answer
            continue
        except RuntimeError:  # the connection to the proxy has been closed: it has ended
            return
        if not ended.is_set():
            tell(Progress(f"loading {name}", waits_for=said))
