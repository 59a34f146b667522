"""The composition root: builds every room, wires them together, and runs them until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, cast

import httpx2
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from proxy.access import Keys, exposure
from proxy.admin import admin_routes
from proxy.auth import Credentials
from proxy.contract import ErrorAnswer
from proxy.controlplane.api import control_routes
from proxy.controlplane.changes import Changes
from proxy.controlplane.federation import federation_routes
from proxy.controlplane.forwarding import forwarded_routes
from proxy.controlplane.members import Members
from proxy.controlplane.members_api import members_routes
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.reconciler import Reconciler
from proxy.controlplane.reloading import Reloading
from proxy.controlplane.replica_api import ReplicaApi
from proxy.controlplane.stopping import AnsweredWhenStopped
from proxy.controlplane.storage import gate_to
from proxy.controlplane.turn import Turn
from proxy.controlplane.weights import Weights
from proxy.controlplane.weights_api import weights_routes
from proxy.dashboard.history import History
from proxy.dashboard.routes import dashboard_routes
from proxy.dataplane.app import Dataplane
from proxy.dataplane.budget import Budget
from proxy.dataplane.door import Door
from proxy.dataplane.outbox import Outbox
from proxy.dataplane.pool import KEEP_ALIVE_S
from proxy.dataplane.relay import Relay
from proxy.dataplane.server_protocol import ServerProtocol, close_late, stop_unserved
from proxy.descriptors import raise_limit
from proxy.discovery.dns import DnsLookup
from proxy.discovery.file import FileLookup
from proxy.discovery.follow import Discovery
from proxy.discovery.jobs import JobsLookup
from proxy.discovery.listing import Lookup
from proxy.errors import ApiError, SettingsError
from proxy.fleet.pool import Fleet
from proxy.metrics.loads import LoadMetrics
from proxy.metrics.lookups import LookupMetrics
from proxy.settings import AccessSettings, ControlSettings, ListenSettings, Settings, UpstreamSettings
from proxy.sources import DnsSource, FileSource, JobsSource, Source
from proxy.telemetry import summary
from proxy.telemetry.loop_lag import measure_lag
from proxy.telemetry.registry import observe
from proxy.tracing.parts import Parts, parts

logger = logging.getLogger(__name__)

GC_EVERY = 50_000
"""Objects made between two collections of the youngest; at Python's 700 they took an eighth of the proxy's time."""

_NO_SPANS_OF_ITS_OWN: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""FastAPI 0.165 traces each request, and writes what does not validate into its log. Older ones ignore this."""

_BACKLOG = 4096
"""Connections waiting to be taken: a trainer opens hundreds at once."""

_TAKEN_AT_ONCE = 32
"""Of these, so many are taken in one turn of the event loop. libuv takes one a turn from each listening socket, and a
turn in which hundreds of connections have something to say takes long: those that came last would wait for seconds."""


@dataclass(frozen=True)
class Proxy:
    """What runs: the ASGI application, the fleet that it serves from, and what it may hold meanwhile."""

    asgi: ASGIApp
    fleet: Fleet
    budget: Budget


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Proxy]:
    """Build the proxy and run its background loops. A loop that dies takes the whole process with it."""
    async with parts(settings.tracing) as made_of, _built(settings, made_of) as proxy:
        yield proxy


