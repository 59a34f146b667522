"""The paths of the status page: its files, and the stream of events that keeps it up to date."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from proxy.dashboard.history import SAMPLE_S, History
from proxy.dashboard.snapshot import Snapshots
from proxy.errors import ApiError
from proxy.fleet.events import EventLog
from proxy.fleet.pool import Fleet
from proxy.metrics.rollouts import RolloutMetrics
from proxy.routing.router import Router

STATIC = Path(__file__).parent / "static"

FIRST_EVENTS = 300
"""Events of the past that a page gets when it is opened: enough to tell of each replica what went wrong last."""

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Nothing from elsewhere, nothing inline, and no text that the browser could take for markup."""

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def dashboard_routes(fleet: Fleet, router: Router, rollouts: RolloutMetrics, history: History) -> APIRouter:
    """Return the routes of the status page. `/` leads to it."""
    routes = APIRouter()
    snapshots = Snapshots(fleet, router, rollouts)
    files = {
        path.relative_to(STATIC).as_posix(): (path.read_bytes(), _MEDIA_TYPES[path.suffix])
        for path in STATIC.rglob("*.*")
        if path.suffix in _MEDIA_TYPES
    }

    def file(name: str) -> Response:
        content, media_type = files[name]
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    @routes.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("proxy/dashboard", headers=PAGE_HEADERS)

    @routes.get("/proxy/dashboard", include_in_schema=False)
    async def page() -> Response:
        return file("index.html")

    @routes.get("/proxy/dashboard/stream", include_in_schema=False)
    async def stream(request: Request) -> Response:
        process, _, last = request.headers.get("last-event-id", "").partition("-")
        known = int(last) if process == str(history.began) and last.isdecimal() and len(last) < 19 else 0
        return StreamingResponse(
            messages(fleet.events, history, snapshots, after=known),
            media_type="text/event-stream",
            headers=PAGE_HEADERS | {"Cache-Control": "no-store"},
        )

    @routes.get("/proxy/dashboard/{name:path}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"The status page has no '{name}'.", reason="not_forwarded", type="NotFoundError")
        return file(name)

    return routes


async def messages(log: EventLog, history: History, snapshots: Snapshots, *, after: int) -> AsyncIterator[bytes]:
    """Yield what the page shows, as server-sent events, until the proxy stops.

    First `history`, the columns of its charts; then `happened`, one for each event of the fleet above id `after`, and
    every SAMPLE_S seconds a `snapshot`. Only events carry an id, PROCESS-EVENT, so that a browser that comes back goes
    on after them, or gets all of a proxy that has started anew.
    """
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    forget = log.on_event(woken.set)
    try:
        yield _message("history", msgspec.json.encode({"began": history.began, "columns": history.columns()}))
        after = max(after, log.newest - FIRST_EVENTS)
        due = loop.time()
        while not log.closed:
            woken.clear()
            for event in log.after(after):
                after = event.id
                yield b"id: %d-%d\n" % (history.began, event.id) + _message("happened", msgspec.json.encode(event))
            if loop.time() >= due:
                due = loop.time() + SAMPLE_S
                yield _message("snapshot", snapshots.latest())
            try:
                async with asyncio.timeout_at(due):
                    await woken.wait()
            except TimeoutError:
                pass
    finally:
        forget()


def _message(kind: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
