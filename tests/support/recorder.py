"""Stands between a client and the proxy, passes everything on unchanged, and keeps what was said."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.contract import LOAD_PATH

_NOT_PASSED = {"content-length", "transfer-encoding", "connection", "date", "server", "host"}


@dataclass(frozen=True)
class Exchange:
    """One request and its answer."""

    at: float
    """Seconds on time.monotonic when the request came."""
    method: str
    target: str
    """Path and query."""
    body: bytes
    status: int
    headers: dict[str, str]
    answer: bytes
    until: float
    """When its answer went back to the client."""

    def json(self) -> Any:
        """Return the decoded request body."""
        return json.loads(self.body)

    def answered(self) -> Any:
        """Return the decoded answer."""
        return json.loads(self.answer)


@dataclass
class Recorder:
    """What has been said so far.

    `kept` holds a copy of every adapter that was announced, as it was at that moment, under the name that rollouts use.
    """

    url: str
    kept: Path
    exchanges: list[Exchange] = field(default_factory=list)

    def of(self, path: str) -> list[Exchange]:
        """Return the exchanges on `path`, without regard to the query."""
        return [exchange for exchange in self.exchanges if exchange.target.partition("?")[0] == path]


def asked_as(announced: dict[str, Any]) -> str:
    """Return what rollouts call a policy: the alias of its announcement, or its name."""
    name: str = (announced.get("policy") or {}).get("alias") or announced["lora_name"]
    return name


@contextmanager
def recorder(upstream: str, port: int, kept: Path, on_load: Callable[[], None] = lambda: None) -> Iterator[Recorder]:
    """Listen on `port` and pass everything on to `upstream`, until the block ends.

    `on_load` is called, in a thread, after each load but before the client has its answer.
    """
    record = Recorder(f"http://127.0.0.1:{port}", kept)
    sessions: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            sessions.append(session)
            yield

    async def relay(request: Request) -> Response:
        at, body = time.monotonic(), await request.body()
        if request.url.path == LOAD_PATH:
            wanted = json.loads(body)
            shutil.copytree(wanted["lora_path"], kept / asked_as(wanted))
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        passed = {name: value for name, value in request.headers.items() if name not in _NOT_PASSED}
        async with sessions[0].request(request.method, upstream + target, data=body, headers=passed) as answer:
            content = await answer.read()
            headers = {name.lower(): value for name, value in answer.headers.items()}
            if request.url.path == LOAD_PATH:
                await asyncio.to_thread(on_load)
            exchange = Exchange(at, request.method, target, body, answer.status, headers, content, time.monotonic())
            record.exchanges.append(exchange)
            back = {name: value for name, value in headers.items() if name not in _NOT_PASSED}
            return Response(content, status_code=answer.status, headers=back)

    app = Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])], lifespan=lifespan)
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_level="warning", access_log=False, timeout_keep_alive=75)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the recorder did not start"
        time.sleep(0.01)
    try:
        yield record
    finally:
        server.should_exit = True
        thread.join()
