"""An offline Hub: what huggingface_hub and hf_xet need of huggingface.co, on a free port of this machine.

    with OfflineHub() as hub:
        hub.api().create_bucket("tester/runs")
        hub.faults.landing_s = 2.5

It serves from a thread of its own, so a test sets faults and looks at what arrived without a detour. Other processes
reach it through `hub.environment()`.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn
from huggingface_hub import HfApi
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.hub.bucket import Bucket
from tests.hub.bucket_api import BucketApi
from tests.hub.cas_api import CasApi
from tests.hub.content import Content
from tests.hub.faults import Faults, FaultyAnswers
from tests.hub.job import Job
from tests.hub.job_api import JobApi, Launch
from tests.support.replicas import wait_until

USER = "tester"
TOKEN = "hf_offline"


class OfflineHub:
    """Serve from entering to leaving the context; everything is forgotten then."""

    def __init__(self, *, launch: Launch = Job.command) -> None:
        """Run `launch(job)` for every Job, by default what it was asked to run."""
        self.faults = Faults()
        self.calls: list[str] = []
        """`METHOD /path` of every call, in order of arrival."""
        self._launch = launch
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __repr__(self) -> str:
        return f"OfflineHub({self.url}, buckets={sorted(self._buckets.buckets)})"

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="offline-hub-")
        config = uvicorn.Config(
            self._app(Path(self._directory.name)),
            lifespan="on",
            log_level="warning",
            access_log=False,
            ws="none",
            date_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        wait_until(lambda: self._server.started, what=f"{self.url} answers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        self._directory.cleanup()

    def api(self) -> HfApi:
        """Return a real client of this Hub with a good token."""
        return HfApi(endpoint=self.url, token=TOKEN)

    def environment(self) -> dict[str, str]:
        """Return the variables with which another process finds this Hub and writes nothing into the user's home."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(Path(self._directory.name) / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def bucket(self, bucket_id: str) -> Bucket:
        """Return the state behind a bucket."""
        return self._buckets.buckets[bucket_id]

    def job(self, job_id: str) -> Job:
        """Return the process behind a Job."""
        return self._jobs.jobs[job_id]

    def _app(self, home: Path) -> Starlette:
        for folder in ("xorbs", "logs"):
            (home / folder).mkdir()
        self.content = Content(home / "xorbs")
        cas = CasApi(self.content, endpoint=self.url)
        self._buckets = BucketApi(
            self.content, cas, self.faults, endpoint=self.url, user=USER, closing=self._is_closing
        )
        self._jobs = JobApi(
            self.faults,
            user=USER,
            token=TOKEN,
            launch=self._launch,
            environment={name: value for name, value in self.environment().items() if name != "HF_TOKEN"},
            logs=home / "logs",
            closing=self._is_closing,
        )
        return Starlette(
            routes=[Route("/api/whoami-v2", _whoami), *self._buckets.routes(), *cas.routes(), *self._jobs.routes()],
            lifespan=lambda app: self._jobs.running(),
            middleware=[
                Middleware(FaultyAnswers, faults=self.faults, calls=self.calls),
                Middleware(OnlyWithToken),
            ],
            exception_handlers={HTTPException: _error},
        )

    def _is_closing(self) -> bool:
        return self._server.should_exit


class OnlyWithToken:
    """ASGI middleware that wants the token for every call to the API, and for every file."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith(("/api/", "/buckets/"))
        if guarded and Headers(scope=scope).get("authorization") != f"Bearer {TOKEN}":
            answer = JSONResponse({"error": "Invalid username or password."}, 401)
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _whoami(request: Request) -> Response:
    return JSONResponse(
        {
            "type": "user",
            "id": "0" * 24,
            "name": USER,
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": {"displayName": "offline", "role": "write"}},
        }
    )


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
