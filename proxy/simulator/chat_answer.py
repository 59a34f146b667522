"""The JSON bodies of POST /v1/chat/completions, whole and in pieces, field by field as vLLM 0.32 sends them."""

from __future__ import annotations

from typing import Any

from proxy.simulator.answer_parts import Envelope, finished, head, prompt_logprobs, top_logprobs, usage, usage_piece
from proxy.simulator.generation_request import GenerationRequest
from proxy.simulator.sequence import Sequence
from proxy.simulator.tokens import detokenize, token_text


class ChatAnswer:
    """Bodies of POST /v1/chat/completions."""

    def __init__(self, envelope: Envelope, asked: GenerationRequest) -> None:
        self.envelope = envelope
        self.asked = asked

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        told = None if self.asked.prompt_logprobs is None else prompt_logprobs(sequences[0])
        return {
            **head(self.envelope, "chat.completion"),
            "choices": [self._choice(index, sequence) for index, sequence in enumerate(sequences)],
            "service_tier": None,
            "system_fingerprint": self.envelope.fingerprint,
            "usage": usage(self.envelope, sequences, self.asked, chat=True),
            "prompt_logprobs": told,
            "prompt_token_ids": sequences[0].prompt if self.asked.token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        """Return the pieces that come before any token: one per choice, with the role."""
        return [
            {
                **head(self.envelope, "chat.completion.chunk"),
                "choices": [
                    {
                        "index": index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
                "prompt_token_ids": sequence.prompt if self.asked.token_ids else None,
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
        choice["token_ids"] = tokens if self.asked.token_ids else None
        piece = {**head(self.envelope, "chat.completion.chunk"), "choices": [choice]}
        return finished(piece, sequence, self.envelope, self.asked)

    def usage_piece(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Return the last piece of a stream that asked for usage."""
        used = usage(self.envelope, sequences, self.asked, chat=True)
        told = ("cached_tokens", "created_cache_tokens")
        return usage_piece(self.envelope, "chat.completion.chunk", used, told=told)

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
            "token_ids": sequence.tokens if self.asked.token_ids else None,
            "routed_experts": None,
        }

    def _logprobs(self, sequence: Sequence, start: int) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        content = []
        for position, top in enumerate(top_logprobs(sequence, start, self.asked.logprobs), start):
            alternatives = [_chat_logprob(token, logprob) for token, logprob in top.items()]
            entry = _chat_logprob(sequence.tokens[position], sequence.logprobs[position])
            content.append({**entry, "top_logprobs": alternatives[: self.asked.logprobs]})
        return {"content": content}


def _chat_logprob(token: int, logprob: float) -> dict[str, Any]:
    text = token_text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
