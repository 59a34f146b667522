"""The little HTTP that the simulator needs, on bare ASGI: requests read whole, answers sent whole, vLLM's error bodies.

No framework stands between, because two replicas and a proxy share two cores in the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode

_PRIVATE_PATH = re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+")
_FILE_PATH = re.compile(r"(?:/[\w\-]+)+/[\w\-]+\.\w+")


@dataclass(slots=True)
class Request:
    """One request, its body already read."""

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes
    receive: Receive
    """After the body it returns nothing but the client's disconnect."""
    send: Send

    def json(self) -> Any:
        """Return the body, read as JSON. Raises Refusal in vLLM's words, also when the content type is not JSON's."""
        if not self.headers.get("content-type", "").startswith("application/json"):
            raise Refusal.invalid("Unsupported Media Type: Only 'application/json' is allowed")
        if not self.body:
            raise Refusal.wrong("body", None, type="missing", message="Field required")
        try:
            return _decode(self.body)
        except msgspec.DecodeError:
            return _decode_slowly(self.body)

    def json_object(self) -> dict[str, Any]:
        """Return the body, which must be a JSON object."""
        body = self.json()
        if not isinstance(body, dict):
            message = "Input should be a valid dictionary or object to extract fields from"
            raise Refusal.wrong("body", body, type="model_attributes_type", message=message)
        return body


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer."""

    status: int
    body: bytes = b""
    content_type: str | None = "application/json"

    async def send(self, send: Send) -> None:
        """Send it."""
        headers = [(b"content-length", str(len(self.body)).encode())]
        if self.content_type:
            headers.append((b"content-type", self.content_type.encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


class Refusal(Exception):
    """An error answer in vLLM's shape."""

    def __init__(self, status: int, message: str, *, type: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param

    @classmethod
    def invalid(cls, *problems: str, param: str | None = None) -> Refusal:
        """Return the 400 for a body that does not fit its schema."""
        plural = "s" if len(problems) > 1 else ""
        text = f"{len(problems)} validation error{plural}:\n  " + "\n  ".join(problems)
        return cls(400, text, type="Bad Request", param=param)

    @classmethod
    def missing(cls, *fields: str, body: Any) -> Refusal:
        """Return the 400 for a body without fields that it needs."""
        problems = [
            {"type": "missing", "loc": f"body.{field}", "msg": "Field required", "input": shown(body)}
            for field in fields
        ]
        return cls.invalid(*map(str, problems), param=f"body.{fields[0]}")

    @classmethod
    def wrong(cls, where: str, value: Any, *, type: str, message: str) -> Refusal:
        """Return the 400 for a value of the wrong type."""
        problem = {"type": type, "loc": where, "msg": message, "input": shown(value)}
        return cls.invalid(str(problem), param=where)

    @classmethod
    def engine_dead(cls) -> Refusal:
        """Return what every call answers once the engine is gone."""
        text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        return cls(500, text, type="InternalServerError")

    def body(self) -> dict[str, Any]:
        """Return the JSON body, with local paths masked as vLLM masks them."""
        message = _FILE_PATH.sub("<path>", _PRIVATE_PATH.sub("<path>", self.message)).strip()
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.status}}

    def answer(self) -> Answer:
        """Return the answer."""
        return as_json(self.body(), status=self.status)


def as_json(value: Any, *, status: int = 200) -> Answer:
    """Return a JSON answer."""
    return Answer(status, _encode(value))


def detail(status: int, text: str) -> Answer:
    """Return the error body of the web framework, for paths and methods that are not there."""
    return as_json({"detail": text}, status=status)


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


async def read_request(scope: Scope, receive: Receive, send: Send) -> Request:
    """Read the whole request."""
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        pieces = [body]
        while message.get("more_body"):
            message = await receive()
            pieces.append(message.get("body", b""))
        body = b"".join(pieces)
    return Request(
        method=scope["method"],
        path=scope["path"],
        query=dict(parse_qsl(scope["query_string"].decode(), keep_blank_values=True)),
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
        body=body,
        receive=receive,
        send=send,
    )


def _decode_slowly(body: bytes) -> Any:
    try:
        return json.loads(body)  # takes what msgspec does not, such as NaN
    except ValueError as error:
        position, reason = getattr(error, "pos", 0), getattr(error, "msg", str(error))
        found = {
            "type": "json_invalid",
            "loc": f"body.{position}",
            "msg": "JSON decode error",
            "input": "<dict of 0 items>",
            "ctx": {"error": reason},
        }
        raise Refusal.invalid(str(found), param=f"body.{position}") from error


def shown(value: Any) -> str:
    """Return a value as vLLM's validation errors show it."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)
