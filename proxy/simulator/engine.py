"""The engine of one replica: a single loop that prefills and decodes in simulated time.

Every step gives each running sequence one token and costs `decode_step_s`, plus the prefill of those it admitted. The
loop sleeps once for as many steps as fit into one tick, so a core can serve hundreds of rollouts per second.
Everything that a real API server asks its engine process for is a coroutine here and hangs when the engine does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from proxy.simulator.faults import FaultBox
from proxy.simulator.lora import AdapterMemory, LoraRequest
from proxy.simulator.lora_directory import AdapterNotFoundError, AdapterRefusedError
from proxy.simulator.prefix_cache import PrefixCache, block_keys
from proxy.simulator.scheduler import Scheduler
from proxy.simulator.sequence import Generation, Sequence
from proxy.simulator.settings import SimulatorSettings
from proxy.simulator.tokens import base_weights

PauseMode = Literal["abort", "wait", "keep"]

_TICK_S = 0.002
"""Steps shorter than this are taken several at a time: event loop timers are no finer than a millisecond."""

_MAX_LAG_S = 0.5
"""Simulated time that the loop may be behind and still catch up. Beyond it (a stopped process) the time is lost."""


class EngineDeadError(Exception):
    """The engine is gone; the process will follow."""


@dataclass
class Counters:
    """What /metrics counts."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    loads: int = 0


