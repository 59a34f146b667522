"""What a source says of the replicas there are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field


class LookupFailed(Exception):
    """A source did not tell which replicas there are, so nothing is known to have changed. Says why, in words."""


@dataclass(frozen=True)
class Listing:
    """All replicas that a source knows at one time."""

    replicas: Mapping[str, str]
    """URL -> what else the source tells of it; empty: nothing."""
    gone: Mapping[str, str] = field(default_factory=dict)
    """Why some of those that were listed before are not any more, by URL, where the source knows."""
    unusable: tuple[str, ...] = ()
    """What is listed but cannot be reached, each with the reason."""


Lookup = Callable[[], Awaitable[Listing]]
"""Asks a source once. Raises LookupFailed."""
