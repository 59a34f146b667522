"""Reading a request: what routing needs, and a clear refusal of what no replica could answer rightly."""

from __future__ import annotations

import json

import pytest

from proxy.errors import ApiError
from proxy.routing.request_key import PIECE_BYTES, SiblingMemory, pieces_of, read_request


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
        {"prompt": None, "messages": [{"role": "user", "content": "hi"}]},
    ],
    ids=["ids", "text", "batch", "chat", "generate", "chat and null"],
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


def test_a_batch_is_routed_by_its_first_prompt_and_counted_whole() -> None:
    first, second = list(range(10_000, 10_100)), list(range(20_000, 20_300))
    alone, batch = read_request(body(prompt=first)), read_request(body(prompt=[first, second], n=2))
    assert batch.pieces == alone.pieces
    assert (alone.answers, batch.answers) == (1, 4)
    assert 390 <= batch.prompt_tokens <= 410 and 95 <= alone.prompt_tokens <= 105
    texts = read_request(body(prompt=["some text", "more text"]))
    assert texts.pieces == read_request(body(prompt="some text")).pieces and texts.answers == 2


@pytest.mark.parametrize("count", [1, 100, 5000])
def test_the_length_of_a_prompt_of_ids_is_estimated(count: int) -> None:
    key = read_request(body(prompt=[50_000 + number for number in range(count)]))
    assert key.prompt_tokens == pytest.approx(count, rel=0.02)
    assert key.piece_tokens * len(key.pieces) == pytest.approx(count, rel=0.02)


def test_the_prompt_of_messages_begins_with_system_and_tools() -> None:
    messages = [{"role": "user", "content": "hi"}]
    one, two = (read_request(body(messages=messages, system=system * 40)) for system in ("abc", "xyz"))
    assert one.pieces[0] != two.pieces[0] and len(one.pieces) == 2


@pytest.mark.parametrize(
    ("fields", "limit", "answers"),
    [
        ({}, None, 1),
        ({"max_tokens": 7, "n": 3}, 7, 3),
        ({"max_completion_tokens": 8}, 8, 1),
        ({"sampling_params": {"max_tokens": 9, "n": 2}}, 9, 2),
        ({"max_tokens": "many", "n": True, "sampling_params": []}, None, 1),
        ({"max_tokens": -1, "n": None}, None, 1),
    ],
)
def test_what_limits_the_answer_is_read_and_nonsense_left_to_the_replica(
    fields: dict[str, object], limit: int | None, answers: int
) -> None:
    key = read_request(body(prompt=[1, 2], **fields))
    assert (key.max_tokens, key.answers) == (limit, answers)


def test_a_batch_of_a_million_prompts_is_one_prompt() -> None:
    """A list of raw texts takes a hundred times the bytes of `[]`."""
    key = read_request(b'{"model":"m","prompt":[' + b"[]," * 1_000_000 + b"[]]}")
    assert key.answers == 1 and key.pieces


def test_a_session_is_told_apart_by_its_header() -> None:
    keys = [read_request(body(prompt=[1]), session=name).session for name in (b"", b"a", b"b", b"a")]
    assert keys[0] == 0 and keys[1] == keys[3] != keys[2]


def test_a_memory_of_siblings_changes_nothing_but_the_work() -> None:
    memory = SiblingMemory(prompts=2)
    bodies = [body(prompt=[number] * 300, seed=seed) for number in (1, 2, 3, 1) for seed in range(3)]
    assert [read_request(raw, cut=memory.pieces) for raw in bodies] == [read_request(raw) for raw in bodies]
    known = memory.pieces(b"text")
    assert memory.pieces(b"text") is known
    memory.pieces(b"other"), memory.pieces(b"third")
    assert memory.pieces(b"text") is not known, "it forgets the oldest"
