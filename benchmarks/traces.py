"""What an asynchronous GRPO trainer asks for: groups of rollouts of one prompt, policies that change, turns of agents.

Tokens are random numbers from a fixed seed, so that each run replays the same.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.routing.request_key import RequestKey, read_request

GROUP = 8
VOCABULARY = 150_000


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    key: RequestKey
    """As read from a real body; the model is filled in when it is sent."""
    prompt: Sequence[int]
    answer: Sequence[int] | int
    """Token ids where a later turn repeats them, else only how many."""

    @property
    def answer_tokens(self) -> int:
        """Return how many tokens the answer has."""
        return self.answer if isinstance(self.answer, int) else len(self.answer)


@dataclass(frozen=True)
class Conversation:
    """Requests of which each waits for the one before; most have one."""

    group: int
    turns: Sequence[Turn]


@dataclass(frozen=True)
class Trace:
    """Conversations in the order in which they start."""

    name: str
    conversations: Sequence[Conversation]
    inflight: int
    """Conversations open at once."""
    rollouts_per_policy: int | None = None
    """Answers after which the next policy takes over; None: one policy for all."""


def burst(share: float, *, shuffled: bool) -> Trace:
    """24 groups of 8 at once, prompts of 1,000 tokens of which `share` is a template, answers of 256."""
    rng = random.Random(f"burst {share}")
    template = _tokens(rng, int(1000 * share))
    prompts = [template + _tokens(rng, 1000 - len(template)) for _ in range(24)]
    conversations = _groups(prompts, [[256] * GROUP for _ in prompts])
    if shuffled:
        rng.shuffle(conversations)
    name = f"burst, {share:.0%} template" + (", shuffled" if shuffled else "")
    return Trace(name, conversations, inflight=len(conversations))


def long_run(inflight: int) -> Trace:
    """1,460 prompts x 8, a template of 100 tokens, 16 prompts a step, a new policy every 4 steps."""
    rng = random.Random("long run")
    template = _tokens(rng, 100)
    prompts = [template + _tokens(rng, _long_tailed(rng, 300, 0.8, most=2500)) for _ in range(1460)]
    answers = [_answers(rng, GROUP) for _ in prompts]
    return Trace(
        f"long run, {inflight} in flight",
        _groups(prompts, answers),
        inflight=inflight,
        rollouts_per_policy=4 * 16 * GROUP,
    )


def long_tailed_groups() -> Trace:
    """600 groups of 1 to 64 rollouts: most are small, a few make up half of the load."""
    rng = random.Random("groups")
    prompts = [_tokens(rng, _long_tailed(rng, 600, 0.6, most=4000)) for _ in range(600)]
    sizes = [min(int(rng.paretovariate(0.9)) + 1, 64) for _ in prompts]
    return Trace("long-tailed groups", _groups(prompts, [_answers(rng, size) for size in sizes]), inflight=192)


def agents() -> Trace:
    """96 tasks x 8 conversations of 6 turns: a system prompt, a task, short actions, observations."""
    rng = random.Random("agents")
    system = _tokens(rng, 400)
    conversations = []
    for group in range(96):
        task = system + _tokens(rng, _long_tailed(rng, 300, 0.5, most=1500))
        for _ in range(GROUP):
            turns, prompt = [], task
            for _ in range(6):
                action = _tokens(rng, _long_tailed(rng, 80, 0.6, most=400))
                turns.append(Turn(_key(prompt, max_tokens=400), prompt, action))
                prompt = prompt + action + _tokens(rng, _long_tailed(rng, 150, 0.8, most=1000))
            conversations.append(Conversation(group, turns))
    return Trace("agents", conversations, inflight=192)


def no_reuse() -> Trace:
    """3,000 prompts that share nothing: there is nothing to gain here."""
    rng = random.Random("control")
    prompts = [_tokens(rng, _long_tailed(rng, 300, 0.8, most=2500)) for _ in range(3000)]
    return Trace("no reuse", _groups(prompts, [_answers(rng, 1) for _ in prompts]), inflight=128)


def _groups(prompts: Sequence[list[int]], answers: Sequence[Sequence[int]]) -> list[Conversation]:
    made = []
    for group, (prompt, lengths) in enumerate(zip(prompts, answers, strict=True)):
        key = _key(prompt, max_tokens=2048)
        made += [Conversation(group, (Turn(key, prompt, length),)) for length in lengths]
    return made


def _answers(rng: random.Random, count: int) -> list[int]:
    """Return lengths of answers to one prompt: half of their spread is the prompt's, half their own."""
    median = 350 * math.exp(rng.gauss(0, 0.5))
    return [_long_tailed(rng, median, 0.5, most=2048) for _ in range(count)]


def _long_tailed(rng: random.Random, median: float, sigma: float, *, most: int) -> int:
    return max(1, min(int(median * math.exp(rng.gauss(0, sigma))), most))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


def _key(prompt: Sequence[int], *, max_tokens: int) -> RequestKey:
    return read_request(json.dumps({"model": "-", "prompt": prompt, "max_tokens": max_tokens}).encode())
