"""The prefix cache: what a second prompt finds, and what empties it. Blocks have 32 tokens, prompts 400."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.simulator.adapters import write_adapter
from tests.support.replicas import Replica, wait_until

WHOLE_BLOCKS = 400 // 32 * 32


def test_the_second_time_whole_blocks_are_cached(replica: Replica, prompt: list[int]) -> None:
    queries, hits = (replica.metric(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    assert [replica.cached_tokens(prompt=prompt) for _ in range(2)] == [0, WHOLE_BLOCKS]
    assert replica.metric("vllm:prefix_cache_queries_total") - queries == 800
    assert replica.metric("vllm:prefix_cache_hits_total") - hits == WHOLE_BLOCKS


@pytest.mark.parametrize(("length", "cached"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64)])
def test_the_last_token_is_always_computed(replica: Replica, prompt: list[int], length: int, cached: int) -> None:
    assert [replica.cached_tokens(prompt=prompt[:length]) for _ in range(2)] == [0, cached]


def test_a_common_beginning_is_shared(replica: Replica, prompt: list[int]) -> None:
    replica.complete(prompt=prompt)
    assert replica.cached_tokens(prompt=prompt[:200] + [5] * 100) == 192


def test_an_answer_that_comes_back_in_a_prompt_is_cached_too(replica: Replica, prompt: list[int]) -> None:
    answer = replica.complete(prompt=prompt, max_tokens=100)
    assert replica.cached_tokens(prompt=prompt + answer + [5]) == (400 + 99) // 32 * 32


def test_every_name_has_its_own_cache(
    replica: Replica, adapter: Callable[..., Path], name: str, prompt: list[int]
) -> None:
    path = adapter()
    for own in (name, f"{name}-again"):
        replica.load(own, path)
        assert [replica.cached_tokens(own, prompt=prompt) for _ in range(2)] == [0, WHOLE_BLOCKS]
    assert replica.cached_tokens(prompt=prompt) == 0


def test_every_salt_has_its_own_cache(replica: Replica, prompt: list[int]) -> None:
    assert [replica.cached_tokens(prompt=prompt, cache_salt=salt) for salt in "xxy"] == [0, WHOLE_BLOCKS, 0]


def test_unload_and_load_by_the_same_path_find_the_cache_again(
    replica: Replica, adapter: Callable[..., Path], name: str, prompt: list[int]
) -> None:
    path = adapter()
    replica.load(name, path)
    replica.complete(name, prompt=prompt)
    replica.unload(name)
    replica.load(name, path)
    assert replica.cached_tokens(name, prompt=prompt) == WHOLE_BLOCKS
    replica.unload(name)
    replica.load(name, f"{path}/")
    assert replica.cached_tokens(name, prompt=prompt) == 0  # paths are compared as text


def test_other_weights_under_the_same_name_and_path_give_a_wrong_answer(
    replica: Replica, adapter: Callable[..., Path], loaded: Callable[..., str], name: str, prompt: list[int]
) -> None:
    right = replica.complete(loaded(2), prompt=prompt)
    path = adapter(1)
    replica.load(name, path)
    replica.complete(name, prompt=prompt)
    replica.unload(name)
    write_adapter(path, seed=2)
    replica.load(name, path)
    assert replica.cached_tokens(name, prompt=prompt) == WHOLE_BLOCKS
    assert replica.complete(name, prompt=prompt) != right
    replica.client.post("/reset_prefix_cache")
    assert replica.complete(name, prompt=prompt) == right


def test_loading_another_adapter_leaves_the_cache_alone(
    replica: Replica, loaded: Callable[..., str], prompt: list[int]
) -> None:
    replica.complete(prompt=prompt)
    loaded()
    assert replica.cached_tokens(prompt=prompt) == WHOLE_BLOCKS


def test_a_reset_empties_it(replica: Replica, prompt: list[int]) -> None:
    replica.complete(prompt=prompt)
    answer = replica.client.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert replica.cached_tokens(prompt=prompt) == 0


def test_a_reset_is_refused_while_requests_run(replica: Replica, prompt: list[int]) -> None:
    replica.complete(prompt=prompt)
    preemptions = replica.metric("vllm:num_preemptions_total")
    with replica.in_flight(n=2):
        answer = replica.client.post("/reset_prefix_cache")
        assert (answer.status_code, answer.json()) == (200, {"success": False})
        assert replica.cached_tokens(prompt=prompt) == WHOLE_BLOCKS
        answer = replica.client.post("/reset_prefix_cache?reset_running_requests=true")
        assert answer.json() == {"success": True}
        assert replica.cached_tokens(prompt=prompt) == 0
        # The count comes with a later step of the engine, so it is waited for while there are steps.
        wait_until(
            lambda: replica.metric("vllm:num_preemptions_total") == preemptions + 2,
            what="both are counted as preempted",
        )


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_empties_it_unless_told_not_to(replica: Replica, prompt: list[int], mode: str) -> None:
    replica.complete(prompt=prompt)
    for query, cached in [("&clear_cache=false", WHOLE_BLOCKS), ("", 0)]:
        replica.client.post(f"/pause?mode={mode}{query}")
        replica.client.post("/resume")
        assert replica.cached_tokens(prompt=prompt) == cached


def test_of_several_sequences_the_last_ones_cached_tokens_are_told(replica: Replica, prompt: list[int]) -> None:
    assert replica.cached_tokens(prompt=[prompt, prompt]) == WHOLE_BLOCKS
    assert replica.cached_tokens(prompt=[prompt, prompt[::-1]]) == 0
