"""What the proxy itself says to a client, and what it changes in an answer."""

from __future__ import annotations

import msgspec
from starlette.types import Send

from proxy.dataplane.headers import Headers
from proxy.errors import ApiError


def with_client_name(body: bytes, upstream: str, name: str) -> bytes:
    """Return a whole answer with `name` in place of what the replica calls the policy.

    Its own `model` field stands before any generated text, and within a text the quotes would be escaped.
    """
    model = b'"model":'
    return body.replace(model + msgspec.json.encode(upstream), model + msgspec.json.encode(name), 1)


def told(error: ApiError) -> tuple[Headers, bytes]:
    """Return head and body of `error` as an answer of the proxy itself."""
    head = [(b"content-type", b"application/json")]
    head += [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    return head, msgspec.json.encode(error.body())


async def send_error(send: Send, error: ApiError) -> None:
    """Send `error` as an answer of the proxy itself."""
    head, body = told(error)
    head.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": error.status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def broken_off(said: str) -> bytes:
    """Return the end of a stream that broke: an error event, then the end mark, as vLLM does when its engine dies.

    Half an answer must not look like a whole one. The line break ends whatever line was begun.
    """
    answer = ApiError(502, f"The replica broke off this stream: {said}", reason="stream_broken")
    return b"\n\ndata: " + msgspec.json.encode(answer.body()) + b"\n\ndata: [DONE]\n\n"
