"""The JSON bodies of completions and chats, whole and in pieces, field by field as vLLM 0.32 sends them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.simulator.generation_request import GenerationRequest
from proxy.simulator.sequence import Sequence
from proxy.simulator.tokens import detokenize, prompt_logprob, token_text, top_logprobs_at


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


class CompletionAnswer:
    """Bodies of POST /v1/completions."""

    def __init__(self, envelope: Envelope, asked: GenerationRequest) -> None:
        self._envelope = envelope
        self._asked = asked
        self._offsets: dict[int, int] = {}
        """How much text each sequence has sent: offsets go on from piece to piece."""

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        return {
            **_head(self._envelope, "text_completion"),
            "choices": [self._choice(index, sequence) for index, sequence in enumerate(sequences)],
            "service_tier": None,
            "system_fingerprint": self._envelope.fingerprint,
            "usage": _usage(self._envelope, sequences, self._asked),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        """Return the pieces that come before any token: none."""
        return []

    def piece(self, index: int, sequence: Sequence, start: int) -> dict[str, Any]:
        """Return the piece with the tokens from `start` on."""
        tokens = sequence.tokens[start:]
        choice = {
            "index": index,
            "text": detokenize(tokens),
            "logprobs": self._logprobs(sequence, start),
            "finish_reason": sequence.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": sequence.prompt if self._asked.token_ids and not start else None,
            "token_ids": tokens if self._asked.token_ids else None,
        }
        return _finished({**_head(self._envelope, "text_completion"), "choices": [choice]}, self, sequence)

    def usage_piece(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Return the last piece of a stream that asked for usage."""
        usage = _usage(self._envelope, sequences, self._asked)
        return _usage_piece(self._envelope, "text_completion", usage, told=("cached_tokens",))

    @property
    def envelope(self) -> Envelope:
        """What all pieces share."""
        return self._envelope

    @property
    def asked(self) -> GenerationRequest:
        """What was asked for."""
        return self._asked

    def _choice(self, index: int, sequence: Sequence) -> dict[str, Any]:
        return {
            "index": index,
            "text": detokenize(sequence.tokens),
            "logprobs": self._logprobs(sequence, 0),
            "finish_reason": sequence.finish_reason,
            "stop_reason": None,
            "token_ids": sequence.tokens if self._asked.token_ids else None,
            "prompt_logprobs": None if self._asked.prompt_logprobs is None else _prompt_logprobs(sequence),
            "prompt_token_ids": sequence.prompt if self._asked.token_ids else None,
            "routed_experts": None,
        }

    def _logprobs(self, sequence: Sequence, start: int) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        texts = [_shown(token, self._asked) for token in sequence.tokens[start:]]
        offsets, offset = [], self._offsets.get(id(sequence), 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[id(sequence)] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": sequence.logprobs[start:],
            "tokens": texts,
            "top_logprobs": [
                {_shown(token, self._asked): logprob for token, logprob in top.items()}
                for top in _top(sequence, start, self._asked.logprobs)
            ],
        }


