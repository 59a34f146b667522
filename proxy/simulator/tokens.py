"""What a replica answers: tokens as a pure function of (weights, prompt, seed, position), and text as bytes.

Whoever knows which weights a rollout asked for can compute its answer with `expected_tokens`, and so can tell when
other weights have answered. One hash per request, then a few integer operations per token.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from proxy.artifacts.checkpoint import read_checkpoint
from proxy.artifacts.digest import adapter_digest

VOCAB_SIZE = 32_000
"""Default number of tokens, as in `SimulatorSettings.vocab_size`."""

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_BYTES = 256
_CONSONANTS = "bdfghjklmnprstvwz"
_VOWELS = "aeiou"
_WORST_LOGPROB = 8.0


def base_weights(model: str) -> str:
    """Return the `weights` of the base model itself."""
    return f"base:{model}"


def updated_base_weights(model: str, update_info: Any) -> str:
    """Return the `weights` of the base model after an update with this `update_info`."""
    return f"{base_weights(model)}@{json.dumps(update_info, sort_keys=True)}"


def checkpoint_weights(directory: Path) -> str:
    """Return the `weights` of the base model in a checkpoint. Raises ArtifactError when it is not whole."""
    read_checkpoint(directory)
    found = xxhash.xxh3_64()
    for file in sorted(directory.glob("*.safetensors")):
        found.update(file.read_bytes())
    return f"checkpoint:{found.hexdigest()}"


def adapter_weights(directory: Path) -> str:
    """Return the `weights` of the adapter in `directory`. Raises ArtifactError when it cannot be read."""
    return adapter_digest(directory)


def prompt_digest(prompt: Sequence[int]) -> int:
    """Return a 64-bit hash of the prompt's token ids."""
    return xxhash.xxh3_64_intdigest(array("q", prompt).tobytes())


def stream_key(weights: str, digest: int, seed: int | None) -> int:
    """Return the key from which every token of one answer follows. No seed means seed 0."""
    return xxhash.xxh3_64_intdigest(f"{weights}/{digest}/{(seed or 0) & _MASK}".encode())


def token_at(key: int, position: int, vocab_size: int = VOCAB_SIZE) -> int:
    """Return the token at `position` (from 0) of the answer."""
    mixed = (key + position * _STRIDE) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _MIX) & _MASK
    return (mixed >> 33) % vocab_size


def tokens_between(key: int, start: int, stop: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return the tokens at the positions from `start` up to `stop`, which is left out."""
    return [token_at(key, position, vocab_size) for position in range(start, stop)]


def generated_token(weights: str, digest: int, seed: int | None, position: int, *, vocab_size: int = VOCAB_SIZE) -> int:
    """Return one token of the answer that `weights` give to the prompt with this `prompt_digest`."""
    return token_at(stream_key(weights, digest, seed), position, vocab_size)


def expected_tokens(
    weights: str,
    prompt: Sequence[int],
    seed: int | None,
    count: int,
    start: int = 0,
    *,
    vocab_size: int = VOCAB_SIZE,
) -> list[int]:
    """Return the `count` tokens from position `start` on that a replica with these weights must answer.

    `weights` is `adapter_weights(directory)` or `base_weights(model)`. With n > 1, choice i is drawn with seed + i.
    """
    key = stream_key(weights, prompt_digest(prompt), seed)
    return tokens_between(key, start, start + count, vocab_size)


def logprob_at(key: int, position: int) -> float:
    """Return the log-probability of the token at `position`: between -8 and 0, as pure as the token."""
    mixed = ((key ^ _MIX) + position * _STRIDE) & _MASK
    mixed = ((mixed ^ (mixed >> 31)) * _MIX) & _MASK
    return -_WORST_LOGPROB * ((mixed >> 40) + 1) / (1 << 24)


def top_logprobs_at(key: int, position: int, count: int, vocab_size: int = VOCAB_SIZE) -> dict[int, float]:
    """Return the token at `position` and `count - 1` less likely others, with their log-probabilities."""
    sampled = token_at(key, position, vocab_size)
    first = logprob_at(key, position)
    others = {(sampled + rank) % vocab_size: first - 0.5 * rank for rank in range(1, count)}
    return {sampled: first, **others}


def prompt_logprob(weights: str, prompt: Sequence[int], position: int) -> float:
    """Return the log-probability that `weights` give to the prompt's token at `position`, given those before it."""
    seen = prompt_digest(prompt[: position + 1])
    return logprob_at(stream_key(weights, seen, 0), position)


def tokenize(text: str) -> list[int]:
    """Return one token per byte of the text."""
    return list(text.encode())


def chat_tokens(messages: Iterable[tuple[str, str]]) -> list[int]:
    """Return the prompt of a chat of (role, content) pairs, up to where the assistant begins to speak."""
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return tokenize(turns + "<|im_start|>assistant\n")


def detokenize(tokens: Iterable[int]) -> str:
    """Return the text of the tokens; bytes that are not UTF-8 become U+FFFD."""
    return b"".join(map(_text_bytes, tokens)).decode(errors="replace")


@lru_cache(maxsize=1 << 17)
def token_text(token: int) -> str:
    """Return the text of a token that stands alone."""
    return _text_bytes(token).decode(errors="replace")


@lru_cache(maxsize=1 << 17)
def _text_bytes(token: int) -> bytes:
    if token < _BYTES:
        return bytes((token,))
    rest, syllables = token - _BYTES, [" "]
    while True:
        rest, consonant = divmod(rest, len(_CONSONANTS))
        rest, vowel = divmod(rest, len(_VOWELS))
        syllables.append(_CONSONANTS[consonant] + _VOWELS[vowel])
        if not rest:
            return "".join(syllables).encode()
