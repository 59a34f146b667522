"""The engine's steps without time: prefills, tokens, caches, ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.simulator.adapters import write_adapter
from proxy.simulator.batch import Batch
from proxy.simulator.faults import FaultBox
from proxy.simulator.lora import LoraRequest
from proxy.simulator.sequence import Generation, Sequence
from proxy.simulator.settings import SimulatorSettings
from proxy.simulator.tokens import adapter_weights, base_weights, expected_tokens

SETTINGS = SimulatorSettings(block_size=4)
PROMPT = list(range(10))


@pytest.fixture
def faults() -> FaultBox:
    return FaultBox()


@pytest.fixture
def batch(faults: FaultBox) -> Batch:
    return Batch(SETTINGS, faults)


def queued(
    batch: Batch, *, lora: LoraRequest | None = None, prompt: list[int] = PROMPT, max_tokens: int = 8
) -> Sequence:
    generation = Generation(wants_logprobs=True)
    generation.add(
        Sequence(
            generation=generation,
            prompt=prompt,
            lora=lora,
            seed=7,
            max_tokens=max_tokens,
            salt="",
            vocab_size=SETTINGS.vocab_size,
        )
    )
    batch.scheduler.add(generation.sequences[0])
    return generation.sequences[0]


def lora(directory: Path, *, id: int = 1, inplace: bool = False) -> LoraRequest:
    return LoraRequest(id=id, name="a", path=str(directory), inplace=inplace)


def test_an_answer_is_what_the_weights_say(batch: Batch, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", seed=1)
    base, adapted = queued(batch), queued(batch, lora=lora(directory))
    batch.admit()
    for _ in range(4):
        batch.advance(2)
    assert base.tokens == expected_tokens(base_weights("sim"), PROMPT, 7, 8)
    assert adapted.tokens == expected_tokens(adapter_weights(directory), PROMPT, 7, 8)
    for sequence in (base, adapted):
        assert sequence.finish_reason == "length"
        assert len(sequence.logprobs) == 8
        assert sequence.generation.done


def test_a_prefill_costs_what_is_not_cached(batch: Batch) -> None:
    queued(batch)
    assert batch.admit() == 10
    second = queued(batch)
    assert batch.admit() == 2
    assert second.cached_tokens == 8
    assert (batch.counters.cache_queries, batch.counters.cache_hits) == (20, 8)


def test_an_answer_is_cached_for_the_next_turn(batch: Batch) -> None:
    first = queued(batch)
    batch.admit()
    batch.advance(8)
    queued(batch, prompt=PROMPT + first.tokens + [1])
    assert batch.admit() == 19 - (10 + 7) // 4 * 4


def test_a_preempted_answer_starts_over_and_stays_the_same(batch: Batch) -> None:
    sequence = queued(batch)
    batch.admit()
    batch.advance(5)
    batch.preempt_all()
    batch.cache.clear()
    assert batch.admit() == 15
    batch.advance(5)
    assert sequence.tokens == expected_tokens(base_weights("sim"), PROMPT, 7, 8)
    assert batch.counters.preemptions == 1
    assert batch.counters.prompt_tokens == 10


def test_blocks_of_other_weights_under_the_same_name_and_path_spoil_the_answer(batch: Batch, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", seed=1)
    queued(batch, lora=lora(directory))
    batch.admit()
    write_adapter(directory, seed=2)
    stale, fresh = (
        queued(batch, lora=lora(directory, id=2)),
        queued(batch, lora=lora(directory, id=2), prompt=[5] * 10),
    )
    batch.admit()
    batch.advance(8)
    assert stale.cached_tokens == 8
    assert stale.tokens != expected_tokens(adapter_weights(directory), PROMPT, 7, 8)
    assert fresh.tokens == expected_tokens(adapter_weights(directory), [5] * 10, 7, 8)


def test_an_adapter_loaded_in_place_changes_weights_mid_sequence(batch: Batch, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", seed=1)
    old = adapter_weights(directory)
    sequence = queued(batch, lora=lora(directory))
    batch.admit()
    batch.advance(3)
    write_adapter(directory, seed=2)
    batch.load(lora(directory, inplace=True))
    batch.advance(5)
    new = adapter_weights(directory)
    assert sequence.tokens == expected_tokens(old, PROMPT, 7, 3) + expected_tokens(new, PROMPT, 7, 5, 3)


def test_an_abort_keeps_the_tokens_so_far(batch: Batch) -> None:
    sequence = queued(batch)
    batch.admit()
    batch.advance(3)
    assert batch.abort([sequence]) == 1
    assert batch.abort([sequence]) == 0
    assert (sequence.finish_reason, len(sequence.tokens)) == ("abort", 3)
    assert batch.scheduler.everything() == []


def test_wrong_weights_answer_without_touching_the_cache(batch: Batch, faults: FaultBox) -> None:
    faults.set({"wrong_weights": "others"})
    wrong = queued(batch)
    batch.admit()
    batch.advance(8)
    assert wrong.tokens == expected_tokens("others", PROMPT, 7, 8)
    faults.clear()
    right = queued(batch)
    batch.admit()
    batch.advance(8)
    assert right.tokens == expected_tokens(base_weights("sim"), PROMPT, 7, 8)
