"""Let one replica read a checkpoint in place of its base weights, step by step, and prove that it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.controlplane.answer import Answer
from proxy.controlplane.changes import Changes
from proxy.controlplane.collective import together
from proxy.controlplane.pausing import OWN_PAUSE
from proxy.controlplane.plan import differ
from proxy.controlplane.replica_api import ReplicaApi, needs_restart, sees_no_checkpoint
from proxy.controlplane.verify import read_proof
from proxy.controlplane.weights import EMPTY_CACHE, LABEL_PATH, json_body
from proxy.fleet.pool import Fleet
from proxy.fleet.weights import UPDATING, Member
from proxy.settings import ControlSettings

RPC_PATH = "/collective_rpc"


class FailedError(Exception):
    """A step has failed, so the replica must serve nothing: its weights are no version, or nobody knows which."""

    def __init__(self, why: str, *, untouched: bool = False) -> None:
        super().__init__(why)
        self.untouched = untouched
        """It has the weights that it had before."""


class Rereading:
    """Takes replicas through the steps."""

    def __init__(
        self, fleet: Fleet, apis: Mapping[int, ReplicaApi], changes: Changes, settings: ControlSettings
    ) -> None:
        self._fleet = fleet
        self._apis = apis
        self._changes = changes
        self._settings = settings
        self._logprobs: dict[str, tuple[float, ...]] = {}
        """What replicas with the wanted version have answered to the probe, by URL."""

    def forget(self) -> None:
        """Compare replicas with none of those read so far: another version is wanted."""
        self._logprobs.clear()

    async def read(self, member: Member, label: str, path: str, *, late_s: float) -> None:
        """Let a replica that gets no rollouts read `path`, and label it. Raises FailedError.

        `late_s`: for so long it may find nothing there.
        """
        fleet, replica = self._fleet, member.replica
        answer = await self._answer(member, LABEL_PATH, {"new_version": UPDATING})
        if not answer.ok:  # such as 404 of a server without VLLM_SERVER_DEV_MODE=1
            raise FailedError(_said(LABEL_PATH, answer), untouched=answer.status is not None)
        await self._send(member, OWN_PAUSE)
        fleet.set_paused(replica, True)
        answer = await self._checkpoint_read(member, path, late_s)
        if needs_restart(answer):
            raise FailedError(f"{_said(RPC_PATH, answer)}: an earlier checkpoint has torn its model: restart it")
        if not answer.ok:
            raise FailedError(_said(RPC_PATH, answer))
        await self._send(member, EMPTY_CACHE)  # vLLM keeps KV that the old weights have computed
        fleet.cache_was_reset(replica)
        await self._go_on(member)
        if not replica.paused:
            await self._prove(member)
        await self._send(member, LABEL_PATH, {"new_version": label})
        await self._go_on(member)  # a client may have resumed the fleet meanwhile

    async def _checkpoint_read(self, member: Member, path: str, late_s: float) -> Answer:
        """Let it read; again and again where it sees nothing there yet, as a mount that lags behind the store."""
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        deadline = self._fleet.clock() + late_s
        while True:
            answer = await self._answer(member, RPC_PATH, rpc, timeout_s=self._settings.reload_timeout_s)
            again_at = self._fleet.clock() + self._settings.lora_retry_s
            if not sees_no_checkpoint(answer) or again_at > deadline:
                return answer
            self._fleet.note("weights.late", answer.message, replica=member.replica)
            await self._changes.wait_until(lambda: not member.is_there, deadline=again_at)

    async def _go_on(self, member: Member) -> None:
        """End its pause, unless the whole fleet stands still."""
        if member.replica.paused and not self._fleet.stands_still:
            await self._send(member, "/resume")
            self._fleet.set_paused(member.replica, False)

    async def _prove(self, member: Member) -> None:
        """Ask for one token: the engine works, its values are numbers, and the others answer alike."""
        replica = member.replica
        if replica.facts is None or not replica.facts.model_names or not member.is_there:
            return
        answer = await self._apis[replica.index].prove(replica.facts.model_names[0])
        proof = read_proof(answer)
        if answer.status is None or answer.failed_inside:
            raise FailedError(_said("the probe", answer))
        if proof.spoiled:
            raise FailedError(f"its answers are not numbers: {proof.message}")
        for url, theirs in self._logprobs.items():
            if url != replica.url and (said := differ(replica.url, proof.logprobs, url, theirs)):
                self._fleet.note("weights.disagree", said, level="error", replica=replica)
        if proof.logprobs:
            self._logprobs[replica.url] = proof.logprobs

    async def _send(self, member: Member, target: str, body: dict[str, Any] | None = None) -> None:
        answer = await self._answer(member, target, body)
        if not answer.ok:
            raise FailedError(_said(target, answer))

    async def _answer(
        self, member: Member, target: str, body: dict[str, Any] | None, *, timeout_s: float | None = None
    ) -> Answer:
        """Send one call, and give it up when the replica goes down."""
        calls = [(member, json_body(body) if body else b"")]
        answers = await together(calls, target, apis=self._apis, changes=self._changes, timeout_s=timeout_s)
        return answers[member]


def _said(target: str, answer: Answer) -> str:
    return f"{target.partition('?')[0]}: {answer.status or 'no answer'} {answer.message}"
