"""What request bodies and answers may take together, so that a burst is refused before memory runs out."""

from __future__ import annotations

from proxy.errors import ApiError


class Budget:
    """Bytes for all rollouts together. Only accounts take from it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @property
    def is_tight(self) -> bool:
        """Whether more than half is taken."""
        return self.used > self.limit / 2

    def __repr__(self) -> str:
        return f"<Budget used={self.used} of {self.limit}>"


class Account:
    """What one rollout, or one connection, has taken. Close it when that has ended; a second close does nothing."""

    __slots__ = ("_budget", "_taken")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._taken = 0

    def take(self, count: int) -> bool:
        """Take `count` bytes; False if they are not to be had."""
        if self._budget.used + count > self._budget.limit:
            return False
        self.hold(count)
        return True

    def hold(self, count: int) -> None:
        """Take `count` bytes that are there already, whether they are to be had or not."""
        self._budget.used += count
        self._taken += count

    def close(self) -> None:
        """Give everything back."""
        self._budget.used -= self._taken
        self._taken = 0


def no_room() -> ApiError:
    """Return the answer to a rollout whose request or answer there is no room for."""
    message = "The proxy holds as many bytes as PROXY_MAX_BUFFER allows; try again when other rollouts have ended."
    return ApiError(503, message, reason="over_budget", retry_after_s=1)
