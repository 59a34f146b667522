"""Carry one rollout to a replica and its answer back: hold, retry elsewhere, pass through.

Until the client has seen a byte, a failed try costs nothing and the rollout goes to another replica that holds its
policy (P6). Non-streaming answers are therefore held until whole, which also shows whether they were cut short (P5).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable
from typing import Literal

import msgspec

from proxy.dataplane import headers
from proxy.dataplane.answers import broken_off, with_client_name
from proxy.dataplane.budget import no_room
from proxy.dataplane.errors import UpstreamError
from proxy.dataplane.exchange import Exchange
from proxy.dataplane.passing import Passing
from proxy.dataplane.retry import AGAIN_S, Step, may_go_on, next_step
from proxy.dataplane.rollout import Rollout
from proxy.dataplane.upstream import Upstream
from proxy.dataplane.verdict import Verdict, judge, judge_first
from proxy.errors import ApiError
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.pool import Candidate, Fleet, Lease
from proxy.fleet.replica import Replica, ReplicaState
from proxy.metrics.rollouts import RolloutMetrics
from proxy.routing.choose import Choice
from proxy.routing.load import Usage
from proxy.routing.request_key import for_model, with_model
from proxy.routing.router import Router
from proxy.settings import DataplaneSettings

logger = logging.getLogger(__name__)

SUSPICION_S = 1.0
"""After an engine's death, for so long at most no further replica gets rollouts of the policy under which it died. What
kills an engine does so within its first step."""


class Attempt(msgspec.Struct, frozen=True):
    """What became of one try on one replica."""

    outcome: Literal["answered", "refused", "failed", "broken", "cancelled"]
    """`refused`: the client has the replica's own error. `failed`: the client has seen nothing, another replica may be
    tried. `broken`: a stream ended early. `cancelled`: nothing came of it here, as when the client has left."""
    why: str = ""
    cause: str = ""
    """The same as `why` in a word, for what is counted."""
    joins_again: bool = False
    """The replica left the ready set because of this; once it has joined again it may be asked again."""
    inside: bool = False
    """The replica failed inside, perhaps because of this rollout."""


_ANSWERED = Attempt("answered")
_REFUSED = Attempt("refused")
_CANCELLED = Attempt("cancelled")


class _Awaited(set[Exchange]):
    """The answers that are awaited of one replica. While it is out it gives none, and no new one either."""

    _out: UpstreamError | None = None

    def add(self, exchange: Exchange) -> None:
        super().add(exchange)
        if self._out is not None:  # it went down while the rollout waited for a connection
            exchange.fail(self._out)

    def end(self, out: UpstreamError | None) -> None:
        """Break off all of them if the replica is out."""
        self._out = out
        if out is not None:
            for exchange in self:
                exchange.fail(out)


class Relay:
    """Serves rollouts from the fleet."""

    def __init__(
        self, fleet: Fleet, router: Router, upstream: Upstream, metrics: RolloutMetrics, settings: DataplaneSettings
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._upstream = upstream
        self._metrics = metrics
        self._settings = settings
        self._changed = asyncio.Event()
        self._under_way: defaultdict[int, _Awaited] = defaultdict(_Awaited)
        """By replica."""
        fleet.on_change(self._fleet_changed)

    async def serve(self, rollout: Rollout) -> str:
        """Answer `rollout` and return how that ended: `answered`, `refused` or `broken`.

        Raises ApiError when no replica could, before anything was sent.
        """
        clock = self._fleet.clock
        while True:
            policy = self._policy(rollout)
            candidates = self._candidates(rollout, policy)
            if not candidates:
                await self._wait_for_a_change(rollout)
                continue
            if policy is not rollout.policy:
                _address_to(rollout, policy)
            choice = self._router.choose(rollout.key, candidates, retried=bool(rollout.tried))
            if policy is not None and rollout.engines_killed:
                policy.second_try = choice.replica
            address = rollout.client.scope["client"]
            lease = self._fleet.lease(choice.replica, policy, load=choice.load, client=address)
            attempt, asked_at, stale = _CANCELLED, clock(), self._fleet.staleness(policy)
            joins = lease.replica.joins
            try:
                attempt = await self._attempt(rollout, choice, lease)
            finally:
                self._fleet.release(lease)
                if rollout.generates:
                    self._metrics.tried(choice.replica, choice.route, attempt.outcome, staleness=stale)
            if attempt is _ANSWERED and rollout.generates:
                self._count_answer(rollout, lease.replica, stale)
            if attempt.outcome != "failed":
                return attempt.outcome
            took_s = clock() - asked_at
            rollout.away_s += took_s
            rollout.failed_by[lease.replica] = joins
            self._note(rollout, lease.replica, attempt, took_s)
            await self._until_the_next_try(rollout)

    def _count_answer(self, rollout: Rollout, replica: Replica, stale_at_start: int | None) -> None:
        assert rollout.started_at is not None
        replica.heard_at = self._fleet.clock()
        began_at = rollout.began_at
        first_byte_s = rollout.started_at - began_at
        self._metrics.answered(
            took_s=self._fleet.clock() - began_at,
            first_byte_s=first_byte_s,
            overhead_s=first_byte_s - rollout.away_s,
            request_bytes=rollout.request_bytes,
            answer_bytes=rollout.answer_bytes,
        )
        stale_at_end = self._fleet.staleness(rollout.policy)
        if stale_at_start is not None and stale_at_end is not None:
            self._metrics.stale(stale_at_start, stale_at_end)

    def _note(self, rollout: Rollout, replica: Replica, attempt: Attempt, took_s: float) -> None:
        """Remember a failed try of so many seconds."""
        url = replica.url
        logger.warning("a try failed: %s", attempt.why, extra=rollout.about(url, took_s))
        self._metrics.failed(replica.index, attempt.cause)
        rollout.tried.append(f"{url}: {attempt.why}")
        rollout.failed_inside = rollout.failed_inside or attempt.inside
        if not attempt.joins_again:
            rollout.failed_on.add(replica.index)
        rollout.retries_left -= 1

    async def _until_the_next_try(self, rollout: Rollout) -> None:
        """Return when it may be tried again. Raises ApiError if it may not."""
        step = next_step(tries_left=rollout.retries_left, failed_inside=rollout.failed_inside)
        if step is Step.GIVE_UP:
            raise self._gave_up(rollout)
        if step is Step.HOLD:
            await self._hold(rollout, asyncio.sleep(AGAIN_S))
            while not may_go_on(still_out=rollout.still_out, retries=self._settings.retries):
                await self._hold(rollout, self._change())

    async def _wait_for_a_change(self, rollout: Rollout) -> None:
        """Wait for the fleet to change, because no replica may serve the rollout now. Raises ApiError in the end."""
        joining = {replica.index for replica in self._fleet.replicas if replica.state is ReplicaState.JOINING}
        if rollout.failed_on and joining <= rollout.failed_on:
            raise self._gave_up(rollout)
        policy = rollout.policy or self._fleet.named.get(rollout.key.model)
        if policy is not None and policy.blocked:
            raise _blocked(policy)
        if policy is not None and policy.state is PolicyState.RETIRING and not self._is_held(policy):
            raise _retired(policy.name, "its last replica has lost it after its unload was asked for")
        await self._hold(rollout, self._change())

    async def _change(self) -> None:
        """Wait for the fleet to change."""
        self._changed.clear()
        await self._changed.wait()

    async def _hold(self, rollout: Rollout, until: Awaitable[None]) -> None:
        """Wait for something, PROXY_WAIT_READY_S for all such things together. Raises ApiError then."""
        if rollout.deadline is None:
            rollout.deadline = asyncio.get_running_loop().time() + self._settings.wait_ready_s
        waits_since = self._fleet.clock()
        try:
            async with asyncio.timeout_at(rollout.deadline):
                await until
        except TimeoutError:
            raise self._gave_up(rollout) if rollout.tried else self._nobody_ready(rollout) from None
        rollout.away_s += self._fleet.clock() - waits_since

    def _fleet_changed(self) -> None:
        """Wake who waits, and give up what a replica will never answer, or must not: with torn base weights (P5)."""
        self._changed.set()
        for replica in self._fleet.replicas:
            if (awaited := self._under_way.get(replica.index)) is not None:
                out = replica.state is ReplicaState.DOWN or self._fleet.is_torn(replica)
                why = f"it is {replica.state}: {replica.reason}"
                awaited.end(UpstreamError(why, unreachable=replica.silent) if out else None)

    def _candidates(self, rollout: Rollout, policy: Policy | None) -> list[Candidate]:
        if policy is None and self._is_of_policy(rollout):
            return []
        if policy is not None and (policy.state is PolicyState.LOADING or policy.blocked):
            return []  # some replicas hold it already, but it is not live before all of them do (P2)
        if policy is not None and not rollout.engines_killed and self._fleet.clock() < policy.suspected_until:
            return []
        candidates = self._fleet.candidates(policy, excluding=rollout.failed_on)
        if rollout.failed_by:
            failed = {replica.index for replica in rollout.failed_by}
            candidates = [c for c in candidates if c.index not in failed] or candidates
        if policy is not None and rollout.engines_killed and policy.second_try is not None:
            return [c for c in candidates if c.index == policy.second_try]  # no third one, whatever becomes of it
        return candidates

    def _policy(self, rollout: Rollout) -> Policy | None:
        """Return the policy that the rollout names, or raise 404 if nobody knows the name.

        None: it names the base model, or one that may still be found on a replica (P10).
        """
        first = rollout.policy
        name = rollout.name
        known = self._fleet.named.get(name)
        if known is None:
            if first is not None:
                raise _retired(name, first.reason)
            if not self._is_of_policy(rollout) or self._fleet.is_looking:
                return None
            raise _not_found(f"The model `{name}` does not exist: the proxy has never loaded it.", name)
        if first is not None and known is not first:
            raise _retired(name, "another one has its name now")
        if known.state in (PolicyState.RETIRED, PolicyState.FAILED):
            raise _retired(name, f"it is {known.state}" + (f": {known.reason}" if known.reason else ""))
        return known

    def _is_of_policy(self, rollout: Rollout) -> bool:
        """Whether it names something else than the base model, as far as that is known."""
        base_models = self._fleet.base_models
        return rollout.needs_policy and bool(base_models) and rollout.name not in base_models

    def _is_held(self, policy: Policy) -> bool:
        return any(replica.holds(policy) for replica in self._fleet.up)

    async def _attempt(self, rollout: Rollout, choice: Choice, lease: Lease) -> Attempt:
        """Try one replica."""
        url, index = lease.replica.url, choice.replica
        under_way = self._under_way[index]
        try:
            connection, answer = await self._upstream.start(
                url,
                rollout.method,
                rollout.target,
                rollout.headers,
                rollout.body,
                account=rollout.account,
                under_way=under_way,
            )
            try:
                body = None if answer.is_stream else await answer.read(self._settings.hold_limit)
                if body is None:
                    first = await answer.chunk()  # before the client sees anything: until then, others can serve it
                    verdict = judge_first(first, client_aborted=self._fleet.client_aborted_since(rollout.began_at))
                    attempt = self._not_delivered(rollout, lease, verdict) if verdict is not Verdict.DELIVER else None
                    return attempt or await self._pass_through(rollout, answer, first, choice, lease)
            finally:
                under_way.discard(answer)
                if not answer.complete:
                    connection.close()
        except UpstreamError as error:
            if error.over_budget:
                raise no_room() from error
            said = "could not reach it" if error.unreachable else "lost its connection"
            cause = "unreachable" if error.unreachable else "broken_off"
            self._fleet.suspect(lease.replica, f"a rollout {said}: {error}")
            if rollout.engines_killed and not error.unreachable:
                self._engine_died(rollout, lease)  # the process may be gone before its engine's death is told
            elif rollout.engines_killed and lease.policy is not None:
                lease.policy.second_try = None  # nothing has died: somebody else may be the second
            return Attempt("failed", str(error), cause, joins_again=True)
        return await self._deliver(rollout, choice, lease, answer, body)

    async def _deliver(self, rollout: Rollout, choice: Choice, lease: Lease, answer: Exchange, body: bytes) -> Attempt:
        """Send a whole answer to the client, unless another replica should try first."""
        verdict = judge(answer.status, body, client_aborted=self._fleet.client_aborted_since(rollout.began_at))
        if verdict is not Verdict.DELIVER:
            attempt = self._not_delivered(rollout, lease, verdict)
            if attempt is not None:
                return attempt
        head = self._head(answer, choice, lease)
        assert answer.ended_at is not None
        rollout.started_at = self._fleet.clock()
        rollout.away_s += answer.ended_at - answer.sent_at
        policy = lease.policy
        if answer.status == 200:
            usage = self._finished(rollout, choice.replica, body)
            if usage.completion_tokens and rollout.generates:
                tokens, beside = usage.completion_tokens / rollout.key.answers, lease.replica.inflight
                self._router.took(choice, tokens, answer.ended_at - answer.sent_at, beside=beside)
            if policy is not None and rollout.engines_killed:
                policy.second_try = None  # it was not this policy that killed the first engine
                policy.suspected_until = -math.inf
        if answer.status != 200:
            body = self._upstream.hidden_in(body)
        if policy is not None and policy.upstream != rollout.asked_for:
            body = with_client_name(body, policy.upstream, rollout.asked_for)
        rollout.answer_bytes = len(body)
        client = rollout.client
        if client.is_slow:
            await client.room()
        client.begin(answer.status, head, len(body))
        client.end(body)
        return _ANSWERED if answer.status == 200 else _REFUSED

    def _head(self, answer: Exchange, choice: Choice, lease: Lease) -> headers.Headers:
        """Return the headers for the client; with the versions of the base weights, if these have ever changed."""
        changed = self._fleet.weights.version is not None
        weights = (lease.weights, lease.replica.weights) if changed else ()
        return headers.to_client(answer.headers, replica=choice.replica, route=choice.route, weights=weights)

    def _finished(self, rollout: Rollout, replica: int, answer: bytes) -> Usage:
        """Learn from an answer that has ended well, of which `answer` is the whole or the end."""
        usage = self._router.finished(rollout.key, answer)
        if rollout.generates:
            self._metrics.reported(replica, usage.prompt_tokens, usage.cached_tokens)
        return usage

    def _not_delivered(self, rollout: Rollout, lease: Lease, verdict: Verdict) -> Attempt | None:
        """Return the failed attempt if somebody else should try, None if the client should have this answer."""
        replica, why, cause = lease.replica, verdict.value, verdict.name.lower()
        match verdict:
            case Verdict.LOST_POLICY:
                if lease.policy is None:
                    return None  # the base model's name: the client's own mistake
                live = lease.policy.state is PolicyState.LIVE
                if live:
                    self._fleet.suspect(replica, "a rollout found it without a live policy")
                return Attempt("failed", why, cause, joins_again=live)
            case Verdict.ABORTED:
                self._fleet.suspect(replica, "it aborted a rollout that no client had aborted")
                return Attempt("failed", why, cause, joins_again=True)
            case Verdict.SHUT_OUT:
                self._fleet.suspect(replica, why)
                return Attempt("failed", why, cause, joins_again=True)
            case Verdict.ENGINE_DIED | Verdict.FAILED_INSIDE | Verdict.NOT_FINITE:
                if verdict is Verdict.ENGINE_DIED:
                    self._fleet.suspect(replica, "its engine died under a rollout")
                    self._engine_died(rollout, lease)
                if rollout.failed_inside:
                    return None
        others = self._fleet.candidates(lease.policy, excluding=rollout.failed_on | {replica.index})
        if not others or rollout.retries_left <= 0:
            return None
        return Attempt("failed", why, cause, inside=verdict is not Verdict.BUSY)

    def _engine_died(self, rollout: Rollout, lease: Lease) -> None:
        """Count it; the second one is the policy's fault, or the rollout's."""
        rollout.engines_killed += 1
        policy = lease.policy
        if policy is None:
            return
        if rollout.engines_killed > 1 or policy.second_try == lease.replica.index:
            self._fleet.block(policy, "two engines died one after the other under rollouts of it")
        else:
            policy.suspected_until = self._fleet.clock() + SUSPICION_S
            asyncio.get_running_loop().call_later(SUSPICION_S, self._fleet.changed)

    async def _pass_through(
        self, rollout: Rollout, answer: Exchange, chunk: bytes, choice: Choice, lease: Lease
    ) -> Attempt:
        """Pass a body on as it arrives, from `chunk` on: a stream, or an answer that is too long to be held."""
        head = self._head(answer, choice, lease)
        rollout.started_at = self._fleet.clock()
        rollout.away_s += rollout.started_at - answer.sent_at
        client = rollout.client
        client.begin(answer.status, head)
        passing = Passing(rollout, lease.replica, self._fleet)
        attempt = _ANSWERED if answer.status == 200 else _REFUSED
        try:
            while chunk:
                passing.look(chunk)
                await client.room()
                client.pass_on(chunk)
                chunk = await answer.chunk(passing.pour)
            if passing.failed:
                attempt = Attempt("broken", "an error event within a stream")
        except UpstreamError as error:
            attempt = Attempt("broken", str(error))
            lasted_s = self._fleet.clock() - rollout.began_at
            logger.warning("its stream broke off: %s", error, extra=rollout.about(lease.replica.url, lasted_s))
            client.pass_on(broken_off(str(error)))
        if attempt is _ANSWERED:
            self._finished(rollout, choice.replica, passing.tail)
        client.end()
        return attempt

    def _gave_up(self, rollout: Rollout) -> ApiError:
        aborted = any(Verdict.ABORTED.value in why for why in rollout.tried)
        return ApiError(
            503 if aborted else 502,
            f"No replica could answer a request for `{rollout.name}`. Tried {'; '.join(rollout.tried)}.",
            reason="aborted" if aborted else "replicas_failed",
            retry_after_s=1,
        )

    def _nobody_ready(self, rollout: Rollout) -> ApiError:
        states = self._fleet.not_ready()
        return ApiError(
            503,
            f"No ready replica holds `{rollout.name}` ({states or 'it is loading'}).",
            reason="not_ready",
            retry_after_s=1,
        )


def _address_to(rollout: Rollout, policy: Policy | None) -> None:
    """Note which policy a rollout is for, and write the name into it that replicas know that one by."""
    rollout.policy = policy
    if policy is not None and policy.upstream != rollout.key.model:
        rollout.body = with_model(rollout.body, rollout.key, policy.upstream)
        rollout.key = for_model(rollout.key, policy.upstream)


def _retired(name: str, why: str) -> ApiError:
    """Say that a rollout's policy is gone: nobody can repeat it, and a trainer would drop it as too stale."""
    message = f"The model `{name}` does not exist any more: {why}."
    return ApiError(404, message, reason="retired", type="NotFoundError", param="model", details={"policy": name})


def _blocked(policy: Policy) -> ApiError:
    return ApiError(
        503,
        f"The model `{policy.name}` takes no new rollouts: {policy.blocked}. It does again once its files are seen in "
        f"{policy.path}, or it has been loaded again.",
        reason="blocked",
        retry_after_s=1,
        details={"policy": policy.name},
    )


def _not_found(message: str, name: str) -> ApiError:
    return ApiError(
        404, message, reason="unknown_policy", type="NotFoundError", param="model", details={"policy": name}
    )
