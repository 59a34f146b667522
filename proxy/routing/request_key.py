"""Read from a request body what routing needs, and nothing more: the model, the prompt's raw text, a few numbers.

The prompt is not decoded: two prompts that begin with the same tokens, written by the same client, begin with the same
bytes. Pieces of that text are hashed in a chain, so that one hash stands for everything before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import numpy as np
import xxhash
from msgspec import structs

from proxy.errors import ApiError

PIECE_BYTES = 96
"""Raw text of about 16 to 24 token ids, vLLM's default block; smaller pieces cost memory, larger ones miss prefixes."""

_SAMPLE_BYTES = 2048
"""How much of an array of ids is looked at to estimate its length: an exact count would cost as much as parsing."""

_IDS = re.compile(rb'"(?:prompt|token_ids)": ?\[')
"""Where the ids of a prompt begin. Within a text the quotes would be escaped."""

_IDS_BEGIN_WITHIN = 1024
"""So much of a body is searched for them: what stands before them is short, and a long chat has none."""

_NO_IDS = b"[ ]"
"""Stands in their place: an array as nobody writes an empty one, so that it is told from one of the client's."""

_MOST_PROMPTS = 100_000
"""A batch that might hold more is routed, and counted, as one prompt: to take it apart would take gigabytes."""

_MOST_DIGITS = 9

_TEXT_BYTES_PER_TOKEN = 4
"""Of English text; only the balance of load hangs on it."""


