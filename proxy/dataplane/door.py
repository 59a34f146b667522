"""The door: stands in front of everything and lets in who may call. Plain ASGI."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.access import OPEN_PATHS, Keys, is_cross_site
from proxy.dataplane.answers import send_error
from proxy.errors import ApiError

_BAD_POLICY = 1008
"""RFC 6455, section 7.4.1: the code with which a WebSocket is refused."""


class Door:
    """Plain ASGI: `app` gets what may come in. A caller without a key is not read from: its body is left unread."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys if keys.asked else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _turn_away(scope, send)
        elif scope["path"] in OPEN_PATHS:
            await self._app(scope, _nothing, send)
        elif (refused := self._refusal(scope)) is not None:
            await send_error(send, refused)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if self._keys is not None and not self._keys.admit(headers.get(b"authorization", b"")):
            return ApiError(
                401,
                f"{scope['method']} {scope['path']} needs one of the proxy's keys (PROXY_API_KEY): "
                "send it as a bearer token, or as the password of HTTP Basic.",
                reason="unauthorized",
            )
        if origin is not None and is_cross_site(scope["method"], origin=origin, host=headers.get(b"host", b"")):
            what = f"{scope['method']} {scope['path']} comes from a page of another site ({origin.decode('latin-1')})"
            return ApiError(403, f"{what}: the proxy takes such calls from programs alone.", reason="cross_site")
        return None


async def _nothing() -> Message:
    """Receive an empty body: what needs no key must not make the proxy keep anything."""
    return {"type": "http.request", "body": b"", "more_body": False}


async def _turn_away(scope: Scope, send: Send) -> None:
    """Refuse what is not HTTP. Raises ValueError for what ASGI has no refusal for, as it asks of applications."""
    if scope["type"] != "websocket":
        raise ValueError(f"{scope['type']} is not served here")
    await send({"type": "websocket.close", "code": _BAD_POLICY})
