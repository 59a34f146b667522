"""Wait until what is announced is whole in its store, before any replica looks for it.

A replica that looks too early may remember for half a minute that nothing is there. Where the proxy knows no store for
a path, there is nothing to wait for.
"""

from __future__ import annotations

from typing import Protocol

from proxy.contract import PolicyFile


class Gate(Protocol):
    """Knows whether files have landed."""

    async def wait(self, path: str, files: tuple[PolicyFile, ...], *, timeout_s: float) -> None:
        """Return once the store lists all of `files` below `path`. Raises ApiError when `timeout_s` has passed."""


class NoGate:
    """For fleets whose storage everybody sees directly."""

    async def wait(self, path: str, files: tuple[PolicyFile, ...], *, timeout_s: float) -> None:
        """Return at once."""
