"""GRPO rollouts against the proxy: groups of G requests that share a prompt, each answer checked token by token."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx2

from proxy.simulator.tokens import expected_tokens

GROUP_SIZE = 8
"""G: rollouts of one prompt, as in the published runs."""

TEMPLATE_TOKENS = 64
PROMPT_TOKENS = 256
COMPLETION_TOKENS = 48
GROUPS_IN_FLIGHT = 6
"""48 rollouts in flight keep two simulated replicas busy without queueing on a laptop."""

ANSWER_LIMIT_S = 60.0
"""A rollout takes about half a second; one that takes a hundred times as long is lost."""


@dataclass
class Tally:
    """What has come back so far."""

    rollouts: int = 0
    failures: int = 0
    wrong_tokens: int = 0
    by_policy: Counter[str] = field(default_factory=Counter)
    first_failure: str = ""

    def failed(self, why: str) -> None:
        """Count a rollout that came to nothing."""
        self.failures += 1
        self.first_failure = self.first_failure or why


@dataclass(frozen=True)
class Target:
    """The policy that new groups ask for: its name, and the weights that must answer."""

    model: str
    weights: str


class Rollouts:
    """Keeps groups in flight until stopped. Set `target` to move on; groups under way stay on their policy."""

    def __init__(self, url: str, target: Target, *, seed: int = 0) -> None:
        self.target = target
        self.tally = Tally()
        self._url = url
        self._random = random.Random(seed)
        self._template = self._tokens(TEMPLATE_TOKENS)

    async def run(self, stop: asyncio.Event) -> None:
        """Send groups until `stop` is set, then wait for those in flight."""
        limits = httpx2.Limits(max_connections=GROUPS_IN_FLIGHT * GROUP_SIZE)
        client = httpx2.AsyncClient(base_url=self._url, timeout=ANSWER_LIMIT_S, limits=limits, trust_env=False)
        async with client, asyncio.TaskGroup() as workers:
            for _ in range(GROUPS_IN_FLIGHT):
                workers.create_task(self._worker(client, stop))

    async def _worker(self, client: httpx2.AsyncClient, stop: asyncio.Event) -> None:
        while not stop.is_set():
            target = self.target
            prompt = self._template + self._tokens(PROMPT_TOKENS)
            async with asyncio.TaskGroup() as group:
                for _ in range(GROUP_SIZE):
                    group.create_task(self._rollout(client, target, prompt, self._random.getrandbits(63)))

    async def _rollout(self, client: httpx2.AsyncClient, target: Target, prompt: list[int], seed: int) -> None:
        body = {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": COMPLETION_TOKENS,
            "temperature": 1.0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        try:
            response = await client.post("/v1/completions", json=body)
        except httpx2.HTTPError as error:
            return self.tally.failed(f"{type(error).__name__}: {error}")
        if response.status_code != 200:
            return self.tally.failed(f"HTTP {response.status_code}: {response.text[:500]}")
        tokens = response.json()["choices"][0]["token_ids"]
        expected = expected_tokens(target.weights, prompt, seed, COMPLETION_TOKENS)
        self.tally.rollouts += 1
        self.tally.by_policy[target.model] += 1
        self.tally.wrong_tokens += sum(a != b for a, b in zip(tokens, expected, strict=False))
        self.tally.wrong_tokens += abs(len(tokens) - len(expected))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1000, 32_000) for _ in range(count)]
