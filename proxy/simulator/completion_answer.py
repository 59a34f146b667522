"""The JSON bodies of POST /v1/completions, whole and in pieces, field by field as vLLM 0.32 sends them."""

from __future__ import annotations

from typing import Any

from proxy.simulator.answer_parts import Envelope, finished, head, prompt_logprobs, top_logprobs, usage, usage_piece
from proxy.simulator.generation_request import GenerationRequest
from proxy.simulator.sequence import Sequence
from proxy.simulator.tokens import detokenize, token_text


class CompletionAnswer:
    """Bodies of POST /v1/completions."""

    def __init__(self, envelope: Envelope, asked: GenerationRequest) -> None:
        self.envelope = envelope
        self.asked = asked
        self._offsets: dict[int, int] = {}
        """How much text each sequence has sent: offsets go on from piece to piece."""

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        return {
            **head(self.envelope, "text_completion"),
            "choices": [self._choice(index, sequence) for index, sequence in enumerate(sequences)],
            "service_tier": None,
            "system_fingerprint": self.envelope.fingerprint,
            "usage": usage(self.envelope, sequences, self.asked),
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
            "prompt_token_ids": sequence.prompt if self.asked.token_ids and not start else None,
            "token_ids": tokens if self.asked.token_ids else None,
        }
        piece = {**head(self.envelope, "text_completion"), "choices": [choice]}
        return finished(piece, sequence, self.envelope, self.asked)

    def usage_piece(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Return the last piece of a stream that asked for usage."""
        used = usage(self.envelope, sequences, self.asked)
        return usage_piece(self.envelope, "text_completion", used, told=("cached_tokens",))

    def _choice(self, index: int, sequence: Sequence) -> dict[str, Any]:
        return {
            "index": index,
            "text": detokenize(sequence.tokens),
            "logprobs": self._logprobs(sequence, 0),
            "finish_reason": sequence.finish_reason,
            "stop_reason": None,
            "token_ids": sequence.tokens if self.asked.token_ids else None,
            "prompt_logprobs": None if self.asked.prompt_logprobs is None else prompt_logprobs(sequence),
            "prompt_token_ids": sequence.prompt if self.asked.token_ids else None,
            "routed_experts": None,
        }

    def _logprobs(self, sequence: Sequence, start: int) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        texts = [_shown(token, self.asked) for token in sequence.tokens[start:]]
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
                {_shown(token, self.asked): logprob for token, logprob in top.items()}
                for top in top_logprobs(sequence, start, self.asked.logprobs)
            ],
        }


def _shown(token: int, asked: GenerationRequest) -> str:
    return f"token_id:{token}" if asked.tokens_as_ids else token_text(token)
