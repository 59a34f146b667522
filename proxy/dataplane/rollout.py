"""One generation request on its way through the proxy."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.dataplane.budget import Account
from proxy.fleet.policies import Policy
from proxy.routing.request_key import RequestKey


@dataclass(slots=True)
class Rollout:
    """The state of one request. Requests that any ready replica can answer have an empty `key.model`."""

    method: str
    target: str
    """Path and query, as the client wrote them."""
    headers: list[tuple[bytes, bytes]]
    body: bytes
    key: RequestKey
    account: Account
    began_at: float
    """On the fleet's clock."""
    retries_left: int
    policy: Policy | None = None
    """What it was sent to first. A name that has come to mean another policy since must not answer it (P5)."""
    tried: list[str] = field(default_factory=list)
    """What went wrong so far, each with the replica's URL."""
    failed_on: set[int] = field(default_factory=set)
    """Replicas that are not to be asked again."""
    failed_inside: bool = False
    """A replica has died or failed inside with it: one other may try, not a third."""
    started: bool = False
    """Whether the client has been sent the head of an answer."""
    deadline: float | None = None
    """When it has waited long enough for a ready replica, on the event loop's clock; set when it first has to wait."""

    @property
    def needs_policy(self) -> bool:
        """Whether it names a policy or the base model."""
        return bool(self.key.model)