class _Body(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    stream: bool | None = None
    # Whatever these hold: what is wrong with them is for the replica to say.
    n: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    sampling_params: msgspec.Raw = msgspec.Raw()


class _Sampling(msgspec.Struct):
    n: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()


_UNSAID = _Sampling()
_decoder = msgspec.json.Decoder(_Body)
_name_decoder = msgspec.json.Decoder(str | None)
_sampling_decoder = msgspec.json.Decoder(_Sampling)
_prompts_decoder = msgspec.json.Decoder(list[msgspec.Raw])
# Nothing else is decoded, so that a body of 64 MB that is all brackets does not become gigabytes of objects.


class Abridged(msgspec.Struct, frozen=True):
    """A body without the ids of its prompt: parsing over them would take longer than all else that is read of it."""

    text: bytes
    """What is left."""
    ids_at: int = 0
    """Where they were, if there were any."""


_NOTHING, _NOT_WRITTEN = Abridged(b""), msgspec.Raw()


class RequestKey(msgspec.Struct, frozen=True):
    """What routing knows of one rollout."""

    model: str
    pieces: tuple[int, ...]
    """Chained 60-bit hashes; the last one covers the whole prompt, of a batch the first prompt."""
    stream: bool
    prompt_tokens: int = 0
    """An estimate, over all prompts of a batch."""
    piece_tokens: float = 0.0
    """Tokens that one piece stands for."""
    answers: int = 1
    """Completions asked for: n for each prompt."""
    max_tokens: int | None = None
    """Of one completion, if the client set it."""
    session: int = 0
    """A hash of X-Session-ID; 0 without one."""
    parsed: Abridged = _NOTHING
    """What all this was read from."""
    written_model: msgspec.Raw = _NOT_WRITTEN
    """The value of `model` where it stands there (see `with_model`)."""


class Pieces(msgspec.Struct, frozen=True):
    """What is worked out from the text of one prompt."""

    hashes: tuple[int, ...]
    tokens: int
    """An estimate."""


class SiblingMemory:
    """Remembers the last prompts, since the rollouts of a group come close together: hashing a prompt whole is thirty
    times cheaper than in pieces.
    """

    def __init__(self, prompts: int = 64) -> None:
        self._most = prompts
        self._known: dict[bytes, Pieces] = {}

    def pieces(self, text: bytes) -> Pieces:
        """Return what `cut` returns for `text`."""
        whole = xxhash.xxh3_128_digest(text)
        known = self._known.get(whole)
        if known is None:
            if len(self._known) >= self._most:
                del self._known[next(iter(self._known))]
            known = self._known[whole] = cut(text)
        return known


def cut(text: bytes) -> Pieces:
    """Work out pieces and tokens of one prompt."""
    return Pieces(pieces_of(text), _tokens(text))


def read_request(body: bytes, *, session: bytes = b"", cut: Callable[[bytes], Pieces] = cut) -> RequestKey:
    """Read a generation request. `session` is the value of its X-Session-ID header.

    `cut` works out a prompt's pieces; `SiblingMemory.pieces` does it once for a group.

    Raises ApiError 400, in vLLM's shape, when the body is not a JSON object or `model` is missing: vLLM would answer
    such a request from the base model, which no trainer means (P5).
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder skips the prompt, so it would let broken UTF-8 through
        abridged, ids = _abridge(body)
        parsed = _decoder.decode(abridged.text)
        model = _name_decoder.decode(parsed.model) if parsed.model else None
    except msgspec.ValidationError as error:
        raise _bad_request(f"The request body is not valid: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_request(f"The request body is not JSON: {error}") from None
    if not model:
        raise _bad_request("`model` is missing: name the policy or the base model that this request is for", "model")
    prompts = _prompts(parsed, ids)
    first = cut(prompts[0])
    pieces, tokens = first.hashes, first.tokens
    sampling = _sampling(parsed.sampling_params)
    return RequestKey(
        model=model,
        pieces=pieces,
        stream=bool(parsed.stream),
        prompt_tokens=tokens if len(prompts) == 1 else sum(map(_tokens, prompts)),
        piece_tokens=tokens / len(pieces) if pieces else 0.0,
        answers=len(prompts) * (_first_count(parsed.n, sampling.n) or 1),
        max_tokens=_first_count(parsed.max_tokens, parsed.max_completion_tokens, sampling.max_tokens),
        session=xxhash.xxh3_64_intdigest(session) >> 4 if session else 0,
        parsed=abridged,
        written_model=parsed.model,
    )


def _abridge(body: bytes) -> tuple[Abridged, bytes]:
    """Take the ids of the prompt out of `body`, if it has any near its beginning, and return these too: their array.

    Whether they are numbers is for the replica to say: they hold no text, so nothing that is read here can be in them.
    """
    found = _IDS.search(body, 0, _IDS_BEGIN_WITHIN)
    if found is None:
        return Abridged(body), b""
    start = found.end() - 1
    end = body.find(b"]", start) + 1
    ids = body[start:end]
    if not ids or b'"' in ids or b"{" in ids or ids.rfind(b"["):
        return Abridged(body), b""
    return Abridged(b"".join((body[:start], _NO_IDS, body[end:])), start), ids


NO_KEY = RequestKey(model="", pieces=(), stream=False)
"""Of a request that every replica answers alike."""


def read_model(body: bytes) -> RequestKey:
    """Read what a request that is not a generation is for, if it says so: its prompt is not worth routing by.

    Whatever is wrong with it is for the replica to say.
    """
    try:
        abridged, _ = _abridge(body)
        written = _decoder.decode(abridged.text).model
        model = _name_decoder.decode(written) if written else None
    except (msgspec.MsgspecError, RecursionError):
        return NO_KEY
    if not model:
        return NO_KEY
    return RequestKey(model=model, pieces=(), stream=False, parsed=abridged, written_model=written)


def with_model(body: bytes, key: RequestKey, name: str) -> bytes:
    """Return `body`, which `key` was read from, with `name` as its model, byte for byte the same otherwise.

    The decoder has kept a view of the value; where that lies in memory tells where it stands, without a search that a
    prompt could mislead.
    """
    parsed = key.parsed
    start = _address(key.written_model) - _address(parsed.text)
    if start > parsed.ids_at:
        start += len(body) - len(parsed.text)
    end = start + len(memoryview(key.written_model))
    return b"".join((body[:start], msgspec.json.encode(name), memoryview(body)[end:]))  # its tail is copied once


def for_model(key: RequestKey, name: str) -> RequestKey:
    """Return `key` with `name` as its model, and without the body that it was read from, which can go now."""
    return structs.replace(key, model=name, parsed=_NOTHING, written_model=_NOT_WRITTEN)


def _address(buffer: bytes | msgspec.Raw) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, reason="bad_request", type="Bad Request", param=param)


def _prompts(parsed: _Body, ids: bytes) -> list[bytes]:
    """Return the raw text of each prompt; `ids` were taken out of the body.

    Chat is one prompt: what the template puts first, first.
    """
    text = _restored(parsed.prompt, ids).removeprefix(b"null")
    if _is_batch(text) and text.count(b"[") + text.count(b'"') <= _MOST_PROMPTS:
        return [bytes(prompt) for prompt in _prompts_decoder.decode(text)]
    if text:
        return [text]
    messages = bytes(parsed.messages)
    if messages and (parsed.system or parsed.tools):
        return [b"".join((parsed.tools, parsed.system, messages))]
    return [messages or _restored(parsed.token_ids, ids)]


def _restored(value: msgspec.Raw, ids: bytes) -> bytes:
    found = bytes(value)
    return ids if ids and found == _NO_IDS else found


def _is_batch(prompt: bytes) -> bool:
    return prompt[:1] == b"[" and prompt[1:32].lstrip()[:1] in (b"[", b'"')


def _tokens(text: bytes) -> int:
    if text[:1] == b"[" and text[1:32].lstrip()[:1] != b"{":
        sample = text[:_SAMPLE_BYTES]
        return 1 + sample.count(b",") * len(text) // len(sample)
    return len(text) // _TEXT_BYTES_PER_TOKEN


def _sampling(raw: msgspec.Raw) -> _Sampling:
    try:
        return _sampling_decoder.decode(raw) if raw else _UNSAID
    except msgspec.DecodeError:
        return _UNSAID


def _first_count(*values: msgspec.Raw) -> int | None:
    """Return the first that is a positive number of at most nine digits."""
    for value in values:
        if value and len(memoryview(value)) <= _MOST_DIGITS:
            text = bytes(value)
            if text.isdigit() and text != b"0":
                return int(text)
    return None


def pieces_of(text: bytes) -> tuple[int, ...]:
    """Return the chained hashes of `text`, one for every PIECE_BYTES and one for what remains."""
    digest = xxhash.xxh3_64_intdigest
    chained = 0
    # Four bits less: an integer of up to 60 bits takes 32 bytes, a longer one 48 with its padding.
    return tuple(
        [
            (chained := digest(text[start : start + PIECE_BYTES], chained) >> 4)
            for start in range(0, len(text), PIECE_BYTES)
        ]
    )
