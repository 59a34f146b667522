"""Reading a request: what routing needs, and a clear refusal of what no replica could answer rightly."""

from __future__ import annotations

import json

import pytest

from proxy.errors import ApiError
from proxy.routing.request_key import PIECE_BYTES, pieces_of, read_request


def body(**fields: object) -> bytes:
    return json.dumps({"model": "p-v1", **fields}).encode()


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": "text"},
        {"prompt": [[1, 2], [3]]},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"token_ids": [1, 2, 3]},
    ],
    ids=["ids", "text", "batch", "chat", "generate"],
)
def test_every_kind_of_prompt_has_pieces(prompt: dict[str, object]) -> None:
    key = read_request(body(**prompt))
    assert key.model == "p-v1" and len(key.pieces) == 1 and not key.stream


def test_a_shared_beginning_gives_shared_pieces() -> None:
    beginning = list(range(10_000, 10_100))
    one, two = (read_request(body(prompt=[*beginning, last])) for last in (1, 2))
    shared = [a == b for a, b in zip(one.pieces, two.pieces, strict=True)]
    assert all(shared[:-1]) and not shared[-1] and len(shared) > 5


def test_the_last_piece_stands_for_the_whole_prompt() -> None:
    text = bytes(range(256)) * 4
    assert len(pieces_of(text)) == -(-len(text) // PIECE_BYTES)
    assert pieces_of(text)[-1] != pieces_of(b"x" + text[1:])[-1]


def test_a_chain_differs_from_its_beginning_on() -> None:
    text = b"a" * PIECE_BYTES
    first, second = pieces_of(text + text)
    assert first != second


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"model": 3, "prompt": "x"}', b'{"model": "m", "prompt": [1, 2'],
)
def test_what_is_not_a_request_is_a_400_in_vllms_shape(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(raw)
    assert caught.value.status == 400
    assert set(caught.value.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": ""}])
def test_a_generation_without_model_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(json.dumps({"prompt": [1], **fields}).encode())
    assert caught.value.status == 400 and caught.value.param == "model"
