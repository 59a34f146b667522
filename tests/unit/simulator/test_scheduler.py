"""Who runs and who waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.lora import LoraRequest
from proxy.simulator.scheduler import Scheduler, Waiting
from proxy.simulator.sequence import Generation, Sequence
from proxy.simulator.settings import SimulatorSettings

SETTINGS = SimulatorSettings(max_num_seqs=3, max_loras=2, block_size=4, kv_cache_tokens=40)


def sequence(adapter: int | None = None, *, prompt: int = 4) -> Sequence:
    lora = None if adapter is None else LoraRequest(id=adapter, name=f"a{adapter}", path="/", inplace=False)
    return Sequence(
        generation=Generation(),
        prompt=[1] * prompt,
        lora=lora,
        seed=0,
        max_tokens=100,
        salt="",
        vocab_size=1000,
    )


def scheduler(*sequences: Sequence) -> Scheduler:
    scheduler = Scheduler(SETTINGS)
    for one in sequences:
        scheduler.add(one)
    return scheduler


def test_first_come_first_served_up_to_the_limit() -> None:
    sequences = [sequence() for _ in range(4)]
    queue = scheduler(*sequences)
    assert queue.admit() == sequences[:3]
    assert queue.waiting == Waiting(capacity=1, deferred=0)
    assert repr(queue) == "Scheduler(3 running, 1 waiting)"
    queue.remove(sequences[0])
    assert queue.admit() == sequences[3:]


def test_a_third_adapter_is_deferred_and_others_pass_it() -> None:
    first, second, third, again, base = (sequence(adapter) for adapter in (1, 2, 3, 1, None))
    queue = scheduler(first, second, third, again, base)
    assert queue.admit() == [first, second, again]
    assert queue.adapter_names() == (["a1", "a2"], ["a3"])
    for one in (first, again):
        queue.remove(one)
    assert queue.admit() == [third, base]
    assert queue.waiting.total == 0


def test_deferred_sequences_are_counted_apart() -> None:
    queue = scheduler(sequence(1), sequence(2), sequence(3))
    queue.admit()
    assert queue.waiting == Waiting(capacity=0, deferred=1)


def test_a_sequence_waits_for_free_blocks() -> None:
    big, small = sequence(prompt=30), sequence(prompt=30)
    queue = scheduler(big, small)
    assert queue.admit() == [big]
    queue.remove(big)
    assert queue.admit() == [small]


def test_one_sequence_alone_always_runs() -> None:
    huge = sequence(prompt=1000)
    assert scheduler(huge).admit() == [huge]


def test_when_the_cache_is_full_the_newest_is_preempted() -> None:
    old, new = sequence(), sequence()
    queue = scheduler(old, new)
    queue.admit()
    old.produced, new.produced = 20, 20
    assert queue.make_room() == 1
    assert queue.running == [old]
    assert queue.admit() == []
    queue.remove(old)
    assert queue.admit() == [new]


def test_preempted_sequences_come_first_again_in_order() -> None:
    sequences = [sequence() for _ in range(4)]
    queue = scheduler(*sequences)
    queue.admit()
    assert queue.preempt_all() == 3
    assert queue.admit() == sequences[:3]


def test_removing_twice_changes_nothing() -> None:
    one, other = sequence(1), sequence(2)
    queue = scheduler(one, other)
    queue.admit()
    for _ in range(2):
        queue.remove(one)
    assert queue.running == [other]


@given(st.lists(st.sampled_from(["add", "admit", "remove", "preempt", "grow"]), max_size=60))
def test_limits_hold_and_everything_comes_back(events: list[str]) -> None:
    queue, alive = Scheduler(SETTINGS), list[Sequence]()
    for step, event in enumerate(events):
        if event == "add":
            alive.append(sequence(step % 4 or None))
            queue.add(alive[-1])
        elif event == "admit":
            queue.admit()
        elif event == "remove" and alive:
            queue.remove(alive.pop(step % len(alive)))
        elif event == "preempt":
            queue.preempt_all()
        elif event == "grow":
            for one in queue.running:
                one.produced += 5
            queue.make_room()
        assert queue.running_count <= SETTINGS.max_num_seqs
        assert len(queue.adapters_running) <= SETTINGS.max_loras
        assert set(queue.everything()) == set(alive)
    for one in alive:
        queue.remove(one)
    assert queue.cache_usage == 0
