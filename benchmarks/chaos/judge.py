"""Whether an answer came from the weights that were asked for: every token of it is checked.

A simulator's tokens are a function of weights, prompt and seed, so that each answer is judged as it arrives. Real vLLM
reports the log-probability of each token; in the end transformers + peft compute it again, with every adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from proxy.simulator.tokens import expected_tokens

CLEARLY_NEARER = 3.0
"""The weights that were asked for must be so many times nearer to what a replica reported than any others, by the mean
difference of log-probabilities. Random adapters were within 0.06 nats a token, and the others 0.9 or more off; single
tokens are up to 0.7 off in bfloat16, so that a bound on these would not do."""


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

    def verdicts(self, adapters: dict[str, Path]) -> list[tuple[Asked, str]]:
        """Return what turned out to be wrong in the end, and why; `adapters`: digest -> directory."""


class TokenJudge:
    """For simulators."""

    def look(self, asked: Asked, answer: dict[str, Any]) -> str:
        if problem := _cut_or_renamed(asked, answer):
            return problem
        expected = expected_tokens(asked.digest, asked.prompt, asked.seed, asked.count)
        tokens = answer["choices"][0]["token_ids"]
        return "" if tokens == expected else f"{asked.model} was answered by other weights than {asked.digest[:8]}"

    def verdicts(self, adapters: dict[str, Path]) -> list[tuple[Asked, str]]:
        return []


@dataclass
class LogprobJudge:
    """For real vLLM; needs torch. `model`: the base model's directory."""

    model: Path
    _answered: list[tuple[Asked, list[int], list[float]]] = field(default_factory=list)

    def look(self, asked: Asked, answer: dict[str, Any]) -> str:
        if problem := _cut_or_renamed(asked, answer):
            return problem
        choice = answer["choices"][0]
        self._answered.append((asked, choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        return ""

    def verdicts(self, adapters: dict[str, Path]) -> list[tuple[Asked, str]]:
        from tests.support.who_sampled import Sampled, distances

        rollouts = [
            Sampled(policy=asked.digest, replica="", prompt=asked.prompt, tokens=tokens, logprobs=logprobs)
            for asked, tokens, logprobs in self._answered
        ]
        if not rollouts or len(adapters) < 2:
            return []
        found = distances(rollouts, model=self.model, adapters=adapters)
        wrong = []
        for position, (asked, _, _) in enumerate(self._answered):
            means = {digest: float(found[digest][position].mean()) for digest in adapters}
            own = means.pop(asked.digest)
            nearest = min(means, key=means.__getitem__)
            if own > means[nearest] / CLEARLY_NEARER:
                told = f"{own:.3f} nats a token off, {nearest[:8]} {means[nearest]:.3f}"
                wrong.append((asked, f"answered by other weights than {asked.digest[:8]}: {told}"))
        return wrong


def _cut_or_renamed(asked: Asked, answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    if answer["model"] != asked.model:
        return f"{asked.model} was answered as {answer['model']}"
    if choice["finish_reason"] != "length" or len(choice["token_ids"]) != asked.count:
        return f"{asked.model} got {len(choice['token_ids'])} of {asked.count} tokens ({choice['finish_reason']})"
    return ""