@asynccontextmanager
async def _built(settings: Settings, made_of: Parts) -> AsyncIterator[Proxy]:
    fleet = Fleet(settings.upstream.urls, clock=time.monotonic)
    routing = settings.routing
    router = made_of.router(max_tracked_blocks=routing.max_tracked_blocks, routing=routing.routing)
    registry = CollectorRegistry()
    observe(fleet, router, registry)
    rollouts = made_of.rollouts(registry)
    fleet.on_change(lambda: router.follow(fleet))
    control = settings.control
    # Redirects are not followed and no environment proxy is used: the token goes to the replicas alone (P8).
    client = httpx2.AsyncClient(
        timeout=httpx2.Timeout(control.call_timeout_s, connect=settings.upstream.connect_timeout_s),
        trust_env=False,
        verify=ssl.create_default_context(),  # the system's authorities, or those that SSL_CERT_FILE names
        follow_redirects=False,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # what one replica sets goes to no other
        event_hooks={"request": list(made_of.request_hooks)},
        limits=httpx2.Limits(keepalive_expiry=KEEP_ALIVE_S),
    )
    credentials, keys = _credentials(settings.upstream), _keys(settings.access)
    async with (
        made_of.upstream(settings.upstream, credentials) as upstream,
        client,
        gate_to(control, settings.upstream.read_token) as gate,
        asyncio.TaskGroup() as tasks,
    ):
        apis: dict[int, ReplicaApi] = {}
        changes = Changes(fleet)
        pausing = Pausing(fleet, apis, control)
        new_api = partial(_replica_api, made_of, client, credentials, control)
        members = Members(fleet, apis, new_api, pausing, changes, control, tasks)
        loading = made_of.loading(fleet, changes, gate, control, LoadMetrics(registry))
        fleet.on_change(lambda: upstream.forget_all_but(replica.url for replica in fleet.replicas))
        relay = Relay(fleet, router, upstream, rollouts, settings.dataplane)
        api = FastAPI(
            title="lora-sync-proxy",
            docs_url=None,
            redoc_url=None,
            openapi_url="/proxy/openapi.json",
            responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
            redirect_slashes=False,  # to whatever host the client names
            telemetry=_NO_SPANS_OF_ITS_OWN,
        )
        api.include_router(control_routes(fleet, apis, loading, pausing, changes, control))
        turn = Turn()
        reloading = Reloading(fleet, apis, pausing, changes, gate, turn, control)
        weights = Weights(fleet, apis, pausing, changes, turn)
        api.include_router(weights_routes(weights, reloading, keys))
        api.include_router(forwarded_routes(fleet, apis, pausing, control, keys))
        api.include_router(members_routes(fleet, members, keys))
        history = History(fleet, router, rollouts)
        api.include_router(federation_routes(fleet, apis))
        api.include_router(admin_routes(fleet, router, rollouts, registry))
        api.include_router(dashboard_routes(fleet, router, rollouts, history))
        api.add_middleware(AnsweredWhenStopped)
        api.add_exception_handler(ApiError, _api_error)
        api.add_exception_handler(HTTPException, _not_routed)
        api.add_exception_handler(RequestValidationError, _bad_parameter)
        for replica in fleet.replicas:
            members.watch(replica)
        loops = [
            tasks.create_task(Reconciler(fleet, control).run()),
            tasks.create_task(reloading.run()),
            tasks.create_task(history.run()),
            tasks.create_task(measure_lag(registry)),
            tasks.create_task(summary.tell(fleet, router, every_s=settings.listen.stats_every_s)),
        ]
        lookups = LookupMetrics(registry)
        if (source := settings.discovery.discover) is not None:
            fleet.discovering = True
            lookup = _lookup(source, credentials, settings.upstream)
            every_s = settings.discovery.discover_every_s
            discovery = Discovery(fleet, members, lookup, lookups, source=str(source), every_s=every_s)
            loops.append(tasks.create_task(discovery.run()))
        dataplane = Dataplane(relay, api, rollouts, settings.dataplane, fleet.clock)
        yield Proxy(Door(made_of.front(dataplane), keys), fleet, dataplane.budget)
        members.stop()
        for loop in loops:
            loop.cancel()


def _credentials(settings: UpstreamSettings) -> Credentials:
    return Credentials(
        settings.read_token,
        network_group_prefix=settings.network_group_prefix,
        token_over_http=settings.token_over_http,
    )


def _keys(settings: AccessSettings) -> Keys:
    return Keys(settings.read_api_keys(), settings.admin_key.get_secret_value() if settings.admin_key else None)


def _replica_api(
    made_of: Parts, client: httpx2.AsyncClient, credentials: Credentials, settings: ControlSettings, url: str
) -> ReplicaApi:
    if credentials.token is not None and credentials.bearer(url) is None:
        logger.warning(
            "HF_TOKEN is not sent to %s: plain http can be read on the way. "
            "Use https, or set PROXY_TOKEN_OVER_HTTP=1 if that network is yours.",
            url,
        )
    return made_of.replica_api(client, url, credentials=credentials, stall_s=settings.stall_s)


def _lookup(source: Source, credentials: Credentials, settings: UpstreamSettings) -> Lookup:
    match source:
        case JobsSource():
            return JobsLookup(source, credentials, group_prefix=settings.network_group_prefix)
        case DnsSource():
            return DnsLookup(source)
        case FileSource():
            return FileLookup(source)


