"""Between the proxy's own HTTP and its calls to replicas: the same target on the way there, the same answer back."""

from __future__ import annotations

from fastapi import Request, Response

from proxy.controlplane.answer import Answer
from proxy.errors import ApiError


def target_of(request: Request) -> str:
    """Return path and query as the client wrote them. Not by `request.url`: what it calls Host goes into that."""
    query = request.scope["query_string"].decode("latin-1")
    return f"{request.scope['path']}?{query}" if query else str(request.scope["path"])


def passed_on(answer: Answer) -> Response:
    """Return a replica's answer as it is. Raises ApiError 502 if there was none."""
    if answer.status is None:
        raise ApiError(502, f"A replica did not answer: {answer.text}", reason="replica_failed")
    return Response(answer.text, status_code=answer.status, media_type=answer.content_type or None)
