"""What a fleet can serve, as far as its replicas tell how they are started. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.artifacts.verdict import Verdict
from proxy.contract import ReplicaStatus

NO_LORA = "the fleet's replicas run without LoRA (start them with --enable-lora)"


@dataclass(frozen=True)
class FleetLimits:
    """What counts for whoever publishes. None: no replica has told."""

    max_lora_rank: int | None = None
    """The smallest --max-lora-rank."""
    serves_lora: bool | None = None
    """Whether every replica is started with --enable-lora."""
    dtype: str | None = None
    """Of the base model's weights on the replicas."""
    model: str | None = None
    """The base model that they were started with: a directory, as they see it, or a repository of the Hub."""

    @property
    def known(self) -> bool:
        """Whether a replica has told."""
        return self.serves_lora is not None


def limits_of(replicas: Iterable[ReplicaStatus]) -> FleetLimits:
    """Return what all replicas together can serve."""
    told = [replica for replica in replicas if replica.dtype or replica.max_lora_rank]
    if not told:
        return FleetLimits()
    return FleetLimits(
        max_lora_rank=min((replica.max_lora_rank for replica in told if replica.max_lora_rank), default=None),
        serves_lora=all(replica.max_lora_rank for replica in told),
        dtype=next((replica.dtype for replica in told if replica.dtype), None),
        model=next((replica.model for replica in told if replica.model), None),
    )


def other_base(base_model: str, limits: FleetLimits) -> str:
    """Return a warning if an adapter was trained on another base model than the fleet serves, else an empty text.

    Only names of repositories are compared: what is in a directory nobody can tell from its path.
    """
    served = limits.model or ""
    if not base_model or not served or base_model[0] in "/.~" or served[0] in "/.~":
        return ""
    if base_model.casefold() == served.casefold():
        return ""
    return (
        f"it was trained on {base_model}, but the replicas serve {served}; unless these are the same weights, its "
        "answers are of no use"
    )


def on_fleet(verdict: Verdict, limits: FleetLimits) -> Verdict:
    """Return how an adapter can be served there."""
    return verdict.unless_merged(NO_LORA) if limits.serves_lora is False else verdict