def serve(settings: Settings) -> None:
    """Run the proxy until SIGTERM or Ctrl-C, then let the rollouts in flight finish and return.

    A second signal ends the process at once. Raises SettingsError if the port is taken.
    """
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with _listen(settings.listen) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listener, stop))


class _Stop:
    """Handles signals: the first lets the rollouts in flight finish, the second ends the process at once."""

    def __init__(self) -> None:
        self._asked = False
        self._carry_out: Callable[[], None] = lambda: None

    def __call__(self, number: int, _: object) -> None:
        if self._asked:
            os._exit(128 + number)  # as shells tell of a signal; a thread that hangs in a mount must not hold this up
        self._asked = True
        self._carry_out()

    def is_carried_out_by(self, carry_out: Callable[[], None]) -> None:
        """Call this for the first signal, now if it has come already."""
        self._carry_out = carry_out
        if self._asked:
            carry_out()


def _listen(settings: ListenSettings) -> socket.socket:
    """Take the port before anything else, so that a taken one is one sentence."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError:
        raise SettingsError(
            f"Port {settings.port} on {settings.host} cannot be bound: it is in use, not allowed, or not an address "
            "of this machine. Stop what uses it, or set PROXY_PORT or PROXY_HOST to another one."
        ) from None


async def _serve(settings: Settings, listener: socket.socket, stop: _Stop) -> None:
    async with running(settings) as proxy:
        config = uvicorn.Config(
            proxy.asgi,
            http=cast(Any, partial(ServerProtocol, outbox=Outbox(asyncio.get_running_loop()), budget=proxy.budget)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(settings.listen.shutdown_s),
            # TRL keeps its connections through long steps; a client that reuses a closed one loses a request.
            timeout_keep_alive=75,
            backlog=_BACKLOG,
        )
        # What is there now stays; and a collection walks everything young, so it should not come at every few rollouts.
        gc.freeze()
        gc.set_threshold(GC_EVERY, 20, 50)
        host, port = settings.listen.host, listener.getsockname()[1]
        source = settings.discovery.discover
        others = f", and those of {source}" if source else ""
        count = len(settings.upstream.urls)
        logger.info("listening on http://%s:%d for %d replica%s%s", host, port, count, "s" * (count != 1), others)
        if (warning := exposure(host, _keys(settings.access))) is not None:
            logger.warning(warning)
        raise_limit(settings.dataplane.max_inflight)
        server = _Server(config, proxy.fleet, settings.listen.request_timeout_s)
        stop.is_carried_out_by(server.stop)
        await server.serve(sockets=[listener, *(listener.dup() for _ in range(_TAKEN_AT_ONCE - 1))])
        if proxy.fleet.inflight:
            logger.warning("stopped with %d rollouts in flight", proxy.fleet.inflight)


class _Server(uvicorn.Server):
    """Ends what has no end of its own: requests that do not come on and, when it stops, streams of events."""

    def __init__(self, config: uvicorn.Config, fleet: Fleet, request_timeout_s: float) -> None:
        super().__init__(config)
        self._fleet = fleet
        self._request_timeout_s = request_timeout_s

    def stop(self) -> None:
        """Be not ready from now on, then stop listening, wait for what is under way, and cancel what is left."""
        self._fleet.stopping = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Look after connections about once a second, since uvicorn comes by ten times."""
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            close_late(self.server_state.connections, now, self._request_timeout_s)
        return await super().on_tick(counter)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # a generator in uvicorn's words
        """Leave signals to `_Stop`: uvicorn takes a second SIGTERM for the first."""
        return nullcontext()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._fleet.events.close()
        await super().shutdown(sockets)
        stop_unserved(self.server_state.connections)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


async def _bad_parameter(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    refused = ApiError(400, f"{name}: {first['msg']}", reason="bad_request", type="Bad Request", param=name)
    return JSONResponse(refused.body(), status_code=refused.status, headers=refused.headers())


async def _not_routed(request: Request, error: Exception) -> Response:
    """Answer for a path that the proxy does not have. Unknown paths are not forwarded: vLLM guards none of its own."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: the proxy does not forward this path ({error.detail})"
    refused = ApiError(error.status_code, message, reason="not_forwarded", type="NotFoundError")
    return JSONResponse(refused.body(), status_code=refused.status, headers=refused.headers())
