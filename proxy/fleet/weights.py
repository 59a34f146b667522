"""The weights of the base model: which version the fleet serves, and which replicas do not have it.

Every replica carries a label (vLLM's /weight_info). It is `default` on a server that has started, `updating` while base
weights change, and after that the number of the update, with the policy's name where it has one (`7~math-r1-v40-...`).
So a replica that restarts after an update, and has the original weights again, is told from one that has the fleet's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.fleet.replica import Replica

ORIGINAL = "default"
"""The label of a server whose base weights nobody has changed (vLLM's own word)."""

UPDATING = "updating"
"""The label from the start of an update until its end: what is served meanwhile is neither version."""

SEPARATOR = "~"
"""Between the number of a version and the name of the policy that it is."""


@dataclass(frozen=True)
class Member:
    """A replica as it was when it joined the trainer's group. One that goes down has left the group for good."""

    replica: Replica
    life: int

    @classmethod
    def now(cls, replica: Replica) -> Member:
        """Return the replica as it is now."""
        return cls(replica, replica.life)

    @property
    def is_there(self) -> bool:
        """Whether it has answered ever since."""
        return self.replica.is_up and self.replica.life == self.life


@dataclass
class Update:
    """An update of base weights that has been started and not finished."""

    members: tuple[Member, ...]
    received: bool = False
    """Every member has received weights."""

    def has(self, replica: Replica) -> bool:
        """Whether the replica takes part in it, and has since it began."""
        return any(member.replica is replica and member.is_there for member in self.members)


@dataclass
class BaseWeights:
    """What is wanted of every replica."""

    version: str | None = None
    """The label that replicas must carry to serve; None: nobody has changed base weights."""
    checkpoint: str | None = None
    """Where these weights are, if they came from a directory: who lacks them can read them there."""
    before: str | None = None
    """While replicas are reloaded one after the other: the label that those serve which still wait."""
    update: Update | None = None
    reloading: set[Replica] = field(default_factory=set)
    """Replicas that read a checkpoint now, or are about to."""
    all_out: bool = False
    """No replica is ready until a reload has ended: policies are announced to none before."""
    labelling: bool = False
    """Replicas are being given other labels."""

    @property
    def settled(self) -> bool:
        """Whether what a replica says of its label now can be held against what is known of it."""
        return self.update is None and not self.labelling and not self.reloading

    def next_version(self, name: str = "") -> str:
        """Return the label of the version that comes after this one. `name`: of the policy that it is."""
        number = (number_of(self.version) or 0) + 1
        return f"{number}{SEPARATOR}{name}" if name else str(number)

    def misfit(self, replica: Replica) -> str | None:
        """Return why a replica must not serve: its base weights are not the fleet's. Pure."""
        label = replica.weights
        if replica in self.reloading:
            return "its base weights are being reloaded"
        if self.update is not None:
            if self.update.has(replica):
                return None
            return "base weights are being updated, and it is not in the trainer's group"
        if label == UPDATING:
            return "an update of its base weights was begun and not finished"
        if self.version is not None and label != self.version:
            if self.before is not None and (label or ORIGINAL) == self.before:
                return None
            has = "the original base weights" if label in (None, ORIGINAL) else f"version {label} of the base weights"
            return f"it has {has}, the fleet serves version {self.version}"
        return None


def policy_in(label: str | None) -> str:
    """Return the name of the policy in a label, empty if it has none."""
    return (label or "").partition(SEPARATOR)[2]


def number_of(label: str | None) -> int | None:
    """Return the number of a version, None if the label has none."""
    head = (label or "").partition(SEPARATOR)[0]
    return int(head) if head.isdigit() else None


def newest_version(wanted: str | None, found: str | None) -> str | None:
    """Return which version a fleet serves that wants one and finds a replica labelled with another (P10). Pure.

    The higher number wins. A label that has none counts only where nothing is wanted.
    """
    if found in (None, ORIGINAL, UPDATING) or found == wanted:
        return wanted
    if wanted is None:
        return found
    ours, theirs = number_of(wanted), number_of(found)
    return found if ours is not None and theirs is not None and theirs > ours else wanted
