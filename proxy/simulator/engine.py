"""The engine of one replica: a single loop that prefills and decodes in simulated time.

Every step gives each running sequence one token and costs `decode_step_s`, plus the prefill of those it admitted. The
loop sleeps once for as many steps as fit into one tick, so a core can serve hundreds of rollouts per second.
Everything that a real API server asks its engine process for is a coroutine here and hangs when the engine does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

from proxy.simulator.batch import Batch
from proxy.simulator.faults import FaultBox
from proxy.simulator.lora import LoraRequest
from proxy.simulator.lora_directory import AdapterNotFoundError, AdapterRefusedError
from proxy.simulator.sequence import Generation
from proxy.simulator.settings import SimulatorSettings

PauseMode = Literal["abort", "wait", "keep"]

_TICK_S = 0.002
"""Steps shorter than this are taken several at a time: event loop timers are no finer than a millisecond."""

_MAX_LAG_S = 0.5
"""Simulated time that the loop may be behind and still catch up. Beyond it (a stopped process) the time is lost."""


class EngineDeadError(Exception):
    """The engine is gone; the process will follow."""


class Engine:
    """One replica's engine. `run` must be running for anything to be generated."""

    def __init__(
        self, settings: SimulatorSettings, faults: FaultBox, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.batch = Batch(settings, faults)
        self.paused: PauseMode | None = None
        self.updating = False
        """Base weights are half there: the next step would kill the engine."""
        self.dead = False
        self.on_death: Callable[[], None] = lambda: None
        """Called once, when the engine dies."""
        self._settings = settings
        self._faults = faults
        self._clock = clock
        self._time = clock()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._faults_changed = asyncio.Event()
        self._reading = asyncio.Lock()
        """Held while an adapter or a checkpoint is read: the engine does that in its own loop, and answers nobody."""

    def __repr__(self) -> str:
        state = "dead" if self.dead else f"paused ({self.paused})" if self.paused else "running"
        return f"Engine({state}, {self.batch})"

    def submit(self, generation: Generation) -> None:
        """Queue every sequence of a request. Raises EngineDeadError."""
        self._raise_if_dead()
        if self._faults.now.abort_answers:
            self.batch.abort(generation.sequences)
            return
        for sequence in generation.sequences:
            self.batch.scheduler.add(sequence)
        self._wake.set()

    def drop(self, generation: Generation) -> None:
        """Abort what is left of a request whose client has gone."""
        self.batch.abort(generation.sequences)
        self._note_drained()

    def abort(self, ids: set[str]) -> None:
        """Abort the requests with these ids, as their clients know them."""
        everything = self.batch.scheduler.everything()
        self.batch.abort(sequence for sequence in everything if sequence.generation.id in ids)
        self._note_drained()

    def abort_all(self) -> int:
        """Abort every sequence and return how many there were."""
        aborted = self.batch.abort(self.batch.scheduler.everything())
        self._note_drained()
        return aborted

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
            self.batch.preempt_all()
            self.batch.cache.clear()

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
            self.batch.preempt_all()
            self._wake.set()
        if self.batch.scheduler.running_count:
            return False
        self.batch.cache.clear()
        return True

    async def load(self, lora: LoraRequest) -> None:
        """Read an adapter into memory. Raises what `read_adapter` raises."""
        await asyncio.sleep(self._faults.now.load_delay_s)
        await self.responsive()
        duration = self._settings.load_s / self._settings.speed
        async with self._reading:
            self._time = max(self._time, self._clock()) + duration
            self.batch.load(lora)
            await asyncio.sleep(duration)

    async def responsive(self) -> None:
        """Return once the engine is able to answer. Raises EngineDeadError."""
        while self._faults.now.hang and not self.dead:
            self._faults_changed.clear()
            await self._faults_changed.wait()
        async with self._reading:
            self._raise_if_dead()

    @asynccontextmanager
    async def occupied(self) -> AsyncIterator[None]:
        """Let the engine do nothing else meanwhile, and answer nobody: what its workers do, it waits for."""
        async with self._reading:
            yield

    def faults_changed(self) -> None:
        """Look at the faults again: the engine may have been told to hang or to go on."""
        self._faults_changed.set()
        self._wake.set()

    def die(self) -> None:
        """Fail everything in flight and answer nothing any more. Dying twice changes nothing."""
        if self.dead:
            return
        self.dead = True
        self.batch.fail_all()
        self._drained.set()
        self.faults_changed()
        self.on_death()

    async def run(self) -> None:
        """Generate until cancelled or dead."""
        try:
            while not self.dead:
                await self._step()
        except (AdapterNotFoundError, AdapterRefusedError):
            # vLLM reads a dropped adapter inside the step, where any failure is fatal to the engine.
            self.die()
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
        if self.updating:
            self.die()  # as vLLM's does on weights that are half there
            return
        self._time = max(self._time, self._clock() - _MAX_LAG_S)
        scale = self._faults.now.slow / self._settings.speed
        step_s = self._settings.decode_step_s * scale
        steps = self._steps(step_s)
        self._time += steps * step_s
        if not self.paused:
            self._time += self.batch.admit() / self._settings.prefill_tokens_per_s * scale
        await asyncio.sleep(max(self._time - self._clock(), 0))
        if not (self.dead or self._frozen()):
            self.batch.advance(steps)
            self._note_drained()

    def _frozen(self) -> bool:
        return self._faults.now.hang or self.paused in ("keep", "abort")

    def _runnable(self) -> bool:
        if self.dead or self._frozen():
            return False
        scheduler = self.batch.scheduler
        return bool(scheduler.running_count or (not self.paused and scheduler.waiting.total))

    def _steps(self, step_s: float) -> int:
        if step_s == 0:
            return self._settings.max_model_len
        behind = self._clock() - self._time
        return max(1, math.ceil(max(_TICK_S, behind) / step_s))

    async def _drain(self) -> None:
        while self.batch.scheduler.running_count and self.paused:
            self._drained.clear()
            await self._drained.wait()
        self._raise_if_dead()

    def _note_drained(self) -> None:
        if not self.batch.scheduler.running_count:
            self._drained.set()

    def _raise_if_dead(self) -> None:
        if self.dead:
            raise EngineDeadError
