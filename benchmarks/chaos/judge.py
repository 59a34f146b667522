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

RIVALS = 1
"""Policies before and after the right one with which an answer is compared as well. What any other has answered is as
far off from the right one as from these."""


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
    stream: bool = False
    """As server-sent events."""


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

        wrong = []
        for digest in adapters:
            answered = [one for one in self._answered if one[0].digest == digest]
            rivals = neighbours(list(adapters), digest)
            if not answered or not rivals:
                continue
            rollouts = [Sampled(digest, "", asked.prompt, tokens, logprobs) for asked, tokens, logprobs in answered]
            found = distances(rollouts, model=self.model, adapters={name: adapters[name] for name in (digest, *rivals)})
            for position, (asked, _, _) in enumerate(answered):
                own, *others = (float(found[name][position].mean()) for name in (digest, *rivals))
                if own > min(others) / CLEARLY_NEARER:
                    told = f"{own:.3f} nats a token off, others {min(others):.3f}"
                    wrong.append((asked, f"answered by other weights than {digest[:8]}: {told}"))
        return wrong


def neighbours(digests: list[str], digest: str) -> list[str]:
    """Return those announced shortly before and after: what a replica could confuse it with, and no more to compute."""
    at = digests.index(digest)
    return [*digests[max(at - RIVALS, 0) : at], *digests[at + 1 : at + 1 + RIVALS]]


def _cut_or_renamed(asked: Asked, answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    if answer["model"] != asked.model:
        return f"{asked.model} was answered as {answer['model']}"
    if choice["finish_reason"] != "length" or len(choice["token_ids"]) != asked.count:
        return f"{asked.model} got {len(choice['token_ids'])} of {asked.count} tokens ({choice['finish_reason']})"
    return ""
