"""What happens in the engine's steps, without time or waiting: prefills, tokens, ends, and the caches they touch.

Plain synchronous state: `engine` decides when to call it and how long that takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.simulator.faults import FaultBox
from proxy.simulator.lora import AdapterMemory, LoraRequest
from proxy.simulator.prefix_cache import PrefixCache, block_keys
from proxy.simulator.scheduler import Scheduler
from proxy.simulator.sequence import Sequence
from proxy.simulator.settings import SimulatorSettings
from proxy.simulator.tokens import base_weights


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


class Batch:
    """Every sequence of one replica, its adapters in memory and its prefix cache."""

    def __init__(self, settings: SimulatorSettings, faults: FaultBox) -> None:
        self.counters = Counters()
        self.scheduler = Scheduler(settings)
        self.memory = AdapterMemory(capacity=settings.max_cpu_loras, max_rank=settings.max_lora_rank)
        self.cache = PrefixCache(blocks=settings.num_gpu_blocks, block_size=settings.block_size)
        self.base = base_weights(settings.model)
        """The weights of the base model, as `tokens` knows them."""
        self._settings = settings
        self._faults = faults

    def __repr__(self) -> str:
        return f"Batch({self.scheduler}, {self.memory}, {self.cache})"

    def admit(self) -> int:
        """Start what fits and return how many prompt tokens must be computed for it.

        Raises what `read_adapter` raises when an adapter that memory had dropped can no longer be read.
        """
        return sum(map(self._start, self.scheduler.admit()))

    def advance(self, steps: int) -> None:
        """Give every running sequence up to `steps` tokens. Raises as `admit` does."""
        for sequence in self.scheduler.running:
            if sequence.lora:
                self._follow_inplace(sequence, sequence.lora)
            left = sequence.max_tokens - sequence.produced
            taken = min(steps, left)
            sequence.produced += taken
            self.counters.generation_tokens += taken
            if taken == left:
                self._finish(sequence)
            else:
                sequence.generation.progressed()
        self.counters.preemptions += self.scheduler.make_room()

    def change_base(self, weights: str) -> None:
        """Serve other base weights; what runs goes on with them, and what is cached stays."""
        self.base = weights
        for sequence in self.scheduler.running:
            if sequence.lora is None:
                sequence.change_weights(weights)

    def abort(self, sequences: Iterable[Sequence]) -> int:
        """End these sequences with the tokens they have, and return how many had not ended before."""
        aborted = 0
        for sequence in sequences:
            if sequence.finish_reason is None:
                self.scheduler.remove(sequence)
                sequence.finish("abort")
                aborted += 1
        self.counters.aborted += aborted
        return aborted

    def preempt_all(self) -> None:
        """Take the KV of everything that runs, which then has to start over behind the next `admit`."""
        self.counters.preemptions += self.scheduler.preempt_all()

    def fail_all(self) -> None:
        """Tell every request that the engine is dead."""
        for sequence in self.scheduler.everything():
            self.scheduler.remove(sequence)
            sequence.generation.fail()

    def load(self, lora: LoraRequest) -> None:
        """Read an adapter into memory. Raises what `read_adapter` raises."""
        self.memory.use(lora, in_use=self.scheduler.adapters_running)
        self.counters.loads += 1

    def _start(self, sequence: Sequence) -> int:
        sequence.settle()  # what it produced before a preemption
        weights = self._weights_of(sequence)
        computed = sequence.prompt + sequence.tokens if sequence.tokens else sequence.prompt
        keys = self._block_keys(sequence, computed)
        hit = self.cache.lookup(keys, prompt_tokens=len(computed))
        sequence.kv_weights = weights if hit.weights in (None, weights) else f"stale:{hit.weights}/{weights}"
        self.cache.store(keys, weights=sequence.kv_weights)
        sequence.change_weights(self._faults.now.wrong_weights or sequence.kv_weights)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = hit.tokens
            self.counters.prompt_tokens += len(sequence.prompt)
            self.counters.cache_queries += len(sequence.prompt)
            self.counters.cache_hits += hit.tokens
        return len(computed) - hit.tokens

    def _weights_of(self, sequence: Sequence) -> str:
        if sequence.lora is None:
            return self.base
        files = self.memory.use(sequence.lora, in_use=self.scheduler.adapters_running)
        sequence.adapter_digest = files.digest
        return files.digest

    def _follow_inplace(self, sequence: Sequence, lora: LoraRequest) -> None:
        # A later load_inplace keeps the id, so weights change under sequences that started before it.
        files = self.memory.use(lora) if lora.inplace else self.memory.get(lora)
        if files and files.digest != sequence.adapter_digest:
            sequence.adapter_digest = files.digest
            sequence.change_weights(files.digest)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        sequence.finish("length")
        self.counters.finished += 1
        # The last token's own KV is never computed. A follow-up prompt that repeats this answer finds the rest.
        computed = sequence.prompt + sequence.tokens[:-1]
        self.cache.store(self._block_keys(sequence, computed), weights=sequence.kv_weights)

    def _block_keys(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        adapter = f"{sequence.lora.name}\0{sequence.lora.path}" if sequence.lora else ""
        return block_keys(tokens, block_size=self._settings.block_size, scope=f"{adapter}\0{sequence.salt}")
