"""What a test can make the offline Hub do wrong, and the middleware that answers instead of it.

hub.set_faults(landing_s=2.5, refused={"*/adapter_model.safetensors": 1})
hub.set_faults(answers=[Answer(503, "POST */batch", times=1)])
"""

from __future__ import annotations

import random
from fnmatch import fnmatchcase

import msgspec
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_TOO_MANY = 429


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """An error that calls get instead of what they asked for."""

    status: int
    calls: str = "*"
    """Which calls, as a pattern over `METHOD /path`."""
    times: int | None = None
    """How many of them; None for all."""
    share: float = 1.0
    """Which part of them, drawn at random, the same in every run."""
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


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """All faults of one offline Hub; they may change at any time."""

    landing_s: float = 0.0
    """Seconds from an upload's end until the Hub shows its files."""
    landing_of: dict[str, float] = {}
    """The same for the paths that match a pattern, so that a directory lands torn."""
    stale_listing_s: float = 0.0
    """How old the answers of the tree and of paths-info are. HEAD and downloads are never stale."""
    refused: dict[str, int | None] = {}
    """How often (None: always) operations on paths that match fail within their batch, while the rest succeeds."""
    scheduling_s: float = 0.0
    """Seconds that a Job waits before it runs."""
    listed_after_s: float = 0.0
    """Seconds from a Job's start until the list of Jobs has it."""
    token_role: str = "write"
    """What the Hub says of the token: `read`, `write` or `fineGrained`."""
    answers: list[Answer] = []
    """Errors in place of answers; of several that match, the first."""

    def refuses(self, path: str) -> bool:
        """Tell whether this operation fails, and count it."""
        for pattern, left in self.refused.items():
            if left != 0 and fnmatchcase(path, pattern):
                self.refused[pattern] = None if left is None else left - 1
                return True
        return False

    def landing_of_path(self, path: str) -> float:
        """Return the seconds that this path takes to land."""
        return next((s for pattern, s in self.landing_of.items() if fnmatchcase(path, pattern)), self.landing_s)

    def answer_to(self, call: str, draw: random.Random) -> Answer | None:
        """Return what to answer `METHOD /path` instead, if anything, and count it."""
        for answer in self.answers:
            if answer.times != 0 and fnmatchcase(call, answer.calls) and draw.random() < answer.share:
                answer.times = None if answer.times is None else answer.times - 1
                return answer
        return None


class FaultyAnswers:
    """ASGI middleware that notes every call and answers those that `faults` names."""

    def __init__(self, app: ASGIApp, *, faults: Faults, calls: list[str]) -> None:
        self._app = app
        self._faults = faults
        self._calls = calls
        self._draw = random.Random(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = f"{scope['method']} {scope['path']}"
        self._calls.append(call)
        answer = self._faults.answer_to(call, self._draw)
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
