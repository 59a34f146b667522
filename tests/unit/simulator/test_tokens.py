"""Tokens are a pure function, so whoever knows the weights can tell the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.artifacts.digest import adapter_digest
from proxy.simulator.adapters import write_adapter
from proxy.simulator.tokens import (
    adapter_weights,
    base_weights,
    chat_tokens,
    detokenize,
    expected_tokens,
    generated_token,
    logprob_at,
    prompt_digest,
    prompt_logprob,
    stream_key,
    tokenize,
    top_logprobs_at,
)

PROMPT = [1, 2, 3]


def test_the_same_question_has_the_same_answer() -> None:
    assert expected_tokens("w", PROMPT, 7, 20) == expected_tokens("w", tuple(PROMPT), 7, 20)


@pytest.mark.parametrize("other", [("x", PROMPT, 7), ("w", [1, 2, 4], 7), ("w", [1, 2], 7), ("w", PROMPT, 8)], ids=str)
def test_weights_prompt_and_seed_all_matter(other: tuple[str, list[int], int]) -> None:
    assert expected_tokens("w", PROMPT, 7, 20) != expected_tokens(*other, 20)


def test_no_seed_means_seed_0() -> None:
    assert expected_tokens("w", PROMPT, None, 5) == expected_tokens("w", PROMPT, 0, 5)


def test_an_answer_can_be_computed_from_any_position() -> None:
    assert expected_tokens("w", PROMPT, 7, 5, 3) == expected_tokens("w", PROMPT, 7, 8)[3:]
    assert generated_token("w", prompt_digest(PROMPT), 7, 3) == expected_tokens("w", PROMPT, 7, 4)[3]


@given(seed=st.integers(0, 2**63 - 1), vocab_size=st.integers(257, 100_000))
def test_tokens_stay_in_the_vocabulary(seed: int, vocab_size: int) -> None:
    assert all(0 <= token < vocab_size for token in expected_tokens("w", PROMPT, seed, 50, vocab_size=vocab_size))


def test_tokens_are_spread_over_the_vocabulary() -> None:
    assert len(set(expected_tokens("w", PROMPT, 7, 1000))) > 900


def test_log_probabilities_are_negative_and_differ_between_weights() -> None:
    first, second = (
        [logprob_at(stream_key(weights, prompt_digest(PROMPT), 0), at) for at in range(100)] for weights in "wx"
    )
    assert all(-8 <= logprob < 0 for logprob in first + second)
    assert first != second
    assert prompt_logprob("w", PROMPT, 1) != prompt_logprob("x", PROMPT, 1)


def test_the_sampled_token_is_the_most_likely_one() -> None:
    key = stream_key("w", prompt_digest(PROMPT), 0)
    top = top_logprobs_at(key, 0, 3)
    assert len(top) == 3
    assert max(top, key=top.__getitem__) == expected_tokens("w", PROMPT, 0, 1)[0]


def test_the_weights_of_an_adapter_are_its_digest(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", seed=1)
    assert adapter_weights(directory) == adapter_digest(directory)
    assert base_weights("sim") == "base:sim"


@given(st.text())
def test_text_survives_the_tokenizer(text: str) -> None:
    assert detokenize(tokenize(text)) == text


def test_made_up_tokens_have_readable_text() -> None:
    assert detokenize(range(256, 32_000)).isascii()


def test_a_chat_ends_where_the_assistant_begins() -> None:
    text = detokenize(chat_tokens([("user", "hi")]))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
