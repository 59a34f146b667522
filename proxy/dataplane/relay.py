"""Carry one rollout to a replica and its answer back: hold, retry elsewhere, pass through.

Until the client has seen a byte, a failed try costs nothing and the rollout goes to another replica that holds its
policy (P6). Non-streaming answers are therefore held until whole.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from starlette.types import Send

from proxy.dataplane import headers
from proxy.dataplane.upstream import Answer, Upstream, UpstreamError
from proxy.errors import ApiError
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Candidate, Fleet, Lease
from proxy.fleet.replica import ReplicaState
from proxy.metrics import Metrics
from proxy.routing.choose import Choice
from proxy.routing.request_key import RequestKey
from proxy.routing.router import Router

logger = logging.getLogger(__name__)


@dataclass
class Rollout:
    """The state of one request on its way."""

    method: str
    target: str
    """Path and query, as the client wrote them."""
    headers: list[tuple[bytes, bytes]]
    body: bytes
    key: RequestKey
    needs_policy: bool
    """False for requests that any ready replica can answer."""
    failed: dict[int, str] = field(default_factory=dict)
    """Replicas that failed it, with what happened."""
    policy: Policy | None = None
    """What it was sent to first. A name that has come to mean another policy since must not answer it (P5)."""
    tried: bool = False
    deadline: float | None = None
    """When it has waited long enough for a ready replica, on the event loop's clock; set when it first has to wait."""


@dataclass(frozen=True)
class _Attempt:
    outcome: Literal["answered", "failed", "broken"]
    """`failed`: the client has seen nothing, another replica may be tried. `broken`: a stream ended early."""
    why: str = ""
    suspected: bool = False
    """Failed before the replica worked on it, which joins again now: afterwards it may be tried there once more."""


