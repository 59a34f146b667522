"""One answer in the making (`Sequence`) and the request that waits for one or more of them (`Generation`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from proxy.simulator.lora import LoraRequest
from proxy.simulator.tokens import logprob_at, prompt_digest, stream_key, tokens_between


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what has been generated for it.

    Tokens are only counted while the sequence runs and made when somebody looks (`settle`): since they are a pure
    function of the position, a rollout that nobody streams costs almost nothing until it ends.
    """

    generation: Generation
    prompt: list[int]
    lora: LoraRequest | None
    seed: int | None
    max_tokens: int
    salt: str
    vocab_size: int
    weights: str = ""
    """The weights that compute the tokens from here on; set when the sequence starts to run."""
    adapter_digest: str | None = None
    """What memory held of its adapter when the sequence started, to notice that it was loaded in place."""
    kv_weights: str = ""
    """The weights that computed its KV: `weights`, unless a fault made the answer a wrong one."""
    cached_tokens: int | None = None
    """Prompt tokens that the cache spared when it first ran."""
    produced: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    """One stream key per token, for whoever asks for more than the sampled token's log-probability."""
    finish_reason: str | None = None
    _digest: int | None = None

    def settle(self) -> None:
        """Make the tokens up to `produced`, with the weights that apply now."""
        start = len(self.tokens)
        if start == self.produced:
            return
        if self._digest is None:
            self._digest = prompt_digest(self.prompt)
        key = stream_key(self.weights, self._digest, self.seed)
        self.tokens += tokens_between(key, start, self.produced, self.vocab_size)
        if self.generation.wants_logprobs:
            self.logprobs += [logprob_at(key, position) for position in range(start, self.produced)]
            self.keys += [key] * (self.produced - start)

    def change_weights(self, weights: str) -> None:
        """Go on with other weights; what is already produced stays as it is."""
        if weights != self.weights:
            self.settle()
            self.weights = weights

    def finish(self, reason: str) -> None:
        """End the sequence. A sequence ends once: later calls change nothing."""
        if self.finish_reason is None:
            self.settle()
            self.finish_reason = reason
            self.generation.sequence_finished()


@dataclass(eq=False, slots=True)
class Generation:
    """One HTTP request: n sequences for each of its prompts."""

    id: str = ""
    streaming: bool = False
    wants_logprobs: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    failed: bool = False
    """True once the engine died under it."""
    _unfinished: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, sequence: Sequence) -> None:
        """Wait for one more sequence."""
        self.sequences.append(sequence)
        self._unfinished += 1

    @property
    def done(self) -> bool:
        """Tell whether there is nothing more to wait for."""
        return self.failed or self._unfinished == 0

    async def changed(self) -> None:
        """Wait for new tokens (only when streaming), for the end, or for the engine's death."""
        await self._changed.wait()
        self._changed.clear()

    def progressed(self) -> None:
        """Wake the reader of a stream."""
        if self.streaming:
            self._changed.set()

    def sequence_finished(self) -> None:
        """Count one sequence out."""
        self._unfinished -= 1
        if self.streaming or self._unfinished == 0:
            self._changed.set()

    def fail(self) -> None:
        """Tell the reader that the engine died."""
        self.failed = True
        self._changed.set()
