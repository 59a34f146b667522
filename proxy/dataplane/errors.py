"""What can go wrong between the proxy and a replica. `relay` decides what follows."""

from __future__ import annotations


class UpstreamError(Exception):
    """A replica did not answer, or its answer broke off or was not HTTP. Says what happened, not where."""

    def __init__(self, said: str, *, unreachable: bool = False, over_budget: bool = False) -> None:
        super().__init__(said)
        self.unreachable = unreachable
        """Whether no connection could be made, or the replica has fallen silent: nothing has died of the rollout."""
        self.over_budget = over_budget
        """Whether it was the proxy that had no room for the answer."""
