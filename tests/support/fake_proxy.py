"""A stand-in for the proxy as the trainer client sees it: load, unload and policies, over a real socket.

It holds managed paths to their manifest as the proxy does, unless it does not see the files. A test scripts what the
next announcements are answered.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from proxy.artifacts.manifest import verify_manifest
from proxy.contract import (
    LOAD_PATH,
    POLICIES_PATH,
    RELOAD_PATH,
    REPLICAS_PATH,
    UNLOAD_PATH,
    LoadReport,
    LoadRequest,
    PolicyStatus,
    ReloadReport,
    ReloadRequest,
    ReplicaLoad,
)
from proxy.errors import ApiError, ArtifactError

REPLICA = "http://replica-1:8000"
START_TIMEOUT_S = 5.0
"""uvicorn starts in a tenth of a second; a busy machine takes longer."""


@dataclass(frozen=True)
class Answer:
    """What one announcement is answered instead of being loaded."""

    status: int
    body: dict[str, Any] | str = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


class FakeProxy:
    """Serve on a free port from entering to leaving the context. `listen()` may come later, or never."""

    def __init__(self, *, listening: bool = True, sees_files: bool = True) -> None:
        self.loads: list[LoadRequest] = []
        """Every announcement, in order."""
        self.reloads: list[ReloadRequest] = []
        """Every announcement of merged weights, in order."""
        self.checkpoint: str | None = None
        """The policy that is served in place of the base model."""
        self.unloads: list[str] = []
        self.live: dict[str, str] = {}
        """Path by name of what is loaded."""
        self.retired: set[str] = set()
        self.leased: set[str] = set()
        """Policies whose files are still needed."""
        self.script: deque[Answer] = deque()
        """Answers to the next announcements."""
        self.answers: dict[int, Answer] = {}
        """Answers to later announcements, by their number from 1."""
        self.answer_to_unload: Answer | None = None
        self.answer_to_status: Answer | None = None
        self.max_lora_rank: int | None = None
        """What its replica says, None for one that does not answer, or is started without LoRA."""
        self.dtype: str | None = None
        """What its replica says, None for one that does not answer."""
        self.calls: list[str] = []
        """Pauses and resumes, in order, each with its query."""
        self.answer_to_pause: Answer | None = None
        self._listening = listening
        self._sees_files = sees_files
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._app(), lifespan="off", log_level="warning", ws="none", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> Self:
        if self._listening:
            self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()

    def listen(self) -> None:
        """Begin to answer."""
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            assert time.monotonic() < deadline, "the fake proxy did not start"
            time.sleep(0.01)

    def forget(self) -> None:
        """Forget every policy, as a proxy that restarted without replicas."""
        self.live.clear()
        self.retired.clear()

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route(LOAD_PATH, self._load, methods=["POST"]),
                Route(UNLOAD_PATH, self._unload, methods=["POST"]),
                Route(POLICIES_PATH, self._list),
                Route(REPLICAS_PATH, self._replicas),
                Route(RELOAD_PATH, self._reload, methods=["POST"]),
                Route("/pause", self._pause, methods=["POST"]),
                Route("/resume", self._pause, methods=["POST"]),
                Route(f"{POLICIES_PATH}/{{name}}", self._status),
            ]
        )

    async def _load(self, request: Request) -> Response:
        announced = LoadRequest.model_validate_json(await request.body())
        self.loads.append(announced)
        if self.script:
            return await _respond(self.script.popleft())
        if answer := self.answers.get(len(self.loads)):
            return await _respond(answer)
        assert announced.policy is not None
        try:
            if self._sees_files:
                verify_manifest(Path(announced.lora_path), announced.policy, announced.lora_name)
        except ArtifactError as error:
            return _error(ApiError(400, str(error), reason="manifest"))
        self.live[announced.lora_name] = announced.lora_path
        return JSONResponse(report(announced.lora_name, status="live").model_dump())

    async def _reload(self, request: Request) -> Response:
        asked = ReloadRequest.model_validate_json(await request.body())
        self.reloads.append(asked)
        if self.script:
            return await _respond(self.script.popleft())
        assert asked.policy is not None
        try:
            verify_manifest(Path(asked.path), asked.policy, asked.name)
        except ArtifactError as error:
            return _error(ApiError(400, str(error), reason="manifest"))
        self.checkpoint = asked.name
        done = ReloadReport(name=asked.name, version=f"1~{asked.name}", status="live", seconds=0.01, model="base")
        return JSONResponse(done.model_dump())

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        self.unloads.append(name)
        if self.answer_to_unload:
            return await _respond(self.answer_to_unload)
        if self.live.pop(name, None) is None:
            return _error(ApiError(404, f"{name} is not loaded", reason="unknown_policy"))
        self.retired.add(name)
        return PlainTextResponse("Success")

    async def _replicas(self, request: Request) -> Response:
        told = {"max_lora_rank": self.max_lora_rank, "dtype": self.dtype}
        replica = {"index": 0, "url": REPLICA, "state": "ready", **told}
        return JSONResponse({"replicas": [replica], "checkpoints": [self.checkpoint] if self.checkpoint else []})

    async def _pause(self, request: Request) -> Response:
        self.calls.append(request.url.path + (f"?{request.url.query}" if request.url.query else ""))
        if self.answer_to_pause:
            return await _respond(self.answer_to_pause)
        return JSONResponse({"status": "ok"})

    async def _list(self, request: Request) -> Response:
        if self.answer_to_status:
            return await _respond(self.answer_to_status)
        return JSONResponse({"policies": [self._describe(name) for name in [*self.live, *sorted(self.retired)]]})

    async def _status(self, request: Request) -> Response:
        name = request.path_params["name"]
        if self.answer_to_status:
            return await _respond(self.answer_to_status)
        if name in self.live or name in self.retired:
            return JSONResponse(self._describe(name))
        return _error(ApiError(404, f"{name} is unknown", reason="unknown_policy"))

    def _describe(self, name: str) -> dict[str, Any]:
        gone = name in self.retired and name not in self.leased
        return PolicyStatus(
            name=name,
            path=self.live.get(name, ""),
            state="retired" if gone else "retiring" if name in self.retired else "live",
            version=None,
            leases=int(name in self.leased),
            held_by=() if gone else (REPLICA,),
            files_deletable=gone,
        ).model_dump(mode="json")


def report(name: str, *, status: str, message: str = "") -> LoadReport:
    """Return a report of one replica."""
    replica = ReplicaLoad(
        replica=REPLICA, status="loaded" if status == "live" else "failed", attempts=1, seconds=0.01, message=message
    )
    return LoadReport.model_validate({"policy": name, "status": status, "seconds": 0.01, "replicas": [replica]})


def refusal(status: int, message: str, *, details: dict[str, Any] | None = None) -> Answer:
    """Return an answer in the proxy's error shape."""
    error = ApiError(status, message, reason="test", details=details)
    return Answer(status, error.body(), error.headers())


async def _respond(answer: Answer) -> Response:
    await asyncio.sleep(answer.delay_s)
    if isinstance(answer.body, str):
        return PlainTextResponse(answer.body, answer.status, answer.headers)
    return JSONResponse(answer.body, answer.status, answer.headers)


def _error(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())
