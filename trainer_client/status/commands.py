"""`lora-sync status`: the proxy at this moment. `lora-sync top`: the same, again every second."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from proxy.contract import API_KEY
from proxy.errors import SettingsError
from trainer_client.errors import ProxyError
from trainer_client.proxy_api import ProxyApi
from trainer_client.status.reading import Rates, Reading, read
from trainer_client.status.view import age, frame
from trainer_client.tables import show

DEFAULT_PROXY = "http://localhost:8000"

ANSWER_S = 5.0
"""A proxy that needs longer for one of its own pages counts as away."""

app = typer.Typer()

Proxy = Annotated[str, typer.Option(metavar="URL", help=f"Where lora-sync-proxy listens. Its key: {API_KEY}.")]


@app.command(short_help="Show replicas, policies and rollouts once.")
def status(
    proxy: Proxy = DEFAULT_PROXY, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show replicas, policies and where rollouts went, as they are now.

    The exit status is 1 if the proxy does not answer.
    """
    with _asking(proxy) as api:
        reading = read(api)
    if as_json:
        typer.echo(json.dumps(as_data(reading, proxy)))
    else:
        show(frame(reading))


@app.command(short_help="Watch a running proxy, until Ctrl-C.")
def top(
    proxy: Proxy = DEFAULT_PROXY,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Pause between two looks.")] = 1.0,
) -> None:
    """Watch a running proxy in the terminal, until Ctrl-C.

    A proxy that does not answer is shown as such, with what it said last; it is asked again and again.
    """
    console = Console()
    if not console.is_terminal:
        raise SettingsError("top draws on a terminal; for a pipe there is `lora-sync status --json`.")
    watch = Watch(proxy)
    with (
        suppress(KeyboardInterrupt),
        _asking(proxy) as api,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            watch.look(api)
            live.update(watch.shown(), refresh=True)
            time.sleep(every)


class Watch:
    """What is on the screen: the last reading, and since when there is no newer one."""

    def __init__(self, proxy: str) -> None:
        self._proxy = proxy
        self._rates = Rates()
        self._last: Reading | None = None
        self._away_since: float | None = None
        self._why = ""

    def look(self, api: ProxyApi) -> None:
        """Ask the proxy; one that does not answer is away."""
        try:
            self._last = read(api)
        except ProxyError as error:
            self._away_since = self._away_since or time.monotonic()
            self._why = str(error)
            return
        self._away_since = None
        self._rates.add(self._last)

    def shown(self) -> RenderableType:
        """Return the screen."""
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append("lora-sync-proxy ", "bold").append(f"{self._proxy}   {time.strftime('%H:%M:%S')}   Ctrl-C ends")
        parts: list[RenderableType] = [head]
        if self._away_since is not None:
            lasting = age(time.monotonic() - self._away_since)
            parts.append(Text(f"NO ANSWER for {lasting}: {self._why}", "red"))
            if self._last is not None:
                parts.append(Text("What it said last:", "dim"))
        parts.append(Text())
        if self._last is not None:
            parts.append(frame(self._last, self._rates))
        return Group(*parts)


def as_data(reading: Reading, proxy: str) -> dict[str, object]:
    """Return a reading for JSON."""
    current = reading.current
    return {
        "proxy": proxy,
        "ready": reading.ready,
        "current": current.name if current else None,
        "slots": reading.slots,
        "in_flight": reading.inflight,
        "replicas": [replica.model_dump() for replica in reading.replicas],
        "policies": [policy.model_dump() for policy in reading.policies],
        **reading.stats.model_dump(),
    }


@contextmanager
def _asking(proxy: str) -> Iterator[ProxyApi]:
    api = ProxyApi(proxy, timeout_s=0, retry_timeout_s=0, connect_timeout_s=ANSWER_S, control_timeout_s=ANSWER_S)
    try:
        yield api
    finally:
        api.close()
