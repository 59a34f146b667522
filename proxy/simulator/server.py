"""Run one simulated replica as a process of its own, ending as vLLM's API server ends."""

from __future__ import annotations

import asyncio
import socket
import sys

import uvicorn
from starlette.types import ASGIApp

from proxy.errors import SettingsError
from proxy.simulator.app import App
from proxy.simulator.settings import SimulatorSettings

_KEEP_ALIVE_S = 5
"""vLLM leaves uvicorn's default alone, so idle connections close after 5 s and clients must cope."""

_EXIT_AFTER_DEATH_S = 0.2
"""Time between the engine's death and the exit, in which the error answers get out."""

_GRACE_S = 2
"""Requests that a hung engine will never answer are cut off after this."""


def build_app(settings: SimulatorSettings) -> ASGIApp:
    """Return the ASGI application of one replica; its lifespan runs the engine."""
    return App(settings)


def run(settings: SimulatorSettings) -> None:
    """Serve until SIGTERM or until the engine dies, and print the address first. A dead engine exits with 1.

    Raises SettingsError if the port cannot be had.
    """
    try:
        listener = socket.create_server((settings.host, settings.port), backlog=2048)
    except OSError as error:
        where = f"port {settings.port} on {settings.host}"
        raise SettingsError(f"The simulator cannot listen on {where}: {error.strerror}. Give another --port.") from None
    host, port = listener.getsockname()[:2]
    print(f"simulated vLLM replica on http://{host}:{port}", flush=True)
    app = App(settings)
    _Server(app).run(sockets=[listener])
    if app.replica.engine.dead:
        sys.exit(1)


class _Server(uvicorn.Server):
    """Aborts what is in flight when told to stop, so that those clients get a whole answer."""

    def __init__(self, app: App) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="auto",
                http="httptools",
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._faults = app.replica.faults
        self._engine = app.replica.engine
        self._engine.on_death = self._exit_soon

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._faults.now.stuck_at_sigterm:
            self._faults.set({"hang": True})
            self.config.timeout_graceful_shutdown = None
        else:
            self._engine.abort_all()
        await super().shutdown(sockets)

    def _exit_soon(self) -> None:
        asyncio.get_running_loop().call_later(_EXIT_AFTER_DEATH_S, self._exit)

    def _exit(self) -> None:
        self.should_exit = True
