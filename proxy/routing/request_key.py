"""Read from a request body what routing needs, and nothing more: the model, the prompt's raw text, the stream flag.

The prompt is not decoded: two prompts that begin with the same tokens, written by the same client, begin with the same
bytes. Pieces of that text are hashed in a chain, so that one hash stands for everything before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import xxhash

from proxy.errors import ApiError

PIECE_BYTES = 96
"""Raw text of about 16 to 24 token ids, vLLM's default block; smaller pieces cost memory, larger ones miss prefixes."""


class _Body(msgspec.Struct):
    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    stream: bool | None = None


_decoder = msgspec.json.Decoder(_Body)


@dataclass(frozen=True)
class RequestKey:
    """What routing knows of one rollout."""

    model: str
    pieces: tuple[int, ...]
    """Chained 64-bit hashes; the last one covers the whole prompt."""
    stream: bool


def read_request(body: bytes) -> RequestKey:
    """Read a generation request.

    Raises ApiError 400, in vLLM's shape, when the body is not a JSON object or `model` is missing: vLLM would answer
    such a request from the base model, which no trainer means (P5).
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder skips the prompt, so it would let broken UTF-8 through
        parsed = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _bad_request(f"The request body is not valid: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_request(f"The request body is not JSON: {error}") from None
    if not parsed.model:
        raise _bad_request("`model` is missing: name the policy or the base model that this request is for", "model")
    text = bytes(parsed.prompt) or bytes(parsed.messages) or bytes(parsed.token_ids)
    return RequestKey(model=parsed.model, pieces=pieces_of(text), stream=bool(parsed.stream))


def _bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, reason="bad_request", type="Bad Request", param=param)


def pieces_of(text: bytes) -> tuple[int, ...]:
    """Return the chained hashes of `text`, one for every PIECE_BYTES and one for what remains."""
    pieces = []
    chained = 0
    for start in range(0, len(text), PIECE_BYTES):
        chained = xxhash.xxh3_64_intdigest(text[start : start + PIECE_BYTES], seed=chained)
        pieces.append(chained)
    return tuple(pieces)
