"""What ends the serving of a rollout from outside: its client leaves, or it takes too long."""

from __future__ import annotations

import asyncio

from proxy.dataplane.client_request import ClientRequest


class Watch:
    """Cancels the task that serves a rollout when its client goes away, or when it takes too long (`late`).

    Stop it when the answer is on its way.
    """

    __slots__ = ("_client", "_limit", "gone", "late", "serving")

    def __init__(self, client: ClientRequest, loop: asyncio.AbstractEventLoop, limit: Limit) -> None:
        serving = asyncio.current_task(loop)
        assert serving is not None
        self.serving = serving
        self.gone = self.late = False
        self._client = client
        self._client.on_leaving = self._leave
        self._limit = limit
        limit.add(self)

    def _leave(self) -> None:
        self.gone = True
        self.serving.cancel()

    def expire(self) -> None:
        self.late = True
        self.serving.cancel()

    def stop(self) -> None:
        self._client.on_leaving = None
        self._limit.remove(self)


class Limit:
    """What rollouts may take, `limit_s`. One timer for all: each one's own would cost it as much as its routing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._ends_at: dict[Watch, float] = {}
        """In the order in which they end."""
        self._is_waiting = False

    def add(self, watch: Watch) -> None:
        self._ends_at[watch] = self._loop.time() + self._limit_s
        if not self._is_waiting:
            self._wait(self._limit_s)

    def remove(self, watch: Watch) -> None:
        self._ends_at.pop(watch, None)

    def _wait(self, delay_s: float) -> None:
        self._is_waiting = True
        self._loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._is_waiting = False
        for watch, ends_at in list(self._ends_at.items()):
            if (left_s := ends_at - self._loop.time()) > 0:
                self._wait(left_s)
                return
            self.remove(watch)
            watch.expire()
