"""Pauses: recorded when a client asks for one, made real only when something needs it (P9).

Loading an adapter under a new name needs no pause, and a real one with `clear_cache` (vLLM's default) makes every
running rollout compute its KV again. So `mode=keep` is a note until a call changes base weights; `abort` and `wait`,
whose callers expect the rollouts to be gone, are always real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from urllib.parse import parse_qs, urlsplit

from proxy.controlplane.answer import Answer
from proxy.controlplane.broadcast import agreed, broadcast
from proxy.controlplane.replica_api import ReplicaApi
from proxy.errors import ApiError
from proxy.fleet.pause import Pause
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.settings import ControlSettings

OWN_PAUSE = "/pause?mode=keep"
"""What the proxy sends where base weights change and no client has paused."""


class Pausing:
    """Carries out pauses and resumes, and knows which replicas are paused."""

    def __init__(self, fleet: Fleet, apis: Mapping[int, ReplicaApi], settings: ControlSettings) -> None:
        self._fleet = fleet
        self._apis = apis
        self._settings = settings
        self._calls = 0
        """Pauses and resumes begun, and those ended: what was read of a replica meanwhile is stale."""
        self._own: Pause | None = None
        """The last pause that only the proxy wanted."""
        self._resuming = asyncio.Lock()
        """A second resume, while requests come again, can deadlock an engine with data parallelism (verl#7846)."""

    async def pause(self, target: str) -> Answer:
        """Pause the fleet as `target` (path and query) says. Raises ApiError, with nothing changed, if one fails."""
        if _mode(target) == "keep" and self._settings.pause == "lazy":
            if not self._fleet.up:
                raise ApiError(503, "The pause: no replica is up.", reason="no_replica", retry_after_s=1)
            self._fleet.pause = Pause(target, real=self._fleet.stands_still)
            self._fleet.note("pause.recorded", f"{target}: nothing stops until base weights change")
            return _done("paused")
        return await self._really_pause(target)

    async def make_real(self) -> None:
        """Pause the replicas really if a pause is on record: something is about to change base weights."""
        if self._fleet.pause is not None and not self._fleet.pause.real:
            await self._really_pause(self._fleet.pause.target)

    async def resume(self, target: str = "/resume") -> Answer:
        """End every pause. The call goes to each replica that is paused, whoever paused it.

        Not to one whose base weights are half there: that one goes on when it has others. Raises ApiError 409 within an
        update.
        """
        fleet = self._fleet
        if not fleet.up:
            raise ApiError(503, "The resume: no replica is up.", reason="no_replica", retry_after_s=1)
        self._refuse_within_an_update()
        fleet.pause = None
        async with self._resuming:
            self._refuse_within_an_update()  # it may have begun while another resume was under way
            paused = [r for r in fleet.up if r.paused and not fleet.is_torn(r) and r not in fleet.weights.reloading]
            if not paused:
                fleet.note("pause.ended", "nothing was really paused")
                return _done("resumed")
            answers = await self._send(paused, target)
            for replica in paused:
                self._resumed(replica, answers[replica.url])
        fleet.note("pause.ended", f"resumed {sum(answer.ok for answer in answers.values())} replicas")
        return agreed(answers, what="The resume")

    def _refuse_within_an_update(self) -> None:
        if self._fleet.weights.update is not None:  # a generation on weights that are half there kills vLLM's engine
            raise ApiError(409, "Base weights are being updated: finish that first.", reason="updating")

    async def stand_still(self) -> None:
        """Pause the replicas really, for base weights are about to change. `go_on` ends that."""
        if self._fleet.pause is None:
            await self._really_pause(OWN_PAUSE)
            self._own = self._fleet.pause
        await self.make_real()

    async def go_on(self) -> None:
        """End the pause of `stand_still`, unless a client had paused before, or has since.

        A replica that does not resume is read back, and resumed then.
        """
        if self._own is None or self._fleet.pause is not self._own:
            return
        try:
            await self.resume()
        except ApiError as error:
            self._fleet.note("pause.not_ended", str(error), level="warning")

    async def align(self, replica: Replica, api: ReplicaApi) -> bool:
        """Pause a replica that is about to join if the others are; return whether it stands as they do."""
        pause = self._fleet.pause
        if pause is None or not pause.real or replica.paused:
            return True
        answer = await api.call("POST", pause.target)
        self._paused(replica, answer)
        return answer.ok

    async def read_back(self, replica: Replica, paused: bool) -> None:
        """Let a quarantined replica join again, now that it has said whether it is paused.

        Not if it is there for its base weights: these no answer mends, and it stands still until it has others.
        """
        self._fleet.set_paused(replica, paused)
        if not self._is_unread(replica):
            return
        if paused and not self._fleet.stands_still:
            answer = await self._apis[replica.index].call("POST", "/resume")
            if not answer.ok:
                return
            self._fleet.set_paused(replica, False)
        if self._is_unread(replica):
            self._fleet.set_state(replica, ReplicaState.JOINING, "it has said how it stands")

    def _is_unread(self, replica: Replica) -> bool:
        """Whether a replica is quarantined because nobody knows whether it is paused."""
        return replica.state is ReplicaState.QUARANTINED and not self._fleet.is_outdated(replica)

    def observed(self, replica: Replica, paused: bool, *, calls: int) -> None:
        """Note what a replica says of itself. `calls`: the count of `calls_so_far` when it was asked."""
        if calls != self._calls:
            return
        self._fleet.set_paused(replica, paused)
        found = paused and not self._fleet.stands_still
        if found == replica.found_paused:
            return
        replica.found_paused = found
        if found:
            said = "it is paused, and not by this proxy: it gets no rollouts until somebody sends POST /resume"
            self._fleet.note("pause.found", said, level="error", replica=replica)
        self._fleet.changed()

    @property
    def calls_so_far(self) -> int:
        """Changes when a real pause or resume begins, and when it ends."""
        return self._calls

    @property
    def intended(self) -> bool:
        """Whether the fleet is paused as far as clients are concerned."""
        return self._fleet.pause is not None or any(replica.found_paused for replica in self._fleet.replicas)

    async def _really_pause(self, target: str) -> Answer:
        fleet = self._fleet
        up = [r for r in fleet.up if r.state is not ReplicaState.QUARANTINED or fleet.is_outdated(r)]
        aborting = _mode(target) == "abort"
        with fleet.client_aborting() if aborting else nullcontext():
            answers = await self._send(up, target)
        for replica in up:
            self._paused(replica, answers[replica.url])
            if answers[replica.url].ok and _clears_cache(target):
                fleet.cache_was_reset(replica)
        try:
            answer = agreed(answers, what="The pause")
        except ApiError:
            # A fleet that is half paused answers some rollouts and holds others for ever: undo what was done.
            fleet.pause = None
            undo = [replica for replica in up if answers[replica.url].ok]
            undone = await self._send(undo, "/resume")
            for replica in undo:
                self._resumed(replica, undone[replica.url])
            raise
        fleet.pause = Pause(target, real=True)
        fleet.note("pause.real", f"{target}: {len(up)} replicas are paused")
        return answer

    async def _send(self, replicas: list[Replica], target: str) -> dict[str, Answer]:
        self._calls += 1
        try:
            return await broadcast([self._apis[replica.index] for replica in replicas], "POST", target)
        finally:
            self._calls += 1

    def _paused(self, replica: Replica, answer: Answer) -> None:
        if answer.ok:
            self._fleet.set_paused(replica, True)
        elif answer.status is None:
            self._quarantine(replica, f"a pause got no answer: {answer.text}")

    def _resumed(self, replica: Replica, answer: Answer) -> None:
        if answer.ok:
            self._fleet.set_paused(replica, False)
            replica.found_paused = False
            self._fleet.changed()
        elif answer.status is None:
            self._quarantine(replica, f"a resume got no answer: {answer.text}")

    def _quarantine(self, replica: Replica, why: str) -> None:
        if replica.is_up:
            self._fleet.set_state(replica, ReplicaState.QUARANTINED, why)


def _mode(target: str) -> str:
    return parse_qs(urlsplit(target).query).get("mode", ["abort"])[-1]


def _clears_cache(target: str) -> bool:
    return parse_qs(urlsplit(target).query).get("clear_cache", ["true"])[-1].lower() not in ("false", "0")


def _done(status: str) -> Answer:
    return Answer(200, f'{{"status":"{status}"}}', "application/json")
