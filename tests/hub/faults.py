"""What a test can make the offline Hub do wrong, and the middleware that answers instead of it.

hub.faults.landing_s = 2.5
hub.faults.refuse("*/adapter_model.safetensors")
hub.faults.answers.append(Answer(503, "POST */batch", times=1))
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_TOO_MANY = 429


@dataclass
class Answer:
    """An error that calls get instead of what they asked for."""

    status: int
    calls: str = "*"
    """Which calls, as a pattern over `METHOD /path`."""
    times: float = inf
    """How many of them."""
    share: float = 1.0
    """Which part of them, drawn at random."""
    retry_after_s: int | None = None
    """The Retry-After of the answer."""
    carried_out: bool = False
    """Whether the call is carried out all the same, and only its answer is lost."""

    def response(self) -> JSONResponse:
        """Return the answer, with a request limit that is used up if it is a 429."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == _TOO_MANY and self.retry_after_s is not None:
            headers["RateLimit"] = f'"api";r=0;t={self.retry_after_s}'
        return JSONResponse({"error": f"the test asked for a {self.status}"}, self.status, headers)


@dataclass
class Faults:
    """All faults of one offline Hub; they may change at any time."""

    landing_s: float = 0.0
    """Seconds from an upload's end until the Hub shows its files."""
    landing_of: dict[str, float] = field(default_factory=dict)
    """The same for the paths that match a pattern, so that a directory lands torn."""
    stale_listing_s: float = 0.0
    """How old the answers of the tree and of paths-info are. HEAD and downloads are never stale."""
    scheduling_s: float = 0.0
    """Seconds that a Job waits before it runs."""
    answers: list[Answer] = field(default_factory=list)
    """Errors in place of answers; of several that match, the first."""
    seed: int = 0
    """Of the draws for `Answer.share`."""

    def __post_init__(self) -> None:
        self._refused: dict[str, float] = {}
        self._random = random.Random(self.seed)

    def refuse(self, paths: str, *, times: float = inf) -> None:
        """Let operations on paths that match fail within their batch, so many times, while the rest succeeds."""
        self._refused[paths] = times

    def refuses(self, path: str) -> bool:
        """Tell whether this operation fails, and count it."""
        for pattern, left in self._refused.items():
            if left > 0 and fnmatchcase(path, pattern):
                self._refused[pattern] = left - 1
                return True
        return False

    def landing_of_path(self, path: str) -> float:
        """Return the seconds that this path takes to land."""
        return next((s for pattern, s in self.landing_of.items() if fnmatchcase(path, pattern)), self.landing_s)

    def answer_to(self, call: str) -> Answer | None:
        """Return what to answer `METHOD /path` instead, if anything, and count it."""
        for answer in self.answers:
            if answer.times > 0 and fnmatchcase(call, answer.calls) and self._random.random() < answer.share:
                answer.times -= 1
                return answer
        return None


class FaultyAnswers:
    """ASGI middleware that notes every call and answers those that `faults` names."""

    def __init__(self, app: ASGIApp, *, faults: Faults, calls: list[str]) -> None:
        self._app = app
        self._faults = faults
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = f"{scope['method']} {scope['path']}"
        self._calls.append(call)
        answer = self._faults.answer_to(call)
        if answer is None:
            await self._app(scope, receive, send)
            return
        if answer.carried_out:
            await self._app(scope, receive, _nowhere)
        else:
            await _drain(receive)
        await answer.response()(scope, receive, send)


async def _nowhere(message: Message) -> None:
    """Drop a message of an answer that is lost."""


async def _drain(receive: Receive) -> None:
    # The client is still sending: an answer before the end would look like a broken connection.
    while (await receive()).get("more_body"):
        pass
