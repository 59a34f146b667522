"""Which sequences run and which wait: at most `max_num_seqs`, at most `max_loras` adapters, at most the KV cache."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from proxy.simulator.sequence import Sequence
from proxy.simulator.settings import SimulatorSettings


@dataclass(frozen=True)
class Waiting:
    """How many sequences wait, by vLLM's two reasons."""

    capacity: int
    deferred: int
    """Waiting for an adapter slot."""

    @property
    def total(self) -> int:
        """How many wait, for whatever reason."""
        return self.capacity + self.deferred


class Scheduler:
    """First come, first served, except that a sequence whose adapter finds no slot lets others pass."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self._settings = settings
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, int] = {}
        self._adapters: Counter[int] = Counter()
        self._free_blocks = settings.num_gpu_blocks
        self._deferred = 0
        self._stale = False

    def __repr__(self) -> str:
        return f"Scheduler({len(self._running)} running, {len(self._waiting)} waiting)"

    @property
    def running(self) -> list[Sequence]:
        """The sequences that run, oldest first."""
        return list(self._running)

    @property
    def running_count(self) -> int:
        """How many run."""
        return len(self._running)

    @property
    def cache_usage(self) -> float:
        """The part of the KV cache that running sequences have claimed."""
        return 1 - self._free_blocks / self._settings.num_gpu_blocks

    @property
    def waiting(self) -> Waiting:
        """How many wait, and for what, as of the last `admit`."""
        deferred = min(self._deferred, len(self._waiting))
        return Waiting(capacity=len(self._waiting) - deferred, deferred=deferred)

    @property
    def adapters_running(self) -> Counter[int]:
        """The ids of the adapters that run, with the number of their sequences."""
        return self._adapters

    def adapter_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the adapters that run and of those that wait."""
        running = {sequence.lora.name for sequence in self._running if sequence.lora}
        waiting = {sequence.lora.name for sequence in self._waiting if sequence.lora}
        return sorted(running), sorted(waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting.append(sequence)
        self._stale = True

    def admit(self) -> list[Sequence]:
        """Move every sequence that fits from waiting to running and return them."""
        if not self._stale:
            return []
        self._stale = False
        admitted: list[Sequence] = []
        deferred: list[Sequence] = []
        while self._waiting and len(self._running) < self._settings.max_num_seqs:
            sequence = self._waiting.popleft()
            if not self._has_slot(sequence):
                deferred.append(sequence)
            elif not self._has_blocks(sequence):
                self._waiting.appendleft(sequence)
                break
            else:
                self._start(sequence)
                admitted.append(sequence)
        self._waiting.extendleft(reversed(deferred))
        self._deferred = len(deferred)
        return admitted

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Forgetting it twice changes nothing."""
        blocks = self._running.pop(sequence, None)
        if blocks is None:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            return
        self._release(sequence, blocks)

    def make_room(self) -> int:
        """Count the blocks that running sequences have grown to, and preempt the newest until the rest fit."""
        for sequence in self._running:
            blocks = self._blocks_of(sequence)
            self._free_blocks -= blocks - self._running[sequence]
            self._running[sequence] = blocks
        newest_first = self.running[:0:-1]  # the oldest stays: alone it always fits
        preempted = 0
        while self._free_blocks < 0 and preempted < len(newest_first):
            self._preempt([newest_first[preempted]])
            preempted += 1
        return preempted

    def preempt_all(self) -> int:
        """Send every running sequence back to the head of the queue and return how many there were."""
        preempted = self.running
        self._preempt(preempted)
        return len(preempted)

    def everything(self) -> list[Sequence]:
        """Return all sequences, those that run first."""
        return [*self._running, *self._waiting]

    def _preempt(self, preempted: list[Sequence]) -> None:
        for sequence in preempted:
            self._release(sequence, self._running.pop(sequence))
        self._waiting.extendleft(reversed(preempted))

    def _start(self, sequence: Sequence) -> None:
        blocks = self._blocks_of(sequence)
        self._free_blocks -= blocks
        self._running[sequence] = blocks
        if sequence.lora:
            self._adapters[sequence.lora.id] += 1

    def _release(self, sequence: Sequence, blocks: int) -> None:
        self._free_blocks += blocks
        self._stale = True
        if sequence.lora:
            self._adapters[sequence.lora.id] -= 1
            if not self._adapters[sequence.lora.id]:
                del self._adapters[sequence.lora.id]

    def _has_slot(self, sequence: Sequence) -> bool:
        if sequence.lora is None or sequence.lora.id in self._adapters:
            return True
        return len(self._adapters) < self._settings.max_loras

    def _has_blocks(self, sequence: Sequence) -> bool:
        # A sequence that runs alone always fits: the cache holds at least one answer of the greatest length.
        return not self._running or self._blocks_of(sequence) <= self._free_blocks

    def _blocks_of(self, sequence: Sequence) -> int:
        return -(-(len(sequence.prompt) + sequence.produced + 1) // self._settings.block_size)
