"""The weights of the base model: which version the fleet serves, and which replicas do not have it.

Every replica carries a label (vLLM's /weight_info). It is `default` on a server that has started, `updating` while base
weights change, and the number of the update after that. So a replica that restarts after an update, and has the
original weights again, is told from one that has the fleet's.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.fleet.replica import Replica

ORIGINAL = "default"
"""The label of a server whose base weights nobody has changed (vLLM's own word)."""

UPDATING = "updating"
"""The label from the start of an update until its end: what is served meanwhile is neither version."""


@dataclass(frozen=True)
class Member:
    """A replica as it was when it joined the trainer's group. One that goes down has left the group for good."""

    replica: Replica
    life: int

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
    update: Update | None = None
    labelling: bool = False
    """Replicas are being given other labels."""

    @property
    def settled(self) -> bool:
        """Whether what a replica says of its label now can be held against what is known of it."""
        return self.update is None and not self.labelling

    def next_version(self) -> str:
        """Return the label of the version that comes after this one."""
        return str(int(self.version) + 1 if self.version and self.version.isdigit() else 1)

    def misfit(self, replica: Replica) -> str | None:
        """Return why a replica must not serve: its base weights are not the fleet's. Pure."""
        label = replica.weights
        if self.update is not None:
            if self.update.has(replica):
                return None
            return "base weights are being updated, and it is not in the trainer's group"
        if label == UPDATING:
            return "an update of its base weights was begun and not finished"
        if self.version is not None and label != self.version:
            has = "the original base weights" if label in (None, ORIGINAL) else f"version {label} of the base weights"
            return f"it has {has}, the fleet serves version {self.version}"
        return None


def newest_version(wanted: str | None, found: str | None) -> str | None:
    """Return which version a fleet serves that wants one and finds a replica labelled with another (P10). Pure.

    The higher number wins. A label that is no number counts only where nothing is wanted.
    """
    if found in (None, ORIGINAL, UPDATING) or found == wanted:
        return wanted
    if wanted is None:
        return found
    return max(wanted, found, key=int) if wanted.isdigit() and found.isdigit() else wanted
