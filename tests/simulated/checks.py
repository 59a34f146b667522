"""What every scenario looks for beside its own point: wrong weights, lost rollouts, stuck requests, leaked counts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx2

from proxy.fleet import names
from proxy.simulator.tokens import adapter_weights, base_weights, expected_tokens
from tests.support.background import Background
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, wait_until

PROMPT = [100, 200, 300]
"""The prompt of `RunningProxy.completion`."""

TOKENS = 8
"""Tokens that it asks for."""

BASE = base_weights("sim")
"""The weights of the simulators' base model."""


def right_tokens(
    weights: Path | str, *, prompt: Sequence[int] = PROMPT, seed: int | None = None, count: int = TOKENS
) -> list[int]:
    """Return what an adapter directory, or weights by their name, must answer."""
    return expected_tokens(_name_of(weights), prompt, seed, count)


def _name_of(weights: Path | str) -> str:
    return adapter_weights(weights) if isinstance(weights, Path) else weights


def held(replica: SimulatedReplica) -> dict[str, str]:
    """Return what a replica lists, the base model too, by the names that clients use: name -> path."""
    return {names.decode(upstream)[0]: path for upstream, path in replica.models().items()}


def unloads_of(replica: SimulatedReplica, name: str) -> int:
    """Return how often a replica was told to unload a policy, whatever it calls it."""
    told = replica.state()["unloads"].items()
    return sum(count for upstream, count in told if names.decode(upstream)[0] == name)


def upstream_of(replica: SimulatedReplica, name: str) -> str:
    """Return what a replica calls the policy that clients call `name`: its newest generation, if one leaves."""
    generations = [upstream for upstream in replica.models() if names.decode(upstream)[0] == name]
    return max(generations, default=name)


def assert_served_by_all(replicas: Sequence[SimulatedReplica], name: str, directory: Path) -> None:
    """Ask every replica itself for the policy."""
    for replica in replicas:
        assert held(replica).get(name) == str(directory), f"{replica} does not list {name}"
        assert replica.complete(upstream_of(replica, name), prompt=PROMPT) == right_tokens(directory), (
            f"{replica} serves others"
        )


def assert_held_by_none(replicas: Sequence[SimulatedReplica], name: str) -> None:
    """Fail if a replica lists the policy."""
    assert [replica.url for replica in replicas if name in held(replica)] == []


def wait_quiet(proxy: RunningProxy, *replicas: SimulatedReplica) -> None:
    """Wait until nothing is in flight, by the proxy's count and the replicas' own (P7)."""
    wait_until(lambda: proxy.inflight() == 0, what="no lease is held")
    for replica in replicas:
        wait_until(lambda r=replica: r.state()["in_flight"] == 0, what=f"{replica} has nothing in flight")  # type: ignore[misc]
    wait_until(lambda: not leased(proxy), what="no policy has a lease")


def leased(proxy: RunningProxy) -> list[str]:
    """Return the policies that rollouts in flight hold."""
    policies = proxy.client.get("/proxy/policies").json()["policies"]
    return [policy["name"] for policy in policies if policy["leases"]]


class WaitingProxy(RunningProxy):
    """A proxy that counts as started when it listens, healthy or not."""

    def start(self, *, healthy: bool = False) -> Self:
        return super().start(healthy=healthy)


def together(*calls: Callable[[], httpx2.Response]) -> list[httpx2.Response]:
    """Make several calls at the same time and return their answers in order."""
    with ThreadPoolExecutor(max(len(calls), 1)) as pool:
        return [pending.result() for pending in [pool.submit(call) for call in calls]]


def models_of(proxy: RunningProxy) -> list[str]:
    """Return the names in the proxy's /v1/models."""
    return [entry["id"] for entry in proxy.client.get("/v1/models").json()["data"]]


class Traffic(Background):
    """Rollouts of several policies from several threads until the block ends; each answer is checked token by token.

    Leaving the block fails if a rollout was lost or answered by other weights. `weights` may grow and shrink meanwhile.
    With `retries` an error of the server's is not a loss yet: the rollout is sent again so often, as TRL does.
    """

    def __init__(
        self,
        proxy: RunningProxy,
        weights: Mapping[str, Path | str],
        *,
        threads: int = 4,
        count: int = TOKENS,
        retries: int = 0,
    ) -> None:
        super().__init__(threads=threads, patience_s=15)
        self.weights = {name: _name_of(given) for name, given in weights.items()}
        self.answered: Counter[str] = Counter()
        self.by_replica: Counter[str] = Counter()
        self._url = proxy.url
        self._tokens = count
        self._retries = retries

    @property
    def count(self) -> int:
        """Rollouts answered so far."""
        return self.answered.total()

    def serve(self, name: str, directory: Path) -> None:
        """Ask for one more policy from now on."""
        self.weights[name] = adapter_weights(directory)

    def _work(self, seed: int) -> None:
        chance = random.Random(seed)
        with httpx2.Client(base_url=self._url, timeout=12, trust_env=False) as client:
            while not self._stop.is_set():
                with suppress(RuntimeError):  # `weights` changed while it was listed
                    name, weights = chance.choice(list(self.weights.items()))
                    self._rollout(client, name, weights, [chance.randrange(1000, 30_000) for _ in range(16)])

    def _rollout(self, client: httpx2.Client, name: str, weights: str, prompt: list[int]) -> None:
        body: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": self._tokens, "return_token_ids": True}
        try:
            answer = client.post("/v1/completions", json=body)
            for _ in range(self._retries if answer.status_code >= 500 else 0):
                self._stop.wait(0.1)
                answer = client.post("/v1/completions", json=body)
                if answer.status_code < 500:
                    break
        except httpx2.HTTPError as error:
            self.problems.append(f"{name}: {type(error).__name__} {error}")
            return
        if answer.status_code != 200:
            self.problems.append(f"{name}: {answer.status_code} {answer.text[:300]}")
        elif answer.json()["choices"][0]["token_ids"] != expected_tokens(weights, prompt, None, self._tokens):
            self.problems.append(f"{name}: wrong tokens from replica {answer.headers['X-Proxy-Upstream']}")
        else:
            self.answered[name] += 1
            self.by_replica[answer.headers["X-Proxy-Upstream"]] += 1
