"""Updates of base weights over NCCL, as vLLM and TRL do them, for a whole fleet (P2 for base weights).

The replicas and the trainer form one group of processes: each replica gets the ranks after those of the replicas before
it. Start, update and finish are collectives: they go to all members at once and fail together. In between nothing is
served by who is not a member, and after a failure nothing by who was one, until an update has gone through.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from proxy.controlplane.answer import Answer
from proxy.controlplane.broadcast import agreed, broadcast, number_told
from proxy.controlplane.changes import Changes
from proxy.controlplane.collective import together
from proxy.controlplane.pausing import Pausing
from proxy.controlplane.replica_api import ReplicaApi
from proxy.controlplane.turn import Turn
from proxy.errors import ApiError
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.fleet.weights import ORIGINAL, UPDATING, Member, Update

INIT_PATH = "/init_weight_transfer_engine"
START_PATH = "/start_weight_update"
UPDATE_PATH = "/update_weights"
FINISH_PATH = "/finish_weight_update"
LABEL_PATH = "/update_weight_version"
EMPTY_CACHE = "/reset_prefix_cache?reset_running_requests=true"
"""Forgets all KV, that of rollouts which stand still as well."""

_LABELS = f"it must be a text other than '{ORIGINAL}' and '{UPDATING}'"


@dataclass(frozen=True)
class Share:
    """What one replica is told about its place in the group."""

    rank_offset: int
    world_size: int


def shares(world_sizes: Sequence[int], *, rank_offset: int, world_size: int) -> list[Share]:
    """Divide the group's ranks among replicas with so many workers each, from `rank_offset` on (the trainer is before).

    Raises ValueError if the group that the client wants is of another size. Pure.
    """
    wanted = rank_offset + sum(world_sizes)
    if world_size != wanted:
        workers = " + ".join(map(str, world_sizes))
        raise ValueError(f"world_size is {world_size}, but with {workers} workers it is {wanted}")
    return [Share(rank_offset + sum(world_sizes[:i]), world_size) for i in range(len(world_sizes))]


class Weights:
    """Carries out the weight-transfer calls of one trainer."""

    def __init__(
        self, fleet: Fleet, apis: Mapping[int, ReplicaApi], pausing: Pausing, changes: Changes, turn: Turn
    ) -> None:
        self._fleet = fleet
        self._apis = apis
        self._pausing = pausing
        self._changes = changes
        self._group: tuple[Member, ...] = ()
        """The replicas that have answered the last init."""
        self._turn = turn

    async def world_size(self) -> int:
        """Return the number of all workers. Raises ApiError naming the replica that does not tell."""
        return sum(await self._world_sizes(self._reachable()))

    async def init(self, body: dict[str, Any]) -> Answer:
        """Let all replicas join the trainer's group at once, each under ranks of its own."""
        with self._turn.taken(INIT_PATH):
            info = body.get("init_info")
            if not isinstance(info, dict):
                raise _bad("init_info", "it must be an object with rank_offset and world_size")
            replicas = self._reachable()
            sizes = await self._world_sizes(replicas)
            first, world_size = _number(info, "rank_offset"), _number(info, "world_size")
            try:
                divided = shares(sizes, rank_offset=first, world_size=world_size)
            except ValueError as error:
                told = ", ".join(f"{r.url} has {size}" for r, size in zip(replicas, sizes, strict=True))
                raise ApiError(
                    409, f"{error} ({told}): ask /get_world_size again and make the group anew.", reason="world_size"
                ) from None
            members = tuple(Member.now(replica) for replica in replicas)
            calls = [
                (member, json_body({**body, "init_info": {**info, **vars(share)}}))
                for member, share in zip(members, divided, strict=True)
            ]
            answers = await together(calls, INIT_PATH, apis=self._apis, changes=self._changes)
            self._group = ()
            answer = _agreed(answers, INIT_PATH)
            self._group = members
            offsets = ", ".join(f"{m.replica.url} from {s.rank_offset}" for m, s in zip(members, divided, strict=True))
            self._fleet.note("weights.group", f"one group of {divided[0].world_size} processes: {offsets}")
            return answer

    async def start(self, body: bytes) -> Answer:
        """Begin an update on all members. Rollouts stand still until it has been finished."""
        with self._turn.taken(START_PATH):
            members = await self._present(self._group or self._everybody())
            await self._pausing.stand_still()
            self._fleet.begin_update(members)
            answers: dict[Member, Answer] | None = {}
            try:
                _labelled(await self._label(members, UPDATING), START_PATH)
                answers = None  # from here on a member may have begun
                answers = await self._together(members, START_PATH, body)
                return _agreed(answers, START_PATH)
            except BaseException as error:
                if answers is None or any(answer.ok or answer.status is None for answer in answers.values()):
                    await self._fail(error)
                else:
                    await self._stay_as_before(members)
                raise

    async def update(self, body: bytes) -> Answer:
        """Let all members receive weights."""
        with self._turn.taken(UPDATE_PATH):
            update = self._started(UPDATE_PATH)
            answer = await self._step(update, UPDATE_PATH, body)
            update.received = True
            return answer

    async def finish(self, body: bytes) -> Answer:
        """End the update: what the members have is the next version, and the only one that is served."""
        with self._turn.taken(FINISH_PATH):
            update = self._started(FINISH_PATH)
            rest, named = _without_version(body)  # labelled once all have it, and not by each for itself
            answer = await self._step(update, FINISH_PATH, rest)
            if not update.received:
                await self._stay_as_before(update.members)
                return answer
            await self._empty_caches(update.members)
            version = named or self._fleet.weights.next_version()
            await self._label(update.members, version)  # who does not take the label is quarantined for want of it
            self._fleet.end_update(version)
            await self._pausing.go_on()
            return answer

    async def set_version(self, body: dict[str, Any]) -> Answer:
        """Give the base weights that all replicas have another label."""
        with self._turn.taken(LABEL_PATH):
            version = body.get("new_version")
            if not _is_label(version):
                raise _bad("new_version", _LABELS)
            if self._fleet.weights.update is not None:
                raise ApiError(409, "An update of base weights is under way: finish it first.", reason="updating")
            answer = _labelled(await self._label(self._everybody(), version), LABEL_PATH)
            self._fleet.want_weights(version, checkpoint=self._fleet.weights.checkpoint)
            return answer

    # Who takes part

    def _reachable(self) -> list[Replica]:
        replicas = [r for r in self._fleet.up if r.state is not ReplicaState.DRAINING]
        if not replicas:
            raise ApiError(503, "No replica is up.", reason="no_replica", retry_after_s=1)
        return replicas

    def _everybody(self) -> tuple[Member, ...]:
        return tuple(Member.now(replica) for replica in self._reachable())

    async def _world_sizes(self, replicas: Sequence[Replica]) -> list[int]:
        answers = await broadcast([self._apis[r.index] for r in replicas], "GET", "/get_world_size")
        agreed(answers, what="/get_world_size")
        return [number_told(r.url, answers[r.url], "world_size", least=1) for r in replicas]

    async def _present(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """Return the members if all are there still. Raises ApiError 409 naming those that are not.

        A call in which one of them takes no part would never end on the others. A server that restarted so fast that no
        probe has seen it has lost the label of its base weights.
        """
        left = [f"{m.replica.url} is {m.replica.state} ({m.replica.reason})" for m in members if not m.is_there]
        for member in members:
            replica = member.replica
            label = await self._apis[replica.index].weight_version() if member.is_there else None
            if label is not None and replica.weights is not None and label != replica.weights:
                left.append(f"{replica.url} has restarted (base weights {label!r}, not {replica.weights!r})")
        if left:
            said = f"A member of the trainer's group has left it: {'; '.join(left)}. Make the group anew: {INIT_PATH}."
            raise ApiError(409, said, reason="member_left")
        return members

    def _started(self, path: str) -> Update:
        update = self._fleet.weights.update
        if update is None:
            raise ApiError(409, f"{path}: no update has been started; send {START_PATH} first.", reason="not_started")
        return update

    # Steps

    async def _step(self, update: Update, path: str, body: bytes) -> Answer:
        try:
            await self._present(update.members)
            return _agreed(await self._together(update.members, path, body), path)
        except BaseException as error:
            await self._fail(error)
            raise

    async def _together(self, members: tuple[Member, ...], path: str, body: bytes) -> dict[Member, Answer]:
        calls = [(member, body) for member in members]
        return await together(calls, path, apis=self._apis, changes=self._changes)

    async def _label(self, members: tuple[Member, ...], label: str) -> dict[str, Answer]:
        """Label the members' base weights. A server that keeps no labels (404) is known by what the proxy remembers."""
        apis = [self._apis[member.replica.index] for member in members]
        self._fleet.weights.labelling = True
        try:
            answers = await broadcast(apis, "POST", LABEL_PATH, body=json_body({"new_version": label}))
        finally:
            self._fleet.weights.labelling = False
        for member in members:
            if answers[member.replica.url].ok or answers[member.replica.url].status == 404:
                member.replica.weights = label
        return answers

    async def _empty_caches(self, members: tuple[Member, ...]) -> None:
        """Forget all KV that the old weights have computed, that of rollouts which stand still as well."""
        apis = [self._apis[member.replica.index] for member in members]
        answers = await broadcast(apis, "POST", EMPTY_CACHE)
        for member in members:
            if answers[member.replica.url].ok:
                self._fleet.cache_was_reset(member.replica)
        for url, answer in answers.items():
            if not answer.ok:
                said = f"{url} keeps KV of the old base weights: {answer.status or 'no answer'} {answer.message}"
                self._fleet.note("weights.stale_cache", said, level="error")

    async def _fail(self, error: BaseException) -> None:
        self._fleet.fail_update(str(error) or type(error).__name__)
        await self._pausing.go_on()

    async def _stay_as_before(self, members: tuple[Member, ...]) -> None:
        """End an update in which no member has received anything."""
        await self._label(members, self._fleet.weights.version or ORIGINAL)
        self._fleet.end_update(self._fleet.weights.version)
        await self._pausing.go_on()


def _agreed(answers: dict[Member, Answer], path: str) -> Answer:
    return agreed({member.replica.url: answer for member, answer in answers.items()}, what=path)


def _labelled(answers: dict[str, Answer], path: str) -> Answer:
    """Return the answer to a label. Raises ApiError unless every replica that keeps labels has taken it."""
    kept = {url: answer for url, answer in answers.items() if answer.status != 404}
    return agreed(kept or answers, what=f"{path}: labelling the base weights")


def _number(info: dict[str, Any], name: str) -> int:
    value = info.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad(f"init_info.{name}", "it must be a number above 0")
    return value


def _without_version(body: bytes) -> tuple[bytes, str | None]:
    """Return the body without the version that the client gives to what it has sent, and that version."""
    try:
        sent = json.loads(body) if body else None
    except ValueError:
        return body, None
    if not isinstance(sent, dict) or "weight_version" not in sent:
        return body, None
    version = sent.pop("weight_version")
    if version is not None and not _is_label(version):
        raise _bad("weight_version", _LABELS)
    return json_body(sent), version


def _is_label(version: Any) -> TypeGuard[str]:
    return isinstance(version, str) and version not in ("", ORIGINAL, UPDATING)


def _bad(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param}: {why}.", reason="bad_request", type="BadRequestError", param=param)


def json_body(body: dict[str, Any]) -> bytes:
    """Return the body of a call."""
    return json.dumps(body).encode()
