"""Replicas in virtual time: continuous batching and a prefix cache, as far as routing can change how long they take.

A step gives every running sequence one token and takes as long as the batch asks for, but never less than reading the
weights does. While prompts wait, each step also computes a chunk of the first one, which holds up everybody. What
running sequences keep of the KV cache is not taken from the prefix cache. Nothing here knows how routing decides.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.simulator.prefix_cache import PrefixCache

PREFILL_TOKENS_PER_S = 20_000
"""The simulator's default."""

STEP_FLOOR_S = 0.010
"""Time of a step with few sequences, which is that of reading the weights. The simulator's default."""

STEP_PER_SEQUENCE_S = STEP_FLOOR_S / 48
"""What each sequence adds beyond the 48 that the floor covers."""

CHUNK_TOKENS = 2048
"""Prompt tokens computed in a step: vLLM's smallest default for --max-num-batched-tokens."""

BLOCK_TOKENS = 16
KV_TOKENS = 262_144
MAX_SEQUENCES = 256

_PRIVATE_BLOCKS = itertools.count(-1, -1)


@dataclass
class Rollout:
    """One rollout on a replica."""

    prompt_tokens: int
    prompt_blocks: Sequence[int]
    answer_tokens: int
    all_blocks: Sequence[int] = ()
    """Blocks of the prompt and its answer, where a later turn repeats them; else nobody asks for the answer's again."""
    cached_tokens: int = 0


@dataclass
class Replica:
    """One engine."""

    engines: int = 1
    """Or so many that share every prompt and every batch evenly, and one cache: what no routing can surpass by much."""
    slow: float = 1.0
    """Everything takes so many times as long."""
    now: float = 0.0
    prefilled: int = 0
    generated: int = 0
    cached: int = 0
    _waiting: deque[Rollout] = field(default_factory=deque)
    _left: float = 0.0
    """Prompt tokens of the first waiting sequence still to compute, once it has started."""
    _started: bool = False
    _running: list[tuple[float, int, Rollout]] = field(default_factory=list)
    """A heap by the progress at which each has all its tokens."""
    _progress: float = 0.0
    """Tokens that a sequence running from the start would have."""
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._cache = PrefixCache(blocks=self.engines * KV_TOKENS // BLOCK_TOKENS, block_size=BLOCK_TOKENS)

    def add(self, sequence: Rollout, now: float) -> None:
        """Queue a sequence at time `now`, which must not be later than `next_event()`."""
        self._advance(now)
        self._waiting.append(sequence)
        self._start_next()

    def next_event(self) -> float:
        """Return when something ends next, or infinity."""
        step = self._step_s()
        ends = [self.now + (self._running[0][0] - self._progress) * step] if self._running else []
        if self._started:
            ends.append(self.now + self._left / (CHUNK_TOKENS * self.engines) * step)
        return min(ends, default=float("inf"))

    def step_to(self, now: float) -> list[Rollout]:
        """Go on until `now`, which is that of `next_event()`, and return the sequences that have ended."""
        self._advance(now)
        if self._started and self._left <= 1e-6:
            sequence = self._waiting.popleft()
            self._started = False
            heapq.heappush(self._running, (self._progress + sequence.answer_tokens, next(self._ids), sequence))
        ended = []
        while self._running and self._running[0][0] - self._progress <= 1e-6:
            ended.append(heapq.heappop(self._running)[2])
        for sequence in ended:
            self.generated += sequence.answer_tokens
            self._keep(sequence)
        self._start_next()
        return ended

    def _advance(self, now: float) -> None:
        if now > self.now:
            steps = (now - self.now) / self._step_s()
            self._progress += steps
            if self._started:
                self._left -= steps * CHUNK_TOKENS * self.engines
            self.now = now

    def _step_s(self) -> float:
        batch = len(self._running) / self.engines
        step = max(STEP_FLOOR_S, batch * STEP_PER_SEQUENCE_S) if batch else 0.0
        return (step + (CHUNK_TOKENS / PREFILL_TOKENS_PER_S if self._started else 0.0) or STEP_FLOOR_S) * self.slow

    def _start_next(self) -> None:
        if self._started or not self._waiting or len(self._running) >= MAX_SEQUENCES * self.engines:
            return
        sequence = self._waiting[0]
        hit = self._cache.lookup(sequence.prompt_blocks, prompt_tokens=sequence.prompt_tokens)
        self._cache.store(sequence.prompt_blocks, weights="")
        sequence.cached_tokens = hit.tokens
        self._started, self._left = True, sequence.prompt_tokens - hit.tokens
        self.cached += hit.tokens
        self.prefilled += sequence.prompt_tokens - hit.tokens

    def _keep(self, sequence: Rollout) -> None:
        private = -(-sequence.answer_tokens // BLOCK_TOKENS)
        self._cache.store(sequence.all_blocks or [next(_PRIVATE_BLOCKS) for _ in range(private)], weights="")


def work_s(*, prefilled: int, generated: int) -> float:
    """Return how long one replica, always full, takes for this."""
    return prefilled / PREFILL_TOKENS_PER_S + generated * STEP_PER_SEQUENCE_S


def alone_s(sequence: Rollout) -> float:
    """Return how long a sequence takes on a replica of its own."""
    return (sequence.prompt_tokens - sequence.cached_tokens) / PREFILL_TOKENS_PER_S + (
        sequence.answer_tokens * STEP_FLOOR_S
    )
