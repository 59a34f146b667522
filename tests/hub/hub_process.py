"""The process behind an offline Hub: what clients see of it, and below /offline what only its test does.

It runs apart from the tests: much of what reads a mounted bucket keeps Python's lock until it has an answer, which a
Hub in the same process could never give. usage: python -m tests.hub.hub_process HOME PROGRAMS
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.hub.bucket_api import BucketApi
from tests.hub.cas_api import CasApi
from tests.hub.content import Content
from tests.hub.faults import Faults, FaultyAnswers
from tests.hub.job_api import JobApi
from tests.hub.parent import end_with_parent

USER = "tester"
TOKEN = "hf_offline"


class Hub:
    """Everything that an offline Hub holds, from one reset to the next."""

    def __init__(self, *, endpoint: str, home: Path, programs: dict[str, list[str]]) -> None:
        self.faults = Faults()
        self.calls: list[str] = []
        self.closing = False
        self.content = Content(home)
        cas = CasApi(self.content, endpoint=endpoint)
        buckets = BucketApi(self.content, cas, self.faults, endpoint=endpoint, user=USER, closing=lambda: self.closing)
        self.jobs = JobApi(
            self.faults,
            endpoint=endpoint,
            user=USER,
            token=TOKEN,
            programs=programs,
            home=home,
            closing=lambda: self.closing,
        )
        self.app = Starlette(
            routes=[Route("/api/whoami-v2", self._whoami), *buckets.routes(), *cas.routes(), *self.jobs.routes()],
            middleware=[
                Middleware(FaultyAnswers, faults=self.faults, calls=self.calls),
                Middleware(OnlyWithToken),
            ],
            exception_handlers={HTTPException: _error},
        )

    async def close(self) -> None:
        """End the feeds and the Jobs."""
        self.closing = True
        await self.jobs.close()

    async def _whoami(self, request: Request) -> Response:
        token = {"displayName": "offline", "role": self.faults.token_role}
        auth = {"type": "access_token", "accessToken": token}
        return JSONResponse({"type": "user", "id": "0" * 24, "name": USER, "orgs": [], "auth": auth})


class OnlyWithToken:
    """ASGI middleware that wants the token for every call to the API, and for every file."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["path"].startswith(("/api/", "/buckets/"))
        if guarded and Headers(scope=scope).get("authorization") != f"Bearer {TOKEN}":
            answer = JSONResponse({"error": "Invalid username or password."}, 401)
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


class Control:
    """The test's side: faults, what was called, and a new Hub in the old one's place."""

    def __init__(self, *, endpoint: str, home: Path, programs: dict[str, list[str]]) -> None:
        self._endpoint = endpoint
        self._home = home
        self._programs = programs
        self._hub = self._new()

    def app(self) -> Starlette:
        """Return the application of the whole process."""
        routes = [
            Route("/offline/faults", self._set_faults, methods=["POST"]),
            Route("/offline/state", self._state),
            Route("/offline/reset", self._reset, methods=["POST"]),
            Route("/offline/jobs/{id}/kill", self._kill_job, methods=["POST"]),
            Mount("/", self._pass_on),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    def _new(self) -> Hub:
        home = Path(tempfile.mkdtemp(dir=self._home))
        return Hub(endpoint=self._endpoint, home=home, programs=self._programs)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await self._hub.close()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._hub.app(scope, receive, send)

    async def _set_faults(self, request: Request) -> Response:
        given = json.loads(await request.body())
        try:
            checked = msgspec.convert(given, Faults)
        except msgspec.ValidationError as error:
            return JSONResponse({"error": str(error)}, 400)
        for name in given:
            setattr(self._hub.faults, name, getattr(checked, name))
        return JSONResponse({})

    async def _state(self, request: Request) -> Response:
        return JSONResponse({"calls": self._hub.calls, "stored_bytes": self._hub.content.stored_bytes})

    async def _reset(self, request: Request) -> Response:
        old, self._hub = self._hub, self._new()
        await old.close()
        return JSONResponse({})

    async def _kill_job(self, request: Request) -> Response:
        self._hub.jobs.jobs[request.path_params["id"]].kill()
        return JSONResponse({})


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def main() -> None:
    """Serve on a free port, which the first line of output names, until SIGTERM. What it keeps is in HOME."""
    end_with_parent()
    home, programs = Path(sys.argv[1]), json.loads(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        print(endpoint, flush=True)
        config = uvicorn.Config(
            Control(endpoint=endpoint, home=home, programs=programs).app(),
            log_level="warning",
            access_log=False,
            ws="none",
            date_header=False,
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
