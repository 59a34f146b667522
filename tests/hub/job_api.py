"""Jobs over HTTP, as huggingface_hub calls them: run, list, inspect, logs, cancel."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

from huggingface_hub import JobHardware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from tests.hub.bucket import hub_time
from tests.hub.faults import Faults
from tests.hub.job import Job
from tests.hub.job_door import Door
from tests.hub.job_network import NetworkGroups

_LOG_POLL_S = 0.05


class JobApi:
    """The Jobs of one user. A command that begins with a key of `programs` runs the words there in its place."""

    def __init__(
        self,
        faults: Faults,
        *,
        endpoint: str,
        user: str,
        token: str,
        programs: dict[str, list[str]],
        home: Path,
        closing: Callable[[], bool],
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self._faults = faults
        self._user = user
        self._token = token
        self._endpoint = endpoint
        self._programs = programs
        self._home = home
        self._closing = closing
        self._groups = NetworkGroups(home)
        self._doors: list[Door] = []
        self._urls: dict[str, list[str]] = {}

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            Route("/api/jobs/{owner}", self._run, methods=["POST"]),
            Route("/api/jobs/{owner}", self._list, methods=["GET"]),
            Route("/api/jobs/{owner}/{id}", self._inspect),
            Route("/api/jobs/{owner}/{id}/logs", self._send_log),
            Route("/api/jobs/{owner}/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    async def close(self) -> None:
        """End every Job."""
        for job in self.jobs.values():
            await asyncio.to_thread(job.end)
        for door in self._doors:
            await door.close()

    async def _run(self, request: Request) -> Response:
        self._check_owner(request)
        spec = await request.json()
        if spec["flavor"] not in {hardware.value for hardware in JobHardware}:
            raise HTTPException(400, f"there is no flavor {spec['flavor']}")
        job_id = secrets.token_hex(12)
        job = Job(job_id, spec, self._home / f"{job_id}.log", self._groups.join(spec.get("network")))
        job.log.touch()
        public = job.spec.get("expose", {}).get("portsPublic", [])
        self._urls[job_id] = []
        for port, local in job.ports.items():
            door = Door(job.address, local, token=None if port in public else self._token)
            self._urls[job_id].append(await door.open())
            self._doors.append(door)
        self.jobs[job_id] = job
        command = job.command()
        command[:1] = self._programs.get(command[0], command[:1])
        environment = {"HF_ENDPOINT": self._endpoint, "HF_HOME": str(self._home / job_id)}
        job.start(command, environment=environment, scheduling_s=self._faults.scheduling_s)
        return JSONResponse(self._describe(job))

    async def _list(self, request: Request) -> Response:
        self._check_owner(request)
        stages = request.query_params.getlist("stage")
        labels = [label.partition("=")[::2] for label in request.query_params.getlist("label")]
        found = [
            self._describe(job)
            for job in reversed(self.jobs.values())
            if (datetime.now(UTC) - job.created_at).total_seconds() >= self._faults.listed_after_s
            and (not stages or job.stage in stages)
            and all(job.spec.get("labels", {}).get(name) == value for name, value in labels)
        ]
        return JSONResponse(found)

    async def _inspect(self, request: Request) -> Response:
        return JSONResponse(self._describe(self._job(request)))

    async def _cancel(self, request: Request) -> Response:
        job = self._job(request)
        job.cancel()
        return JSONResponse(self._describe(job))

    async def _send_log(self, request: Request) -> Response:
        job = self._job(request)
        tail = request.query_params.get("tail")
        # huggingface_hub takes what is later than this for news; uvicorn's own Date lags behind.
        headers = {"Date": formatdate(usegmt=True)}
        lines = self._follow(job, int(tail) if tail else None)
        return StreamingResponse(lines, headers=headers, media_type="text/event-stream")

    async def _follow(self, job: Job, tail: int | None) -> AsyncIterator[str]:
        yield _line("===== Job started =====", job)
        sent = 0 if tail is None else max(0, job.log.read_bytes().count(b"\n") - tail)
        while not self._closing():
            ended = job.finished_at is not None
            lines = job.log.read_text(errors="replace").splitlines(keepends=True)
            whole = lines if ended else [line for line in lines if line.endswith("\n")]
            for line in whole[sent:]:
                yield _line(line.removesuffix("\n"), job)
            sent = max(sent, len(whole))
            if ended:
                return
            await asyncio.sleep(_LOG_POLL_S)

    def _check_owner(self, request: Request) -> None:
        if (owner := request.path_params["owner"]) != self._user:
            raise HTTPException(403, f"{self._user} may not touch the Jobs of {owner}")

    def _job(self, request: Request) -> Job:
        self._check_owner(request)
        job_id = request.path_params["id"]
        if job_id not in self.jobs:
            raise HTTPException(404, f"there is no Job {job_id}")
        return self.jobs[job_id]

    def _describe(self, job: Job) -> dict[str, Any]:
        kept = ("command", "arguments", "environment", "flavor", "dockerImage", "spaceId", "labels", "volumes")
        status: dict[str, Any] = {"stage": job.stage, "message": job.message}
        if job.ports:
            status["exposeUrls"] = self._urls[job.id]
        return {
            **{name: job.spec[name] for name in (*kept, "expose", "network") if name in job.spec},
            "id": job.id,
            "secrets": dict.fromkeys(job.spec.get("secrets", {}), ""),
            "createdAt": hub_time(job.created_at),
            "startedAt": job.started_at and hub_time(job.started_at),
            "finishedAt": job.finished_at and hub_time(job.finished_at),
            "owner": {"id": "0" * 24, "name": self._user, "type": "user"},
            "status": status,
            "durations": _durations(job),
        }


def _durations(job: Job) -> dict[str, int | None]:
    now = datetime.now(UTC)
    end = job.finished_at or now
    started = job.started_at
    return {
        "schedulingSecs": None if started is None else int((started - job.created_at).total_seconds()),
        "runningSecs": None if started is None else int((end - started).total_seconds()),
        "totalSecs": int((end - job.created_at).total_seconds()),
    }


def _line(text: str, job: Job) -> str:
    timestamp = hub_time(job.started_at or job.created_at)
    return f"data: {json.dumps({'data': text, 'timestamp': timestamp})}\n\n"
