"""What completions and chats have in common: the head of every body, usage, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.simulator.generation_request import GenerationRequest
from proxy.simulator.sequence import Sequence
from proxy.simulator.tokens import prompt_logprob, token_text, top_logprobs_at


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all pieces of one answer share."""

    id: str
    created: int
    model: str
    fingerprint: str
    details: bool
    """Tell the cached tokens in `usage`."""
    block_size: int


def head(envelope: Envelope, kind: str) -> dict[str, Any]:
    """Return the fields with which every body and every piece begins."""
    return {"id": envelope.id, "object": kind, "created": envelope.created, "model": envelope.model}


def finished(piece: dict[str, Any], sequence: Sequence, envelope: Envelope, asked: GenerationRequest) -> dict[str, Any]:
    """Add to a piece what only the last one of its sequence has."""
    # vLLM puts the fingerprint into the last piece alone, and that is the usage where there is one.
    if sequence.finish_reason and not asked.include_usage:
        piece["system_fingerprint"] = envelope.fingerprint
    return piece


def usage_piece(envelope: Envelope, kind: str, usage: dict[str, Any], *, told: tuple[str, ...]) -> dict[str, Any]:
    """Return the last piece of a stream that asked for usage; `told` names the details that it shows."""
    usage.pop("completion_tokens_details")
    if details := usage["prompt_tokens_details"]:
        usage["prompt_tokens_details"] = {name: details[name] for name in told}
    return {**head(envelope, kind), "choices": [], "usage": usage, "system_fingerprint": envelope.fingerprint}


def usage(
    envelope: Envelope, sequences: list[Sequence], asked: GenerationRequest, *, chat: bool = False
) -> dict[str, Any]:
    """Return the `usage` of a whole answer."""
    prompt_tokens = sum(len(sequence.prompt) for sequence in sequences[:: asked.n])
    completion_tokens = sum(len(sequence.tokens) for sequence in sequences)
    # Of several sequences vLLM tells the last one's cached tokens, and only a chat tells how many it added.
    last = sequences[-1]
    cached = last.cached_tokens or 0
    added = 0 if last.cached_tokens is None else len(last.prompt) // envelope.block_size * envelope.block_size - cached
    created = added if chat else None
    details = {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": None}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details if envelope.details else None,
        "completion_tokens_details": None,
    }


def top_logprobs(sequence: Sequence, start: int, count: int) -> list[dict[int, float]]:
    """Return, for each token from `start` on, its log-probability and those of `count` others."""
    if count == 0:
        return [
            {token: logprob} for token, logprob in zip(sequence.tokens[start:], sequence.logprobs[start:], strict=True)
        ]
    return [
        top_logprobs_at(sequence.keys[position], position, count + 1, sequence.vocab_size)
        for position in range(start, len(sequence.tokens))
    ]


def prompt_logprobs(sequence: Sequence) -> list[dict[str, Any] | None]:
    """Return the log-probability of every token of the prompt; the first has none."""
    entries: list[dict[str, Any] | None] = [None]
    for position, token in enumerate(sequence.prompt[1:], 1):
        logprob = prompt_logprob(sequence.weights, sequence.prompt, position)
        entries.append({str(token): {"logprob": logprob, "rank": 1, "decoded_token": token_text(token)}})
    return entries
