"""Rollouts against real vLLM in the background, each held against transformers + peft: which weights sampled it?"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import TracebackType

import httpx2

from tests.support.background import Background
from tests.support.proxies import RunningProxy
from tests.support.tiny_model import MODEL, VOCAB_SIZE
from tests.support.who_sampled import Sampled, distances

SAME_WEIGHTS_NATS = 0.5
"""These adapters are far larger than trained ones, so that bfloat16 shows more; others differ by several nats."""

PAUSE_S = 0.3
"""Between two rollouts of a thread: a test of minutes then leaves a thousand to be compared, not ten thousand."""

PATIENCE_S = 60
"""On few cores vLLM's workers keep everybody waiting."""


class VllmTraffic(Background):
    """Greedy rollouts of several policies from several threads until the block ends.

    `adapters` says which directory holds the weights that a name means; it may grow and shrink meanwhile. Leaving the
    block fails if a rollout was lost, or if other weights than those of its name have sampled it.
    """

    def __init__(self, proxy: RunningProxy, adapters: dict[str, Path], *, threads: int = 3) -> None:
        super().__init__(threads=threads, patience_s=PATIENCE_S)
        self.adapters = dict(adapters)
        self.rollouts: list[Sampled] = []
        self._url = proxy.url

    @property
    def count(self) -> int:
        """Rollouts answered so far."""
        return len(self.rollouts)

    @property
    def by_replica(self) -> Counter[str]:
        """Rollouts that each replica has answered."""
        return Counter(rollout.replica for rollout in self.rollouts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            assert_sampled_by_their_policies(self.rollouts)

    def _work(self, seed: int) -> None:
        chance = random.Random(seed)
        with httpx2.Client(base_url=self._url, timeout=PATIENCE_S, trust_env=False) as client:
            while not self._stop.wait(PAUSE_S):
                name, directory = chance.choice(sorted(self.adapters.items()))
                try:
                    self.rollouts.append(ask(client, name, directory, seed=chance.randrange(1 << 30)))
                except (httpx2.HTTPError, AssertionError) as error:
                    self.problems.append(f"{name}: {type(error).__name__} {error}")
                    return


def ask(client: httpx2.Client, name: str, directory: Path, *, seed: int = 0) -> Sampled:
    """Send one greedy rollout with a prompt made from `seed`, and return it under the directory of its weights."""
    chance = random.Random(seed)
    prompt = [chance.randrange(4, VOCAB_SIZE) for _ in range(40)]
    body = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json={**body, "logprobs": 0, "return_token_ids": True})
    assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    return Sampled(
        policy=str(directory),
        replica=answer.headers.get("X-Proxy-Upstream", "direct"),
        prompt=prompt,
        tokens=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
    )


def assert_sampled_by_their_policies(rollouts: list[Sampled], *others: Path) -> None:
    """Compare every rollout with the weights in its directory, and with those of all others and of `others`."""
    assert rollouts
    names = {rollout.policy for rollout in rollouts} | {str(other) for other in others}
    found = distances(rollouts, model=MODEL, adapters={name: Path(name) for name in sorted(names)})
    for position, rollout in enumerate(rollouts):
        off = {name: found[name][position] for name in names}
        own = off.pop(rollout.policy)
        assert float(own.max()) < SAME_WEIGHTS_NATS, (rollout, own)
        for name, distance in off.items():
            assert float(distance.mean()) > 2 * float(own.mean()), (rollout, name, distance, own)
