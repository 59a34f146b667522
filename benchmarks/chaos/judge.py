"""Whether an answer came from the weights that were asked for: every token of it is checked.

A simulator's tokens are a function of weights, prompt and seed, so that each answer is judged as it arrives. Real vLLM
reports the log-probability of each token; in the end transformers + peft compute it again, with every adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from proxy.simulator.tokens import expected_tokens

SAME_WEIGHTS_NATS = 0.12
"""Largest mean difference of log-probabilities between bfloat16 on a replica and float32 here (as in tests/vllm)."""


@dataclass(frozen=True)
class Asked:
    """What one rollout has asked for."""

    model: str
    digest: str
    """Of the adapter that must answer."""
    prompt: list[int]
    seed: int
    count: int
    """Tokens."""


class Judge(Protocol):
    """Looks at answers."""

    def look(self, asked: Asked, answer: dict[str, Any]) -> str:
        """Return what is wrong with an answer, or nothing."""

    def verdicts(self, adapters: dict[str, Path]) -> list[str]:
        """Return what turned out to be wrong in the end; `adapters`: digest -> directory."""


class TokenJudge:
    """For simulators."""

    def look(self, asked: Asked, answer: dict[str, Any]) -> str:
        if problem := _cut_or_renamed(asked, answer):
            return problem
        expected = expected_tokens(asked.digest, asked.prompt, asked.seed, asked.count)
        tokens = answer["choices"][0]["token_ids"]
        return "" if tokens == expected else f"{asked.model} was answered by other weights than {asked.digest[:8]}"

    def verdicts(self, adapters: dict[str, Path]) -> list[str]:
        return []


@dataclass
class LogprobJudge:
    """For real vLLM; needs torch. `model`: the base model's directory."""

    model: Path
    _answered: list[tuple[Asked, list[int], list[float]]] = field(default_factory=list)

    def look(self, asked: Asked, answer: dict[str, Any]) -> str:
        choice = answer["choices"][0]
        self._answered.append((asked, choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        return _cut_or_renamed(asked, answer)

    def verdicts(self, adapters: dict[str, Path]) -> list[str]:
        from tests.support.who_sampled import Sampled, distances

        asked_for = {asked.digest for asked, _, _ in self._answered}
        rollouts = [
            Sampled(policy=asked.digest, replica="", prompt=asked.prompt, tokens=tokens, logprobs=logprobs)
            for asked, tokens, logprobs in self._answered
        ]
        if not rollouts:
            return []
        candidates = {digest: path for digest, path in adapters.items() if digest in asked_for}
        found = distances(rollouts, model=self.model, adapters=candidates)
        wrong = []
        for position, (asked, _, _) in enumerate(self._answered):
            means = {digest: float(found[digest][position].mean()) for digest in candidates}
            nearest = min(means, key=means.__getitem__)
            if nearest != asked.digest or means[nearest] > SAME_WEIGHTS_NATS:
                told = f"{means[asked.digest]:.3f} nats off, {nearest[:8]} {means[nearest]:.3f}"
                wrong.append(f"{asked.model} was answered by other weights than {asked.digest[:8]}: {told}")
        return wrong


def _cut_or_renamed(asked: Asked, answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    if answer["model"] != asked.model:
        return f"{asked.model} was answered as {answer['model']}"
    if choice["finish_reason"] != "length" or len(choice["token_ids"]) != asked.count:
        return f"{asked.model} got {len(choice['token_ids'])} of {asked.count} tokens ({choice['finish_reason']})"
    return ""
