"""Rollouts in the background of a test."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from tests.support.replicas import wait_until


class Background(ABC):
    """Sends rollouts from several threads until the block ends. Leaving it fails if one was lost, or is stuck."""

    def __init__(self, *, threads: int, patience_s: float) -> None:
        self.problems: list[str] = []
        """What went wrong; a thread may end with it."""
        self._patience_s = patience_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(seed,)) for seed in range(threads)]

    @property
    @abstractmethod
    def count(self) -> int:
        """Rollouts answered so far."""

    @abstractmethod
    def _work(self, seed: int) -> None:
        """Send rollouts until `_stop` is set."""

    def wait_more(self, rollouts: int) -> None:
        """Wait until so many more rollouts have been answered."""
        wanted = self.count + rollouts
        wait_until(
            lambda: self.count >= wanted or bool(self.problems),
            limit_s=self._patience_s,
            what=f"{rollouts} more rollouts",
        )

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self._patience_s)
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "a rollout is stuck"
            assert self.problems == [], self.problems
            assert self.count > 0
