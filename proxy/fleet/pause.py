"""The pause that clients have asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pause:
    """A pause on record. `real` tells whether the replicas have been told: until something needs that, they are not."""

    target: str
    """Path and query as the client sent them, such as `/pause?mode=keep`."""
    real: bool
