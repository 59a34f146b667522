"""Prove that a replica serves what it lists: one short request over a fixed prompt, and what its answer says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from proxy.controlplane.answer import Answer
from proxy.errors import NOT_FINITE

PROMPT = "The quick brown fox jumps over the lazy dog, and 12 + 30 = 42."
"""Ordinary text, so that every model has something to say to it. Its values are compared between replicas."""


@dataclass(frozen=True)
class Proof:
    """What a probe has shown."""

    spoiled: bool
    """The values are not finite: the policy would answer garbage, and spoil other requests too."""
    logprobs: tuple[float, ...] = ()
    """Of the prompt's tokens after the first, in nats. Empty if the replica would not say."""
    message: str = ""
    """The replica's words if it told no values."""


def probe_body(upstream: str) -> bytes:
    """Return the request that proves a policy: one token, and the log-probabilities of the prompt."""
    body = {"model": upstream, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    return json.dumps(body).encode()


def read_proof(answer: Answer) -> Proof:
    """Say what the answer to `probe_body` shows. A replica that cannot answer such a request has shown nothing."""
    if answer.status != 200:
        return Proof(spoiled=NOT_FINITE in answer.message, message=answer.message)
    try:
        told = answer.json()["choices"][0]["prompt_logprobs"]
        values = tuple(_first(entry) for entry in told[1:])
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        return Proof(spoiled=False, message="it tells no log-probabilities")
    if not all(math.isfinite(value) for value in values):
        return Proof(spoiled=True, message="its log-probabilities are not finite")
    return Proof(spoiled=False, logprobs=values)


def _first(entry: dict[str, dict[str, float]]) -> float:
    """Return the log-probability of the prompt's own token, which vLLM puts first."""
    own, *_ = entry.values()
    return float(own["logprob"])