class Relay:
    """Serves rollouts from the fleet."""

    def __init__(
        self, fleet: Fleet, router: Router, upstream: Upstream, metrics: Metrics, *, wait_ready_s: float
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._upstream = upstream
        self._metrics = metrics
        self._wait_ready_s = wait_ready_s
        self._changed = asyncio.Event()
        fleet.on_change(self._changed.set)

    async def serve(self, rollout: Rollout, send: Send) -> None:
        """Answer `rollout` through `send`. Raises ApiError when no replica could, before anything was sent."""
        while True:
            policy, candidates = await self._candidates(rollout)
            choice = self._router.choose(rollout.key, candidates, retried=rollout.tried)
            rollout.policy, rollout.tried = policy, True
            lease = self._fleet.lease(choice.replica, policy)
            try:
                attempt = await self._attempt(rollout, choice, lease, send)
            except asyncio.CancelledError:
                self._metrics.rollout(choice.replica, choice.route, "cancelled")
                raise
            finally:
                self._fleet.release(lease)
            self._metrics.rollout(choice.replica, choice.route, attempt.outcome)
            if attempt.why:
                url = self._fleet.replicas[choice.replica].url
                logger.warning("replica %s: rollout of %s %s: %s", url, rollout.key.model, attempt.outcome, attempt.why)
            if attempt.outcome != "failed":
                return
            if not attempt.suspected:
                rollout.failed[choice.replica] = attempt.why

    async def _candidates(self, rollout: Rollout) -> tuple[Policy | None, tuple[Candidate, ...]]:
        """Return the policy and the replicas to choose from, waiting for one to become ready if need be."""
        while True:
            policy = self._policy(rollout)
            candidates = self._fleet.candidates(policy, excluding=frozenset(rollout.failed))
            if candidates and not self._is_loading(rollout):
                return policy, candidates
            if rollout.failed and not candidates and not self._someone_joins(rollout):
                raise self._all_failed(rollout)
            if rollout.deadline is None:
                rollout.deadline = asyncio.get_running_loop().time() + self._wait_ready_s
            self._changed.clear()
            try:
                async with asyncio.timeout_at(rollout.deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise self._nobody_ready(rollout) from None

    def _someone_joins(self, rollout: Rollout) -> bool:
        joining = {r.index for r in self._fleet.replicas if r.state is ReplicaState.JOINING}
        return not joining <= rollout.failed.keys()

    def _is_loading(self, rollout: Rollout) -> bool:
        known = self._fleet.policies.get(rollout.key.model)
        return rollout.needs_policy and known is not None and known.state is PolicyState.LOADING

    def _policy(self, rollout: Rollout) -> Policy | None:
        """Return the policy that the rollout names (None: the base model), or raise 404 if nobody knows the name."""
        name = rollout.key.model
        if not rollout.needs_policy or name in self._fleet.base_models or not self._fleet.base_models:
            return self._fleet.served_policy(name)
        known = self._fleet.policies.get(name)
        if known is None:
            raise _not_found(f"The model `{name}` does not exist: the proxy has never loaded it.", name)
        if known.state in (PolicyState.RETIRED, PolicyState.FAILED):
            why = f" ({known.reason})" if known.reason else ""
            raise _not_found(f"The model `{name}` does not exist any more: it is {known.state}{why}.", name)
        if rollout.tried and known is not rollout.policy:
            raise _not_found(f"The model `{name}` that this was for is retired; another one has its name now.", name)
        return known

    async def _attempt(self, rollout: Rollout, choice: Choice, lease: Lease, send: Send) -> _Attempt:
        url = lease.replica.url
        request_headers = headers.to_replica(rollout.headers, token=self._upstream.token_for(url))
        try:
            async with self._upstream.send(
                rollout.method, url + rollout.target, headers=request_headers, body=rollout.body
            ) as answer:
                head = headers.to_client(answer.headers, replica=choice.replica, route=choice.route)
                if answer.is_stream and answer.status == 200:
                    return await self._pass_through(answer, head, send)
                body = await answer.read()
        except UpstreamError as error:
            if error.unreachable:
                self._fleet.suspect(choice.replica, f"a rollout could not reach it: {error}")
            return _Attempt("failed", str(error), suspected=error.unreachable)
        if answer.status == 404 and lease.policy is not None and b"does not exist" in body:
            live = lease.policy.state is PolicyState.LIVE
            if live:
                self._fleet.suspect(choice.replica, "a rollout found it without a live policy")
            return _Attempt("failed", "it has lost the policy", suspected=live)
        others = self._fleet.candidates(lease.policy, excluding=frozenset({*rollout.failed, choice.replica}))
        if answer.status >= 500 and others:
            return _Attempt("failed", f"HTTP {answer.status}: {body[:300].decode(errors='replace')}")
        await _send_whole(send, answer.status, head, body)
        return _Attempt("answered")

    async def _pass_through(self, answer: Answer, head: headers.Headers, send: Send) -> _Attempt:
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        attempt = _Attempt("answered")
        try:
            async for chunk in answer.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except UpstreamError as error:
            # Half an answer must not look like a whole one: end it as vLLM ends a stream whose engine died.
            attempt = _Attempt("broken", str(error))
            await send({"type": "http.response.body", "body": _broken_off(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return attempt

    def _all_failed(self, rollout: Rollout) -> ApiError:
        tried = "; ".join(f"{self._fleet.replicas[index].url}: {why}" for index, why in rollout.failed.items())
        return ApiError(
            502,
            f"No replica could answer a request for `{rollout.key.model}`. Tried {tried}.",
            reason="replicas_failed",
            retry_after_s=1,
        )

    def _nobody_ready(self, rollout: Rollout) -> ApiError:
        states = "; ".join(f"{r.url} is {r.state} ({r.reason})" for r in self._fleet.replicas if not r.is_ready)
        return ApiError(
            503,
            f"No ready replica holds `{rollout.key.model}` ({states or 'it is loading'}).",
            reason="not_ready",
            retry_after_s=1,
        )


def _not_found(message: str, name: str) -> ApiError:
    return ApiError(
        404, message, reason="unknown_policy", type="NotFoundError", param="model", details={"policy": name}
    )


def _broken_off(error: UpstreamError) -> bytes:
    answer = ApiError(502, f"The replica broke off this stream: {error}", reason="stream_broken")
    return b"\n\ndata: " + msgspec.json.encode(answer.body()) + b"\n\ndata: [DONE]\n\n"


async def _send_whole(send: Send, status: int, head: headers.Headers, body: bytes) -> None:
    head = [*head, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """Send `error` as an answer of the proxy itself."""
    head = [(b"content-type", b"application/json")]
    head += [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    await _send_whole(send, error.status, head, msgspec.json.encode(error.body()))
