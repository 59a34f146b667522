"""One generation request on its way through the proxy."""

from __future__ import annotations

import msgspec

from proxy.dataplane.budget import Account
from proxy.dataplane.client_request import ClientRequest
from proxy.dataplane.headers import Headers, request_id
from proxy.fleet.policies import Policy
from proxy.fleet.replica import Replica
from proxy.routing.request_key import RequestKey


class Rollout(msgspec.Struct, eq=False):
    """The state of one request. Requests that any ready replica can answer have an empty `key.model`."""

    method: str
    target: str
    """Path and query, as the client wrote them."""
    headers: Headers
    """Those that its replica gets: its id is the same with every try."""
    body: bytes
    """What replicas get: the client's, with the name that they know its policy by. It is held once, for another try."""
    request_bytes: int
    """Of the body as the client sent it."""
    key: RequestKey
    """Its `model` is what replicas call the policy, once that is known."""
    asked_for: str
    """What the client has written into `model`."""
    account: Account
    began_at: float
    """On the fleet's clock."""
    retries_left: int
    """Below zero while it is held, though its tries are used up (see `retry`)."""
    client: ClientRequest
    """Where the answer goes."""
    policy: Policy | None = None
    """What it was sent to first. A name that has come to mean another policy since must not answer it (P5)."""
    tried: list[str] = msgspec.field(default_factory=list)
    """What went wrong so far, each with the replica's URL."""
    failed_on: set[int] = msgspec.field(default_factory=set)
    """Replicas that are not to be asked again."""
    failed_by: dict[Replica, int] = msgspec.field(default_factory=dict)
    """Who has failed it, with how often each had joined before that: one that has joined again is well again."""
    failed_inside: bool = False
    """A replica has failed inside with it: one other may try, not a third."""
    engines_killed: int = 0
    """Engines that have died under it."""
    started_at: float | None = None
    """When the client was sent the head of an answer, on the fleet's clock; None before that."""
    away_s: float = 0.0
    """How long replicas had it, or none was ready for it, before an answer could begin: not the proxy's own time."""
    answer_bytes: int = 0
    """Of the body that the client was sent."""
    deadline: float | None = None
    """When it has waited long enough for a ready replica, on the event loop's clock; set when it first has to wait."""

    @property
    def still_out(self) -> int:
        """How many replicas have failed it and have not been ready since."""
        return sum(replica.joins == joins for replica, joins in self.failed_by.items())

    @property
    def name(self) -> str:
        """What clients call the policy; of an alias, the policy that it meant first."""
        return self.policy.name if self.policy is not None else self.asked_for

    @property
    def started(self) -> bool:
        """Whether the client has been sent the head of an answer."""
        return self.started_at is not None

    def about(self, replica: str | None = None, seconds: float | None = None) -> dict[str, object]:
        """Return what a log line about it says (see `logs`)."""
        version = self.policy.version if self.policy is not None else None
        told = {"policy": self.name, "version": version, "replica": replica, "seconds": seconds}
        return {"about": {"event": "rollout", "request": request_id(self.headers), **told}}

    @property
    def generates(self) -> bool:
        """Whether it asks for tokens, rather than for what all replicas say alike."""
        return bool(self.key.pieces)

    @property
    def needs_policy(self) -> bool:
        """Whether it names a policy or the base model."""
        return bool(self.key.model)