class Engine:
    """One replica's engine. `run` must be running for anything to be generated."""

    def __init__(
        self, settings: SimulatorSettings, faults: FaultBox, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = Counters()
        self.paused: PauseMode | None = None
        self.dead = False
        self.on_death: Callable[[], None] = lambda: None
        """Called once, when the engine dies."""
        self.scheduler = Scheduler(settings)
        self.memory = AdapterMemory(capacity=settings.max_cpu_loras, max_rank=settings.max_lora_rank)
        self.cache = PrefixCache(blocks=settings.num_gpu_blocks, block_size=settings.block_size)
        self._settings = settings
        self._faults = faults
        self._clock = clock
        self._time = clock()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._faults_changed = asyncio.Event()

    def __repr__(self) -> str:
        state = "dead" if self.dead else f"paused ({self.paused})" if self.paused else "running"
        return f"Engine({state}, {self.scheduler}, {self.memory}, {self.cache})"

    # What the API server asks for.

    def submit(self, generation: Generation) -> None:
        """Queue every sequence of a request. Raises EngineDeadError."""
        self._raise_if_dead()
        for sequence in generation.sequences:
            if self._faults.now.abort_answers:
                sequence.finish("abort")
            else:
                self.scheduler.add(sequence)
        self._wake.set()

    def drop(self, generation: Generation) -> None:
        """Abort what is left of a request whose client has gone."""
        for sequence in generation.sequences:
            if sequence.finish_reason is None:
                self._abort(sequence)

    def abort(self, ids: set[str]) -> None:
        """Abort the requests with these ids, as their clients know them."""
        for sequence in self.scheduler.everything():
            if sequence.generation.id in ids:
                self._abort(sequence)

    def abort_all(self) -> int:
        """Abort every sequence and return how many there were."""
        sequences = self.scheduler.everything()
        for sequence in sequences:
            self._abort(sequence)
        return len(sequences)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop generating. `abort` ends what runs, `keep` freezes it, `wait` lets it finish first."""
        await self.responsive()
        self.paused = mode
        self._wake.set()  # what was frozen goes on when the mode is now `wait`
        if mode == "abort":
            self.abort_all()
        if mode == "wait":
            await self._drain()
        if clear_cache:
            self.counters.preemptions += self.scheduler.preempt_all()
            self.cache.clear()

    async def _drain(self) -> None:
        while self.scheduler.running_count and self.paused:
            self._drained.clear()
            await self._drained.wait()
        self._raise_if_dead()

    async def resume(self) -> None:
        """Go on generating; harmless when not paused."""
        await self.responsive()
        self.paused = None
        self._drained.set()
        self._wake.set()

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        """Empty the cache. Refused (False) while sequences run, unless they may lose their own KV as well."""
        await self.responsive()
        if preempt_running:
            self.counters.preemptions += self.scheduler.preempt_all()
            self._wake.set()
        if self.scheduler.running_count:
            return False
        self.cache.clear()
        return True

    async def load(self, lora: LoraRequest) -> None:
        """Read an adapter into memory. Raises what `read_adapter` raises."""
        await self.responsive()
        await asyncio.sleep(self._faults.now.load_delay_s)
        await self.responsive()
        duration = self._settings.load_s / self._settings.speed
        self._time = max(self._time, self._clock()) + duration
        self.memory.use(lora, in_use=self.scheduler.adapters_running)
        self.counters.loads += 1
        await asyncio.sleep(duration)

    async def responsive(self) -> None:
        """Return once the engine is able to answer. Raises EngineDeadError."""
        while self._faults.now.hang and not self.dead:
            self._faults_changed.clear()
            await self._faults_changed.wait()
        self._raise_if_dead()

    def faults_changed(self) -> None:
        """Look at the faults again: the engine may have been told to hang or to go on."""
        self._faults_changed.set()
        self._wake.set()

    def die(self) -> None:
        """Fail everything in flight and answer nothing any more."""
        if self.dead:
            return
        self.dead = True
        for sequence in self.scheduler.everything():
            self.scheduler.remove(sequence)
            sequence.generation.fail()
        self._drained.set()
        self.faults_changed()
        self.on_death()

    # The loop.

    async def run(self) -> None:
        """Generate until cancelled or dead."""
        try:
            while not self.dead:
                await self._step()
        except Exception:
            self.die()
            raise

    async def _step(self) -> None:
        while not self._runnable():
            self._wake.clear()
            await self._wake.wait()
            self._time = max(self._time, self._clock())
            if self.dead:
                return
        if self._clock() - self._time > _MAX_LAG_S:
            self._time = self._clock()
        prefill_s = 0.0 if self.paused else sum(map(self._start, self.scheduler.admit()))
        if self.dead:
            return
        scale = self._faults.now.slow / self._settings.speed
        step_s = self._settings.decode_step_s * scale
        steps = self._steps(step_s)
        self._time += prefill_s * scale + steps * step_s
        await asyncio.sleep(max(self._time - self._clock(), 0))
        if self.paused not in ("keep", "abort") and not self._faults.now.hang:
            self._advance(steps)

    def _runnable(self) -> bool:
        if self.dead or self._faults.now.hang or self.paused in ("keep", "abort"):
            return False
        waiting = self.scheduler.waiting
        return bool(self.scheduler.running_count or (not self.paused and waiting.capacity + waiting.deferred))

    def _steps(self, step_s: float) -> int:
        if step_s == 0:
            left = (sequence.max_tokens - sequence.produced for sequence in self.scheduler.running)
            return max(left, default=1)
        behind = self._clock() - self._time
        return max(1, math.ceil(max(_TICK_S, behind) / step_s))

    def _start(self, sequence: Sequence) -> float:
        """Look up the cache and return the seconds that the prefill takes."""
        sequence.settle()  # what it produced before a preemption
        weights = self._weights_of(sequence)
        if self.dead:
            return 0
        files = self.memory.get(sequence.lora) if sequence.lora else None
        sequence.adapter_digest = files.digest if files else None
        computed = sequence.prompt + sequence.tokens if sequence.tokens else sequence.prompt
        keys = self._block_keys(sequence, computed)
        hit = self.cache.lookup(keys, prompt_tokens=len(computed))
        if hit.weights not in (None, weights):
            weights = f"stale:{hit.weights}/{weights}"
        self.cache.store(keys, weights=weights)
        sequence.change_weights(weights)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = hit.tokens
            self.counters.prompt_tokens += len(sequence.prompt)
            self.counters.cache_queries += len(sequence.prompt)
            self.counters.cache_hits += hit.tokens
        return (len(computed) - hit.tokens) / self._settings.prefill_tokens_per_s

    def _weights_of(self, sequence: Sequence) -> str:
        if self._faults.now.wrong_weights is not None:
            return self._faults.now.wrong_weights
        if sequence.lora is None:
            return base_weights(self._settings.model)
        try:
            return self.memory.use(sequence.lora, in_use=self.scheduler.adapters_running).digest
        except (AdapterNotFoundError, AdapterRefusedError):
            # vLLM reads a dropped adapter inside the step, where any failure is fatal to the engine.
            self.die()
            return ""

    def _advance(self, steps: int) -> None:
        for sequence in self.scheduler.running:
            if sequence.lora:
                self._follow_inplace(sequence, sequence.lora)
                if self.dead:
                    return
            left = sequence.max_tokens - sequence.produced
            taken = min(steps, left)
            sequence.produced += taken
            self.counters.generation_tokens += taken
            if taken == left:
                self._finish(sequence, "length")
            else:
                sequence.generation.progressed()
        self.counters.preemptions += self.scheduler.make_room()
        if not self.scheduler.running_count:
            self._drained.set()

    def _follow_inplace(self, sequence: Sequence, lora: LoraRequest) -> None:
        if lora.inplace:
            sequence.change_weights(self._weights_of(sequence))
            return
        # A later load_inplace keeps the id, so weights change under sequences that started before it.
        files = self.memory.get(lora)
        if files and files.digest != sequence.adapter_digest:
            sequence.adapter_digest = files.digest
            sequence.change_weights(files.digest)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.remove(sequence)
        sequence.finish(reason)
        if reason == "abort":
            self.counters.aborted += 1
            return
        self.counters.finished += 1
        # The last token's own KV is never computed. A follow-up prompt that repeats this answer finds the rest.
        computed = sequence.prompt + sequence.tokens[:-1]
        self.cache.store(self._block_keys(sequence, computed), weights=sequence.weights)

    def _abort(self, sequence: Sequence) -> None:
        self._finish(sequence, "abort")
        if not self.scheduler.running_count:
            self._drained.set()

    def _block_keys(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        adapter = f"{sequence.lora.name}\0{sequence.lora.path}" if sequence.lora else ""
        return block_keys(tokens, block_size=self._settings.block_size, scope=f"{adapter}\0{sequence.salt}")

    def _raise_if_dead(self) -> None:
        if self.dead:
            raise EngineDeadError
