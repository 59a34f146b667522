"""The ASGI front: takes the routed paths itself and leaves every other request to the application behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.dataplane.answers import send_error
from proxy.dataplane.budget import Account, Budget, no_room
from proxy.dataplane.client_request import CLIENT
from proxy.dataplane.headers import request_id, to_replica
from proxy.dataplane.relay import Relay
from proxy.dataplane.rollout import Rollout
from proxy.dataplane.watch import Limit, Watch
from proxy.errors import ApiError, stopping
from proxy.metrics.rollouts import RolloutMetrics
from proxy.routing.request_key import RequestKey, SiblingMemory, read_model, read_request
from proxy.settings import DataplaneSettings

logger = logging.getLogger(__name__)

GENERATION_PATHS = frozenset(["/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"])
"""Routed to one replica that holds the policy."""

ANY_REPLICA_PATHS = frozenset(
    [
        "/tokenize",
        "/detokenize",
        "/version",
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/v1/messages/count_tokens",
    ]
)
"""Answered alike by every replica that holds the policy."""


class ClientGone(Exception):
    """The client closed its connection before it had its whole answer."""


class Dataplane:
    """Plain ASGI: `app` gets what is not a rollout."""

    def __init__(
        self,
        relay: Relay,
        app: ASGIApp,
        metrics: RolloutMetrics,
        settings: DataplaneSettings,
        clock: Callable[[], float],
    ) -> None:
        self._loop = asyncio.get_running_loop()  # kept, since asking for it is a system call
        self._relay = relay
        self._siblings = SiblingMemory()
        self._app = app
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._limit = Limit(self._loop, settings.rollout_timeout_s)
        self.budget = Budget(settings.max_buffer)
        self._inflight = 0
        """Rollouts, from their first byte to the end of their answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = Account(self.budget)
        try:
            path = scope["path"]
            if path in GENERATION_PATHS:
                await self._generate(scope, receive, account)
            elif path in ANY_REPLICA_PATHS:
                body = await self._read_body(dict(scope["headers"]), receive, account)
                await self._serve(self._made(scope, body, read_model(body), account))
            else:
                body = await self._read_body(dict(scope["headers"]), receive, account)
                await self._app(scope, _replayed(body, receive), send)
        except ApiError as error:
            await send_error(send, error)
        except ClientGone:
            pass
        finally:
            account.close()

    async def _generate(self, scope: Scope, receive: Receive, account: Account) -> None:
        """Serve a rollout, and count how it ended. One too many is refused before its body is read."""
        ended = "stopping"
        self._inflight += 1
        try:
            if self._inflight > self._settings.max_inflight:
                raise self._too_many()
            ended = await self._serve(await self._rollout(scope, receive, account))
        except ApiError as error:
            ended = error.reason
            raise
        except ClientGone:
            ended = "client_gone"
            raise
        finally:
            self._inflight -= 1
            self._metrics.ended(ended)

    async def _rollout(self, scope: Scope, receive: Receive, account: Account) -> Rollout:
        if scope["method"] != "POST":
            raise ApiError(405, "Method Not Allowed", reason="method")
        headers = dict(scope["headers"])
        body = scope[CLIENT].rest_of_body()
        if body is None:
            body = await self._read_body(headers, receive, account)
        else:
            self._admit(len(body), len(body), account)
        session = headers.get(b"x-session-id", b"")
        return self._made(scope, body, read_request(body, session=session, cut=self._siblings.pieces), account)

    def _made(self, scope: Scope, body: bytes, key: RequestKey, account: Account) -> Rollout:
        target = scope["path"]  # one of those above, whatever way the client wrote it
        if query := scope["query_string"]:
            target = f"{target}?{query.decode('latin-1')}"
        return Rollout(
            method=scope["method"],
            target=target,
            headers=to_replica(scope["headers"]),
            body=body,
            request_bytes=len(body),
            key=key,
            asked_for=key.model,
            account=account,
            began_at=self._clock(),
            retries_left=self._settings.retries,
            client=scope[CLIENT],
        )

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive, account: Account) -> bytes:
        if int(headers.get(b"content-length", b"0")) > self._settings.max_body:
            raise self._too_large()
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body = message.get("body", b"")
            size += len(body)
            self._admit(len(body), size, account)
            if not message.get("more_body"):
                return b"".join([*pieces, body]) if pieces else body
            pieces.append(body)

    def _admit(self, came: int, size: int, account: Account) -> None:
        """Take in so many bytes of a body, which has `size` by now. Raises ApiError if that is too much."""
        if size > self._settings.max_body:
            raise self._too_large()
        if not account.take(came):
            raise no_room()

    def _too_large(self) -> ApiError:
        limit = self._settings.max_body
        message = f"The request body is larger than {limit} bytes; raise PROXY_MAX_BODY if that is intended."
        return ApiError(413, message, reason="body_too_large")

    def _too_many(self) -> ApiError:
        limit = self._settings.max_inflight
        message = (
            f"{limit} rollouts are in flight, as many as PROXY_MAX_INFLIGHT allows; try again when some have ended."
        )
        return ApiError(503, message, reason="overloaded", retry_after_s=1)

    def _too_long(self, rollout: Rollout) -> ApiError:
        tried = f" Tried {'; '.join(rollout.tried)}." if rollout.tried else ""
        limit = f"{self._settings.rollout_timeout_s:g} s (PROXY_ROLLOUT_TIMEOUT_S)"
        message = f"A request for `{rollout.name}` has not been answered within {limit}.{tried}"
        return ApiError(504, message, reason="too_long")

    async def _serve(self, rollout: Rollout) -> str:
        """Serve, and stop at once when the client goes away, so that no replica generates for nobody.

        Return how it ended. Raises ClientGone, and ApiError.
        """
        watch = Watch(rollout.client, self._loop, self._limit)
        try:
            return await self._relay.serve(rollout)
        except asyncio.CancelledError:
            watch.serving.uncancel()
            if watch.gone:
                raise ClientGone from None
            if watch.late and not rollout.started:
                raise self._too_long(rollout) from None
            if not rollout.started:
                # The server cancels what is still under way when the time to drain is over.
                raise stopping() from None
            return "too_long" if watch.late else "stopping"
        except ApiError as error:
            error.request_id = request_id(rollout.headers)
            if error.status >= 500:
                lasted_s = self._clock() - rollout.began_at
                logger.warning("answered %d %s", error.status, error.reason, extra=rollout.about(seconds=lasted_s))
            raise
        finally:
            watch.stop()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole `body` first, and then what the client does next."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
