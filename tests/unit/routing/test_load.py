"""What rollouts are expected to cost."""

from __future__ import annotations

import pytest

from proxy.routing.load import AnswerLengths, Group, Groups, Usage, usage_of


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":17,"total_tokens":22}}', Usage(5, 17)),
        (
            b'{"usage":{"prompt_tokens":64,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":48}}}',
            Usage(64, 8, 48),
        ),
        (b'{"usage":{"prompt_tokens":64,"prompt_tokens_details":null}}', Usage(64)),
        (b'{"usage": {"input_tokens": 5, "output_tokens": 9}}', Usage(None, 9)),
        (
            b'data: {"usage":{"completion_tokens":1}}\n\ndata: {"usage":{"completion_tokens":2}}\n\ndata: [DONE]',
            Usage(None, 2),
        ),
        (b'{"choices":[{"text":"\\"completion_tokens\\": 99"}]}', Usage()),
        (b"", Usage()),
    ],
)
def test_an_answer_tells_its_usage(answer: bytes, usage: Usage) -> None:
    assert usage_of(answer) == usage


def test_a_long_answer_is_read_from_its_end() -> None:
    assert usage_of(b"x" * 1_000_000 + b'"usage":{"completion_tokens":700}}') == Usage(None, 700)


def test_lengths_are_learnt_by_policy_and_a_new_one_starts_from_all() -> None:
    lengths = AnswerLengths()
    for _ in range(2000):
        lengths.learn("long", 900)
        lengths.learn("short", 100)
    assert lengths.expected("long", None) == pytest.approx(900, rel=0.02)
    assert lengths.expected("short", None) == pytest.approx(100, rel=0.02)
    assert 400 < lengths.expected("new", None) < 600
    lengths.keep_policies({"short"})
    assert lengths.expected("long", None) == lengths.expected("new", None)


def test_max_tokens_is_the_most_that_can_come() -> None:
    assert AnswerLengths().expected("p", 10) == 10


def test_a_group_weighs_whole_from_its_first_rollout_on() -> None:
    groups = Groups()
    left = []
    for _ in range(9):
        groups.saw(("p", 1), 0, share=100)
        left.append(groups.kept(0))
    assert left == [700, 600, 500, 400, 300, 200, 100, 0, 0]
    assert groups.open(("p", 1)) == Group(0, share=100, kept=0, seen=9, last_seen=9) and groups.open(("p", 2)) is None


def test_a_group_larger_than_groups_are_has_outgrown_its_place() -> None:
    groups = Groups()
    outgrown = []
    for _ in range(10):
        groups.saw(("p", 1), 0, share=100)
        known = groups.open(("p", 1))
        outgrown.append(known is not None and known.is_outgrown)
    assert outgrown == [False] * 7 + [True] * 3


def test_groups_that_come_whole_are_soon_complete() -> None:
    groups = Groups()
    for number in range(200):
        for _ in range(4):
            groups.saw(("p", number), number % 2, share=100)
    assert "size=4.0" in repr(groups) and "open=3" in repr(groups)


def test_groups_that_come_mixed_are_waited_for() -> None:
    groups = Groups()
    for _ in range(8):
        for number in range(60):
            groups.saw(("p", number), 0, share=100)
    assert "open=60 size=8.0 kept={0: 0}" in repr(groups)


def test_the_size_of_groups_is_learnt_and_nothing_stays_behind() -> None:
    groups = Groups()
    for number in range(3000):
        groups.saw(("p", number), number % 2, share=100)
    assert groups.kept(0) + groups.kept(1) == 0
    assert "size=1.0" in repr(groups)
