"""A body that is passed on while it arrives: what must not pass, and what is learnt from what does."""

from __future__ import annotations

from proxy.dataplane.errors import UpstreamError
from proxy.dataplane.rollout import Rollout
from proxy.dataplane.verdict import ABORTED, Verdict
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica

TAIL_BYTES = 4096
"""So much of its end is kept: there it says how many tokens it took."""


class Passing:
    """One such body, from `replica` to the client of `rollout`."""

    def __init__(self, rollout: Rollout, replica: Replica, fleet: Fleet) -> None:
        self._rollout = rollout
        self._replica = replica
        self._fleet = fleet
        self.tail = b""
        self.failed = False
        """Whether one of its events was an error."""

    def look(self, chunk: bytes) -> None:
        """See what the client is about to get. Raises UpstreamError if it must not have that (P5)."""
        rollout = self._rollout
        if ABORTED in self.tail[-len(ABORTED) :] + chunk and not self._fleet.client_aborted_since(rollout.began_at):
            self._fleet.suspect(self._replica, "it aborted a rollout that no client had aborted")
            raise UpstreamError(Verdict.ABORTED.value)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        rollout.answer_bytes += len(chunk)
        if rollout.generates:
            self._replica.heard_at = self._fleet.clock()
        self.failed = self.failed or chunk.startswith(b'data: {"error"')

    def pour(self, chunk: bytes) -> bool:
        """Pass on what has just arrived; False if the client must be waited for. Raises UpstreamError as `look`."""
        client = self._rollout.client
        if client.is_slow:
            return False
        self.look(chunk)
        client.pass_on(chunk)
        return True