class ChatAnswer:
    """Bodies of POST /v1/chat/completions."""

    def __init__(self, envelope: Envelope, asked: GenerationRequest) -> None:
        self._envelope = envelope
        self._asked = asked

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        prompt_logprobs = None if self._asked.prompt_logprobs is None else _prompt_logprobs(sequences[0])
        return {
            **_head(self._envelope, "chat.completion"),
            "choices": [self._choice(index, sequence) for index, sequence in enumerate(sequences)],
            "service_tier": None,
            "system_fingerprint": self._envelope.fingerprint,
            "usage": _usage(self._envelope, sequences, self._asked, chat=True),
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": sequences[0].prompt if self._asked.token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        """Return the pieces that come before any token: one per choice, with the role."""
        return [
            {
                **_head(self._envelope, "chat.completion.chunk"),
                "choices": [
                    {
                        "index": index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
                "prompt_token_ids": sequence.prompt if self._asked.token_ids else None,
                "prompt_text": None,
            }
            for index, sequence in enumerate(sequences)
        ]

    def piece(self, index: int, sequence: Sequence, start: int) -> dict[str, Any]:
        """Return the piece with the tokens from `start` on."""
        tokens = sequence.tokens[start:]
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": detokenize(tokens)},
            "logprobs": self._logprobs(sequence, start),
            "finish_reason": sequence.finish_reason,
        }
        if sequence.finish_reason:
            choice["stop_reason"] = None
        choice["token_ids"] = tokens if self._asked.token_ids else None
        return _finished({**_head(self._envelope, "chat.completion.chunk"), "choices": [choice]}, self, sequence)

    def usage_piece(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Return the last piece of a stream that asked for usage."""
        usage = _usage(self._envelope, sequences, self._asked, chat=True)
        told = ("cached_tokens", "created_cache_tokens")
        return _usage_piece(self._envelope, "chat.completion.chunk", usage, told=told)

    @property
    def envelope(self) -> Envelope:
        """What all pieces share."""
        return self._envelope

    @property
    def asked(self) -> GenerationRequest:
        """What was asked for."""
        return self._asked

    def _choice(self, index: int, sequence: Sequence) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": detokenize(sequence.tokens),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(sequence, 0),
            "finish_reason": sequence.finish_reason,
            "stop_reason": None,
            "token_ids": sequence.tokens if self._asked.token_ids else None,
            "routed_experts": None,
        }

    def _logprobs(self, sequence: Sequence, start: int) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        content = []
        for position, top in enumerate(_top(sequence, start, self._asked.logprobs), start):
            alternatives = [_chat_logprob(token, logprob) for token, logprob in top.items()]
            entry = _chat_logprob(sequence.tokens[position], sequence.logprobs[position])
            content.append({**entry, "top_logprobs": alternatives[: self._asked.logprobs]})
        return {"content": content}


def _head(envelope: Envelope, kind: str) -> dict[str, Any]:
    return {"id": envelope.id, "object": kind, "created": envelope.created, "model": envelope.model}


def _finished(piece: dict[str, Any], answer: CompletionAnswer | ChatAnswer, sequence: Sequence) -> dict[str, Any]:
    # vLLM puts the fingerprint into the last piece alone, and that is the usage where there is one.
    if sequence.finish_reason and not answer.asked.include_usage:
        piece["system_fingerprint"] = answer.envelope.fingerprint
    return piece


def _usage_piece(envelope: Envelope, kind: str, usage: dict[str, Any], *, told: tuple[str, ...]) -> dict[str, Any]:
    usage.pop("completion_tokens_details")
    if details := usage["prompt_tokens_details"]:
        usage["prompt_tokens_details"] = {name: details[name] for name in told}
    return {**_head(envelope, kind), "choices": [], "usage": usage, "system_fingerprint": envelope.fingerprint}


def _usage(
    envelope: Envelope, sequences: list[Sequence], asked: GenerationRequest, *, chat: bool = False
) -> dict[str, Any]:
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


def _top(sequence: Sequence, start: int, count: int) -> list[dict[int, float]]:
    if count == 0:
        return [
            {token: logprob} for token, logprob in zip(sequence.tokens[start:], sequence.logprobs[start:], strict=True)
        ]
    return [
        top_logprobs_at(sequence.keys[position], position, count + 1, sequence.vocab_size)
        for position in range(start, len(sequence.tokens))
    ]


def _chat_logprob(token: int, logprob: float) -> dict[str, Any]:
    text = token_text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _prompt_logprobs(sequence: Sequence) -> list[dict[str, Any] | None]:
    entries: list[dict[str, Any] | None] = [None]
    for position, token in enumerate(sequence.prompt[1:], 1):
        logprob = prompt_logprob(sequence.weights, sequence.prompt, position)
        entries.append({str(token): {"logprob": logprob, "rank": 1, "decoded_token": token_text(token)}})
    return entries


def _shown(token: int, asked: GenerationRequest) -> str:
    return f"token_id:{token}" if asked.tokens_as_ids else token_text(token)
