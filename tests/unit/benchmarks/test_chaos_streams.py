"""Streams that benchmarks.chaos judges: whole ones are as answers are, broken ones never look whole."""

from __future__ import annotations

import json

import pytest

from benchmarks.chaos.judge import Asked, TokenJudge
from benchmarks.chaos.streams import BrokenStreamError, joined
from proxy.dataplane.answers import broken_off
from proxy.simulator.tokens import expected_tokens

ASKED = Asked("p-v1", digest="a" * 64, prompt=[1, 2, 3], seed=7, count=4, stream=True)
TOKENS = expected_tokens(ASKED.digest, ASKED.prompt, ASKED.seed, ASKED.count)


def events(count: int) -> str:
    """Return the first events of the stream, as a replica names the policy."""
    made = []
    for number, token in enumerate(TOKENS[:count], start=1):
        choice = {"token_ids": [token], "finish_reason": "length" if number == len(TOKENS) else None}
        made.append(f"data: {json.dumps({'model': 'p-v1~6b0e1186', 'choices': [choice]})}\n\n")
    return "".join(made)


def test_a_whole_one_is_the_answer() -> None:
    assert TokenJudge().look(ASKED, joined(events(4) + "data: [DONE]\n\n")) == ""


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_one_that_says_that_it_broke_off_is_no_answer(cut: int) -> None:
    begun = events(3)
    with pytest.raises(BrokenStreamError, match="its engine died"):
        joined(begun[: len(begun) - cut] + broken_off("its engine died").decode())


def test_one_that_stops_without_a_word_is_wrong() -> None:
    assert "3 of 4 tokens" in TokenJudge().look(ASKED, joined(events(3) + "data: [DONE]\n\n"))
