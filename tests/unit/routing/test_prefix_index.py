"""The index: what it remembers, for how long, and in how many bytes."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.request_key import PIECE_BYTES, pieces_of

TEMPLATE = 10


def prompt(*parts: object, pieces: int = 10) -> tuple[int, ...]:
    """Return the pieces of a prompt of parts that are `pieces` long each, and of an end that no longer prompt has."""
    text = b"".join(str(part).encode().ljust(pieces * PIECE_BYTES, b".") for part in parts)
    return pieces_of(text + b"]")


def test_a_known_prompt_attracts_to_where_it_was() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("question"), 1)
    match = index.match("p", prompt("question"), range(3))
    assert match.attracts and match.seen == {0: 0, 1: 11, 2: 0}


def test_another_policy_has_seen_nothing() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("question"), 1)
    assert not any(index.match("q", prompt("question"), range(3)).seen.values())


def test_the_second_prompt_behind_a_template_is_not_attracted_already() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("template", "question"), 0)
    match = index.match("p", prompt("template", "other"), range(2))
    assert not match.attracts and match.seen == {0: TEMPLATE, 1: 0}


def test_each_replica_has_its_own_longest_match() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("template", "question"), 0)
    index.record("p", prompt("template", "other"), 1)
    match = index.match("p", prompt("template", "question"), range(3))
    assert match.attracts and match.seen == {0: 21, 1: TEMPLATE, 2: 0}


def test_a_later_turn_is_attracted_by_the_earlier_ones() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("template", "question"), 0)
    index.record("p", prompt("template", "question", "answer"), 2)
    for answer in ("answer", "another", "third"):
        match = index.match("p", prompt("template", "question", answer, "reply"), range(3))
        assert match.attracts
        assert match.seen == ({0: 20, 1: 0, 2: 30} if answer == "answer" else {0: 20, 1: 0, 2: 20})


def test_turns_that_begin_alike_do_not_make_a_template_of_the_question() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("question"), 0)
    index.record("p", prompt("question", "let me see", "one"), 0)
    index.record("p", prompt("question", "let me see", "two"), 0)
    assert index.match("p", prompt("question", "let me see", "three"), range(2)).attracts


def test_what_a_restarted_replica_had_is_gone_and_the_rest_stays() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("a"), 0)
    index.record("p", prompt("a"), 1)
    index.record("p", prompt("b"), 1)
    index.forget_replica(1)
    assert index.match("p", prompt("a"), range(2)).seen == {0: 11, 1: 0}
    assert not any(index.match("p", prompt("b"), range(2)).seen.values())
    assert len(index) == 11


def test_what_is_used_survives_and_what_is_not_goes() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("used", "more"), 0)
    index.record("p", prompt("unused"), 0)
    for _ in range(3):
        index.age()
        index.record("p", prompt("used", "more"), 0)
    assert index.match("p", prompt("used", "more"), range(1)).seen == {0: 21}
    assert index.match("p", prompt("used", "turn"), range(1)).seen == {0: 10}
    assert not any(index.match("p", prompt("unused"), range(1)).seen.values())


def test_aging_does_not_forget_where_prompts_ended() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("question"), 0)
    index.age()
    index.record("p", prompt("question", "answer"), 0)
    index.age()
    assert index.match("p", prompt("question", "other answer"), range(1)).attracts


def test_using_a_piece_says_nothing_of_other_replicas() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("a"), 0)
    index.age()
    index.record("p", prompt("a"), 1)
    index.age()
    assert index.match("p", prompt("a"), range(2)).seen == {0: 0, 1: 11}


def test_a_prompt_longer_than_the_index_is_remembered_in_part() -> None:
    index = PrefixIndex(20)
    index.record("p", prompt("a", pieces=50), 0)
    assert len(index) == 10
    assert index.match("p", prompt("a", pieces=50), range(1)).seen == {0: 10}


def test_the_repr_shows_the_state() -> None:
    index = PrefixIndex(1000)
    index.record("p", prompt("a"), 0)
    assert repr(index) == "<PrefixIndex policies=1 young=11 old=0>"


@pytest.mark.parametrize("replicas", [1, 64])
@pytest.mark.parametrize("prompts", [250, 400, 700])
def test_a_tracked_piece_takes_at_most_100_bytes(prompts: int, replicas: int) -> None:
    rng = random.Random(1)
    index = PrefixIndex(1_000_000)
    template = rng.randbytes(20 * PIECE_BYTES)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(prompts):
        index.record("p", pieces_of(template + rng.randbytes(60 * PIECE_BYTES)), number % replicas)
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert size / len(index) <= 100
