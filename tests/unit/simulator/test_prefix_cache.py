"""Whole blocks, never the whole prompt, least recently used out first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.prefix_cache import Hit, PrefixCache, block_keys

SIZE = 4


def keys(tokens: list[int], scope: str = "a") -> list[int]:
    return block_keys(tokens, block_size=SIZE, scope=scope)


def lookup(cache: PrefixCache, tokens: list[int], scope: str = "a") -> Hit:
    return cache.lookup(keys(tokens, scope), prompt_tokens=len(tokens))


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    cache = PrefixCache(blocks=10, block_size=SIZE)
    prompt = list(range(length))
    cache.store(keys(prompt), weights="w")
    assert lookup(cache, prompt).tokens == cached


def test_a_hit_names_the_weights_that_computed_it() -> None:
    cache = PrefixCache(blocks=10, block_size=SIZE)
    prompt = list(range(9))
    assert lookup(cache, prompt) == Hit(tokens=0, weights=None)
    cache.store(keys(prompt), weights="old")
    cache.store(keys(prompt), weights="new")
    assert lookup(cache, prompt) == Hit(tokens=8, weights="old")


def test_scopes_do_not_share() -> None:
    cache = PrefixCache(blocks=10, block_size=SIZE)
    cache.store(keys(list(range(9)), "a"), weights="w")
    assert lookup(cache, list(range(9)), "b").tokens == 0


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    cache = PrefixCache(blocks=3, block_size=SIZE)
    first, second = [1] * 9, [2] * 9
    cache.store(keys(first), weights="w")
    cache.store(keys(second), weights="w")
    assert len(cache) == 3
    assert lookup(cache, first).tokens == 4
    assert lookup(cache, second).tokens == 8


def test_clear_forgets_everything() -> None:
    cache = PrefixCache(blocks=3, block_size=SIZE)
    cache.store(keys([1] * 9), weights="w")
    cache.clear()
    assert repr(cache) == "PrefixCache(0/3 blocks of 4)"


@given(st.lists(st.integers(0, 50), max_size=40), st.lists(st.integers(0, 50), max_size=40))
def test_a_hit_never_exceeds_the_common_beginning(first: list[int], second: list[int]) -> None:
    cache = PrefixCache(blocks=100, block_size=SIZE)
    cache.store(keys(first), weights="w")
    common = next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
    assert lookup(cache, second).tokens <= common
